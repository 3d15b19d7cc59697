"""Replaces a computation's collectives in HLO by calls to the engine."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax_ring import runtime
from jax_ring.lowering.custom_call import streams
from jax_ring.lowering.hlo import across_hosts, collectives, for_gpus, in_place, proto, wire
from jax_ring.lowering.hlo.collectives import Collective
from jax_ring.lowering.hlo.replica_groups import Unsupported
from jax_ring.lowering.hlo.shapes import UINT32, Shape, array_shape, slices, tuple_shape
from jax_ring.lowering.hlo.wire import Message

_TYPED_FFI = 4  # a value of API_VERSION
_PARAMETER_NUMBER = 9  # of HloInstructionProto
_KEY, _VALUE = 1, 2  # of a map's entry
# Fields of HloComputationProto and of its ProgramShapeProto.
_COMPUTATION_NAME, _PROGRAM_SHAPE = 1, 4
_PROGRAM_OPERANDS, _PROGRAM_RESULT, _PROGRAM_NAMES = 1, 2, 3


class Platform(NamedTuple):
    """What differs between platforms.

    Attributes:
      takes_position: whether calls take the mesh position first.
      has_layouts: whether XLA has assigned layouts, inserted copies and joined sums.
      has_streams: whether calls can run beside the computation.
    """

    takes_position: bool
    has_layouts: bool
    has_streams: bool


PLATFORMS = {"cpu": Platform(True, True, False), "cuda": Platform(False, False, True)}


class EngineCall(NamedTuple):
    """How the engine serves a collective.

    Attributes:
      config: its attributes, as text.
      blocks_apart: as in a CallSpec.
    """

    config: str
    blocks_apart: bool


class Environment(NamedTuple):
    """What a program gives its computations.

    Attributes:
      serve: (collective, instruction, whether beside products) to the engine's call, or the id of a computation across
        hosts; raises Unsupported.
      reduction_of: as in `collectives.read`.
      body_of: (a computation's id) to its message.
      add: adds a computation, a function of its id; returns the id.
    """

    platform: Platform
    num_partitions: int
    serve: Callable[[Collective, Message, bool], EngineCall | int]
    reduction_of: Callable[[int], str]
    body_of: Callable[[int], bytes]
    add: Callable[[Callable[[int], Message]], int]


class Computation:
    """A computation, an HloComputationProto, whose collectives are replaced."""

    def __init__(self, message: Message, environment: Environment) -> None:
        self._of = environment
        self._beside: set[int] = set()
        if environment.platform.has_streams:
            message, self._beside = for_gpus.prepared(message, environment.num_partitions, environment.reduction_of)
        self._message = message
        self._serialized = message.each(proto.INSTRUCTIONS)
        self._instructions = message.messages(proto.INSTRUCTIONS)
        self._by_id = {instruction.integer(proto.ID): instruction for instruction in self._instructions}
        self._next_id = max(self._by_id) + 1
        self._written: list[Message | bytes] = []
        self._hidden: list[int] = []  # operands in front of the collective's
        self._buffers = in_place.Buffers(self._instructions, message.integer(proto.ROOT), environment.body_of)

    def replace(self, refuse: Callable[[Message, Unsupported], None]) -> Message | None:
        """The computation with calls for collectives; None if there are none.

        refuse: called with each collective that stays, and why.
        """
        calls: dict[int, tuple[Collective, EngineCall | int]] = {}
        of = self._of
        for instruction in self._instructions:
            if not collectives.is_collective(instruction.text(proto.OPCODE)):
                continue
            try:
                call = collectives.read(
                    instruction,
                    self._shape_of,
                    self._of.reduction_of,
                    self._of.num_partitions,
                    self._of.platform.has_layouts,
                )
                if call.size > 1:  # XLA implements groups of one rank by a copy
                    is_beside = instruction.integer(proto.ID) in self._beside
                    calls[instruction.integer(proto.ID)] = call, of.serve(call, instruction, is_beside)
            except Unsupported as why:
                refuse(instruction, why)
        if not calls:
            return None
        if of.platform.takes_position:
            self._hidden = [self._add("partition-id", array_shape(UINT32))]
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
                self._write(instruction, call, by.config)
        others = self._message.without(proto.INSTRUCTIONS)
        return Message([*others, *(wire.data(proto.INSTRUCTIONS, instruction) for instruction in self._written)])

    def _shape_of(self, instruction: int) -> Message:
        return self._by_id[instruction].message(proto.SHAPE)

    # ---- Calls ------------------------------------------------------------------------------------------------------

    def _write(self, instruction: Message, call: Collective, config: str) -> None:
        """Writes a call, with blocks along a leading dimension.

        With layouts they lie one after the other, and arrays are reinterpreted; before, they are moved where necessary.
        """
        operands, ids = call.operands, call.operand_ids
        if call.kind.scatters:
            ids = [self._blocks_first(*item, call, instruction) for item in zip(ids, operands, strict=True)]
            operands = [_blocks_first(x, call) for x in operands]
        if not call.kind.gathers:
            shape, aliased = instruction.message(proto.SHAPE), self._aliased(instruction, call)
            self._call(instruction, call, config, (operands, ids), shape, aliased, instead=True)
            return
        results = [_blocks_first(x, call) for x in call.results]
        made = self._call(instruction, call, config, (operands, ids), _of_all(results).message)
        self._write_results(instruction, call, made, results)

    def _call(
        self,
        instruction: Message,
        call: Collective,
        config: str,
        operands: tuple[Sequence[Shape], Sequence[int]],
        shape: Message,
        aliased: Sequence[tuple[int, int]] = (),
        instead: bool = False,
    ) -> int:
        """Writes the engine's call with a result of this shape; returns its id.

        Args:
          operands: shapes and ids.
          aliased: see `in_place`.
          instead: whether it replaces the collective.
        """
        hidden = [array_shape(UINT32)] * len(self._hidden)
        shapes, ids = [*hidden, *operands[0]], [*self._hidden, *operands[1]]
        is_beside = instruction.integer(proto.ID) in self._beside
        targets = runtime.ASYNC_TARGETS if is_beside else runtime.TARGETS
        is_tuple = Shape(shape).is_tuple
        fields = [
            wire.data(proto.TARGET, targets[call.kind.name]),
            wire.data(proto.CONFIG, config),
            wire.integer(proto.FEATURE_GROUPS, 1),
            wire.integer(proto.CONSTRAIN_LAYOUT, 1),
            *(wire.data(proto.OPERAND_SHAPES, each.message) for each in shapes),
            wire.integer(proto.BATCH_GROUPS, 1),
            wire.integer(proto.API_VERSION, _TYPED_FFI),
            *in_place.fields(aliased, len(hidden), is_tuple),
        ]
        if not is_beside:
            return self._put("custom-call", shape, ids, instruction, fields, instead)
        computation = self._of.add(lambda id_: _function(id_, instruction, shapes, Shape(shape), fields))
        fields = [wire.packed(proto.CALLED, [computation]), *_ON_COLLECTIVE_STREAM]
        if not is_tuple:
            return self._put("call", shape, ids, instruction, fields, instead)
        # As in streams.py.
        made = self._put("call", shape, ids, instruction, fields)
        return self._put("opt-barrier", shape, [made], instruction, (), instead)

    def _aliased(self, instruction: Message, call: Collective) -> list[tuple[int, int]]:
        """Pairs of operand and result in one buffer; see emitter.py for calls beside products."""
        if not call.kind.in_place or instruction.integer(proto.ID) in self._beside:
            return []
        allowed = self._buffers.may_share if self._of.platform.has_layouts else self._buffers.is_computed
        return [(i, i) for i, id_ in enumerate(call.operand_ids) if allowed(instruction, i, id_)]

    def _write_results(self, instruction: Message, call: Collective, made: int, shapes: Sequence[Shape]) -> None:
        """Writes a collective's replacement, from results in other shapes."""
        parts = [made]
        if len(shapes) > 1:
            parts = [
                self._add("get-tuple-element", shape, [made], instruction, [wire.integer(proto.TUPLE_INDEX, i)])
                for i, shape in enumerate(shapes)
            ]
        if not Shape(instruction.message(proto.SHAPE)).is_tuple:
            self._write_whole(made, call.results[0], call, instruction, instead=True)
            return
        wholes = [
            self._write_whole(part, result, call, instruction) for part, result in zip(parts, call.results, strict=True)
        ]
        self._written.append(_instead(instruction, "tuple", wholes))

    def _write_steps(self, instruction: Message, call: Collective, computation: int) -> None:
        """Writes the call of a computation across hosts."""
        operands, results = across_hosts.shapes_of(call)
        fields = [wire.packed(proto.CALLED, [computation])]
        if call.in_tuple:
            joined = self._reshape(self._joined(instruction, call), operands[0], instruction)
            made = self._add("call", results[0], [joined], instruction, fields)
            self._write_cut(instruction, call, self._reshape(made, _blocks_of(call), instruction))
            return
        ids = call.operand_ids
        if call.kind.scatters:
            ids = [self._blocks_first(*item, call, instruction) for item in zip(ids, call.operands, strict=True)]
        ids = [self._reshape(id_, shape, instruction) for id_, shape in zip(ids, operands, strict=True)]
        made = self._add("call", _of_all(results), ids, instruction, fields)
        self._write_results(instruction, call, made, results)

    def _write_exchange(self, instruction: Message, call: Collective, by: EngineCall) -> None:
        """Writes an all-to-all with an operand and a result per rank, if necessary as blocks of one array."""
        if by.blocks_apart:
            apart = call.operands, call.operand_ids
            self._call(instruction, call, by.config, apart, instruction.message(proto.SHAPE), instead=True)
            return
        joined, whole = self._joined(instruction, call), _blocks_of(call)
        self._write_cut(instruction, call, self._call(instruction, call, by.config, ([whole], [joined]), whole.message))

    def _joined(self, instruction: Message, call: Collective) -> int:
        block = _with_leading(call.operands[0], 1)
        blocks = [self._reshape(each, block, instruction) for each in call.operand_ids]
        return self._add("concatenate", _blocks_of(call), blocks, instruction, [wire.packed(proto.DIMENSIONS, [0])])

    def _write_cut(self, instruction: Message, call: Collective, made: int) -> None:
        one, block = _with_leading(call.operands[0], 1), call.operands[0]
        parts = []
        for i in range(call.size):
            limits = [(i, i + 1), *((0, size) for size in block.dimensions)]
            part = self._add("slice", one, [made], instruction, slices(limits))
            parts.append(self._reshape(part, block, instruction))
        self._written.append(_instead(instruction, "tuple", parts))

    # ---- Blocks -----------------------------------------------------------------------------------------------------

    def _reshape(self, id_: int, shape: Shape, instruction: Message, instead: bool = False) -> int:
        """Reinterprets an array in another shape."""
        opcode = "bitcast" if self._of.platform.has_layouts else "reshape"
        return self._put(opcode, shape.message, [id_], instruction, (), instead)

    def _blocks_first(self, id_: int, whole: Shape, call: Collective, instruction: Message) -> int:
        """Writes blocks along a leading dimension."""
        first = _blocks_first(whole, call)
        if self._of.platform.has_layouts or not call.dimension:
            return self._reshape(id_, first, instruction)
        cut, order = _blocks_within(first, call.dimension)
        return self._transpose(self._reshape(id_, cut, instruction), first, order, instruction)

    def _write_whole(
        self, id_: int, whole: Shape, call: Collective, instruction: Message, instead: bool = False
    ) -> int:
        """Writes the array of blocks along a leading dimension, or with its elements."""
        if call.kind.gathers and call.dimension and not self._of.platform.has_layouts:
            first = _blocks_first(whole, call)
            cut, order = _blocks_within(first, call.dimension)
            inverse = sorted(range(len(order)), key=order.__getitem__)
            id_ = self._transpose(self._reshape(id_, first, instruction), cut, inverse, instruction)
        return self._reshape(id_, whole, instruction, instead)

    def _transpose(self, id_: int, shape: Shape, order: Sequence[int], instruction: Message) -> int:
        return self._add("transpose", shape, [id_], instruction, [wire.packed(proto.DIMENSIONS, order)])

    # ---- Instructions -----------------------------------------------------------------------------------------------

    def _put(
        self,
        opcode: str,
        shape: Message,
        operands: Sequence[int],
        instruction: Message,
        fields: Sequence[wire.Field] = (),
        instead: bool = False,
    ) -> int:
        """Writes an instruction for a replaced one, or in its place; returns its id."""
        if not instead:
            return self._add(opcode, Shape(shape), operands, instruction, fields)
        self._written.append(_instead(instruction, opcode, operands, fields))
        return instruction.integer(proto.ID)

    def _add(
        self,
        opcode: str,
        shape: Shape,
        operands: Sequence[int] = (),
        instruction: Message | None = None,
        fields: Sequence[wire.Field] = (),
    ) -> int:
        """Writes another instruction, for a replaced one; returns its id."""
        id_, self._next_id = self._next_id, self._next_id + 1
        of_whom = instruction.text(proto.NAME) if instruction else "jax_ring"
        name = f"{of_whom}.{self._message.integer(proto.COMPUTATION_ID)}.{id_ & 0xFFFFFFFF}"  # unique in the program
        made = [wire.data(proto.NAME, name), wire.data(proto.OPCODE, opcode), wire.data(proto.SHAPE, shape.message)]
        made += [field for field in (instruction.fields if instruction else ()) if field[0] == proto.METADATA]
        made += [*fields, wire.integer(proto.ID, id_)]
        made += [wire.packed(proto.OPERANDS, operands)] if operands else []
        self._written.append(Message(made))
        return id_


def _instead(instruction: Message, opcode: str, operands: Sequence[int], fields: Sequence[wire.Field] = ()) -> Message:
    """An instruction with a replaced one's name, id and shape."""
    made = instruction.only(proto.NAME, proto.SHAPE, proto.METADATA, proto.ID, proto.PREDECESSORS)
    return Message([*made, wire.data(proto.OPCODE, opcode), *fields, wire.packed(proto.OPERANDS, operands)])


# Attributes of a call that XLA's GPU compiler runs on another stream; see streams.py.
_ON_COLLECTIVE_STREAM = [
    wire.data(proto.FRONTEND, Message([wire.data(1, Message([wire.data(_KEY, key), wire.data(_VALUE, value)]))]))
    for key, value in streams.attributes_of(streams.COLLECTIVE).items()
]


def _function(
    id_: int, instruction: Message, operands: Sequence[Shape], result: Shape, fields: Sequence[wire.Field]
) -> Message:
    """A computation of the custom call."""
    name, metadata = instruction.text(proto.NAME), instruction.only(proto.METADATA)
    names = [f"operand.{id_}.{i}" for i in range(len(operands))]

    def written(number: int, opcode: str, name: str, shape: Shape, *more: wire.Field) -> wire.Field:
        own = [wire.data(proto.NAME, name), wire.data(proto.OPCODE, opcode), wire.data(proto.SHAPE, shape.message)]
        numbered = wire.integer(proto.ID, id_ << 32 | number)
        return wire.data(proto.INSTRUCTIONS, Message([*own, *metadata, numbered, *more]))

    parameters = [
        written(i, "parameter", name, shape, wire.integer(_PARAMETER_NUMBER, i))
        for i, (name, shape) in enumerate(zip(names, operands, strict=True))
    ]
    used = wire.packed(proto.OPERANDS, [id_ << 32 | i for i in range(len(operands))])
    call = written(len(operands), "custom-call", f"{name}.{id_}.call", result, *fields, used)
    types = [
        *(wire.data(_PROGRAM_OPERANDS, shape.message) for shape in operands),
        wire.data(_PROGRAM_RESULT, result.message),
        *(wire.data(_PROGRAM_NAMES, name) for name in names),
    ]
    return Message(
        [
            wire.data(_COMPUTATION_NAME, f"{name}.{id_}.on_stream"), *parameters, call,
            wire.data(_PROGRAM_SHAPE, Message(types)), wire.integer(proto.COMPUTATION_ID, id_),
            wire.integer(proto.ROOT, id_ << 32 | len(operands)),
        ]
    )  # fmt: skip


# ---- Shapes ---------------------------------------------------------------------------------------------------------


def _with_leading(block: Shape, size: int) -> Shape:
    """The shape of so many blocks along a new dimension."""
    return block.like([size, *block.dimensions], [*(i + 1 for i in block.minor_to_major), 0])


def _blocks_of(call: Collective) -> Shape:
    """The shape of all blocks of an all-to-all with an operand per rank."""
    return _with_leading(call.operands[0], call.size)


def _blocks_first(whole: Shape, call: Collective) -> Shape:
    """An array's shape in the engine, blocks first."""
    dimensions = list(whole.dimensions)
    dimensions[call.dimension] //= call.size
    return _with_leading(whole.like(dimensions, whole.minor_to_major), call.size)


def _blocks_within(first: Shape, dimension: int) -> tuple[Shape, list[int]]:
    """The shape of blocks along another dimension, and the permutation that puts them first."""
    num_blocks, *block = first.dimensions
    sizes = [*block[:dimension], num_blocks, *block[dimension:]]
    order = [dimension, *(i for i in range(len(sizes)) if i != dimension)]
    return first.like(sizes, range(len(sizes))[::-1]), order


def _of_all(shapes: Sequence[Shape]) -> Shape:
    return tuple_shape(shapes) if len(shapes) > 1 else shapes[0]
