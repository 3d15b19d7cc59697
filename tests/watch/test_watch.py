"""`jax_ring.watch` in one process: what it wraps, which outputs it waits for, and no alarm without a reason."""

import functools
import gc
import math
import os
import re
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_python

import jax_ring
from jax_ring.progress import watch as watching
from jax_ring.progress.watch import are_ready, progress


def completed_after(count, before):
    """Waits until so many steps are noted as completed."""
    until = time.monotonic() + 60
    while (done := progress().page.read()).completed < before.completed + count:
        assert time.monotonic() < until, done
        time.sleep(0.001)
    return done


def nothing_runs():
    """Waits until the steps of other tests, which may not have awaited them, are noted as completed."""
    until = time.monotonic() + 60
    while (done := progress().page.read()).completed < done.started:
        assert time.monotonic() < until, done
        time.sleep(0.001)
    return done


def test_it_is_the_function():
    @jax_ring.watch
    @functools.partial(jax.jit, static_argnums=1)
    def step(x, n):
        """Adds."""
        return {"x": x + n, "n": jnp.int32(n)}

    before = nothing_runs()
    result = step(jnp.arange(3), 2)
    np.testing.assert_array_equal(result["x"], [2, 3, 4])
    done = completed_after(1, before)
    assert done.started == done.completed == before.started + 1
    assert (step.__name__, step.__doc__) == ("step", "Adds.")
    assert step.lower(jnp.arange(3), 2).compile()(jnp.arange(3))["n"] == 2
    assert step.eval_shape(jnp.arange(3), 2)["x"].shape == (3,)
    assert "step" in repr(step)
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        step.unknown  # noqa: B018

    class Model:
        @jax_ring.watch(seconds=5)
        def step(self, x):
            return x + 1

    assert Model().step(1) == 2


def test_calls_in_a_trace_are_those_of_the_function():
    step = jax_ring.watch(lambda x: jnp.sin(x).sum())
    before = progress().page.read()
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.grad(step)(x), jnp.cos(x))
    np.testing.assert_array_equal(jax.jit(step)(x), jax.jit(lambda x: jnp.sin(x).sum())(x))
    assert jax.vmap(step)(jnp.ones((2, 3))).shape == (2,)
    assert progress().page.read().started == before.started


def test_an_exception_ends_a_step():
    @jax_ring.watch
    def step(x):
        raise ValueError("bad batch")

    before = progress().page.read()
    with pytest.raises(ValueError, match="bad batch"):
        step(1)
    completed_after(1, before)


def test_as_many_are_complete_as_have_returned():
    """In two threads the later one may be over first."""
    begun, go_on = threading.Event(), threading.Event()

    @jax_ring.watch
    def step(waits):
        if waits:
            begun.set()
            go_on.wait()

    before = nothing_runs()
    thread = threading.Thread(target=step, args=(True,))
    thread.start()
    begun.wait()
    step(False)
    now = completed_after(1, before)
    assert (now.started, now.completed) == (before.started + 2, before.completed + 1)
    go_on.set()
    assert completed_after(2, before).started == before.started + 2
    thread.join()


def test_calls_within_a_step_are_part_of_it():
    inner = jax_ring.watch(lambda x: x + 1)
    outer = jax_ring.watch(lambda x: inner(x) + inner(x))
    before = nothing_runs()
    assert outer(1) == 4
    assert completed_after(1, before).started == before.started + 1
    assert inner(1) == 2
    assert completed_after(2, before).started == before.started + 2


@pytest.mark.filterwarnings("ignore")  # JAX's threads do not exist there
def test_a_forked_child_notes_nothing():
    step = jax_ring.watch(lambda: None)
    step()
    before = nothing_runs()
    child = os.fork()
    if not child:
        step()
        os._exit(int(progress().page.read().started != 0))
    assert os.waitpid(child, 0)[1] >> 8 == 1
    assert progress().page.read().started == before.started


def test_compilations_are_noted():
    seen = []

    @jax_ring.watch
    @jax.jit
    def step(x):
        seen.append(progress().page.read())
        return x

    step(jnp.zeros(3)).block_until_ready()
    assert seen[0].compiling_for > 0
    assert seen[0].compiling == "step"
    assert progress().page.read().compiling_for == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        *[
            ({"seconds": seconds}, ValueError, f"watch: seconds must be a positive number, got {seconds!r}")
            for seconds in (0, math.inf, math.nan, "60", None, True)
        ],
        ({"on_stuck": "raise"}, ValueError, "on_stuck"),
        ({"step": 3}, TypeError, "step must be a function, got int"),
    ],
)
def test_refused_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        jax_ring.watch(**{"step": len, **arguments})


def test_the_arrays_that_are_waited_for():
    """Those that were donated tell nothing."""
    donated, ready = jnp.zeros(2), jax.block_until_ready(jnp.zeros(3))
    donated.delete()
    assert are_ready([3, donated, ready])
    assert are_ready([3, donated]) is None
    assert are_ready([3, jax.random.key(0)])
    running = types.SimpleNamespace(is_ready=lambda: False, is_deleted=lambda: False)
    assert are_ready([donated, ready, running]) is False


def test_large_outputs_are_not_kept(monkeypatch):
    """What is waited for may be many steps behind."""
    before, x = nothing_runs(), jnp.zeros(54_321)
    with monkeypatch.context() as patch:
        patch.setattr(watching, "are_ready", lambda outputs: False)
        step = jax_ring.watch(jax.jit(lambda x: (x + 1, x[0])))
        for _ in range(3):
            x, _ = step(x)
            time.sleep(0.2)
        assert progress().page.read().completed == before.completed
        assert [y is x for y in jax.live_arrays() if y.shape == x.shape] == [True]
    completed_after(3, before)


def test_all_outputs_are_donated():
    """Most of them are found deleted. A later step tells of those before."""
    step = jax_ring.watch(jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0))
    before = progress().page.read()
    state = {"a": jnp.zeros(1000), "b": jnp.zeros(())}
    for _ in range(300):
        state = step(state)
    assert float(state["b"]) == 300
    completed_after(300, before)


def test_small_outputs_are_donated():
    """Those of the last step are there."""
    step = jax_ring.watch(jax.jit(lambda n, m: (n + 1, m + 1, jnp.arange(1000) + n), donate_argnums=(0, 1)))
    before, n, m = progress().page.read(), jnp.zeros(()), jnp.zeros(10)
    for _ in range(10):
        n, m, large = step(n, m)
        deadline = time.monotonic() + 60
        while not large.is_ready() and time.monotonic() < deadline:
            time.sleep(0.001)
    step(n, m)  # donates the last ones
    completed_after(11, before)


@pytest.mark.full
def test_no_false_alarm_and_cost(capfd, tmp_path, record_property):
    """Ten thousand steps with compilations, checkpoints and garbage collections between them."""

    def body(state, x):
        return state + x, (state * x).sum()

    def steps_of(step, count):
        state = jnp.zeros(8)
        for number in range(count):
            if number % 2000 == 0:
                state = jnp.concatenate([state, state])  # compiles
                np.save(tmp_path / "checkpoint.npy", state)
                gc.collect()
            state, loss = step(state, np.float32(number))
        return jax.block_until_ready(loss)

    program = jax.jit(body, donate_argnums=0)
    watched = jax_ring.watch(program, seconds=10)
    before = progress().page.read()
    costs = []
    for step in (program, watched):
        steps_of(step, 100)
        began = time.process_time()
        steps_of(step, 10_000)
        costs.append(time.process_time() - began)
    completed_after(10_100, before)
    assert "not completed" not in capfd.readouterr().err
    record_property("cost", f"{(costs[1] - costs[0]) / 1e4 * 1e6:.1f} us of processor time per step")


HANGS = """
import time, jax_ring, numpy as np

@jax_ring.watch(seconds=0.4, on_stuck="{on_stuck}")
def in_python(x):
    time.sleep(x)
    return x

def blocks(x):
    time.sleep(float(x))
    return x

@jax_ring.watch(seconds=0.4)
@jax.jit
def on_device(x):
    return jax.pure_callback(blocks, jax.ShapeDtypeStruct((), np.float32), x)

@jax_ring.watch(seconds=0.4)
def calls_another(x):
    in_python(0)
    time.sleep(x)

{calls}
print("goes on")
"""


@pytest.mark.one_pair
def test_a_step_that_hangs():
    """Without a launcher a process reports its own, and goes on, or ends."""
    calls = """
on_device(np.float32(0)).block_until_ready()
in_python(2.0)
on_device(np.float32(2)).block_until_ready()
in_python(0)
calls_another(2.0)
"""
    result = run_python(HANGS.format(on_stuck="report", calls=calls))
    assert (result.returncode, result.stdout) == (0, "goes on\n"), result.stderr
    # On a busy machine another step may take that long as well.
    texts = re.split(r"(?=jax_ring: rank)", result.stderr)[1:]
    reports = {re.search(r"not completed step (\d)", text)[1]: text for text in texts}
    first, second, third = (reports[step] for step in "235")
    assert "rank 0 has not completed step 2 (in_python) within 0.4 s (jax_ring.watch)" in first
    assert re.search(r"process 0 \(pid \d+\): in Python; .*MainThread:.*in in_python\n", first, re.DOTALL), first
    assert "rank 0 has not completed step 3 (on_device) within 0.4 s" in second
    assert re.search(r"process 0 \(pid \d+\): in a callback of the device's program; .* in blocks\n", second, re.DOTALL)
    assert "rank 0 has not completed step 5 (calls_another) within 0.4 s" in third
    assert re.search(r"process 0 \(pid \d+\): in Python; .*MainThread:.*in calls_another\n", third, re.DOTALL), third
    result = run_python(HANGS.format(on_stuck="end", calls="in_python(60)"))
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    assert "rank 0 has not completed step 1 (in_python)" in result.stderr


LAUNCHES = """
import threading, time, jax_ring, numpy as np
import jax.numpy as jnp
from jax_ring import _compat
from jax_ring.progress import watch as watching
from jax_ring.progress.watch import progress, watch_executions

before = jax.jit(lambda x: traced.append(0) or x + 1)
traced = []
before(np.ones(4, np.float32))
watch_executions()
before(np.ones(4, np.float32))
assert traced == [0]  # it is found among those that were compiled before
assert not watching._runs(_compat.is_launch)
traced, begun, go_on = [], threading.Event(), threading.Event()

@jax.jit
def add(x):
    traced.append(x.shape)
    return jnp.where(x > 1, x + 1, x)

def completed(count):
    until = time.monotonic() + 60
    while (notes := progress().page.read()).completed < count:
        assert time.monotonic() < until, notes
        time.sleep(0.01)
    return notes

compiled = add.lower(np.ones(4, np.float32)).compile()
for number in range(100):
    x = add(np.ones(4, np.float32))
    compiled(x)
    x + 1
    assert not watching._runs(_compat.is_launch)
    if number == 1:
        count = progress().page.read().started
    if number == 50:  # programs are found with a value that another one has changed
        jax.jit(lambda x: x - 1)(x)
assert traced == [(4,)] * len(traced) and len(traced) <= 2, traced  # lowered once, and called
assert add._cache_size() == 1
assert completed(count + 98 * 3 + 1).started == count + 98 * 3 + 1

# What is looked up but not launched is no launch, and neither is one that has failed.
add.lower(np.ones(4, np.float32))
jax.make_jaxpr(add)(x)
y = jnp.ones(4)
y.delete()
try:
    add(y)
except RuntimeError:
    pass
time.sleep(0.5)
notes = progress().page.read()
assert notes.started == notes.completed, notes

# One that blocks is seen before it returns.
def block(x):
    begun.set()
    go_on.wait(60)
    return x

@jax.jit
def blocks(x):
    return jax.pure_callback(block, jax.ShapeDtypeStruct((), np.float32), x)

thread = threading.Thread(target=lambda: blocks(np.float32(1)).block_until_ready())
thread.start()
begun.wait()
time.sleep(0.5)
now = progress().page.read()
assert now.started == notes.started + 1 == now.completed + 1, now
assert progress()._where().kind == "in a callback of the device's program"
go_on.set()
thread.join()
completed(notes.started + 1)
print("ends")
"""


def test_launches():
    result = run_python(LAUNCHES)
    assert (result.returncode, result.stdout) == (0, "ends\n"), result.stderr


ENDS = """
import jax_ring, numpy as np
from jax_ring.progress import watch as watching

watching._LOOK_SECONDS = 1e-5
step = jax_ring.watch(jax.jit(lambda x: tuple(x + i for i in range(100))))
for _ in range(20):
    outputs = step(np.ones(4, np.float32))
"""


@pytest.mark.one_pair
def test_a_thread_that_looks_does_not_end_python():
    for _ in range(3):
        result = run_python(ENDS)
        assert (result.returncode, result.stderr) == (0, "")
