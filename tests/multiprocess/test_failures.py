"""Failed and mismatched processes: their peers get an error that names them, and continue; no result is wrong."""

import collections
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from job import client, job_token, segments
from watched import Processes

from jax_ring.launcher.environment import reserved_address

pytestmark = pytest.mark.one_pair  # native code and Python's

DEADLINE = 1.5
HANG = 120.0  # seconds, far more than a process takes on a loaded machine
ENVIRONMENT = {"JAX_RING_TIMEOUT_S": str(DEADLINE)}


def mapped(f, mesh):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))


def values(mesh, shape=(3,), dtype=np.float32):
    """An array of shape (ranks, *shape), with one row on each rank."""
    whole = np.arange(mesh.size * np.prod(shape), dtype=dtype).reshape(mesh.size, *shape)
    return jax.make_array_from_callback(whole.shape, jax.NamedSharding(mesh, P("i")), lambda index: whole[index])


def total(x):
    from jax_ring import ring_psum

    return ring_psum(x, "i")


def import_together():
    """The import publishes the host of a process, for which the others wait to the deadline."""
    import jax_ring  # noqa: F401

    client().wait_at_barrier("all have imported jax_ring", 240_000)


_MEETINGS = collections.Counter()


def compiled_together(f, mesh, *arguments):
    """The executable, once all processes of the mesh have theirs: none waits to the deadline for one that compiles."""
    executable = f.lower(*arguments).compile()
    members = sorted({device.process_index for device in mesh.devices.flat})
    _MEETINGS[tuple(members)] += 1
    client().wait_at_barrier(f"{members} meet {_MEETINGS[tuple(members)]}", 240_000, members)
    return executable


def check_total(mesh):
    x = values(mesh)
    expected = np.arange(mesh.size * 3, dtype=np.float32).reshape(mesh.size, 3).sum(0)
    for shard in compiled_together(mapped(total, mesh), mesh, x)(x).addressable_shards:
        np.testing.assert_array_equal(shard.data[0], expected)


def check_alone():
    np.testing.assert_array_equal(jax.jit(lambda x: x * 2)(jnp.arange(3)), [0, 2, 4])


def error_of(f, *arguments, together=None) -> str:
    """The message of the error that a call raises; `together` is the mesh of those that make a call at once."""
    if together is not None:
        f = compiled_together(f, together, *arguments)
    # JAX raises one of them at launch, and the other when the result is awaited.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"^DEADLINE_EXCEEDED: ") as raised:
        jax.block_until_ready(f(*arguments))
    check_alone()
    return str(raised.value)


def blame_of(error: str) -> tuple:
    """The fields of the failure that an error tells of by its number: kind, process, rank."""
    from jax_ring import runtime

    failure = runtime.failure_of(error)
    assert failure is not None, error
    assert error.endswith(f"{failure.text} [failure {failure.number}]"), error
    assert runtime.failure(failure.number) == failure
    return failure.kind, failure.process, failure.rank


def wait_for(path) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


# ---- Stopped, killed and exited processes ----------------------------------------------------------------------------


def fail_in_turn(folder):
    """Process 0 only runs JAX's coordinator, because no process survives that. Processes 1, 2 and 3 fail in turn."""
    from jax_ring import _ffi_cpu

    folder, me = pathlib.Path(folder), jax.process_index()
    by_process = {device.process_index: device for device in jax.devices()}
    whole_mesh, reverse, two = (
        Mesh([by_process[i] for i in members], ("i",)) for members in ([1, 2, 3], [3, 2, 1], [2, 3])
    )
    import_together()
    if me == 0:
        print(f"token {job_token()}", flush=True)
        wait_for(folder / "end")
        return
    check_total(whole_mesh)
    x = values(whole_mesh)
    add = compiled_together(mapped(total, whole_mesh), whole_mesh, x)
    print("ready", flush=True)
    wait_for(folder / "stopped" if me != 3 else folder / "continued")
    error = error_of(add, x)
    # A later call in a failed group does not wait: it has the error of the first, which names that one's operand.
    later = error_of(mapped(total, whole_mesh), values(whole_mesh, (5,)))
    assert "ring_psum of float32[1,3]" in later.partition("Last calls")[0], later
    assert "ring_psum of float32[1,5]" not in later.partition("Last calls")[0], later
    assert blame_of(later) == blame_of(error)
    if me == 3:
        assert "has aborted the group" in error, error
        assert blame_of(error)[0] == "aborted", error
    else:
        assert f"ring_psum of float32[1,3] over axis 'i', called at {__file__}" in error, error
        assert "(total)" in error, error
        assert "Process 3 (rank 2) is stopped, or busy with something else." in error, error
        assert blame_of(error) == ("stopped", 3, 2), error
    print("resumed", flush=True)
    check_total(reverse)  # a new group, with its own memory
    x = values(reverse)
    add = compiled_together(mapped(total, reverse), reverse, x)
    if me == 1:
        while True:
            add(x).block_until_ready()
            print("adds", flush=True)

    def add_forever(x):
        while True:
            x = jax.block_until_ready(add(x))

    error = error_of(add_forever, x)
    assert "Process 1 (rank 2) has ended." in error or "has aborted the group" in error, error
    assert blame_of(error) == ("ended", 1, 2), error  # also by what the one that has aborted the group tells
    check_total(two)
    if me == 3:
        wait_for(folder / "leave")
        sys.exit(0)
    print("survived", flush=True)
    _ffi_cpu.set_deadline(HANG)  # it hears of the exit at once, whenever that comes
    error = error_of(mapped(total, two), values(two))
    assert "Process 3 (rank 1) has exited." in error, error
    assert blame_of(error) == ("left", 3, 1), error
    jax.distributed.shutdown()


def test_stopped_killed_and_exited_processes_are_named(tmp_path):
    # Without JAX_ENABLE_RECOVERABILITY, JAX waits for dead processes at shutdown, and then terminates all others.
    environment = {**ENVIRONMENT, "JAX_ENABLE_RECOVERABILITY": "1"}
    with Processes(fail_in_turn, 4, arguments=[str(tmp_path)], environment=environment) as program:
        program.wait_until(0, "token")
        token = program.result(0).stdout.split("token ")[1].split()[0]
        for process in (1, 2, 3):
            program.wait_until(process, "ready")
        assert segments(token) == []
        program.popen[3].send_signal(signal.SIGSTOP)
        (tmp_path / "stopped").touch()
        for process in (1, 2):
            program.wait_until(process, "resumed")
        program.popen[3].send_signal(signal.SIGCONT)
        (tmp_path / "continued").touch()
        program.wait_until(1, "adds")
        program.popen[1].send_signal(signal.SIGKILL)  # during a call; stays a zombie
        program.wait_until(2, "survived")
        (tmp_path / "leave").touch()
        survivor_status = program.popen[2].wait(HANG)
        (tmp_path / "end").touch()
        results = program.wait(HANG)
        program.kill()
    assert [result.returncode for result in results] == [0, -signal.SIGKILL, 0, 0], results
    assert survivor_status == 0
    assert segments(token) == []


# ---- Mismatched calls, and cleanup -----------------------------------------------------------------------------------


def make_mismatched_calls(addresses):
    import watched

    import jax_ring
    from jax_ring import ring_pmax, ring_psum

    import_together()
    me = jax.process_index()
    # The process of each rank. Each layout forms its own group, which fails independently of the others.
    layouts = ["10", "01", "001", "010", "011", "100", "101", "110"]

    def group():
        local = [iter(jax.local_devices(process_index=process)) for process in (0, 1)]
        return Mesh(np.array([next(local[int(process)]) for process in layouts.pop()]), ("i",))

    check_total(group())

    # Each case: the call of each process, and the error that both get.
    mesh = group()
    f = mapped(total, mesh)
    small, large = values(mesh), values(mesh, (5,))
    error = error_of(f, (small, large)[me], together=mesh)
    assert "float32[1,3]" in error, error
    assert "float32[1,5]" in error, error
    assert blame_of(error)[0] in ("mismatch", "aborted"), error
    assert blame_of(error)[1] == 1 - me, error

    mesh = group()
    f = mapped(total, mesh)
    error = error_of(f, values(mesh, dtype=(np.float32, np.int32)[me]), together=mesh)
    assert "float32[1,3]" in error, error
    assert "int32[1,3]" in error, error

    mesh = group()
    error = error_of(mapped((total, lambda x: ring_pmax(x, "i"))[me], mesh), values(mesh), together=mesh)
    assert "ring_psum of" in error, error
    assert "ring_pmax of" in error, error

    mesh = group()
    renamed = Mesh(mesh.devices, ("j",))
    x = jax.device_put(values(mesh), jax.NamedSharding((mesh, renamed)[me], P("ij"[me])))
    over_j = jax.shard_map(lambda x: ring_psum(x, "j"), mesh=renamed, in_specs=P("j"), out_specs=P("j"))
    error = error_of((mapped(total, mesh), jax.jit(over_j))[me], x, together=mesh)
    assert "over axis 'i'" in error, error
    assert "over axis 'j'" in error, error

    mesh = group()
    calls = [(mapped(total, mesh), values(mesh)), (mapped(lambda x: ring_pmax(x, "i"), mesh), values(mesh))]
    error = error_of(*calls[me], together=mesh)  # the processes make the calls in different orders
    assert "ring_psum of" in error, error
    assert "ring_pmax of" in error, error

    # Process 1 makes no call. The group is never formed, so its segment stays linked until the timeout.
    mesh = group()
    if me == 0:
        error = error_of(mapped(total, mesh), values(mesh))
        assert "Process 1 (rank" in error, error
        assert ") has not made a call in this group yet." in error, error
        assert blame_of(error)[:2] == ("absent", 1), error
        assert segments(job_token()) == []
    else:
        while not (found := segments(job_token())):
            time.sleep(0.001)
        assert [os.stat(path).st_mode & 0o777 for path in found] == [0o600]
    # The same with the first process missing, which creates the segment.
    mesh = group()
    if me == 0:
        error = error_of(mapped(total, mesh), values(mesh))
        assert "is process 1 (rank 0)" in error, error
        assert blame_of(error)[:2] == ("absent", 1), error

    # After reinitialization, the processes form new groups.
    del calls, x, small, large, f
    for again, address in enumerate(addresses, 1):
        jax.distributed.shutdown()
        jax.clear_caches()
        jax.extend.backend.clear_backends()
        jax.distributed.initialize(**{**watched.distributed, "coordinator_address": address})
        whole_mesh = Mesh(np.array(jax.devices()), ("i",))
        check_total(whole_mesh)
        # With the same layout as a group that failed.
        check_total(Mesh([jax.local_devices(process_index=0)[0], jax.local_devices(process_index=1)[0]], ("i",)))
        if again == 1:
            # What was compiled before fails at once.
            x = values(whole_mesh)
            add = compiled_together(mapped(total, whole_mesh), whole_mesh, x)
            jax.block_until_ready(add(x))
            jax_ring._ffi_cpu.reset_groups()
            assert "it has left for another set of processes." in error_of(add, x)
            assert not jax_ring._ffi_cpu.has_groups()
            del add, x
    # Only the segments of the last two groups are mapped. (JAX itself leaks some threads and files of each runtime.)
    assert pathlib.Path("/proc/self/maps").read_text().count("/dev/shm/jax_ring") == 2
    print(f"token {job_token()}", flush=True)
    time.sleep(1000)


@pytest.mark.full
def test_mismatched_calls_and_reinitialization():
    with (
        reserved_address() as one,
        reserved_address() as other,
        Processes(make_mismatched_calls, 2, 4, arguments=[[one, other]], environment=ENVIRONMENT) as program,
    ):
        for process in (0, 1):
            program.wait_until(process, "token")
        token = program.result(0).stdout.split("token ")[1].split()[0]
        # Process 0 runs JAX's coordinator. JAX aborts the other processes when they notice that it is gone.
        program.popen[0].send_signal(signal.SIGKILL)
        assert program.popen[1].wait(60) == -signal.SIGABRT
        assert segments(token) == []
        assert "JAX distributed service detected fatal errors" in program.result(1).stderr


# ---- Calls in different orders ---------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "devices_each",
    [
        pytest.param(n, marks=pytest.mark.jax_processes(2, devices=n, environment={"JAX_RING_TIMEOUT_S": "20"}))
        for n in (1, 2)
    ],
)
def test_equal_calls_in_different_orders(devices_each):
    assert jax.local_device_count() == devices_each
    from jax_ring import ring_psum
    from jax_ring.lowering.passes import combiner

    combiner.COMBINE_THRESHOLD_COUNT = 1  # calls that do not wait for each other would be one

    me, ranks = jax.process_index(), len(jax.devices())
    mesh = Mesh(np.array(jax.devices()), ("i",))
    delays = np.random.default_rng(me)

    def wait(_):  # ignores its argument: converting it may deadlock in JAX
        time.sleep(delays.uniform(0, 0.03))
        return np.float32(1)

    def delayed(x):
        return x * jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), jnp.sum(x))

    @jax.jit
    def shared(x):  # lowered once, and inlined at each call
        return ring_psum(x, "i")

    def equal_calls(x):
        delayed_ones = [delayed(x * factor) for factor in range(1, 9)]
        return [ring_psum(y, "i") for y in delayed_ones[:4]] + [shared(y) for y in delayed_ones[4:]]

    def scaled_by(factor):
        def scaled(x):
            return ring_psum(delayed(x) * factor, "i")

        return mapped(scaled, mesh)

    def check(results, factors):
        for result, factor in zip(results, factors, strict=True):
            for shard in result.addressable_shards:
                np.testing.assert_array_equal(shard.data[0], factor * expected)

    x = values(mesh)
    expected = np.arange(3 * ranks, dtype=np.float32).reshape(ranks, 3).sum(0)
    independent = mapped(equal_calls, mesh)
    several = [scaled_by(factor) for factor in (1, 2, 4)]  # with the same name
    if me == 0:
        assert independent.lower(x).compile().as_text().count("jax_ring_all_reduce") >= 8
        jax.jit(lambda x: independent(x)[0] + 1).lower(x).compile()
        independent.lower(values(mesh, (7,))).compile()
        jax.clear_caches()
        several[2].lower(x)
    for _ in range(3):
        check(independent(x), range(1, 9))
        # Many in flight at once, and launched from a different source line in each process.
        launches = (
            lambda: [f(x) for f in several for _ in range(3)],
            lambda: [f(x) for f in several for _ in range(3)],
        )
        results = launches[me]()
        check(results, [factor for factor in (1, 2, 4) for _ in range(3)])
