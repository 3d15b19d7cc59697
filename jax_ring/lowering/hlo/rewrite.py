"""Replaces a computation's collectives in HLO by calls to the engine, in place where XLA's passes leave that open."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

from jax_ring import runtime
from jax_ring.lowering.custom_call import streams
from jax_ring.lowering.hlo import across_hosts, collectives, for_gpus, proto
from jax_ring.lowering.hlo.collectives import Collective
from jax_ring.lowering.hlo.program import EngineCall, Program
from jax_ring.lowering.hlo.proto import Message, Unsupported
from jax_ring.lowering.hlo.shapes import UINT32, Shape, array_shape, slices, tuple_shape

_TYPED_FFI = 4  # a value of API_VERSION
_PARAMETER_NUMBER = 9  # of HloInstructionProto
# Fields of HloComputationProto, and of its ProgramShapeProto.
_PROGRAM_SHAPE = 4
_PROGRAM_OPERANDS, _PROGRAM_RESULT, _PROGRAM_NAMES = 1, 2, 3

# _PRODUCERS write a buffer of their own. _READERS read their operands without passing the buffers on to the result. The
# module comes after XLA has inserted its copies, so nothing would copy a shared buffer any more.
_PRODUCERS = {
    "broadcast", "concatenate", "convolution", "copy", "dot", "fusion", "iota", "pad", "reduce", "slice", "transpose",
}  # fmt: skip
_READERS = _PRODUCERS | {"convert", "compare", "reduce-window"}
_IN_PLACE = (b"dynamic-update-slice", b"scatter")


class Computation:
    """A computation, an HloComputationProto, whose collectives are replaced."""

    def __init__(self, message: Message, program: Program) -> None:
        self._program, self._platform = program, program.platform
        self._beside: set[int] = set()
        instructions = message.messages(proto.INSTRUCTIONS)
        _check_order(instructions)
        if not self._platform.has_layouts:
            message, self._beside = for_gpus.prepared(message, program.num_partitions, program.reduction_of)
            instructions = message.messages(proto.INSTRUCTIONS)
        self._message = message
        self._by_id = {each.integer(proto.ID): each for each in instructions}
        self._next_id = max(self._by_id) + 1
        self._hidden: list[int] = []  # operands in front of the collective's
        self._buffers = _Buffers(self._by_id, message.integer(proto.ROOT), program.bodies.__getitem__)
        self._replaced = Message()  # the collective that is being replaced
        self._written: list[Message] = []  # what replaces it

    def replace(self, refuse: Callable[[Message, Unsupported], None]) -> Message | None:
        """The computation with calls for collectives; None if there are none.

        refuse: called with each collective that stays, and why.
        """
        calls: dict[int, tuple[Collective, EngineCall | int]] = {}
        for id_, instruction in self._by_id.items():
            if not collectives.is_collective(instruction.text(proto.OPCODE)):
                continue
            try:
                call = self._read(instruction)
                if call.size > 1:  # XLA implements groups of one rank by a copy
                    calls[id_] = call, self._program.serve(call, id_ in self._beside)
            except Unsupported as why:
                refuse(instruction, why)
        if not calls:
            return None
        if self._platform.takes_position:
            self._hidden = [self._add("partition-id", array_shape(UINT32))]
        instructions: list[Message | bytes] = [*self._written]
        for id_, serialized in zip(self._by_id, self._message.each(proto.INSTRUCTIONS), strict=True):
            if id_ not in calls:
                instructions.append(serialized)
                continue
            self._replaced, self._written = self._by_id[id_], []
            self._write(*calls[id_])
            *others, last = self._written
            instructions += [*others, _in_place_of(self._replaced, last)]
        fields = self._message.without(proto.INSTRUCTIONS)
        return Message([*fields, *(proto.data(proto.INSTRUCTIONS, each) for each in instructions)])

    def _read(self, instruction: Message) -> Collective:
        call = collectives.read(
            instruction, lambda id_: self._by_id[id_].message(proto.SHAPE), self._program.reduction_of,
            self._program.num_partitions, self._platform.has_layouts,
        )  # fmt: skip
        if call.size > 1 and self._message.integer(proto.COMPUTATION_ID) in self._program.on_streams:
            # It would share a lane with calls that may run at the same time.
            raise Unsupported("it is on a GPU stream of compute_on, where calls in a shard_map alone have a lane")
        return call

    # ---- Calls ------------------------------------------------------------------------------------------------------

    def _write(self, call: Collective, by: EngineCall | int) -> None:
        """Writes what replaces a collective; the last instruction has its result.

        The engine has blocks along a leading dimension. With layouts they lie one after the other, and arrays are
        reinterpreted; before, they are moved where necessary.

        by: the engine's call, or the computation of a call across hosts.
        """
        operands, ids, results = call.operands, call.operand_ids, call.results
        if is_joined := call.in_tuple and not (isinstance(by, EngineCall) and by.blocks_apart):
            operands, results = across_hosts.shapes_of(call)
            ids = [self._joined(call, *operands)]
        elif not call.in_tuple:
            if call.kind.scatters:
                ids = [self._blocks_first(*item, call) for item in zip(ids, operands, strict=True)]
                operands = [_shape_of_blocks(x, call) for x in operands]
            if call.kind.gathers:
                results = [_shape_of_blocks(x, call) for x in results]
        if isinstance(by, EngineCall):
            made = self._call(call, by.config, operands, ids, _of_all(results))
        else:
            operands, results = across_hosts.shapes_of(call)
            ids = [self._reshape(*item) for item in zip(ids, operands, strict=True)]
            made = self._add("call", _of_all(results), ids, [proto.packed(proto.CALLED, [by])])
        if is_joined:
            self._write_blocks(call, made, *results)
        elif results is not call.results:
            self._write_results(call, made, results)

    def _call(self, call: Collective, config: str, operands: Sequence[Shape], ids: Sequence[int], result: Shape) -> int:
        """Writes the engine's call; returns its id."""
        hidden = [array_shape(UINT32)] * len(self._hidden)
        shapes, ids = [*hidden, *operands], [*self._hidden, *ids]
        is_beside = self._replaced.integer(proto.ID) in self._beside
        targets = runtime.ASYNC_TARGETS if is_beside else runtime.TARGETS
        fields = [
            proto.data(proto.TARGET, targets[call.kind.name]),
            proto.data(proto.CONFIG, config),
            proto.integer(proto.FEATURE_GROUPS, 1),
            proto.integer(proto.CONSTRAIN_LAYOUT, 1),
            *(proto.data(proto.OPERAND_SHAPES, each.message) for each in shapes),
            proto.integer(proto.BATCH_GROUPS, 1),
            proto.integer(proto.API_VERSION, _TYPED_FFI),
            *_alias_fields(self._aliased(call), len(hidden), result.is_tuple),
        ]
        if not is_beside:
            return self._add("custom-call", result, ids, fields)
        function = self._program.add(lambda id_: _function(id_, self._replaced, shapes, result, fields))
        made = self._add("call", result, ids, [proto.packed(proto.CALLED, [function]), *_ON_COLLECTIVE_STREAM])
        # The barrier takes the tuple as a whole, so that the operations after it are not on the stream.
        return self._add("opt-barrier", result, [made]) if result.is_tuple else made

    def _aliased(self, call: Collective) -> list[tuple[int, int]]:
        """Pairs of operand and result in one buffer. None beside products: XLA of JAX 0.12 adds no copies there."""
        if not call.kind.in_place or self._replaced.integer(proto.ID) in self._beside:
            return []
        allowed = self._buffers.may_share if self._platform.has_layouts else self._buffers.is_computed
        return [(i, i) for i, id_ in enumerate(call.operand_ids) if allowed(self._replaced, i, id_)]

    def _write_results(self, call: Collective, made: int, shapes: Sequence[Shape]) -> None:
        """Writes a collective's results, from those in other shapes."""
        elements = [made]
        if len(shapes) > 1:
            elements = [
                self._add("get-tuple-element", shape, [made], [proto.integer(proto.TUPLE_INDEX, i)])
                for i, shape in enumerate(shapes)
            ]
        results = [self._write_whole(each, x, call) for each, x in zip(elements, call.results, strict=True)]
        if len(shapes) > 1:
            self._add("tuple", tuple_shape(call.results), results)

    # ---- Blocks -----------------------------------------------------------------------------------------------------

    def _joined(self, call: Collective, whole: Shape) -> int:
        """Writes one array of all blocks of an all-to-all with an operand and a result per rank."""
        block = whole.like([1, whole.dimensions[1]], whole.minor_to_major)
        blocks = [self._reshape(each, block) for each in call.operand_ids]
        return self._add("concatenate", whole, blocks, [proto.packed(proto.DIMENSIONS, [0])])

    def _write_blocks(self, call: Collective, made: int, whole: Shape) -> None:
        """Writes the results of such an all-to-all, from one array of all their blocks."""
        size = whole.dimensions[1]
        block = whole.like([1, size], whole.minor_to_major)
        blocks = [self._add("slice", block, [made], slices([(i, i + 1), (0, size)])) for i in range(call.size)]
        blocks = [self._reshape(*item) for item in zip(blocks, call.results, strict=True)]
        self._add("tuple", tuple_shape(call.results), blocks)

    def _reshape(self, id_: int, shape: Shape) -> int:
        """Reinterprets an array in another shape."""
        return self._add("bitcast" if self._platform.has_layouts else "reshape", shape, [id_])

    def _blocks_first(self, id_: int, whole: Shape, call: Collective) -> int:
        """Writes blocks along a leading dimension."""
        first = _shape_of_blocks(whole, call)
        if self._platform.has_layouts or not call.dimension:
            return self._reshape(id_, first)
        cut, order = _blocks_within(first, call.dimension)
        return self._transpose(self._reshape(id_, cut), first, order)

    def _write_whole(self, id_: int, whole: Shape, call: Collective) -> int:
        """Writes the array of blocks along a leading dimension, or with its elements."""
        if call.kind.gathers and call.dimension and not self._platform.has_layouts:
            first = _shape_of_blocks(whole, call)
            cut, order = _blocks_within(first, call.dimension)
            inverse = sorted(range(len(order)), key=order.__getitem__)
            id_ = self._transpose(self._reshape(id_, first), cut, inverse)
        return self._reshape(id_, whole)

    def _transpose(self, id_: int, shape: Shape, order: Sequence[int]) -> int:
        return self._add("transpose", shape, [id_], [proto.packed(proto.DIMENSIONS, order)])

    def _add(self, opcode: str, shape: Shape, operands: Sequence[int] = (), fields: Sequence[proto.Field] = ()) -> int:
        """Writes an instruction for the replaced one; returns its id."""
        id_, self._next_id = self._next_id, self._next_id + 1
        of_whom = self._replaced.text(proto.NAME) or "jax_ring"
        name = f"{of_whom}.{self._message.integer(proto.COMPUTATION_ID)}.{id_ & 0xFFFFFFFF}"  # unique in the program
        fields = [*self._replaced.only(proto.METADATA), *fields]
        self._written.append(_instruction(id_, name, opcode, shape, operands, fields))
        return id_


def _check_order(instructions: Sequence[Message]) -> None:
    """Refuses instructions before their operands. XLA writes none, and a chain of operands ends."""
    before: set[int] = set()
    for each in instructions:
        if not before.issuperset(for_gpus.needed(each)):
            raise ValueError(f"instruction {each.integer(proto.ID)} comes before its operands")
        before.add(each.integer(proto.ID))


def _instruction(
    id_: int, name: str, opcode: str, shape: Shape, operands: Sequence[int], fields: Sequence[proto.Field]
) -> Message:
    made = [proto.data(proto.NAME, name), proto.data(proto.OPCODE, opcode), proto.data(proto.SHAPE, shape.message)]
    return Message([*made, *fields, proto.integer(proto.ID, id_), proto.packed(proto.OPERANDS, operands)])


def _in_place_of(replaced: Message, made: Message) -> Message:
    """An instruction with a replaced one's name, id and shape, behind what preceded it."""
    own = (proto.NAME, proto.SHAPE, proto.ID)
    return Message([*replaced.only(*own, proto.PREDECESSORS), *made.without(*own)])


# Attributes of a call that XLA's GPU compiler runs on another stream.
_ON_COLLECTIVE_STREAM = [
    proto.data(proto.FRONTEND, Message(proto.mapping(1, streams.attributes_of(streams.COLLECTIVE))))
]


def _function(
    id_: int, instruction: Message, operands: Sequence[Shape], result: Shape, fields: Sequence[proto.Field]
) -> Message:
    """A computation of the custom call."""
    name, metadata = instruction.text(proto.NAME), instruction.only(proto.METADATA)
    names = [f"operand.{id_}.{i}" for i in range(len(operands))]
    first, root = id_ << 32, (id_ << 32) + len(operands)
    instructions = [
        _instruction(first + i, names[i], "parameter", shape, (), [*metadata, proto.integer(_PARAMETER_NUMBER, i)])
        for i, shape in enumerate(operands)
    ]
    instructions.append(
        _instruction(root, f"{name}.{id_}.call", "custom-call", result, range(first, root), [*metadata, *fields])
    )
    types = [
        *(proto.data(_PROGRAM_OPERANDS, shape.message) for shape in operands),
        proto.data(_PROGRAM_RESULT, result.message),
        *(proto.data(_PROGRAM_NAMES, name) for name in names),
    ]
    return Message(
        [
            proto.data(proto.NAME, f"{name}.{id_}.on_stream"),
            *(proto.data(proto.INSTRUCTIONS, each) for each in instructions),
            proto.data(_PROGRAM_SHAPE, Message(types)),
            proto.integer(proto.COMPUTATION_ID, id_),
            proto.integer(proto.ROOT, root),
        ]
    )


# ---- In place --------------------------------------------------------------------------------------------------------


def _alias_fields(aliased: Sequence[tuple[int, int]], num_hidden: int, of_tuple: bool) -> list[proto.Field]:
    """A custom call's pairs of operand, behind hidden ones, and result in one buffer."""
    made = []
    for operand, result in aliased:
        of_result = [proto.packed(proto.ALIAS_RESULT, [result])] if of_tuple else []
        made.append(
            proto.data(proto.ALIASES, Message([*of_result, proto.integer(proto.ALIAS_OPERAND, operand + num_hidden)]))
        )
    return made


class _Buffers:
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
        users = defaultdict(list)
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


# ---- Shapes ---------------------------------------------------------------------------------------------------------


def _shape_of_blocks(whole: Shape, call: Collective) -> Shape:
    """An array's shape in the engine, blocks first."""
    dimensions = list(whole.dimensions)
    dimensions[call.dimension] //= call.size
    return whole.like([call.size, *dimensions], [*(i + 1 for i in whole.minor_to_major), 0])


def _blocks_within(first: Shape, dimension: int) -> tuple[Shape, list[int]]:
    """The shape of blocks along another dimension, and the permutation that puts them first."""
    num_blocks, *block = first.dimensions
    sizes = [*block[:dimension], num_blocks, *block[dimension:]]
    order = [dimension, *(i for i in range(len(sizes)) if i != dimension)]
    return first.like(sizes, range(len(sizes))[::-1]), order


def _of_all(shapes: Sequence[Shape]) -> Shape:
    return tuple_shape(shapes) if len(shapes) > 1 else shapes[0]
