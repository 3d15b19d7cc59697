"""Replica groups in HLO, in any encoding."""

import itertools
import math

import numpy as np

from jax_ring.lowering.hlo.wire import Message

Groups = tuple[tuple[int, ...], ...]

# Fields of HloInstructionProto, and of the messages in them.
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


class Unsupported(Exception): ...


def groups_of(instruction: Message, num_partitions: int) -> Groups:
    """A collective's groups of partitions, in rank order.

    Raises:
      Unsupported: for an unknown encoding, several, or groups that do not divide the partitions.
    """
    encodings = instruction.field_numbers() & set(ENCODINGS)
    if len(encodings) > 1:
        raise Unsupported(f"its groups are encoded in fields {sorted(encodings)}")
    if MESH_AXES in encodings:
        groups = _of_mesh_axes(instruction.message(MESH_AXES))
    elif IOTA in encodings:
        groups = _of_iota_list(instruction.message(IOTA))
    elif DEVICE_LIST in encodings:
        groups = _of_device_list(instruction.message(DEVICE_LIST))
    else:
        groups = _of_lists(instruction.messages(LISTS))
    found = tuple(tuple(group) for group in groups if len(group)) or (tuple(range(num_partitions)),)
    if sorted(position for group in found for position in group) != list(range(num_partitions)):
        raise Unsupported(f"its groups {found} do not divide {num_partitions} partitions")
    if len({len(group) for group in found}) > 1:
        raise Unsupported(f"its groups {found} are of different sizes")
    return found


def check_fields(message: Message, known: set[int], what: str) -> None:
    """Refuses fields of later versions of XLA.

    Raises:
      Unsupported: for other fields.
    """
    if unknown := message.field_numbers() - known:
        raise Unsupported(f"{what} has the unknown fields {sorted(unknown)}")


def _of_lists(lists: list[Message]) -> list[list[int]]:
    for each in lists:
        check_fields(each, {_LIST_IDS}, "a group")
    return [each.integers(_LIST_IDS) for each in lists]


def _of_device_list(message: Message) -> list[list[int]]:
    check_fields(message, {_DEVICE_LIST_LISTS, _DEVICE_LIST_IOTA}, "a list of groups")
    if _DEVICE_LIST_IOTA in message.field_numbers():
        return _of_iota_list(message.message(_DEVICE_LIST_IOTA))
    return _of_lists(message.messages(_DEVICE_LIST_LISTS))


def _of_iota_list(message: Message) -> list[list[int]]:
    known = {_IOTA_NUM_GROUPS, _IOTA_GROUP_SIZE, _IOTA_RESHAPE, _IOTA_TRANSPOSE}
    check_fields(message, known, "a list of groups by iota")
    ids = _iota(message.integers(_IOTA_RESHAPE), message.integers(_IOTA_TRANSPOSE))
    return ids.reshape(message.integer(_IOTA_NUM_GROUPS), message.integer(_IOTA_GROUP_SIZE)).tolist()


def _iota(shape: list[int], permutation: list[int]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape).transpose(permutation or range(len(shape))).reshape(-1)


def _of_mesh_axes(message: Message) -> list[list[int]]:
    """Groups along mesh axes or parts of them.

    The part (pre, size) of an axis of size n is the middle of (pre, size, n / (pre * size)).
    """
    check_fields(message, {_MESH, _AXES}, "a list of groups by mesh axes")
    mesh = message.message(_MESH)
    check_fields(mesh, {_MESH_AXES, _MESH_DEVICE_IDS, _MESH_IOTA}, "a mesh")
    sizes = [axis.integer(_AXIS_SIZE, 1) for axis in mesh.messages(_MESH_AXES)]
    if _MESH_IOTA in mesh.field_numbers():
        iota = mesh.message(_MESH_IOTA)
        check_fields(iota, {_MESH_IOTA_RESHAPE, _MESH_IOTA_TRANSPOSE}, "a mesh by iota")
        ids = _iota(iota.integers(_MESH_IOTA_RESHAPE), iota.integers(_MESH_IOTA_TRANSPOSE))
    else:
        ids = np.array(mesh.integers(_MESH_DEVICE_IDS) or range(math.prod(sizes)))
    named = []  # (axis, product of the sizes of its earlier parts, size)
    boundaries = [{1, size} for size in sizes]  # boundaries between the parts of each axis, as products of sizes
    for reference in message.messages(_AXES):
        check_fields(reference, {_REF_AXIS, _REF_SUB_AXIS}, "a mesh axis")
        axis, before, size = reference.integer(_REF_AXIS), 1, sizes[reference.integer(_REF_AXIS)]
        if _REF_SUB_AXIS in reference.field_numbers():
            part = reference.message(_REF_SUB_AXIS)
            check_fields(part, {_SUB_AXIS_PRE_SIZE, _SUB_AXIS_SIZE}, "a part of a mesh axis")
            before, size = part.integer(_SUB_AXIS_PRE_SIZE, 1), part.integer(_SUB_AXIS_SIZE, 1)
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
    others = [i for i in range(len(parts)) if i not in order]
    group_size = math.prod(parts[i][2] for i in order)
    return ids.reshape([size for _, _, size in parts]).transpose(others + order).reshape(-1, group_size).tolist()
