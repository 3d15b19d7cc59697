"""A child that a process of a job has forked is no member of the job: how it ends concerns nobody else."""

import os
import sys
import warnings

import jax
import numpy as np
import pytest
from helpers import run_python
from jax.sharding import Mesh
from test_failures import check_total, mapped, total, values
from watched import Processes, as_text

TIME_LIMIT = 120
# An error that comes by the clock comes after the test has failed.
ENVIRONMENT = {"JAX_RING_TIMEOUT_S": "300"}


def fork(end):
    """Runs `end` in a child, and returns the child's status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's threads are not in the child
        pid = os.fork()
    if pid == 0:
        end()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def raise_in_child():
    # As Python does with an exception that nothing has caught: the frames of the parent do not handle it.
    try:
        raise ValueError("the child's own problem")
    except ValueError:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def exit_of_child():
    # Not all exit handlers: that of jax.distributed waits for the other processes.
    from jax_ring.distributed import exit_notice

    exit_notice._at_exit(None, None)
    os._exit(0)


ENDS = {"raises": (raise_in_child, 1), "exits": (exit_of_child, 0), "exits at once": (lambda: os._exit(5), 5)}


def forks_between_sums():
    both = Mesh(jax.devices(), ("i",))
    first, only_later = mapped(total, both), values(both)
    check_total(both)
    for end, expected in ENDS.values():
        if jax.process_index() == 1:
            status = fork(end)
            assert status == expected, status
        check_total(both)
        out = first(only_later).addressable_shards[0].data[0]
        np.testing.assert_array_equal(out, np.arange(6.0).reshape(2, 3).sum(0))
    # Of another shape, in memory that is made now.
    larger = np.ones((2, 40_000), np.float32)
    sharding = jax.NamedSharding(both, jax.sharding.PartitionSpec("i"))
    x = jax.make_array_from_callback(larger.shape, sharding, lambda index: larger[index])
    assert (np.asarray(first(x).addressable_shards[0].data) == 2).all()


@pytest.mark.full
def test_the_job_goes_on():
    with Processes(forks_between_sums, 2, environment=ENVIRONMENT) as program:
        results = program.wait(TIME_LIMIT)
    assert [result.returncode for result in results] == [0, 0], "\n" + as_text(results)


def test_a_child_that_calls_a_collective():
    result = run_python(
        """
import os, warnings
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import jax_ring

mesh = jax.sharding.Mesh(jax.devices(), ("i",))
f = jax.jit(jax.shard_map(lambda x: jax_ring.ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
x = jax.ShapeDtypeStruct((4,), jnp.float32)
f.lower(x)
jax.devices()
warnings.simplefilter("ignore")
if os.fork() == 0:
    try:
        jax.jit(lambda x: 2 * f(x)).lower(x)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
f.lower(x)
""",
        devices=2,
    )
    assert result.returncode == 0, result.stderr
    assert "ring_psum: this process was forked from process" in result.stdout, result.stdout
    assert "method spawn or forkserver" in result.stdout


@pytest.mark.full
def test_a_child_that_is_forked_before_jax_starts_may_use_it():
    result = run_python(
        """
import multiprocessing
import jax_ring

def use(queue):
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    f = jax.shard_map(lambda x: jax_ring.ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    queue.put(float(jax.jit(f)(jnp.arange(2.0))[0]))

context = multiprocessing.get_context("fork")
queue = context.Queue()
child = context.Process(target=use, args=(queue,))
child.start()
print(queue.get(timeout=100))
child.join()
""",
        devices=2,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1.0"]
