"""wire="int8" across hosts: two processes of four devices each, with a different JAX_RING_HOST_ID."""

import jax
import numpy as np
import pytest
from helpers import assert_same_bits, rank_fold
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_two_level import TWO_HOSTS, by_host, call, integers, local_shards, on_mesh

from jax_ring import explain, sync_gradients, sync_with_feedback
from jax_ring.collectives import int8_blocks as int8

RNG = np.random.default_rng(0)  # the same numbers in both processes
SIZE = 4 * 2 * int8.BLOCK * 2 - 300  # the last shard is padded


def through_packets(x: np.ndarray) -> np.ndarray:
    """x after rounding, on one device."""
    return np.asarray(int8.decode(int8.encode(x.reshape(-1, int8.BLOCK)))).reshape(x.shape)


def expected_sum(values: np.ndarray, hosts: list[slice]) -> tuple[np.ndarray, np.ndarray]:
    """The sum, and the rounding errors of the two hosts."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % (8 * int8.BLOCK))))
    of_hosts = [rank_fold(padded[host]) for host in hosts]
    total = rank_fold(np.stack([through_packets(x) for x in of_hosts]))
    rounded = through_packets(total)
    errors = np.stack([x - through_packets(x) for x in of_hosts]).reshape(2, 4, 2, -1)
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
        shards = np.pad(residuals, ((0, 0), (0, -SIZE % (8 * int8.BLOCK)))).reshape(4, 4, -1) != 0
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


@pytest.mark.jax_processes(2, devices=4, environment=TWO_HOSTS)
def test_two_hosts():
    for part in (only_what_crosses_is_rounded, other_mesh_axes, bytes_across_hosts):
        part()
        print(f"{part.__name__} passed")
