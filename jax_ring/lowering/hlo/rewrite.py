"""Replaces the collectives of one computation in HLO by calls to the engine."""

from collections.abc import Callable, Sequence

from jax_ring import runtime
from jax_ring.lowering.hlo import across_hosts, collectives, proto, wire
from jax_ring.lowering.hlo.collectives import Collective
from jax_ring.lowering.hlo.replica_groups import Unsupported
from jax_ring.lowering.hlo.shapes import UINT32, Shape, array_shape, slices, tuple_shape
from jax_ring.lowering.hlo.wire import Message

_TYPED_FFI = 4  # an API_VERSION

# What writes a buffer of its own, and what reads its operands without giving their buffers to its result. The module
# comes after XLA has inserted its copies, so a buffer that is shared with anything else would not be copied any more.
_PRODUCERS = {
    "broadcast", "concatenate", "convolution", "copy", "dot", "fusion", "iota", "pad", "reduce", "slice", "transpose",
}  # fmt: skip
_READERS = _PRODUCERS | {"convert", "compare", "reduce-window"}
_IN_PLACE = (b"dynamic-update-slice", b"scatter")


class Computation:
    """A computation whose collectives are replaced.

    Args:
      message: the HloComputationProto.
      serve: (the collective, the instruction) to the attributes of the engine's call, as text, or to the id of a
        computation with the steps of one across hosts; it raises Unsupported if the engine cannot serve it.
      reduction_of: as in `collectives.read`.
      body_of: (the id of a computation) to its serialized message.
    """

    def __init__(
        self,
        message: Message,
        num_partitions: int,
        serve: Callable[[Collective, Message], str | int],
        reduction_of: Callable[[int], str],
        body_of: Callable[[int], bytes],
    ) -> None:
        self._message = message
        self._num_partitions = num_partitions
        self._serve, self._reduction_of, self._body_of = serve, reduction_of, body_of
        self._serialized = message.each(proto.INSTRUCTIONS)
        self._instructions = message.messages(proto.INSTRUCTIONS)
        self._by_id = {instruction.integer(proto.ID): instruction for instruction in self._instructions}
        self._next_id = max(self._by_id) + 1
        self._users: dict[int, list[Message]] | None = None
        self._written: list[Message | bytes] = []
        self._position = 0

    def replace(self, refuse: Callable[[Message, Unsupported], None]) -> Message | None:
        """The computation with calls in the place of collectives; None if none is replaced.

        refuse: called with each collective that stays, and why.
        """
        calls: dict[int, tuple[Collective, str | int]] = {}
        for instruction in self._instructions:
            if not collectives.is_collective(instruction.text(proto.OPCODE)):
                continue
            try:
                call = collectives.read(instruction, self._shape_of, self._reduction_of, self._num_partitions)
                if call.size > 1:  # XLA has these done by a copy
                    calls[instruction.integer(proto.ID)] = call, self._serve(call, instruction)
            except Unsupported as why:
                refuse(instruction, why)
        if not calls:
            return None
        self._position = self._add("partition-id", array_shape(UINT32))
        for instruction, serialized in zip(self._instructions, self._serialized, strict=True):
            if (found := calls.get(instruction.integer(proto.ID))) is None:
                self._written.append(serialized)
                continue
            call, by = found
            if isinstance(by, int):
                self._write_steps(instruction, call, by)
            elif call.in_tuple:
                self._write_exchange(instruction, call, by)
            else:
                self._write(instruction, call, by)
        others = [field for field in self._message.fields if field[0] != proto.INSTRUCTIONS]
        return Message([*others, *(wire.data(proto.INSTRUCTIONS, instruction) for instruction in self._written)])

    def _shape_of(self, instruction: int) -> Message:
        return self._by_id[instruction].message(proto.SHAPE)

    # ---- Calls ------------------------------------------------------------------------------------------------------

    def _write(self, instruction: Message, call: Collective, config: str) -> None:
        """Writes a call, with operands and results in the form that the engine has.

        The engine's blocks lie along a leading dimension. XLA's lie one after the other in memory as well, by the
        layout of the array, so that arrays are reinterpreted, not moved.
        """
        operands, operand_ids = call.operands, call.operand_ids
        if call.kind.scatters:
            operands = [_blocks_first(x, call) for x in operands]
            operand_ids = [
                self._add("bitcast", shape, [id_], instruction)
                for id_, shape in zip(operand_ids, operands, strict=True)
            ]
        fields, operand_ids = self._call_fields(call, config, operands), [self._position, *operand_ids]
        if not call.kind.gathers:
            fields += self._aliases(instruction, call) if call.kind.in_place else []
            self._written.append(_instead(instruction, "custom-call", operand_ids, fields))
            return
        results = [_blocks_first(x, call) for x in call.results]
        self._write_bitcasts(instruction, call, "custom-call", results, operand_ids, fields)

    def _write_bitcasts(
        self, instruction: Message, call: Collective, opcode: str, results: Sequence[Shape], operands: Sequence[int],
        fields: Sequence[wire.Field],
    ) -> None:  # fmt: skip
        """Writes a call that makes results of these shapes, which are those of the collective in another form."""
        if not Shape(instruction.message(proto.SHAPE)).is_tuple:
            made = self._add(opcode, results[0], operands, instruction, fields)
            self._written.append(_instead(instruction, "bitcast", [made]))
            return
        made = self._add(
            opcode, tuple_shape(results) if len(results) > 1 else results[0], operands, instruction, fields
        )
        parts = []
        for i, (shape, result) in enumerate(zip(results, call.results, strict=True)):
            part = self._add("get-tuple-element", shape, [made], instruction, [wire.integer(proto.TUPLE_INDEX, i)])
            parts.append(self._add("bitcast", result, [part], instruction))
        self._written.append(_instead(instruction, "tuple", parts))

    def _write_steps(self, instruction: Message, call: Collective, computation: int) -> None:
        """Writes a call of a computation, which has the steps of a collective across hosts."""
        operands, results = across_hosts.shapes_of(call)
        fields = [wire.packed(proto.CALLED, [computation])]
        if not call.in_tuple:
            flat = [
                self._add("bitcast", *item) for item in zip(operands, ([id_] for id_ in call.operand_ids), strict=True)
            ]
            self._write_bitcasts(instruction, call, "call", results, flat, fields)
            return
        joined = self._add("bitcast", operands[0], [self._joined(instruction, call)], instruction)
        made = self._add("call", results[0], [joined], instruction, fields)
        self._write_cut(instruction, call, self._add("bitcast", _blocks_of(call), [made], instruction))

    def _write_exchange(self, instruction: Message, call: Collective, config: str) -> None:
        """Writes the call for an all-to-all that has one operand and one result for each rank: blocks of one array."""
        joined, whole = self._joined(instruction, call), _blocks_of(call)
        fields = self._call_fields(call, config, [whole])
        self._write_cut(
            instruction, call, self._add("custom-call", whole, [self._position, joined], instruction, fields)
        )

    def _joined(self, instruction: Message, call: Collective) -> int:
        block = _with_leading(call.operands[0], 1)
        blocks = [self._add("bitcast", block, [each], instruction) for each in call.operand_ids]
        return self._add("concatenate", _blocks_of(call), blocks, instruction, [wire.packed(proto.DIMENSIONS, [0])])

    def _write_cut(self, instruction: Message, call: Collective, made: int) -> None:
        one = _with_leading(call.operands[0], 1)
        parts = [self._slice(made, i, call.operands[0], one, instruction) for i in range(call.size)]
        self._written.append(_instead(instruction, "tuple", parts))

    def _call_fields(self, call: Collective, config: str, operands: Sequence[Shape]) -> list[wire.Field]:
        shapes = [wire.data(proto.OPERAND_SHAPES, shape.message) for shape in (array_shape(UINT32), *operands)]
        return [
            wire.data(proto.TARGET, runtime.TARGETS[call.kind.name]),
            wire.data(proto.CONFIG, config),
            wire.integer(proto.FEATURE_GROUPS, 1),
            wire.integer(proto.CONSTRAIN_LAYOUT, 1),
            *shapes,
            wire.integer(proto.BATCH_GROUPS, 1),
            wire.integer(proto.API_VERSION, _TYPED_FFI),
        ]

    def _slice(self, made: int, index: int, block: Shape, one: Shape, instruction: Message) -> int:
        limits = [(index, index + 1), *((0, size) for size in block.dimensions)]
        part = self._add("slice", one, [made], instruction, slices(limits))
        return self._add("bitcast", block, [part], instruction)

    def _add(
        self,
        opcode: str,
        shape: Shape,
        operands: Sequence[int] = (),
        instruction: Message | None = None,
        fields: Sequence[wire.Field] = (),
    ) -> int:
        """Writes another instruction, for one that is replaced, and returns its id."""
        id_, self._next_id = self._next_id, self._next_id + 1
        of_whom = instruction.text(proto.NAME) if instruction else "jax_ring"
        name = f"{of_whom}.{self._message.integer(proto.COMPUTATION_ID)}.{id_ & 0xFFFFFFFF}"  # unique in the program
        made = [wire.data(proto.NAME, name), wire.data(proto.OPCODE, opcode), wire.data(proto.SHAPE, shape.message)]
        made += [field for field in (instruction.fields if instruction else ()) if field[0] == proto.METADATA]
        made += [*fields, wire.integer(proto.ID, id_)]
        made += [wire.packed(proto.OPERANDS, operands)] if operands else []
        self._written.append(Message(made))
        return id_

    # ---- Aliases ----------------------------------------------------------------------------------------------------

    def _aliases(self, instruction: Message, call: Collective) -> list[wire.Field]:
        """Gives results the buffers of their operands, where nothing else has or reads these."""
        of_tuple = Shape(instruction.message(proto.SHAPE)).is_tuple
        fields = []
        for i, operand in enumerate(call.operand_ids):
            if self._is_private(operand) and self._is_read(instruction, i, of_tuple):
                result = [wire.packed(proto.ALIAS_RESULT, [i])] if of_tuple else []
                fields.append(wire.data(proto.ALIASES, Message([*result, wire.integer(proto.ALIAS_OPERAND, i + 1)])))
        return fields

    def _users_of(self, id_: int) -> list[Message]:
        if self._users is None:
            self._users = {}
            for instruction in self._instructions:
                for operand in instruction.integers(proto.OPERANDS):
                    self._users.setdefault(operand, []).append(instruction)
        return self._users.get(id_, [])

    def _is_private(self, id_: int) -> bool:
        """Whether a value has a buffer of its own, which only the collective reads."""
        while True:
            instruction = self._by_id[id_]
            if len(self._users_of(id_)) != 1 or id_ == self._message.integer(proto.ROOT):
                return False
            if instruction.text(proto.OPCODE) != "bitcast":
                return self._has_own_buffer(instruction, _PRODUCERS)
            (id_,) = instruction.integers(proto.OPERANDS)

    def _has_own_buffer(self, instruction: Message, opcodes: set[str]) -> bool:
        if instruction.text(proto.OPCODE) not in opcodes or instruction.each(proto.ALIASES):
            return False
        bodies = [self._body_of(called) for called in instruction.integers(proto.CALLED)]
        return not any(mark in body for body in bodies for mark in _IN_PLACE)

    def _is_read(self, instruction: Message, index: int, of_tuple: bool) -> bool:
        """Whether a result is only read, by instructions whose results have buffers of their own."""
        id_ = instruction.integer(proto.ID)
        if id_ == self._message.integer(proto.ROOT):
            return False
        users = self._users_of(id_)
        if of_tuple:
            if any(user.text(proto.OPCODE) != "get-tuple-element" for user in users):
                return False
            elements = [user for user in users if user.integer(proto.TUPLE_INDEX) == index]
            if any(each.integer(proto.ID) == self._message.integer(proto.ROOT) for each in elements):
                return False
            users = [user for each in elements for user in self._users_of(each.integer(proto.ID))]
        while users:
            user = users.pop()
            if user.text(proto.OPCODE) == "bitcast" and user.integer(proto.ID) != self._message.integer(proto.ROOT):
                users += self._users_of(user.integer(proto.ID))
            elif not self._has_own_buffer(user, _READERS):
                return False
        return True


def _instead(instruction: Message, opcode: str, operands: Sequence[int], fields: Sequence[wire.Field] = ()) -> Message:
    """Another instruction with the name, the id and the shape of one that is replaced."""
    kept = {proto.NAME, proto.SHAPE, proto.METADATA, proto.ID, proto.PREDECESSORS}
    made = [field for field in instruction.fields if field[0] in kept]
    return Message([*made, wire.data(proto.OPCODE, opcode), *fields, wire.packed(proto.OPERANDS, operands)])


# ---- Shapes ---------------------------------------------------------------------------------------------------------


def _with_leading(block: Shape, size: int) -> Shape:
    """The shape of so many blocks along a new dimension, one after the other."""
    return block.like([size, *block.dimensions], [*(i + 1 for i in block.minor_to_major), 0])


def _blocks_of(call: Collective) -> Shape:
    """The shape of all blocks of an all-to-all that has one operand for each rank."""
    return _with_leading(call.operands[0], call.size)


def _blocks_first(whole: Shape, call: Collective) -> Shape:
    """The shape of an array as the engine has it, with the blocks along a new dimension."""
    dimensions = list(whole.dimensions)
    dimensions[call.dimension] //= call.size
    return _with_leading(whole.like(dimensions, whole.minor_to_major), call.size)
