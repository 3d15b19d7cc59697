"""What XLA does after the hook for its own collectives on GPUs: scatters and joins sums, overlaps some."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from jax_ring.lowering.hlo import collectives, proto
from jax_ring.lowering.hlo.proto import Message, Unsupported
from jax_ring.lowering.hlo.shapes import Shape, tuple_shape
from jax_ring.lowering.passes.combiner import COMBINE_THRESHOLD_BYTES, COMBINE_THRESHOLD_COUNT

_LITERAL, _LITERAL_SHAPE = 8, 1  # of HloInstructionProto, and of LiteralProto
# Of int32, int64, uint32 and uint64, by element type: the field that holds them, and their values.
_ELEMENTS = {4: 4, 5: 6, 8: 5, 9: 7}
_VALUES = {4: range(-(2**31), 2**31), 5: range(-(2**63), 2**63), 8: range(2**32), 9: range(2**64)}
_MAX_DEPTH = 32  # of an expression that is evaluated

# Operations that take long enough for a collective to run beside them.
_PRODUCTS = {"call", "conditional", "convolution", "custom-call", "dot", "fusion", "scaled-dot", "while"}
_SUMS = {"all-reduce", "reduce-scatter"}


def prepared(computation: Message, num_partitions: int, reduction_of: Callable[[int], str]) -> tuple[Message, set[int]]:
    """A computation with sums scattered and joined, and the collectives to run beside products.

    reduction_of: (a computation's id) to the opcode by which it combines two values; empty for others.
    """
    instructions = computation.messages(proto.INSTRUCTIONS)
    if not any(each.text(proto.OPCODE) in _PRODUCTS for each in instructions):
        return computation, set()
    root = computation.integer(proto.ROOT)
    instructions = _in_order(_joined(_scattered(instructions, root, num_partitions), root, reduction_of))
    others = computation.without(proto.INSTRUCTIONS)
    changed = Message([*others, *(proto.data(proto.INSTRUCTIONS, each) for each in instructions)])
    return changed, _beside_products(instructions)


# ---- Beside products ------------------------------------------------------------------------------------------------


def _beside_products(instructions: Sequence[Message]) -> set[int]:
    """Sums that no product waits for, such as gradients, and gathers that wait for none, such as parameters."""
    waited_for, depths = _waited_for(instructions), _depths(instructions)
    found = set()
    for each in instructions:
        opcode, id_ = each.text(proto.OPCODE), each.integer(proto.ID)
        is_late = opcode in _SUMS and id_ not in waited_for
        is_early = opcode == "all-gather" and not depths[id_]
        if is_late or is_early:
            found.add(id_)
    return found


def needed(instruction: Message) -> list[int]:
    """What precedes an instruction: operands, and others by control."""
    return [*instruction.integers(proto.OPERANDS), *instruction.integers(proto.PREDECESSORS)]


def _takes_time(instruction: Message) -> bool:
    opcode = instruction.text(proto.OPCODE)
    return opcode in _PRODUCTS or collectives.is_collective(opcode)


def _waited_for(instructions: Sequence[Message]) -> set[int]:
    """Instructions that a product or a collective needs."""
    found: set[int] = set()
    for each in reversed(instructions):
        if _takes_time(each) or each.integer(proto.ID) in found:
            found.update(needed(each))
    return found


def _depths(instructions: Sequence[Message]) -> dict[int, int]:
    """The products and collectives in a chain before each instruction."""
    depths: dict[int, int] = {}
    by_id = {each.integer(proto.ID): each for each in instructions}
    for id_, each in by_id.items():
        depths[id_] = max((depths[i] + _takes_time(by_id[i]) for i in needed(each)), default=0)
    return depths


# ---- Joined sums ----------------------------------------------------------------------------------------------------


def _joined(instructions: Sequence[Message], root: int, reduction_of: Callable[[int], str]) -> list[Message]:
    """Joins sums of one kind that no product waits for, the earliest first, up to the combiner's limits."""
    waited_for, depths = _waited_for(instructions), _depths(instructions)
    alike: dict[tuple, list[Message]] = {}
    for each in sorted(instructions, key=lambda each: depths[each.integer(proto.ID)]):
        if each.text(proto.OPCODE) not in _SUMS or each.integer(proto.ID) in waited_for | {root}:
            continue
        is_single = len(each.integers(proto.OPERANDS)) == 1 and not each.integers(proto.PREDECESSORS)
        if is_single and (reduction := reduction_of(each.integers(proto.CALLED)[0])):
            key = reduction, Shape(each.message(proto.SHAPE)).element_type, *sorted(each.without(*_OWN))
            alike.setdefault(key, []).append(each)
    next_id = 1 + max(each.integer(proto.ID) for each in instructions)
    replaced: dict[int, Message] = {}
    added = []
    for group in alike.values():
        for bucket in _buckets(group):
            if len(bucket) == 1:
                continue
            added.append(_one_of(bucket, next_id))
            for i, each in enumerate(bucket):
                kept = each.only(proto.NAME, proto.SHAPE, proto.METADATA, proto.ID)
                element = [proto.data(proto.OPCODE, "get-tuple-element"), proto.integer(proto.TUPLE_INDEX, i)]
                replaced[each.integer(proto.ID)] = Message([*kept, *element, proto.packed(proto.OPERANDS, [next_id])])
            next_id += 1
    return [*(replaced.get(each.integer(proto.ID), each) for each in instructions), *added]


# Fields that may differ between sums to be joined. Each sum has a computation of its own that says how it reduces.
_OWN = {
    proto.NAME, proto.SHAPE, proto.METADATA, proto.CHANNEL, proto.ID, proto.OPERANDS, proto.CALLED, proto.STATISTICS,
}  # fmt: skip


def _buckets(group: Sequence[Message]) -> Iterator[list[Message]]:
    bucket: list[Message] = []
    num_bytes = 0
    for each in group:
        size = Shape(each.message(proto.SHAPE)).num_bytes
        if bucket and (num_bytes + size > COMBINE_THRESHOLD_BYTES or len(bucket) == COMBINE_THRESHOLD_COUNT):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(each)
        num_bytes += size
    if bucket:
        yield bucket


def _one_of(bucket: Sequence[Message], id_: int) -> Message:
    last = bucket[-1]
    shape = tuple_shape([Shape(each.message(proto.SHAPE)) for each in bucket])
    kept = last.without(proto.NAME, proto.SHAPE, proto.ID, proto.OPERANDS)
    operands = [operand for each in bucket for operand in each.integers(proto.OPERANDS)]
    own = [
        proto.data(proto.NAME, f"{last.text(proto.NAME)}.joined"),
        proto.data(proto.SHAPE, shape.message),
        proto.integer(proto.ID, id_),
    ]
    return Message([*kept, *own, proto.packed(proto.OPERANDS, operands)])


def _in_order(instructions: Sequence[Message]) -> list[Message]:
    """Operands before readers, otherwise in the old order."""
    by_id = {each.integer(proto.ID): each for each in instructions}
    ordered: dict[int, Message] = {}
    for each in instructions:
        waiting = [each]
        while waiting:
            last = waiting[-1]
            missing = [i for i in needed(last) if i not in ordered]  # no cycles: no joined sum needs another
            if missing:
                waiting += (by_id[i] for i in reversed(missing))
            else:
                ordered.setdefault(last.integer(proto.ID), waiting.pop())
    return list(ordered.values())


# ---- Scattered sums -------------------------------------------------------------------------------------------------


def _scattered(instructions: Sequence[Message], root: int, num_partitions: int) -> list[Message]:
    """Turns sums of which partitions take their own blocks into reduce-scatters."""
    by_id = {each.integer(proto.ID): each for each in instructions}
    num_readers = Counter(operand for each in instructions for operand in set(each.integers(proto.OPERANDS)))
    replaced: dict[int, Message | None] = {}
    for taken in instructions:
        if taken.text(proto.OPCODE) != "dynamic-slice":
            continue
        total_id = taken.integers(proto.OPERANDS)[0]
        total = by_id[total_id]
        if total.text(proto.OPCODE) != "all-reduce" or num_readers[total_id] > 1 or total_id == root:
            continue
        dimension = _dimension_of_blocks(total, taken, by_id, num_partitions)
        if dimension is not None:
            replaced[total_id] = None
            kept, own = total.without(proto.SHAPE, proto.ID), taken.only(proto.SHAPE, proto.ID)
            scattered = [proto.data(proto.OPCODE, "reduce-scatter"), proto.packed(proto.DIMENSIONS, [dimension])]
            replaced[taken.integer(proto.ID)] = Message([*kept, *own, *scattered])
    found = (replaced.get(id_, each) for id_, each in by_id.items())
    return [each for each in found if each is not None]


def _dimension_of_blocks(total: Message, taken: Message, by_id: dict[int, Message], num_partitions: int) -> int | None:
    """The dimension along which all members take their blocks; None if any does not."""
    whole, block = Shape(total.message(proto.SHAPE)), Shape(taken.message(proto.SHAPE))
    if whole.is_tuple:
        return None
    try:
        groups = collectives.groups_of(total, num_partitions)
    except Unsupported:
        return None
    cut = [i for i, size in enumerate(whole.dimensions) if size != block.dimensions[i]]
    if len(cut) != 1 or whole.dimensions[cut[0]] != block.dimensions[cut[0]] * len(groups[0]):
        return None
    starts = taken.integers(proto.OPERANDS)[1:]
    size = block.dimensions[cut[0]]
    for group in groups:
        for rank, partition in enumerate(group):
            value_of = _evaluator(by_id, partition)
            for dimension, start in enumerate(starts):
                if value_of(start) != [rank * size if dimension == cut[0] else 0]:
                    return None
    return cut[0]


def _evaluator(by_id: dict[int, Message], partition: int) -> Callable[[int], list[int] | None]:
    """A small integer expression's elements for a partition; None for other kinds, and where a value overflows."""

    @functools.cache
    def value_of(id_: int, depth: int = 0) -> list[int] | None:
        instruction = by_id[id_]
        opcode = instruction.text(proto.OPCODE)
        if opcode == "partition-id":
            return [partition]
        if opcode == "constant":
            return _elements_of(instruction.message(_LITERAL))
        shape = Shape(instruction.message(proto.SHAPE))
        if opcode not in _EVALUATED or shape.element_type not in _ELEMENTS or math.prod(shape.dimensions) > 1:
            return None
        if depth == _MAX_DEPTH:  # chains are as long as a user makes them
            return None
        operands = [value_of(i, depth + 1) for i in instruction.integers(proto.OPERANDS)]
        if None in operands:
            return None
        found = _EVALUATED[opcode](*operands)
        return found if found and all(value in _VALUES[shape.element_type] for value in found) else None

    return value_of


def _elements_of(literal: Message) -> list[int] | None:
    shape = Shape(literal.message(_LITERAL_SHAPE))
    field = _ELEMENTS.get(shape.element_type)
    return None if field is None or len(shape.dimensions) > 1 else literal.integers(field)


def _element_at(values: list[int], *starts: list[int]) -> list[int] | None:
    return [values[starts[0][0]]] if len(starts) == 1 and 0 <= starts[0][0] < len(values) else None


_EVALUATED: dict[str, Callable] = {
    "convert": lambda x: x,
    "reshape": lambda x: x,
    "bitcast": lambda x: x,
    "multiply": lambda x, y: [a * b for a, b in zip(x, y, strict=True)],
    "add": lambda x, y: [a + b for a, b in zip(x, y, strict=True)],
    "subtract": lambda x, y: [a - b for a, b in zip(x, y, strict=True)],
    "dynamic-slice": _element_at,
}
