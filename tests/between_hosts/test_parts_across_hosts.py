"""How an operand of an all-reduce across hosts is cut into parts."""

import itertools

import pytest

from jax_ring.lowering.hierarchical.all_reduce import PART_BYTES, _in_turn, parts_of

pytestmark = pytest.mark.one_pair  # native code and tables of the same steps


@pytest.mark.parametrize(("num_bytes", "num_parts"), [(0, 1), (2 * PART_BYTES - 32, 1), (2 * PART_BYTES, 2)])
def test_large_operands_are_cut(num_bytes, num_parts):
    assert len(parts_of(num_bytes // 4, 8, 4)) == num_parts


@pytest.mark.parametrize("num_shards", [2, 3, 8, 48])
def test_every_element_is_in_one_part(subtests, num_shards):
    sizes = [8, PART_BYTES, 5 * PART_BYTES + 1001, 123 * PART_BYTES]
    for itemsize, num_bytes, unit, max_parts in itertools.product([1, 4, 8], sizes, [1, 3, 512], [16, 24]):
        with subtests.test(itemsize=itemsize, num_bytes=num_bytes, unit=unit, max_parts=max_parts):
            size = -(-num_bytes // itemsize // num_shards // unit) * num_shards * unit
            check_parts(size, num_shards, itemsize, unit, max_parts)


def check_parts(size, num_shards, itemsize, unit, max_parts):
    parts = parts_of(size, num_shards, itemsize, unit, max_parts)
    assert len(parts) <= max_parts
    assert parts[0].begin == 0
    assert [part.begin + part.size for part in parts] == [*(part.begin for part in parts[1:]), size]
    assert all(part.size > 0 or size == 0 for part in parts)
    # Each rank has as much of a part, and begins at a cache line.
    assert all(part.size % num_shards == 0 for part in parts)
    assert all(part.begin // num_shards * itemsize % 64 == 0 for part in parts)
    # And a whole number of units.
    assert all(part.size // num_shards % unit == 0 for part in parts)


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_parts_take_their_steps_in_turn(num_parts, num_steps):
    order = _in_turn(num_parts, num_steps)
    assert sorted(order) == [(part, step) for part in range(num_parts) for step in range(num_steps)]
    for step in range(num_steps):
        assert [part for part, i in order if i == step] == list(range(num_parts))
    for part in range(num_parts):
        assert [i for k, i in order if k == part] == list(range(num_steps))
        if num_steps == 2 and part + 1 < num_parts:
            assert order.index((part + 1, 0)) < order.index((part, 1))
