"""Sums along the tree between ranks on one GPU: the same bits on any number of ranks."""

import numpy as np
import pytest

from jax_ring import shard_tree

NUM_SHARDS = 24


@pytest.fixture
def ranks(backend):
    from jax_ring import _gpu_check

    deadline = 5.0 if backend == "cuda" else 30.0
    return lambda p, **options: _gpu_check.Ranks(backend, [(0, 0)] * p, **{"deadline": deadline} | options)


def sum_of(node: shard_tree.Node, shards: np.ndarray) -> np.ndarray:
    """The sum of the shards of a node, along the tree."""
    if node.size == 1:
        return shards[node.first]
    left, right = node.children()
    return sum_of(left, shards) + sum_of(right, shards)


def operand_of(rank: int, p: int, shards: np.ndarray) -> np.ndarray:
    """The slots of a rank: the sums that it contributes, and noise in the slots that it does not use."""
    slots = np.full((shard_tree.num_slots(NUM_SHARDS, p), *shards.shape[1:]), np.nan, np.float32)
    for slot, node in enumerate(shard_tree.terms_of(NUM_SHARDS, p, rank)):
        slots[slot] = sum_of(node, shards)
    return slots


@pytest.mark.parametrize("how", ["together", "streams", "graphs"])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_the_same_bits_on_any_number_of_ranks(ranks, algorithm, how):
    random = np.random.default_rng(1)
    for size in (1, 5, 4099, 70_001):
        shards = random.normal(size=(NUM_SHARDS, size)).astype(np.float32)
        want = sum_of(shard_tree.Node(0, NUM_SHARDS), shards)
        assert size == 1 or (want != shards.sum(0, dtype=np.float32)).any()
        for p in (1, 2, 3, 4, 6, 8):
            group = ranks(p)
            inputs = [[operand_of(rank, p, shards).tobytes()] for rank in range(p)]
            results = group.run(
                inputs, "f32", algorithm=algorithm, order="tree", how=how, num_shards=NUM_SHARDS, repeats=2
            )
            assert group.failure() == ""
            for result in results:
                np.testing.assert_array_equal(np.frombuffer(result[0], np.float32), want, err_msg=f"{p} ranks")


@pytest.mark.parametrize("p", [2, 3, 8])
def test_a_scattered_sum(ranks, p):
    shards = np.random.default_rng(2).normal(size=(NUM_SHARDS, p * 5003)).astype(np.float32)
    want = sum_of(shard_tree.Node(0, NUM_SHARDS), shards).reshape(p, -1)
    group = ranks(p)
    inputs = [[operand_of(rank, p, shards).tobytes()] for rank in range(p)]
    results = group.run(inputs, "f32", order="tree", num_shards=NUM_SHARDS, collective="reduce_scatter")
    assert group.failure() == ""
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(np.frombuffer(result[0], np.float32), want[rank])
