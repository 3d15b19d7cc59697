"""Functions of the native modules with arguments that no caller in jax_ring gives: an exception, and no fault."""

import pytest

from jax_ring import _ffi_cpu, _ffi_cuda

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version


@pytest.mark.parametrize("take", [_ffi_cuda.share_failures, _ffi_cuda.set_gpus])
def test_a_capsule_of_something_else(take):
    other = _ffi_cpu.collective_handlers()["execute"]
    with pytest.raises(ValueError, match="incorrect name"):
        take(other)
    with pytest.raises(TypeError):
        take(None)


@pytest.mark.parametrize(
    ("num_shards", "num_ranks", "ranks"),
    [(0, 0, []), (4, 0, []), (4, -1, []), (5, 2, [0, 1]), (1 << 40, 1, [0]), (4, 2, [0, 2]), (4, 2, [1, 0])],
)
def test_trees_that_do_not_exist(num_shards, num_ranks, ranks):
    with pytest.raises(ValueError, match=r"shards|ascending order"):
        _ffi_cuda.serves_tree(num_shards, num_ranks, ranks)


def test_ranks_and_threads_that_do_not_exist():
    for num_ranks, rank in ((0, 0), (-1, 0), (2, 2), (2, -1)):
        with pytest.raises(ValueError, match=f"no rank {rank} of {num_ranks}"):
            _ffi_cpu.ring_hops(False, num_ranks, rank, 4, 0)
    for num_ranks, num_threads in ((0, 1), (-1, 1), (1, 0), (1, -1)):
        with pytest.raises(ValueError, match="a rank and a thread"):
            _ffi_cpu.fold_limit_seconds(num_ranks, 1024, num_threads, 1)
    with pytest.raises(MemoryError):
        _ffi_cpu.fold_limit_seconds(1, 1 << 62, 1, 1)
