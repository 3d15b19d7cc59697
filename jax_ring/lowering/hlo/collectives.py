"""Reads a collective of a partitioned program: what it computes, between which partitions."""

import itertools
import math
import reprlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jax_ring.lowering.call import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, Kind, Pairs
from jax_ring.lowering.hlo import proto
from jax_ring.lowering.hlo.proto import Message, Unsupported
from jax_ring.lowering.hlo.shapes import Shape

Groups = tuple[tuple[int, ...], ...]

_SOURCE, _TARGET = 1, 2  # of a pair
# Fields of HloInstructionProto that hold replica groups, one for each encoding, and of the messages in them.
ENCODINGS = LISTS, DEVICE_LIST, IOTA, MESH_AXES = 49, 87, 92, 93
_LIST_IDS = 1
_DEVICE_LIST_LISTS, _DEVICE_LIST_IOTA = 1, 2
_IOTA_NUM_GROUPS, _IOTA_GROUP_SIZE, _IOTA_RESHAPE, _IOTA_TRANSPOSE = 1, 2, 3, 4
_MESH, _AXES = 1, 2
_MESH_AXES, _MESH_DEVICE_IDS, _MESH_IOTA = 1, 2, 3
_AXIS_SIZE = 2
_MESH_IOTA_RESHAPE, _MESH_IOTA_TRANSPOSE = 1, 2
_REF_AXIS, _REF_SUB_AXIS = 1, 2
_SUB_AXIS_PRE_SIZE, _SUB_AXIS_SIZE = 1, 2
_MAX_DIMENSIONS = 32  # of an array in all versions of numpy

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
      kind: of collective.
      op: the reduction: "sum", "max" or "min".
      groups: of partitions, in rank order.
      perm: pairs of a permutation, (source, receiver); else None.
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
    instruction.check_fields(_KNOWN, "it")
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


def _op_of(reduction: str, dtype: np.dtype) -> str:
    table = _REDUCTIONS_OF_BOOLEANS if dtype == np.bool_ else _REDUCTIONS
    if reduction not in table:
        raise Unsupported(f"the engine does not reduce {np.dtype(dtype).name} by '{reduction or 'a computation'}'")
    return table[reduction]


def _members(instruction: Message, kind: Kind, num_partitions: int) -> tuple[Groups, Pairs | None]:
    if kind is PERMUTE:
        pairs = tuple((pair.integer(_SOURCE), pair.integer(_TARGET)) for pair in instruction.messages(proto.PAIRS))
        sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
        if not pairs or len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs):
            raise Unsupported(f"its pairs {reprlib.repr(pairs)} are no permutation")
        if not all(0 <= position < num_partitions for position in (*sources, *targets)):
            raise Unsupported(f"its pairs {reprlib.repr(pairs)} name other ranks than the {num_partitions} partitions")
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


# ---- Replica groups, in any encoding --------------------------------------------------------------------------------


def groups_of(instruction: Message, num_partitions: int) -> Groups:
    """A collective's groups of partitions, in rank order.

    Raises:
      Unsupported: for an unknown encoding, several, or groups that do not divide the partitions.
    """
    encodings = instruction.field_numbers() & set(ENCODINGS)
    if len(encodings) > 1:
        raise Unsupported(f"its groups are encoded in fields {sorted(encodings)}")
    if MESH_AXES in encodings:
        groups = _of_mesh_axes(instruction.message(MESH_AXES), num_partitions)
    elif IOTA in encodings:
        groups = _of_iota_list(instruction.message(IOTA), num_partitions)
    elif DEVICE_LIST in encodings:
        groups = _of_device_list(instruction.message(DEVICE_LIST), num_partitions)
    else:
        groups = _of_lists(instruction.messages(LISTS))
    found = tuple(tuple(group) for group in groups if len(group)) or (tuple(range(num_partitions)),)
    if sorted(position for group in found for position in group) != list(range(num_partitions)):
        raise Unsupported(f"its groups {reprlib.repr(found)} do not divide {num_partitions} partitions")
    if len({len(group) for group in found}) > 1:
        raise Unsupported(f"its groups {reprlib.repr(found)} are of different sizes")
    return found


def _check_count(what: str, sizes: Sequence[int], num_partitions: int) -> None:
    """Refuses sizes whose product is not the partitions' number, before an array is made of them."""
    if len(sizes) > _MAX_DIMENSIONS or min(sizes, default=1) < 1 or math.prod(sizes) != num_partitions:
        raise Unsupported(f"{what} {reprlib.repr(sizes)} do not divide {num_partitions} partitions")


def _of_lists(lists: list[Message]) -> list[list[int]]:
    for each in lists:
        each.check_fields({_LIST_IDS}, "a group")
    return [each.integers(_LIST_IDS) for each in lists]


def _of_device_list(message: Message, num_partitions: int) -> list[list[int]]:
    message.check_fields({_DEVICE_LIST_LISTS, _DEVICE_LIST_IOTA}, "a list of groups")
    if _DEVICE_LIST_IOTA in message.field_numbers():
        return _of_iota_list(message.message(_DEVICE_LIST_IOTA), num_partitions)
    return _of_lists(message.messages(_DEVICE_LIST_LISTS))


def _of_iota_list(message: Message, num_partitions: int) -> list[list[int]]:
    known = {_IOTA_NUM_GROUPS, _IOTA_GROUP_SIZE, _IOTA_RESHAPE, _IOTA_TRANSPOSE}
    message.check_fields(known, "a list of groups by iota")
    ids = _iota(message.integers(_IOTA_RESHAPE), message.integers(_IOTA_TRANSPOSE), num_partitions)
    groups = message.integer(_IOTA_NUM_GROUPS), message.integer(_IOTA_GROUP_SIZE)
    _check_count("its groups by iota", groups, num_partitions)
    return ids.reshape(groups).tolist()


def _iota(shape: list[int], permutation: list[int], num_partitions: int) -> np.ndarray:
    _check_count("the dimensions of an iota", shape, num_partitions)
    if permutation and sorted(permutation) != list(range(len(shape))):
        raise Unsupported(f"an iota of {len(shape)} dimensions is transposed by {reprlib.repr(permutation)}")
    return np.arange(math.prod(shape)).reshape(shape).transpose(permutation or range(len(shape))).reshape(-1)


def _of_mesh_axes(message: Message, num_partitions: int) -> list[list[int]]:
    """Groups along mesh axes or parts of them.

    The part (pre, size) of an axis of size n is the middle of (pre, size, n / (pre * size)).
    """
    message.check_fields({_MESH, _AXES}, "a list of groups by mesh axes")
    mesh = message.message(_MESH)
    mesh.check_fields({_MESH_AXES, _MESH_DEVICE_IDS, _MESH_IOTA}, "a mesh")
    sizes = [axis.integer(_AXIS_SIZE, 1) for axis in mesh.messages(_MESH_AXES)]
    _check_count("mesh axes of the sizes", sizes, num_partitions)
    if _MESH_IOTA in mesh.field_numbers():
        iota = mesh.message(_MESH_IOTA)
        iota.check_fields({_MESH_IOTA_RESHAPE, _MESH_IOTA_TRANSPOSE}, "a mesh by iota")
        ids = _iota(iota.integers(_MESH_IOTA_RESHAPE), iota.integers(_MESH_IOTA_TRANSPOSE), num_partitions)
    else:
        ids = np.array(mesh.integers(_MESH_DEVICE_IDS) or range(num_partitions))
    references = message.messages(_AXES)
    if ids.size != num_partitions or len(references) > _MAX_DIMENSIONS:
        raise Unsupported(f"a mesh has {ids.size} devices, and its groups are along {len(references)} axes")
    named = []  # (axis, product of the sizes of its earlier parts, size)
    boundaries = [{1, size} for size in sizes]  # boundaries between the parts of each axis, as products of sizes
    for reference in references:
        reference.check_fields({_REF_AXIS, _REF_SUB_AXIS}, "a mesh axis")
        axis = reference.integer(_REF_AXIS)
        if not 0 <= axis < len(sizes):
            raise Unsupported(f"its groups are along axis {axis} of a mesh of {len(sizes)}")
        before, size = 1, sizes[axis]
        if _REF_SUB_AXIS in reference.field_numbers():
            part = reference.message(_REF_SUB_AXIS)
            part.check_fields({_SUB_AXIS_PRE_SIZE, _SUB_AXIS_SIZE}, "a part of a mesh axis")
            before, size = part.integer(_SUB_AXIS_PRE_SIZE, 1), part.integer(_SUB_AXIS_SIZE, 1)
            if min(before, size) < 1 or sizes[axis] % (before * size):
                raise Unsupported(f"an axis of {sizes[axis]} has no part of {size} after {before}")
        named.append((axis, before, size))
        boundaries[axis] |= {before, before * size}
    # The coarsest parts that make up all named ones, major ones first.
    parts = []
    for axis, products in enumerate(boundaries):
        ordered = sorted(products)
        for before, after in itertools.pairwise(ordered):
            if after % before:
                raise Unsupported(f"the parts of mesh axis {axis} overlap: {named}")
            parts.append((axis, before, after // before))
    order = [
        i
        for axis, before, size in named
        for i, (of_axis, from_, length) in enumerate(parts)
        if of_axis == axis and from_ >= before and from_ * length <= before * size
    ]
    if len(set(order)) < len(order):
        raise Unsupported(f"its groups are along a mesh axis twice: {named}")
    others = [i for i in range(len(parts)) if i not in order]
    group_size = math.prod(parts[i][2] for i in order)
    return ids.reshape([size for _, _, size in parts]).transpose(others + order).reshape(-1, group_size).tolist()
