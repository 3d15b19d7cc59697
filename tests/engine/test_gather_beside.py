"""Which thread gathers a part of an array: none that goes on with a rank's program, if further parts follow."""

import contextlib
import ctypes
import os
import pathlib

import jax
import numpy as np
import pytest
from helpers import make_mesh, sharded
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_ring.lowering.call import ALL_GATHER, CallSpec
from jax_ring.lowering.custom_call import engine
from jax_ring.lowering.plan import service_of

RANKS = 4
# Of the whole array. So large that a result is fresh memory.
BYTES = 64 << 20
PAGE = os.sysconf("SC_PAGESIZE")

gather_part_p = Primitive("gather_part")


@gather_part_p.def_abstract_eval
def _abstract_eval(x, *, part, size):
    return jax.core.ShapedArray((size,), x.dtype)


def _lower(ctx, x, *, part, size):
    call = CallSpec("gather_part", ALL_GATHER, groups=(tuple(range(RANKS)),), axis_size=RANKS, part=part)
    call = call._replace(service=service_of(ctx, call), description="gather_part")
    return engine.emit(ctx, [x], call)


mlir.register_lowering(gather_part_p, _lower, platform="cpu")


@contextlib.contextmanager
def small_pages():
    """A context in which the kernel gives this process no huge pages, so that each page written is one fault."""
    set_thp_disable = 41
    libc = ctypes.CDLL(None)
    if libc.prctl(set_thp_disable, 1, 0, 0, 0):
        pytest.skip("the kernel cannot leave out huge pages")
    try:
        yield
    finally:
        libc.prctl(set_thp_disable, 0, 0, 0, 0)


def faults_by_thread() -> dict[int, tuple[str, int]]:
    """The name of each thread of this process, and how many pages it was the first to write."""
    found = {}
    for path in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name, fields = (path / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            found[int(path.name)] = name, int(fields.split()[7])
    return found


@pytest.mark.parametrize("is_followed", [True, False])
def test_who_gathers_a_part(is_followed):
    mesh = make_mesh((RANKS,))
    size = BYTES // 4
    gathered = size // 2 if is_followed else size
    x = np.arange(gathered, dtype=np.float32)
    fun = sharded(
        lambda x: gather_part_p.bind(x, part=(0, gathered), size=size)[: gathered : PAGE // 4],
        mesh=mesh,
        check_vma=False,
    )
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("i")))
    compiled = fun.lower(x).compile()
    with small_pages():
        before = faults_by_thread()
        out = compiled(x).block_until_ready()
        after = faults_by_thread()
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(0, gathered, PAGE // 4))
    written = {tid: (name, count - before.get(tid, ("", 0))[1]) for tid, (name, count) in after.items()}
    # Ranks run on threads of XLA's pool and on the thread that has called the program.
    of_ranks = sum(n for tid, (name, n) in written.items() if tid == os.getpid() or name.startswith("tf_XLA"))
    pages = RANKS * gathered * 4 // PAGE
    assert sum(n for _, n in written.values()) >= pages
    assert of_ranks < pages / 2 if is_followed else of_ranks >= pages / 2
