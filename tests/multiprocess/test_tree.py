"""Sums along the tree between processes and hosts: the same bits as in one process, and as NumPy's."""

import hashlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from processes import run
from test_failures import DEADLINE, error_of
from test_same_host import put, rows

from jax_ring import ShardSums, ring_pmean, ring_psum, ring_psum_scatter, ring_reduce

RANKS, SHARDS = 8, 24
SIZES = {"float32": (4104, 300_008), "bfloat16": (4104,)}
SMALL_SIZES = {"float32": (4104,), "bfloat16": (4104,)}
PAIRS = [[0, 7], [1, 6], [2, 5], [3, 4]]


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


def print_digests(layouts: list[str], sizes: dict) -> None:
    """Prints a digest of each rank's results, with the ranks in the order of the processes, or from each in turn."""
    by_process = np.array(jax.devices()).reshape(jax.process_count(), -1)
    for layout in layouts:
        mesh = Mesh({"consecutive": by_process, "interleaved": by_process.T}[layout].reshape(-1), ("i",))
        mapped = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
        for dtype, counts in sizes.items():
            for count in counts:
                results = mapped(put(mesh, values(count, dtype)))
                for path, result in jax.tree_util.tree_leaves_with_path(results):
                    for rank, row in rows(result).items():
                        print(f"{layout} {dtype}[{count}] {jax.tree_util.keystr(path)} {rank}: {digest(row[0])}")


def digests(num_processes: int, layouts: tuple[str, ...] = ("consecutive",), sizes=SIZES, **options) -> dict:
    """Those of all ranks, by layout and what they are of."""
    results = run(print_digests, num_processes, RANKS // num_processes, arguments=[layouts, sizes], **options)
    found: dict = {layout: {} for layout in layouts}
    for result in results:
        for layout, of, md5 in re.findall(r"^(\w+) (.*): (\w{32})$", result.stdout, re.M):
            found[layout][of] = md5
    return found


@pytest.fixture(scope="module")
def in_one_process():
    return digests(1)["consecutive"]


def test_one_process_has_the_bits_of_numpy(in_one_process):
    for dtype, counts in SIZES.items():
        for count in counts:
            x = values(count, dtype)
            for name, of in {"shards": x, "ranks": x[:: SHARDS // RANKS]}.items():
                expected = tree_sum(of).astype(x.dtype)
                for rank in range(RANKS):
                    assert in_one_process[f"{dtype}[{count}] ['{name}'] {rank}"] == digest(expected), (name, rank)


@pytest.mark.parametrize(("num_processes", "layout"), [(2, "consecutive"), (4, "interleaved")])
def test_same_bits_between_processes(num_processes, layout, in_one_process):
    assert len(in_one_process) >= RANKS * 20
    assert digests(num_processes, (layout,))[layout] == in_one_process


def test_same_bits_on_two_hosts(in_one_process):
    hosts = [{"JAX_RING_HOST_ID": host} for host in "aabb"]
    expected = {of: md5 for of, md5 in in_one_process.items() if "300008" not in of}
    for found in digests(4, ("consecutive", "interleaved"), SMALL_SIZES, environment_of=hosts).values():
        assert found == expected


def disagree_on_the_number_of_shards():
    terms = jnp.ones((2 * jax.device_count(), 3))

    def total(x, num_shards):
        return ring_psum(ShardSums(x, num_shards, (x.dtype,)), "i", order="tree")

    def call(num_shards):
        mesh = Mesh(np.array(jax.devices()), ("i",))
        mapped = jax.shard_map(lambda x: total(x, num_shards), mesh=mesh, in_specs=P("i"), out_specs=P())
        return jax.jit(mapped)(put(mesh, np.asarray(terms)))

    for row in rows(call(24)).values():
        np.testing.assert_array_equal(row, 2 * jax.device_count())
    # Both have two terms on each rank.
    error = error_of(call, (24, 48)[jax.process_index()])
    assert "All processes must make the same calls" in error or "Every process must make the same calls" in error, error


def test_different_numbers_of_shards_never_meet():
    run(disagree_on_the_number_of_shards, 2, environment={"JAX_RING_TIMEOUT_S": str(DEADLINE)})
