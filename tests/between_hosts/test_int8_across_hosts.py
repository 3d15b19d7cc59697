"""wire="int8" across hosts: two processes of four devices each, with a different JAX_RING_HOST_ID."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, rank_fold
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_two_level import TWO_HOSTS, by_host, call, cut_small_parts, integers, local_shards, on_mesh

from jax_ring import explain, sync_gradients, sync_with_feedback
from jax_ring.collectives import scale_groups as int8
from jax_ring.lowering.hierarchical import all_reduce

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # jobs of several processes; tables of the same steps

RNG = np.random.default_rng(0)  # the same numbers in both processes
SIZE = 4 * 2 * int8.GROUP * 2 - 300  # the last shard is padded


def through_packets(x: np.ndarray) -> np.ndarray:
    """x after rounding, on one device."""
    return np.asarray(int8.decode(int8.encode(x.reshape(-1, int8.GROUP)))).reshape(x.shape)


def expected_sum(values: np.ndarray, hosts: list[slice]) -> tuple[np.ndarray, np.ndarray]:
    """The sum, and the rounding errors of the two hosts."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % (8 * int8.GROUP))))
    of_hosts = [rank_fold(padded[host]) for host in hosts]
    sent = np.stack([through_packets(x) for x in of_hosts])
    total = rank_fold(sent)
    rounded = through_packets(total)
    errors = (np.stack(of_hosts) - sent).reshape(2, 4, 2, -1)
    second = (total - rounded).reshape(4, 2, -1)
    for host in range(2):
        errors[host, :, host] += second[:, host]
    size = values.shape[1]
    return rounded[:size], errors.reshape(2, -1)[:, :size]


def only_what_crosses_is_rounded():
    """With the hosts consecutive and interleaved, the bits are those of the definition."""
    values = RNG.standard_normal((8, SIZE)).astype(np.float32)

    def body(x):
        total, residual = sync_with_feedback(x[0], 0 * x[0], "i", wire="int8", mean=False)
        return total, residual[None]

    for devices, hosts in [
        (by_host().reshape(8), [slice(0, 4), slice(4, 8)]),
        (by_host().T.reshape(8), [slice(0, 8, 2), slice(1, 8, 2)]),
    ]:
        mesh = Mesh(devices, ("i",))
        total, residual = call(body, mesh, values, out_specs=(P(), P("i")))
        expected, errors = expected_sum(values, hosts)
        for part in local_shards(total):
            assert_same_bits(part, expected)
        # Each rank of a host owns one shard, and the residual is zero elsewhere.
        residuals = local_shards(residual)[:, 0]
        assert_same_bits(residuals.sum(0, dtype=np.float32), errors[jax.process_index()])
        shards = np.pad(residuals, ((0, 0), (0, -SIZE % (8 * int8.GROUP)))).reshape(4, 4, -1) != 0
        assert (shards.any(-1) == np.eye(4, dtype=bool)).all()


def other_mesh_axes():
    """Groups of two hosts beside each other, with the axes in any order, and integer leaves in between."""
    mesh = Mesh(by_host().reshape(2, 2, 2).transpose(1, 0, 2), ("j", "host", "i"))
    values = {"x": np.tile(integers(8, 1) * 126, (1, 300)).astype(np.float32), "n": integers(8, 2, dtype=np.int32)}
    fun = lambda tree: sync_gradients(tree, ("i", "host"), wire="int8", mean=False)  # noqa: E731
    out = call(fun, mesh, values, out_specs=P("j"))
    sums = jax.tree.map(lambda x: x.reshape(2, 4, -1).sum(1, dtype=x.dtype), values)  # exact
    mine = jax.tree.map(lambda x: np.repeat(x, 2, 0)[:, None].reshape(4, 1, -1), sums)
    assert_same_bits(jax.tree.map(local_shards, out), mine)


def bytes_across_hosts():
    """At most 0.27 of those of float32."""
    mesh = Mesh(by_host().reshape(8), ("i",))
    values = np.zeros((8, 1 << 16), np.float32)

    def crossing(**options):
        fun, arrays = on_mesh(lambda x: sync_gradients(x[0], "i", **options), mesh, values, out_specs=P())
        explanation = explain(fun, arrays)
        assert explanation.predicted_bytes == explanation.counted_bytes
        found = explanation.instructions
        assert {i.name: set(i.group_sizes) for i in found if i.name.startswith("jax_ring")} == {
            "jax_ring_reduce_scatter": {4},
            "jax_ring_all_gather": {4},
        }
        across = [i for i in found if not i.name.startswith("jax_ring")]
        assert all(i.group_sizes == (2, 2, 2, 2) for i in across)
        return sum(i.wire_bytes for i in across)

    assert 0.25 < crossing(wire="int8") / crossing() < 0.27


def large_messages_cross_in_parts():
    """The bits are those of one piece, with and without padding, with what is not finite, donated, and in a loop."""
    mesh = Mesh(by_host().reshape(8), ("i",))
    sum_of = lambda x: sync_gradients(x, "i", wire="int8", mean=False)  # noqa: E731

    def both(x):
        zeros = jnp.zeros_like(x[0])  # with a residual they are not cut
        return sum_of(x[0]), sync_with_feedback(x[0], zeros, "i", wire="int8", mean=False)[0]

    for size in (3 * all_reduce.PART_BYTES // 2, 2 * all_reduce.PART_BYTES + 1001):
        values = RNG.standard_normal((8, size)).astype(np.float32)
        values[:, ::4096] *= 1e9
        values[0, 5000] = np.nan
        values[3, 70_000], values[6, size - 1] = np.inf, -np.inf
        values[:, 1 << 17 : (1 << 17) + 256] = 0
        values[0, 99_999], values[1, 99_999] = np.inf, -np.inf

        fun, arrays = on_mesh(both, mesh, values, out_specs=P())
        found = explain(fun, arrays)
        assert found.predicted_bytes == found.counted_bytes
        assert [i.name for i in found.instructions].count("jax_ring_all_gather") > 2
        for _ in range(2):
            in_parts, whole = fun(arrays)
            assert_same_bits(local_shards(in_parts), local_shards(whole))
    assert np.isnan(local_shards(whole)[:, [5000, 99_999]]).all()
    assert (local_shards(whole)[:, [70_000, size - 1]] == [np.inf, -np.inf]).all()

    values = np.tile(integers(8, 256) * 126, (1, 4 * all_reduce.PART_BYTES // 1024)).astype(np.float32)
    fun, arrays = on_mesh(lambda x: lax.fori_loop(0, 2, lambda _, x: sum_of(x) / 8, x), mesh, values, check_vma=False)
    once = rank_fold(np.stack([through_packets(rank_fold(values[:4])), through_packets(rank_fold(values[4:]))]))
    mean = through_packets(once) / 8
    of_host = through_packets(rank_fold(np.stack([mean] * 4)))
    expected = through_packets(of_host + of_host) / 8
    for part in local_shards(fun(arrays)):
        np.testing.assert_allclose(part[0], expected, rtol=1e-6)
    fun, arrays = on_mesh(sum_of, mesh, values)
    expected = through_packets(once)
    for part in local_shards(jax.jit(fun, donate_argnums=0)(arrays)):
        assert_same_bits(part[0], expected)


@pytest.mark.jax_processes(2, devices=4, environment=TWO_HOSTS)
def test_two_hosts():
    cut_small_parts()
    for part in (only_what_crosses_is_rounded, other_mesh_axes, bytes_across_hosts, large_messages_cross_in_parts):
        part()
        print(f"{part.__name__} passed")
