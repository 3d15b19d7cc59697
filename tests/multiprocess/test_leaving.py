"""A process that raises or exits is named at once, with its exception; what it has launched still completes."""

import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from test_failures import check_total, error_of, mapped, total, values, wait_for
from watched import Processes, as_text

from jax_ring import _compat, runtime
from jax_ring.distributed import exit_notice, xla_timeouts
from jax_ring.lowering.passes.program_id import digest_of

TIME_LIMIT = 60
# The errors must come long before it.
ENVIRONMENT = {"JAX_RING_TIMEOUT_S": "300", "JAX_ENABLE_RECOVERABILITY": "1"}


def leave_in_turn(folder):
    """Processes 3, 2 and 1 leave, each in another way; process 0 is last, because it hosts JAX's coordinator."""
    folder, me = pathlib.Path(folder), jax.process_index()

    def mesh_of(*members):
        return Mesh([device for i in members for device in jax.devices() if device.process_index == i], ("i",))

    def slow_total(x):
        y = jax.lax.fori_loop(0, 100, lambda i, y: jnp.sin(y) + i, jnp.ones((300, 100)) * x.sum())
        return total(x) + 0 * y.sum()

    check_total(mesh_of(0, 1, 2, 3))
    of_exit, never_joined, unknown = mesh_of(0, 3), mesh_of(3, 0), mesh_of(2, 0, 1)
    slow, x = mapped(slow_total, of_exit), values(of_exit) if me in (0, 3) else None
    if me == 3:
        # Nothing holds the results, and the other process makes these calls only once this one has returned.
        for _ in range(3):
            slow(x)
        (folder / "launched").touch()
        return
    if me == 0:
        wait_for(folder / "launched")
        time.sleep(0.5)
        for _ in range(3):
            result = jax.block_until_ready(slow(x))
        np.testing.assert_array_equal(result.addressable_shards[0].data[0], np.arange(6.0).reshape(2, 3).sum(0))
        error = error_of(slow, x)
        assert "Process 3 (rank 1) has exited." in error, error
        error = error_of(mapped(total, never_joined), values(never_joined))
        assert "rocess 3 (rank 0) has exited." in error, error
    both, three = mesh_of(1, 2), mesh_of(0, 1, 2)
    check_total(three)
    if me != 0:
        check_total(both)
    if me == 2:
        raise ValueError("bad\nbatch")
    if me == 0:
        error = error_of(mapped(total, three), values(three))
        assert "Process 2 (rank 2) raised ValueError: bad batch." in error, error
        assert "Every process must make" not in error
        failure = runtime.failure_of(error)
        assert failure[1:6] == (
            "DEADLINE_EXCEEDED", "left", 2, 2, "process 2 (rank 2) raised ValueError: bad batch",
        ), failure  # fmt: skip
    # A group that has not been formed, with the first process missing, which creates its memory.
    error = error_of(mapped(total, unknown), values(unknown))
    assert "rocess 2 (rank 0) raised ValueError: bad batch." in error, error
    two = mesh_of(0, 1)
    check_total(two)
    if me == 1:
        jax.block_until_ready(mapped(total, both)(values(both)))  # raises
    error = error_of(mapped(total, two), values(two))
    assert "Process 1 (rank 1) failed because process 2 (rank 1) raised ValueError: bad batch." in error, error
    # Of the one that began: neither the process that waited for it nor its own text is read for that.
    failure = runtime.failure_of(error)
    assert failure[1:6] == (
        "DEADLINE_EXCEEDED", "left", 2, 1, "process 2 (rank 1) raised ValueError: bad batch",
    ), failure  # fmt: skip
    wait_for(folder / "others have exited")


@pytest.mark.full
def test_leaving_processes_are_named_at_once(tmp_path):
    with Processes(leave_in_turn, 4, arguments=[str(tmp_path)], environment=ENVIRONMENT) as program:
        for process in program.popen[1:]:
            process.wait(TIME_LIMIT)
        (tmp_path / "others have exited").touch()
        results = program.wait(TIME_LIMIT)
        program.kill()
    assert [result.returncode for result in results] == [0, 1, 1, 0], "\n" + as_text(results)
    assert "ValueError: bad\nbatch" in results[2].stderr


@pytest.mark.full
@pytest.mark.jax_processes(2, environment={"JAX_RING_TIMEOUT_S": "20"})
def test_threads_that_launch_programs_of_one_name():
    import threading

    mesh = Mesh(np.array(jax.devices()), ("i",))
    x, random = values(mesh), np.random.default_rng(jax.process_index())
    expected = np.arange(2 * 3, dtype=np.float32).reshape(2, 3).sum(0)

    def scaled_by(factor):
        def scaled(x):
            return total(x * factor)

        return mapped(scaled, mesh)

    def launch(factor, delays, wrong):
        scaled = scaled_by(factor)
        for delay in delays:
            time.sleep(delay)
            result = scaled(x).addressable_shards[0].data[0]
            wrong.append(not np.array_equal(result, factor * expected))

    wrong = []
    threads = [threading.Thread(target=launch, args=(factor, random.uniform(0, 0.005, 40), wrong)) for factor in (1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 80


def digest(factor=2.0, repeats=3, shape=(4,), prints=False):
    def f(x):
        x = jax.lax.fori_loop(0, repeats, lambda i, x: jnp.sin(x) * factor, x)
        if prints:
            jax.debug.print("{}", x.sum())
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return digest_of(jax.make_jaxpr(f)(jnp.ones(shape)))


def test_digests_of_programs():
    assert digest() == digest()  # of functions, callbacks and lines that are not the same
    assert digest() == digest(prints=True)
    assert len({digest(), digest(factor=3.0), digest(repeats=4), digest(shape=(5,))}) == 4


def test_what_is_told_of_an_exception(monkeypatch):
    kept = {
        7: (7, "DEADLINE_EXCEEDED", "ended", 2, 4, "process 2 (ranks 4, 5) has ended", "ring_psum: process 0 waited"),
        8: (8, "DEADLINE_EXCEEDED", "mismatch", 1, 3, "", "ring_psum: process 0 waited"),
    }
    monkeypatch.setattr(runtime._ffi_cpu, "failure", kept.get)
    departure = exit_notice.departure_by
    assert departure(ValueError("bad batch")) == ("raised ValueError: bad batch", "left", None, None)
    assert departure(KeyboardInterrupt()) == ("raised KeyboardInterrupt", "left", None, None)
    of_killed = ("process 2 (ranks 4, 5) has ended", "ended", 2, 4)
    assert departure(RuntimeError("any text [failure 7]")) == of_killed
    assert departure(ValueError("step 3: any text [failure 8] [failure 7]")) == of_killed  # the last number counts
    # The number is of no use to the others, and neither process is known to be at fault.
    text = "raised RuntimeError: DEADLINE_EXCEEDED: ring_psum: process 0 waited"
    assert departure(RuntimeError("any text [failure 8]")) == (text, "left", None, None)
    # What is not kept is an exception like any other.
    assert departure(RuntimeError("old [failure 9]")) == ("raised RuntimeError: old [failure 9]", "left", None, None)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="this system does not tell")
def test_a_process_that_has_ended_is_recognized():
    host = exit_notice._own_host()
    own = exit_notice._read_process(host, os.getpid())
    assert not exit_notice._has_ended(own)
    assert exit_notice._has_ended(own._replace(start_time=own.start_time - 1))  # its pid has been given to this one
    assert not exit_notice._has_ended(own._replace(host="another", start_time=0))
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    other = exit_notice._read_process(host, child.pid)
    assert not exit_notice._has_ended(other)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert exit_notice._has_ended(other)  # a zombie
    child.wait()
    assert exit_notice._has_ended(other)


def test_the_hook_explains_what_xla_raises_as_a_value_error(monkeypatch, capsys):
    call = runtime.CallOfXla(3.0, "ring_psum of float32[2]", [0, 1])
    monkeypatch.setattr(runtime, "take_calls_of_xla", lambda: [call])
    monkeypatch.setattr(_compat, "complete_errors", lambda complete: None)
    monkeypatch.setattr(sys, "excepthook", lambda *exception: None)
    xla_timeouts._complete_errors.__wrapped__()
    for error in (ValueError("bad batch"), RuntimeError("Gloo all-reduce failed")):
        sys.excepthook(type(error), error, None)
        assert capsys.readouterr().err == ""
    sys.excepthook(ValueError, ValueError("Gloo all-reduce failed: timed out"), None)
    assert "has waited 3.0 s in ring_psum of float32[2], which XLA serves between hosts" in capsys.readouterr().err


class Store:
    """A store in which process 2 has published nothing."""

    def __init__(self):
        self.values = {"jax_ring/waits/1": b"ring_psum of int8[3]"}
        self.peek = self.values.get

    def put(self, key, value, *, replaces):
        assert replaces
        self.values[key] = value


def test_others_are_asked_in_what_they_wait(monkeypatch):
    store, answers = Store(), {}
    monkeypatch.setattr(exit_notice, "store", lambda: store)
    monkeypatch.setattr(runtime, "timeout", lambda: 0.01)
    xla_timeouts._ask(answers, [runtime.CallOfXla(1.0, "ring_psum of float32[2]", [0, 1, 2])])
    assert answers == {0: "ring_psum of float32[2]", 1: "ring_psum of int8[3]", 2: ""}
    assert store.values["jax_ring/waits/0"] == b"ring_psum of float32[2]"
    store.values["jax_ring/waits/1"] = b"\x1b[2J\n\xff" + 10_000 * b"a"
    xla_timeouts._ask(answers, [runtime.CallOfXla(1.0, "ring_psum of float32[2]", [0, 1, 2])])
    assert answers[1] == "\\x1b[2J\\n\ufffd" + (xla_timeouts._MAX_LENGTH - 6) * "a"
    answers.clear()
    monkeypatch.setattr(exit_notice, "store", lambda: None)  # as one that is out of reach
    xla_timeouts._ask(answers, [runtime.CallOfXla(1.0, "ring_psum of float32[2]", [0, 1, 2])])
    assert answers == {}


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (None, "A process of these has failed, or the connection to it is broken"),
        ({}, "JAX's coordinator does not answer either"),
        ({0: "f", 1: "g"}, "Nothing is known of them yet"),
        ({0: "f", 1: "g", 2: ""}, "no call like it waits in process 2 on host b: stopped, busy"),
        ({0: "f", 1: "g", 2: "h"}, "differ: process 1 on host a waits in g; process 2 on host b waits in h"),
    ],
)
def test_what_is_known_of_others(monkeypatch, answers, text):
    monkeypatch.setattr(xla_timeouts, "_state", xla_timeouts._State(names={1: "a", 2: "b"}, answers=answers))
    assert text in xla_timeouts._what_is_known([1, 2])


def test_the_hook_calls_the_one_before(monkeypatch):
    told, shown = [], []
    monkeypatch.setattr(exit_notice, "abort", told.append)
    monkeypatch.setattr(sys, "excepthook", lambda *exception: shown.append(exception))
    exit_notice._chain_excepthook()
    error = ValueError("bad batch")
    sys.excepthook(ValueError, error, None)
    assert told == [runtime.Departure("raised ValueError: bad batch")]
    assert shown == [(ValueError, error, None)]
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # an interactive session, which goes on
    sys.excepthook(ValueError, error, None)
    assert len(told) == 1
    assert len(shown) == 2


def test_what_the_store_says_of_another_process_is_escaped(monkeypatch):
    store = Store()
    store.values["jax_ring/left/1"] = b'["raised \\u001b[2J\\n' + b"x" * 1000 + b'", "left", null, null]'
    monkeypatch.setattr(exit_notice, "_store", store)
    cause = exit_notice.departure_of(1).cause
    assert cause.startswith("raised \\x1b[2J\\nxxx")
    assert len(cause) < 700
