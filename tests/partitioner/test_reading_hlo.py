"""What jax_ring reads of HLO is what XLA means: replica groups in all encodings, layouts, serialized messages."""

import contextlib
import itertools
import math
import re

import numpy as np
import pytest
from jaxlib import _hlo

from jax_ring.lowering.hlo import collectives, proto
from jax_ring.lowering.hlo.collectives import DEVICE_LIST, IOTA, LISTS, MESH_AXES, groups_of
from jax_ring.lowering.hlo.proto import Message, Unsupported

MODULE = """
HloModule m, replica_count=1, num_partitions={ranks}
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
ENTRY main {{
  x = f32[4] parameter(0)
  ROOT y = f32[4] all-reduce(x), channel_id=1, use_global_device_ids=true, replica_groups={groups}, to_apply=add
}}
"""


def instruction_with(groups: str, ranks: int = 8) -> Message:
    """XLA's own all-reduce with these groups."""
    module = _hlo.hlo_module_from_text(MODULE.format(groups=groups, ranks=ranks))
    computations = Message.parse(module.as_serialized_hlo_module_proto()).messages(3)
    instructions = [each for computation in computations for each in computation.messages(proto.INSTRUCTIONS)]
    return next(each for each in instructions if each.text(2) == "all-reduce")


@pytest.mark.parametrize(
    ("text", "encoding", "expected"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", DEVICE_LIST, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("{{3,1},{0,2},{7,4},{5,6}}", DEVICE_LIST, [[3, 1], [0, 2], [7, 4], [5, 6]]),
        ("{}", DEVICE_LIST, [list(range(8))]),
        ("[2,4]<=[8]", IOTA, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", IOTA, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[2,2,2]T(1,2,0)", IOTA, [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", MESH_AXES, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b','a'}", MESH_AXES, [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", MESH_AXES, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", MESH_AXES, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a'}", MESH_AXES, [[0, 2], [4, 6], [1, 3], [5, 7]]),
    ],
)
def test_encodings(text, encoding, expected):
    instruction = instruction_with(text)
    assert instruction.field_numbers() & {LISTS, DEVICE_LIST, IOTA, MESH_AXES} == {encoding}
    assert sorted(map(list, groups_of(instruction, 8))) == sorted(expected)


def groups_by_coordinates(sizes, ids, axes) -> set[tuple[int, ...]]:
    """Groups along axes, or along parts (axis, before, size): devices that differ in these coordinates alone."""
    found: dict[tuple, list] = {}
    for position, coordinates in enumerate(itertools.product(*map(range, sizes))):
        rest, own = list(coordinates), []
        for axis, before, size in axes:
            after = sizes[axis] // (before * size)
            own.append(coordinates[axis] // after % size)
            rest[axis] -= own[-1] * after
        found.setdefault(tuple(rest), []).append((own, ids[position]))
    return {tuple(id_ for _, id_ in sorted(members)) for members in found.values()}


@pytest.mark.parametrize("seed", range(12))
def test_parts_of_axes_of_random_meshes(seed):
    rng = np.random.default_rng(seed)
    sizes = [(4, 4), (2, 8), (16,), (2, 2, 4), (8, 2)][rng.integers(5)]
    parts = []
    for axis, size in enumerate(sizes):
        choices = [(axis, 1, size)]
        choices += [(axis, before, 2) for before in (1, 2, 4) if size % (2 * before) == 0 and size > 2]
        parts.append(choices[rng.integers(len(choices))])
    axes = [parts[i] for i in rng.permutation(len(sizes))[: rng.integers(1, len(sizes) + 1)]]
    ids, order = list(range(16)), ""
    permutation = rng.permutation(len(sizes))
    if rng.random() < 0.7 and permutation.tolist() != sorted(permutation):
        shape = np.array(sizes)[np.argsort(permutation)]
        ids = np.arange(16).reshape(shape).transpose(permutation).reshape(-1).tolist()
        order = f", device_ids=([{','.join(map(str, shape))}]T({','.join(map(str, permutation))}))"
    mesh = ",".join(f"'{'abc'[i]}'={size}" for i, size in enumerate(sizes))
    named = [f"'{'abc'[axis]}'" + (f":({before}){size}" if size < sizes[axis] else "") for axis, before, size in axes]
    text = f"mesh[{mesh}]{order} {{{','.join(named)}}}"
    assert set(groups_of(instruction_with(text, 16), 16)) == groups_by_coordinates(sizes, ids, axes), text
    assert math.prod(size for _, _, size in axes) == len(groups_of(instruction_with(text, 16), 16)[0])


def of_lists(*groups) -> Message:
    return Message([proto.data(LISTS, Message([proto.packed(1, group)])) for group in groups])


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        (of_lists([0, 1], [2]), "of different sizes"),
        (of_lists([0, 1]), "do not divide 3 partitions"),
        (of_lists([0, 1], [1, 2]), "do not divide 3 partitions"),
        (Message([*of_lists([0, 1, 2]).fields, proto.data(IOTA, Message())]), "encoded in fields [49, 92]"),
        (Message([proto.data(LISTS, Message([proto.integer(7, 1)]))]), "unknown fields [7]"),
        (Message([proto.data(MESH_AXES, Message([proto.data(9, b"")]))]), "unknown fields [9]"),
    ],
)
def test_what_is_not_known_is_refused(instruction, why):
    with pytest.raises(Unsupported, match=re.escape(why)):
        groups_of(instruction, 3)


def test_the_older_lists():
    """No supported version of JAX writes them, and XLA reads them."""
    assert groups_of(of_lists([0, 2], [1, 3]), 4) == ((0, 2), (1, 3))


def test_messages_keep_what_they_were_read_from():
    data = _hlo.hlo_module_from_text(MODULE.format(groups="[2,4]<=[8]", ranks=8)).as_serialized_hlo_module_proto()
    assert Message.parse(data).to_bytes() == data
    numbers = [0, 1, 127, 128, -1, 2**62, -(2**63)]
    message = Message.parse(Message([proto.packed(1, numbers), proto.integer(2, -5), proto.data(3, "text")]).to_bytes())
    assert (message.integers(1), message.integer(2), message.text(3)) == (numbers, -5, "text")


@pytest.mark.parametrize("data", [b"\x08", b"\x0a\x05ab", b"\x0b\x01", b"\x0a\xff"])
def test_what_is_no_message(data):
    with pytest.raises(ValueError, match="not a message"):
        Message.parse(data)


GATHER = """
HloModule m, replica_count=1, num_partitions=8
ENTRY main {{
  x = f32[4,6]{operand} parameter(0)
  ROOT y = f32[{rows},{columns}]{result} all-gather(x), channel_id={channel}, use_global_device_ids=true,
    replica_groups=[2,4]<=[8], dimensions={{{dimension}}}
}}
"""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"dimension": 1, "rows": 4, "columns": 24, "operand": "{0,1}", "result": "{0,1}"}, ""),
        ({"dimension": 1, "rows": 4, "columns": 24}, "its blocks along dimension 1 do not lie one after the other"),
        ({"result": "{0,1}"}, "its operand and its result have different layouts"),
    ],
)
def test_layouts_of_blocks(changes, why):
    form = {"dimension": 0, "rows": 16, "columns": 6, "operand": "{1,0}", "result": "{1,0}", "channel": 1}
    module = _hlo.hlo_module_from_text(GATHER.format(**form | changes))
    (computation,) = Message.parse(module.as_serialized_hlo_module_proto()).messages(3)
    parameter, gather = computation.messages(proto.INSTRUCTIONS)
    with pytest.raises(Unsupported, match=why) if why else contextlib.nullcontext():
        call = collectives.read(gather, lambda _: parameter.message(3), str, 8, has_layouts=True)
        assert (call.size, call.dimension, call.kind.name) == (4, (form | changes)["dimension"], "all_gather")
