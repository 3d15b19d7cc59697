"""Reads a collective of a partitioned program: what it computes, between which partitions."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jax_ring.lowering.call import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, Kind, Pairs
from jax_ring.lowering.hlo import proto
from jax_ring.lowering.hlo.replica_groups import ENCODINGS, Groups, Unsupported, check_fields, groups_of
from jax_ring.lowering.hlo.shapes import Shape
from jax_ring.lowering.hlo.wire import Message

_SOURCE, _TARGET = 1, 2  # of a pair

_KNOWN = {
    proto.NAME, proto.OPCODE, proto.SHAPE, proto.METADATA, proto.DIMENSIONS, proto.CHANNEL, proto.ID, proto.OPERANDS,
    proto.PREDECESSORS, proto.CALLED, proto.SHARDING, proto.CONFIG, proto.FEATURE_GROUPS, proto.PAIRS,
    proto.CONSTRAIN_LAYOUT, proto.OPERAND_SHAPES, proto.BATCH_GROUPS, proto.FRONTEND, proto.USE_GLOBAL_IDS,
    proto.STATISTICS, proto.RESULT_ACCURACY, *ENCODINGS,
}  # fmt: skip

_KINDS = {
    "all-reduce": ALL_REDUCE,
    "reduce-scatter": REDUCE_SCATTER,
    "all-gather": ALL_GATHER,
    "all-to-all": ALL_TO_ALL,
    "collective-permute": PERMUTE,
}
# Collectives without a call to the engine: asynchronous ones, and those with sizes or sources known at run time.
_OTHERS = (*(f"{name}-start" for name in _KINDS), "ragged-all-to-all", "collective-broadcast")
_MARKS = tuple(b"\x12" + bytes([len(name)]) + name.encode() for name in (*_KINDS, *_OTHERS))  # field 2, a text

_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min"}
_REDUCTIONS_OF_BOOLEANS = {"or": "max", "and": "min", "maximum": "max", "minimum": "min"}


class Collective(NamedTuple):
    """A collective that the engine can serve.

    Attributes:
      instruction: the HloInstructionProto.
      opcode: of HLO.
      kind, op, groups, perm: as in a CallSpec.
      operand_ids, operands, results: ids of operands, and shapes.
      dimension: of the scatter or gather.
      in_tuple: whether an all-to-all has an operand and a result per rank.
    """

    instruction: Message
    opcode: str
    kind: Kind
    op: str
    groups: Groups
    perm: Pairs | None
    operand_ids: list[int]
    operands: list[Shape]
    results: list[Shape]
    dimension: int
    in_tuple: bool

    @property
    def size(self) -> int:
        return len(self.groups[0])


def may_hold_any(computation: bytes) -> bool:
    """Whether a serialized computation has collectives: cheaper than reading it, rarely wrong."""
    return any(mark in computation for mark in _MARKS)


def is_collective(opcode: str) -> bool:
    return opcode in _KINDS or opcode in _OTHERS


def read(
    instruction: Message,
    shape_of: Callable[[int], Message],
    reduction_of: Callable[[int], str],
    num_partitions: int,
    has_layouts: bool,
) -> Collective:
    """Reads a collective.

    Args:
      shape_of: (an instruction's id) to its shape.
      reduction_of: (a computation's id) to its `reduction_of`.
      has_layouts: whether layouts are assigned, so that blocks apart in memory are copied.

    Raises:
      Unsupported: if the engine cannot serve it, or it has unknown fields.
    """
    opcode = instruction.text(proto.OPCODE)
    if opcode not in _KINDS:
        raise Unsupported("the engine has no such collective")
    check_fields(instruction, _KNOWN, "it")
    kind, result = _KINDS[opcode], Shape(instruction.message(proto.SHAPE))
    operand_ids = instruction.integers(proto.OPERANDS)
    operands = [Shape(shape_of(each)) for each in operand_ids]
    for shape in (*operands, *result.arrays):
        shape.check()
    if len({shape.dtype for shape in (*operands, *result.arrays)}) > 1:
        raise Unsupported("its operands are of several types")
    if not instruction.integer(proto.CHANNEL):
        raise Unsupported("it communicates between replicas")
    groups, perm = _members(instruction, kind, num_partitions)
    op = "sum"
    if kind.adds:
        op = _op_of(reduction_of(instruction.integers(proto.CALLED)[0]), operands[0].dtype)
        if refusal := kind.refusal(op, operands[0].dtype):
            raise Unsupported(refusal.format(function=opcode, type=operands[0].dtype.name))
    in_tuple = kind is ALL_TO_ALL and result.is_tuple
    if len(operands) != len(result.arrays):
        raise Unsupported(f"it has {len(operands)} operands and {len(result.arrays)} results")
    blocks = {f"{each}{each.minor_to_major}" for each in (*operands, *result.arrays)}
    if in_tuple and (len(operands) != len(groups[0]) or len(blocks) > 1):
        raise Unsupported("the blocks of its operands differ")
    dimensions = instruction.integers(proto.DIMENSIONS)
    if len(dimensions) != (1 if (kind.scatters or kind.gathers) and not in_tuple else 0):
        raise Unsupported(f"it has the dimensions {dimensions}")
    call = Collective(
        instruction, opcode, kind, op, groups, perm, operand_ids, operands, result.arrays, (*dimensions, 0)[0], in_tuple
    )
    for operand, of_result in zip(operands, result.arrays, strict=True):
        _check_shapes(call, operand, of_result, has_layouts)
    return call


def reduction_of(computation: Message) -> str:
    """The opcode that combines a computation's arguments; else empty."""
    instructions = {each.integer(proto.ID): each for each in computation.messages(proto.INSTRUCTIONS)}
    root = instructions[computation.integer(proto.ROOT)]
    operands = root.integers(proto.OPERANDS)
    parameters = {id_ for id_, each in instructions.items() if each.text(proto.OPCODE) == "parameter"}
    if len(instructions) != 3 or len(operands) != 2 or parameters != set(operands) or root.integers(proto.CALLED):
        return ""
    types = {each.raw(proto.SHAPE) for each in instructions.values()}
    return root.text(proto.OPCODE) if len(types) == 1 else ""


def _op_of(reduction: str, dtype) -> str:
    table = _REDUCTIONS_OF_BOOLEANS if dtype == np.bool_ else _REDUCTIONS
    if reduction not in table:
        raise Unsupported(f"the engine does not reduce {np.dtype(dtype).name} by '{reduction or 'a computation'}'")
    return table[reduction]


def _members(instruction: Message, kind: Kind, num_partitions: int) -> tuple[Groups, Pairs | None]:
    if kind is PERMUTE:
        pairs = tuple((pair.integer(_SOURCE), pair.integer(_TARGET)) for pair in instruction.messages(proto.PAIRS))
        sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
        if not pairs or len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs):
            raise Unsupported(f"its pairs {pairs} are no permutation")
        if not all(0 <= position < num_partitions for position in (*sources, *targets)):
            raise Unsupported(f"its pairs {pairs} name other ranks than the {num_partitions} partitions")
        return (tuple(range(num_partitions)),), pairs
    # With a channel these name partitions, by the global ids of programs without replicas. An all-to-all is always
    # between partitions. Other collectives without this mark have groups of replicas, each with all partitions.
    if kind is not ALL_TO_ALL and not instruction.integer(proto.USE_GLOBAL_IDS):
        if groups_of(instruction, 1) != ((0,),):
            raise Unsupported("its groups are of several replicas")
        return (tuple(range(num_partitions)),), None
    return groups_of(instruction, num_partitions), None


def _check_shapes(call: Collective, operand: Shape, result: Shape, has_layouts: bool) -> None:
    """Refuses a result whose shape does not follow from the operand's, or with another layout."""
    expected, k = list(operand.dimensions), call.dimension
    if operand.minor_to_major != result.minor_to_major:
        raise Unsupported("its operand and its result have different layouts")
    if not has_layouts and operand.minor_to_major != operand.with_default_layout().minor_to_major:
        raise Unsupported("it has a layout before XLA has assigned any")
    if (call.kind.scatters or call.kind.gathers) and not call.in_tuple:
        if k >= len(expected) or (call.kind.scatters and expected[k] % call.size):
            raise Unsupported(f"dimension {k} of {operand} does not consist of {call.size} blocks")
        outer = operand.minor_to_major[operand.minor_to_major.index(k) + 1 :]
        if has_layouts and any(operand.dimensions[i] != 1 for i in outer):
            raise Unsupported(f"its blocks along dimension {k} do not lie one after the other in memory")
    if call.kind is ALL_GATHER:
        expected[k] *= call.size
    elif call.kind is REDUCE_SCATTER:
        expected[k] //= call.size
    if expected != result.dimensions:
        raise Unsupported(f"its operand is {operand}, and its result {result}")
