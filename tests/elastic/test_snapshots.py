"""What a commit has: leaves, parts of divided arrays, and their bytes."""

import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_ring.elastic.snapshots import UNDIVIDED, Leaf, Snapshot, _divided

# Two parts on the first of three processes, none on the second.
BOXES = ((((0, 1), (0, 3)), ((3, 4), (0, 3))), (), (((1, 3), (0, 3)),))


def part_of(process, leaves):
    """What one of three processes has of arrays that are divided."""
    described = [Leaf(str(i), None, leaf.dtype, leaf.shape, BOXES) for i, leaf in enumerate(leaves)]
    parts = [leaf[tuple(slice(*ends) for ends in box)].copy() for leaf in leaves for box in BOXES[process]]
    return Snapshot(described, 3, {UNDIVIDED: [], process: parts})


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.complex64, bool])
def test_parts_come_together(dtype):
    whole = [np.arange(12).reshape(4, 3).astype(dtype), np.arange(12)[::-1].reshape(4, 3).astype(dtype)]
    first, second, third = (part_of(process, whole) for process in range(3))
    assert [first.num_bytes(p) for p in range(3)] == [2 * 6 * whole[0].itemsize, 0, 2 * 6 * whole[0].itemsize]
    assert len(second.packed([1])) == 0
    third.unpack([0, 1], np.concatenate([first.packed([0]), second.packed([1])]))
    assert (third.num_parts, third.undivided().num_parts) == (3, 0)
    restored = third.undivided().trees({"0": 0, "1": 0})
    for leaf, expected in zip(restored.values(), whole, strict=True):
        assert leaf.dtype == expected.dtype
        assert leaf.tobytes() == expected.tobytes()


def test_one_process_has_all():
    mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4])
    x = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    snapshot = Snapshot.of({"x": x}, 0, 1)
    assert snapshot.num_parts == 0
    np.testing.assert_array_equal(snapshot.trees({"x": 0})["x"], np.arange(8.0))


def test_parts_of_a_global_array():
    mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4])
    x = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    boxes, own = _divided(x, 0, 2)
    assert boxes == ((((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)), ())
    snapshot = Snapshot([Leaf("x", None, np.dtype(x.dtype), x.shape, boxes)], 2, {UNDIVIDED: [], 0: own, 1: []})
    np.testing.assert_array_equal(snapshot.trees({"x": 0})["x"], np.arange(8.0))


def test_an_array_of_the_user_stays_apart():
    host = np.ones(3)
    trees = Snapshot.of({"x": host}, 0, 1).trees({"x": 0})
    trees["x"][:] = 5
    np.testing.assert_array_equal(host, 1)


EXACT = {
    "flags": [True, False], "numbers": [0, -1, 2**70, 0.1, -0.0, float("inf"), float("-inf"), 5e-324],
    "texts": ["", "ü\0\ud800"], "nothing": None, "none": {},
}  # fmt: skip


def test_values_come_through_json_exactly():
    snapshot, sections = Snapshot.of_header(Snapshot.of(EXACT, 0, 1).header([UNDIVIDED]), "here")
    snapshot.unpack(sections, np.empty(0, np.uint8))
    found = snapshot.trees(EXACT)
    assert jax.tree.structure(found) == jax.tree.structure(EXACT)
    assert [*map(repr, jax.tree.leaves(found))] == [*map(repr, jax.tree.leaves(EXACT))]
    nan, _ = Snapshot.of_header(Snapshot.of({"x": float("nan")}, 0, 1).header(), "here")
    assert np.isnan(nan.leaves[0].value)


def test_types_come_through_json():
    values = {
        "key": jax.random.split(jax.random.key(3, impl="rbg"), 2), "weak": jnp.asarray(1.0), "scalar": np.float32(2),
        "half": jnp.ones((2, 3), jnp.bfloat16), "int4": jnp.ones(3, jnp.int4), "empty": np.zeros((0, 3)),
        "number": 3,
    }  # fmt: skip
    own = Snapshot.of(values, 0, 1)
    snapshot, _ = Snapshot.of_header(own.header(), "here")
    assert snapshot.leaves == own.leaves
    snapshot.unpack([UNDIVIDED], own.packed([UNDIVIDED]))
    found = snapshot.trees(values)
    assert found["key"].dtype == values["key"].dtype
    np.testing.assert_array_equal(jax.random.key_data(found["key"]), jax.random.key_data(values["key"]))
    assert found["weak"].weak_type
    for name in ("weak", "scalar", "half", "int4", "empty", "number"):
        assert np.asarray(found[name]).dtype == np.asarray(values[name]).dtype
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(values[name]))
        assert name in ("weak", "number") or found[name].flags.writeable


class Settings(dict):
    pass


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (threading.Lock(), "lock"),
        (2j, "complex"),
        (1 << 10_000, "int"),
        (b"bytes", "bytes"),
        (Settings(), "Settings"),
        ({1, 2}, "set"),
        (np.array([None]), "ndarray of object"),
        (np.array("text"), "ndarray of <U4"),
        (np.str_("text"), "str_ of <U4"),
        (np.ones(2, ">f4"), "ndarray of >f4"),
        (np.longdouble(1), "longdouble of float128"),
    ],
)
def test_a_leaf_that_cannot_be_kept_is_named(leaf, kind):
    with pytest.raises(TypeError, match=rf"State: the leaf at \['data'\]\['train'\], a {kind}, cannot be kept: leaves"):
        Snapshot.of({"step": 0, "data": {"train": leaf}}, 0, 1)
