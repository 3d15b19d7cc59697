"""Parts of divided arrays: kept, sent as bytes, and put together."""

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_ring.elastic.snapshots import Divided, Snapshot


def divided(whole, boxes, process):
    parts = {process: [whole[tuple(slice(*ends) for ends in box)].copy() for box in boxes[process]]}
    return Divided(whole.shape, whole.dtype, boxes, parts)


def snapshots(leaves, boxes):
    """What each process keeps of some whole arrays."""
    structure = jax.tree.structure(leaves)
    return [
        Snapshot(7, structure, [divided(leaf, boxes, process) for leaf in leaves], len(boxes), (process,))
        for process in range(len(boxes))
    ]


# Two parts on the first of three processes, none on the second.
BOXES = ((((0, 1), (0, 3)), ((3, 4), (0, 3))), (), (((1, 3), (0, 3)),))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.complex64, bool])
def test_parts_come_together(dtype):
    whole = [np.arange(12).reshape(4, 3).astype(dtype), np.arange(12)[::-1].reshape(4, 3).astype(dtype)]
    first, second, third = snapshots(whole, BOXES)
    assert [first.num_bytes(p) for p in range(3)] == [2 * 6 * whole[0].itemsize, 0, 2 * 6 * whole[0].itemsize]
    assert len(second.packed(1)) == 0
    received = {0: first.packed(0), 1: second.packed(1)}
    complete = third.with_parts(received)
    assert complete.held == (0, 1, 2)
    restored = complete.whole()
    assert restored.held is None
    for leaf, expected in zip(restored.leaves, whole, strict=True):
        assert leaf.dtype == expected.dtype
        assert leaf.tobytes() == expected.tobytes()


def test_one_process_has_all():
    mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4])
    x = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    snapshot = Snapshot.of({"x": x}, 0, 0, 1)
    assert snapshot.held is None
    np.testing.assert_array_equal(snapshot.trees()["x"], np.arange(8.0))


def test_parts_of_a_global_array():
    mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4])
    x = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    leaf = Divided.of(x, 0, 2)
    assert leaf.boxes == ((((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)), ())
    leaf.parts[1] = []
    np.testing.assert_array_equal(leaf.whole(), np.arange(8.0))
