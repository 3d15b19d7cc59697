"""Which operands give their buffers to results, after XLA's passes."""

import collections
import functools
from collections.abc import Callable, Sequence

from jax_ring.lowering.hlo import proto, wire
from jax_ring.lowering.hlo.shapes import Shape
from jax_ring.lowering.hlo.wire import Message

# _PRODUCERS write a buffer of their own. _READERS read their operands without passing the buffers on to the result. The
# module comes after XLA has inserted its copies, so nothing would copy a shared buffer any more.
_PRODUCERS = {
    "broadcast", "concatenate", "convolution", "copy", "dot", "fusion", "iota", "pad", "reduce", "slice", "transpose",
}  # fmt: skip
_READERS = _PRODUCERS | {"convert", "compare", "reduce-window"}
_IN_PLACE = (b"dynamic-update-slice", b"scatter")


def fields(aliased: Sequence[tuple[int, int]], num_hidden: int, of_tuple: bool) -> list[wire.Field]:
    """A custom call's pairs of operand, behind hidden ones, and result in one buffer."""
    made = []
    for operand, result in aliased:
        of_result = [wire.packed(proto.ALIAS_RESULT, [result])] if of_tuple else []
        made.append(
            wire.data(proto.ALIASES, Message([*of_result, wire.integer(proto.ALIAS_OPERAND, operand + num_hidden)]))
        )
    return made


class Buffers:
    """The buffers of a computation.

    Args:
      instructions: by id.
      root: the id of its result.
      body_of: (a computation's id) to its message.
    """

    def __init__(self, instructions: dict[int, Message], root: int, body_of: Callable[[int], bytes]) -> None:
        self._by_id, self._root, self._body_of = instructions, root, body_of

    def is_computed(self, collective: Message, index: int, operand: int) -> bool:
        """Whether an operand is no argument: others may be shared before XLA copies."""
        while (instruction := self._by_id[operand]).text(proto.OPCODE) in ("bitcast", "reshape", "get-tuple-element"):
            (operand,) = instruction.integers(proto.OPERANDS)
        return instruction.text(proto.OPCODE) != "parameter"

    def may_share(self, collective: Message, index: int, operand: int) -> bool:
        """Whether nothing else has or reads an operand's buffer, for the result of this index."""
        return self._is_private(operand) and self._is_read(collective, index)

    @functools.cached_property
    def _users(self) -> dict[int, list[Message]]:
        users = collections.defaultdict(list)
        for instruction in self._by_id.values():
            for operand in instruction.integers(proto.OPERANDS):
                users[operand].append(instruction)
        return users

    def _is_private(self, id_: int) -> bool:
        """Whether only the collective reads a value's buffer."""
        while True:
            instruction = self._by_id[id_]
            if len(self._users[id_]) != 1 or id_ == self._root:
                return False
            if instruction.text(proto.OPCODE) != "bitcast":
                return self._has_own_buffer(instruction, _PRODUCERS)
            (id_,) = instruction.integers(proto.OPERANDS)

    def _has_own_buffer(self, instruction: Message, opcodes: set[str]) -> bool:
        if instruction.text(proto.OPCODE) not in opcodes or instruction.each(proto.ALIASES):
            return False
        bodies = [self._body_of(called) for called in instruction.integers(proto.CALLED)]
        return not any(mark in body for body in bodies for mark in _IN_PLACE)

    def _is_read(self, instruction: Message, index: int) -> bool:
        """Whether a result is read only by instructions with buffers of their own."""
        id_, of_tuple = instruction.integer(proto.ID), Shape(instruction.message(proto.SHAPE)).is_tuple
        if id_ == self._root:
            return False
        users = [*self._users[id_]]
        if of_tuple:
            if any(user.text(proto.OPCODE) != "get-tuple-element" for user in users):
                return False
            elements = [user for user in users if user.integer(proto.TUPLE_INDEX) == index]
            if any(each.integer(proto.ID) == self._root for each in elements):
                return False
            users = [user for each in elements for user in self._users[each.integer(proto.ID)]]
        while users:
            user = users.pop()
            if user.text(proto.OPCODE) == "bitcast" and user.integer(proto.ID) != self._root:
                users += self._users[user.integer(proto.ID)]
            elif not self._has_own_buffer(user, _READERS):
                return False
        return True
