"""Sums along the tree, compiled for GPUs that are not there: the custom calls and the trees that they are told."""

import jax.numpy as jnp
import pytest
from compiled_programs import ONE_HOST, TWO_HOSTS, attribute, calls_in, collectives_of_xla, compiled_for

from jax_ring import ShardSums, assume_hosts, ring_psum, ring_psum_scatter, ring_reduce, shard_tree

pytestmark = pytest.mark.one_pair  # other modules cover what XLA's passes do with calls

NUM_SHARDS = 24


def of_shards(function, num_ranks):
    """`function` of sums over the rank's shards, which are all alike here."""

    def body(x):
        shards = jnp.stack([x * (i + 1) for i in range(NUM_SHARDS // num_ranks)])
        return function(ShardSums.of(shards, "i", NUM_SHARDS))

    return body


@pytest.mark.parametrize(("shape", "hosts"), [("1x1x8", {0: 0}), ("1x8x1", ONE_HOST)])
def test_on_one_host(mesh_of, shape, hosts):
    calls = {
        "all_reduce": lambda x: ring_psum(x, "i", order="tree"),
        "reduce_scatter": lambda x: ring_psum_scatter(x, "i", order="tree", tiled=True),
        "reduce": lambda x: ring_reduce(x, "i", order="tree"),
    }
    with assume_hosts(hosts):
        for kind, function in calls.items():
            hlo = compiled_for(mesh_of(shape), function)
            assert calls_in(hlo) == [kind]
            assert collectives_of_xla(hlo) == []
            assert 'order = "tree"' in hlo
            assert attribute("tree_shards", hlo) == [8]
            assert attribute("tree_sizes", hlo) == [8]
            assert attribute("tree_ranks", hlo) == list(range(8))


def test_partial_sums_of_shards(mesh_of):
    with assume_hosts({0: 0}):
        hlo = compiled_for(mesh_of("1x1x8"), of_shards(lambda sums: ring_psum(sums, "i", order="tree"), 8))
    assert calls_in(hlo) == ["all_reduce"]
    assert collectives_of_xla(hlo) == []
    assert attribute("tree_shards", hlo) == [NUM_SHARDS]
    assert "f32[2,96]" in hlo  # two terms of each rank


@pytest.mark.parametrize(("shape", "hosts"), [("1x2x8", {0: "a", 1: "b"}), ("1x16x1", TWO_HOSTS)])
def test_on_two_hosts(mesh_of, shape, hosts):
    with assume_hosts(hosts):
        hlo = compiled_for(mesh_of(shape), lambda x: ring_psum(x, "i", order="tree"))
    assert calls_in(hlo) == ["reduce_scatter", "all_gather"]
    # XLA only moves data: it adds nothing.
    assert {opcode for opcode, _ in collectives_of_xla(hlo)} <= {"all-to-all", "all-gather"}
    assert attribute("tree_shards", hlo) == [16, 16]
    assert attribute("tree_ranks", hlo) == list(range(16))


def test_a_tree_beyond_the_kernels(mesh_of):
    def body(x):  # 31 shards on each rank
        terms = jnp.stack([x] * shard_tree.num_slots(8 * 31, 8))
        return ring_psum(ShardSums(terms, 8 * 31, (jnp.float32,)), "i", order="tree")

    with assume_hosts({0: 0}):
        hlo = compiled_for(mesh_of("1x1x8"), body)
    assert calls_in(hlo) == []
    assert {opcode for opcode, _ in collectives_of_xla(hlo)} == {"all-to-all", "all-gather"}
