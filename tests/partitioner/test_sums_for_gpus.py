"""Which sums of a program for GPUs are scattered, joined and run beside products, read from HLO text."""

import re
from collections import Counter

import pytest
from jaxlib import _hlo

from jax_ring.lowering.hlo import collectives, for_gpus, proto
from jax_ring.lowering.hlo.proto import Message

HEAD = """
HloModule m, num_partitions=8
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] add(a, b) }
plus { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] add(a, b) }
greatest { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] maximum(a, b) }
skewed { a = f32[] parameter(0) b = f32[] parameter(1) d = f32[] add(a, b) ROOT c = f32[] add(d, a) }
"""
SUM = "channel_id=1, use_global_device_ids=true, replica_groups=[1,8]<=[8], to_apply=add"


def prepared(entry: str) -> tuple[list[Message], set[str]]:
    """The instructions of the entry, and the names of the collectives that run beside products."""
    module = _hlo.hlo_module_from_text(HEAD + "ENTRY main {\n" + entry + "\n}\n")
    bodies = Message.parse(module.as_serialized_hlo_module_proto()).messages(proto.COMPUTATIONS)
    by_id = {body.integer(proto.COMPUTATION_ID): body for body in bodies}
    main = next(body for body in bodies if body.text(proto.NAME) == "main")
    changed, beside = for_gpus.prepared(main, 8, lambda id_: collectives.reduction_of(by_id[id_]))
    found = changed.messages(proto.INSTRUCTIONS)
    return found, {each.text(proto.NAME) for each in found if each.integer(proto.ID) in beside}


def opcodes(found: list[Message]) -> Counter:
    return Counter(each.text(proto.OPCODE) for each in found)


def step(start: str, taken: str = "f32[8,16] dynamic-slice(total, start, zero), dynamic_slice_sizes={8,16}") -> str:
    return f"""
      x = f32[64,64] parameter(0)
      y = f32[64,16] parameter(1)
      made = f32[64,16] dot(x, y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
      total = f32[64,16] all-reduce(made), {SUM}
      id = u32[] partition-id()
      zero = s32[] constant(0)
      {start}
      ROOT taken = {taken}
    """


TABLE = """table = s32[8] constant({{{entries}}})
      entry = s32[1] dynamic-slice(table, id), dynamic_slice_sizes={{1}}
      start = s32[] reshape(entry)"""


@pytest.mark.parametrize(
    ("start", "is_scattered"),
    [
        ("size = s32[] constant(8) number = s32[] convert(id) start = s32[] multiply(number, size)", True),
        ("size = s32[] constant(4) number = s32[] convert(id) start = s32[] multiply(number, size)", False),
        (TABLE.format(entries="0,8,16,24,32,40,48,56"), True),
        (TABLE.format(entries="8,0,16,24,32,40,48,56"), False),
        (
            "is_other = pred[] convert(id) one = s32[] convert(is_other) size = s32[] constant(8) "
            "start = s32[] multiply(one, size)",
            False,
        ),
        ("start = s32[] parameter(2)", False),
    ],
)
def test_blocks_of_a_sum(start, is_scattered):
    found, beside = prepared(step(start))
    assert opcodes(found)["reduce-scatter"] == is_scattered
    assert opcodes(found)["all-reduce"] != is_scattered
    assert beside == {"total"}


def test_a_sum_of_which_more_is_read():
    start = "size = s32[] constant(8) number = s32[] convert(id) start = s32[] multiply(number, size)"
    several = "(f32[8,16], f32[64,16]) tuple(part, total)"
    part = "\n      part = f32[8,16] dynamic-slice(total, start, zero), dynamic_slice_sizes={8,16}"
    assert not opcodes(prepared(step(start + part, several))[0])["reduce-scatter"]


def sums(*calls: str) -> str:
    names = [f"total{i}" for i in range(len(calls))]
    lines = [
        f"{name} = f32[{i + 2}] all-reduce(p{i}), {call}"
        for i, (name, call) in enumerate(zip(names, calls, strict=True))
    ]
    parameters = [f"p{i} = f32[{i + 2}] parameter({i + 2})" for i in range(len(calls))]
    types = ", ".join(f"f32[{i + 2}]" for i in range(len(calls)))
    return f"""
      x = f32[8,8] parameter(0)
      y = f32[8,8] parameter(1)
      {chr(10).join(parameters)}
      {chr(10).join(lines)}
      product = f32[8,8] dot(x, y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
      ROOT all = ({types}, f32[8,8]) tuple({", ".join(names)}, product)
    """


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, 1),
        ({"to_apply=add": "to_apply=plus"}, 1),  # an equal computation
        ({"to_apply=add": "to_apply=greatest"}, 2),
        ({"[1,8]<=[8]": "[2,4]<=[8]"}, 2),
    ],
)
def test_sums_are_one_if_they_are_alike(changes, left):
    other = SUM.replace("channel_id=1", "channel_id=2")
    for one, by in changes.items():
        other = other.replace(one, by)
    found, beside = prepared(sums(SUM, other))
    assert opcodes(found)["all-reduce"] == left == len(beside)
    positions = {each.integer(proto.ID): i for i, each in enumerate(found)}
    assert all(positions[id_] < i for i, each in enumerate(found) for id_ in each.integers(proto.OPERANDS))


def test_sums_in_an_order_of_control_are_not_joined():
    """One sum that needs another by way of a third instruction."""
    entry = sums(SUM, SUM.replace("channel_id=1", "channel_id=2"))
    entry = entry.replace("total1 =", "between = f32[3] negate(p1), control-predecessors={total0}\n      total1 =")
    found, _ = prepared(entry.replace("all-reduce(p1)", "all-reduce(between)"))
    assert opcodes(found)["all-reduce"] == 2


def test_reductions_that_are_not_known_are_not_joined():
    """Two computations of which nothing is known may differ."""
    skewed = SUM.replace("=add", "=skewed")
    assert opcodes(prepared(sums(skewed, skewed.replace("channel_id=1", "channel_id=2")))[0])["all-reduce"] == 2


def test_sums_that_products_wait_for_run_alone():
    entry = re.sub(r"ROOT.*", "", sums(SUM, SUM.replace("channel_id=1", "channel_id=2")))
    entry += """
      row = f32[1,2] reshape(total0)
      ROOT last = f32[1,3] dot(row, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    """
    found, beside = prepared(entry.replace("x = f32[8,8]", "w = f32[2,3] parameter(4)\n      x = f32[8,8]"))
    assert opcodes(found)["all-reduce"] == 2
    assert beside == {"total1"}
