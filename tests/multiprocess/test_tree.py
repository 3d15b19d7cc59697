"""Sums along the tree between processes and hosts: the same bits as in one process, and as NumPy's."""

import functools
import hashlib
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from job import merged
from test_failures import DEADLINE, compiled_together, error_of
from test_same_host import put, rows

from jax_ring import ShardSums, _ffi_cpu, ring_pmean, ring_psum, ring_psum_scatter, ring_reduce

pytestmark = pytest.mark.one_pair  # native code and Python's

RANKS, SHARDS = 8, 24
SMALL_CASES = [("float32", 4104), ("bfloat16", 4104)]  # types, and numbers of values
CASES = [*SMALL_CASES, ("float32", 300_008)]
PAIRS = [[0, 7], [1, 6], [2, 5], [3, 4]]


@functools.cache
def values(count: int, dtype: str) -> np.ndarray:
    """By shard. Their sum depends on the order of adding."""
    random = np.random.default_rng(count)
    wide = random.normal(size=(SHARDS, count)) * 10.0 ** random.integers(-3, 4, size=(SHARDS, count))
    return np.asarray(jnp.asarray(wide).astype(dtype))


def tree_sum(part: np.ndarray) -> np.ndarray:
    """In float32, from the definition of the tree."""
    if len(part) == 1:
        return part[0].astype(np.float32)
    left = 1 << (len(part) - 1).bit_length() - 1
    return tree_sum(part[:left]) + tree_sum(part[left:])


def sums(x) -> dict:
    """Results of all kinds, from the three shards of this rank. The first of them is the rank's own value."""
    shards, own = ShardSums.of(x, "i", SHARDS), x[0]
    results = {"shards": ring_psum(shards, "i", order="tree"), "ranks": ring_psum(own, "i", order="tree")}
    if x.shape[1] < 10_000:
        results |= {
            "shards, one-shot": ring_psum(shards, "i", order="tree", algorithm="one_shot"),
            "shards, scattered": ring_psum_scatter(shards, "i", order="tree", tiled=True),
            "shards, reduced": ring_reduce(shards, "i", order="tree", root=5),
            "ranks, scattered": ring_psum_scatter(own, "i", order="tree", tiled=True),
            "ranks, one-shot": ring_psum(own, "i", order="tree", algorithm="one_shot"),
            "ranks in pairs": ring_psum(own, "i", order="tree", axis_index_groups=PAIRS),
            "mean": ring_pmean([shards.terms[0], own], "i", order="tree"),
        }
    return jax.tree.map(lambda result: result[None], results)


def digest(array: np.ndarray) -> str:
    return hashlib.md5(np.ascontiguousarray(array).tobytes()).hexdigest()


def digests(cases: Iterable[tuple[str, int]], devices: Sequence) -> dict[str, str]:
    """Digests of the results that this process holds, with the ranks on these devices, by what they are of."""
    found = {}
    mesh = Mesh(devices, ("i",))
    mapped = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    for dtype, count in cases:
        results = mapped(put(mesh, values(count, dtype)))
        for path, result in jax.tree_util.tree_leaves_with_path(results):
            for rank, row in rows(result).items():
                found[f"{dtype}[{count}] {jax.tree_util.keystr(path)} {rank}"] = digest(row[0])
    return found


def check_bits(layouts: list[str], cases: list[tuple[str, int]]) -> None:
    """With the ranks in the order of the processes, or from each in turn, against those of one process.

    The devices of a process are enough for all ranks. Each process finds a part of what is expected.
    """
    num_processes = jax.process_count()
    expected = merged(digests(cases[jax.process_index() :: num_processes], jax.local_devices()))
    assert len(expected) >= RANKS * 20
    each = [jax.local_devices(process_index=i)[: RANKS // num_processes] for i in range(num_processes)]
    for layout in layouts:
        devices = {"consecutive": np.array(each), "interleaved": np.array(each).T}[layout].reshape(-1)
        assert merged(digests(cases, devices)) == expected, layout


def test_one_process_has_the_bits_of_numpy():
    in_one_process = digests(CASES, jax.devices()[:RANKS])
    for dtype, count in CASES:
        x = values(count, dtype)
        for name, of in {"shards": x, "ranks": x[:: SHARDS // RANKS]}.items():
            expected = tree_sum(of).astype(x.dtype)
            for rank in range(RANKS):
                assert in_one_process[f"{dtype}[{count}] ['{name}'] {rank}"] == digest(expected), (name, rank)


@pytest.mark.full
@pytest.mark.jax_processes(2, devices=RANKS)
def test_same_bits_between_processes():
    check_bits(["consecutive", "interleaved"], CASES)


@pytest.mark.full
@pytest.mark.jax_processes(4, devices=RANKS, environment=[{"JAX_RING_HOST_ID": host} for host in "aabb"])
def test_same_bits_on_two_hosts():
    check_bits(["consecutive", "interleaved"], SMALL_CASES)


@pytest.mark.full
@pytest.mark.jax_processes(2)
def test_different_numbers_of_shards_never_meet():
    terms = jnp.ones((2 * jax.device_count(), 3))

    def total(x, num_shards):
        return ring_psum(ShardSums(x, num_shards, (x.dtype,)), "i", order="tree")

    mesh = Mesh(np.array(jax.devices()), ("i",))
    operand = put(mesh, np.asarray(terms))

    def program(num_shards):
        mapped = jax.shard_map(lambda x: total(x, num_shards), mesh=mesh, in_specs=P("i"), out_specs=P())
        return compiled_together(jax.jit(mapped), mesh, operand)

    for row in rows(program(24)(operand)).values():
        np.testing.assert_array_equal(row, 2 * jax.device_count())
    # Both have two terms on each rank.
    other = program((24, 48)[jax.process_index()])
    _ffi_cpu.set_deadline(DEADLINE)  # now that both have called one and compiled the other
    error = error_of(other, operand)
    assert "All processes must make the same calls" in error or "Every process must make the same calls" in error, error
