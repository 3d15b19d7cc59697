"""Shared memory that a process cannot map: all processes of the group hear why, at once."""

import contextlib
import pathlib
import re
import resource
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from job import client, job_token, segments

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # jobs of several processes; native code and Python's

# Later than the test may end: a process that waited for it would not pass.
DEADLINE = 3600.0


@contextlib.contextmanager
def no_more_files():
    """This process cannot open another file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def compiled_sum(order):
    """A sum over a mesh of one device of each process, in this order, and its argument."""
    from jax_ring import ring_psum

    mesh = Mesh([jax.devices()[process] for process in order], ("i",))
    sharding = jax.NamedSharding(mesh, P("i"))
    x = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.arange(mesh.size, dtype=np.int32)[index])
    f = jax.jit(jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    return f.lower(x).compile(), x


@pytest.mark.jax_processes(3, environment={"JAX_RING_TIMEOUT_S": str(DEADLINE)})
def test_all_hear_at_once_that_a_process_has_no_file_descriptors():
    me = jax.process_index()
    for order, failing, step in (([0, 1, 2], 1, "open"), ([2, 1, 0], 2, "create")):
        f, x = compiled_sum(order)
        with (
            no_more_files() if me == failing else contextlib.nullcontext(),
            pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"^RESOURCE_EXHAUSTED: ") as raised,
        ):
            jax.block_until_ready(f(x))
        text = str(raised.value)
        who = "this process" if me == failing else rf"rocess {failing} .*"
        what = rf"could not {step} \d+ KiB of shared memory in /dev/shm .*: Too many open files. It may have 0 files"
        assert re.search(rf"ring_psum of int32\[1\] over axis 'i', called at .*{who} ?{what}", text), text
    client().wait_at_barrier("all have heard", 60_000)
    # A process whose calls have failed removes what it has left from another thread.
    while segments(job_token()):
        time.sleep(0.01)
    # The next call creates memory of the same name's beginning, which a process that still looks would wait for.
    client().wait_at_barrier("all have looked", 60_000)
    f, x = compiled_sum([1, 0, 2])
    assert [int(shard.data[0]) for shard in f(x).addressable_shards] == [3]


@pytest.mark.jax_processes(2)
def test_memory_grows_with_the_calls():
    """Calls of growing size, whose results are right."""
    mesh = Mesh(jax.devices(), ("i",))
    from jax_ring import ring_psum

    sharding = jax.NamedSharding(mesh, P("i"))
    f = jax.jit(jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    mapped = []
    for size in (1, 1000, 30_000, 3_000_000):
        row = np.arange(size, dtype=np.int32)
        x = jax.make_array_from_callback((mesh.size * size,), sharding, lambda index, row=row: np.tile(row, 2)[index])
        for _ in range(2):
            (shard,) = f(x).addressable_shards
            np.testing.assert_array_equal(shard.data, 2 * row)
        ranges = re.findall(r"^(\w+)-(\w+) .*/dev/shm/jax_ring", pathlib.Path("/proc/self/maps").read_text(), re.M)
        mapped.append(sum(int(end, 16) - int(begin, 16) for begin, end in ranges) >> 10)
    # KiB: a first segment alone, and with ever larger ones.
    assert mapped[0] == mapped[1] < 64, mapped
    assert mapped[1] < mapped[2] < mapped[3] < 4096, mapped
