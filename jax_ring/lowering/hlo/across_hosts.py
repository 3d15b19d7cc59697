"""A collective across hosts as computations in HLO: the steps of a call of `lax`.

They are lowered as a program, whose computations join the partitioned one. On CPU devices XLA's passes are over by
then, so their work is done here: arrays get layouts, reshapes become bitcasts, an all-to-all gets an operand per rank,
and a value that a call overwrites is copied if something else may read it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering.call import CallSpec
from jax_ring.lowering.hierarchical import other_collectives
from jax_ring.lowering.hlo import proto
from jax_ring.lowering.hlo.collectives import Collective
from jax_ring.lowering.hlo.proto import Message, Unsupported
from jax_ring.lowering.hlo.shapes import Shape, slices, tuple_shape
from jax_ring.lowering.module_state import state_of
from jax_ring.lowering.override_state import for_xla
from jax_ring.lowering.xla.ops import aval_of

_ENTRY = 6  # a field of HloModuleProto

_REWRITTEN = {
    proto.NAME, proto.OPCODE, proto.SHAPE, proto.METADATA, proto.ID, proto.OPERANDS, proto.PREDECESSORS, proto.CALLED,
    proto.CHANNEL,
}  # fmt: skip
# XLA would have to insert copies for these, or to simplify them.
_REFUSED = {"conditional", "while", "dynamic-update-slice", "gather", "scatter", "sort"}
_WITHOUT_BUFFER = {"parameter", "constant", "call", "tuple"}

_steps_p = Primitive("jax_ring_across_hosts")
_steps_p.multiple_results = True
_steps_p.def_abstract_eval(lambda *_, results, **params: list(results))


def _lower_steps(
    ctx: mlir.LoweringRuleContext, *operands: ir.Value, call: CallSpec, program: str, site: str, results: tuple
) -> Sequence:
    del results  # are in ctx
    state = state_of(ctx)
    state.program, state.site = program, site
    return other_collectives.emit(call, ctx, operands)


mlir.register_lowering(_steps_p, _lower_steps)


def shapes_of(call: Collective) -> tuple[list[Shape], list[Shape]]:
    """Shapes of the operands and results of a call's steps: 1-D, behind the dimension of blocks, if any."""
    if call.in_tuple:
        size = math.prod(call.operands[0].dimensions)
        blocks = [call.operands[0].like([call.size, size], [1, 0])]
        return blocks, blocks
    return (
        [_flat(x, call.size if call.kind.scatters else 0) for x in call.operands],
        [_flat(x, call.size if call.kind.gathers else 0) for x in call.results],
    )


def _flat(shape: Shape, num_blocks: int) -> Shape:
    size = math.prod(shape.dimensions)
    return shape.like([num_blocks, size // num_blocks], [1, 0]) if num_blocks else shape.like([size], [0])


def lowered(
    call: CallSpec,
    shapes: tuple[list[Shape], list[Shape]],
    mesh: jax.sharding.Mesh,
    program: str,
    site: str,
    platform: str,
) -> Message:
    """The HloModuleProto of a call's steps.

    Args:
      shapes: of the steps' operands and results, from `shapes_of`.
      program: the calling program's name between processes.
      site: the user's line.
    """
    operands, results = [[aval_of(shape.dtype, *shape.dimensions) for shape in each] for each in shapes]
    steps = partial(_steps_p.bind, call=call, program=program, site=site, results=tuple(results))
    context = _compat.SPMDAxisContext(mesh, frozenset(mesh.axis_names))
    # A thread of XLA lacks the settings of the lowering thread.
    with for_xla(), jax.enable_x64(True):
        (equation,) = jax.make_jaxpr(steps)(*operands).eqns
        computation = _compat.lowered_alone(equation, context, platform)
    return Message.parse(computation.as_serialized_hlo_module_proto())


class AcrossHosts(Unsupported):
    """The groups cross hosts. Also XLA's steps of a jax_ring call, so `JAX_RING_STRICT` does not forbid it."""


class ReplacedCollective(NamedTuple):
    """The collective that a program's computations replace, and what they need in its program.

    Attributes:
      instruction: the HloInstructionProto.
      num_hosts: of each group.
      channels: unused channels, equal in all processes.
      ids: unused ids of computations, equal in all processes.
      has_layouts: whether XLA's passes are over.
    """

    instruction: Message
    num_hosts: int
    channels: Iterator[int]
    ids: Iterator[int]
    has_layouts: bool


def computations_of(program: Message, replaced: ReplacedCollective) -> list[Message]:
    """A program's computations for another one, callees first, entry last.

    One with several callers is repeated, as XLA flattens programs.

    Raises:
      AcrossHosts: for instructions that need XLA's passes.
    """
    by_id = {each.integer(proto.COMPUTATION_ID): each for each in program.messages(proto.COMPUTATIONS)}
    copies: list[Message] = []

    def copy(id_: int) -> int:
        new_id = next(replaced.ids)
        copies.append(_ComputationCopy(by_id[id_], new_id, replaced, copy).message())
        return new_id

    copy(program.integer(_ENTRY))
    return copies


class _ComputationCopy:
    """A computation with other ids, in which calls overwrite only what nothing else reads.

    Args:
      new_id: the copy's.
      copy: (a callee's id) to that of another copy.
    """

    def __init__(
        self, computation: Message, new_id: int, replaced: ReplacedCollective, copy: Callable[[int], int]
    ) -> None:
        self._computation, self._id, self._collective = computation, new_id, replaced
        self._by_id = {each.integer(proto.ID): each for each in computation.messages(proto.INSTRUCTIONS)}
        self._called = {id_: list(map(copy, each.integers(proto.CALLED))) for id_, each in self._by_id.items()}
        self._uses = Counter(operand for each in self._by_id.values() for operand in each.integers(proto.OPERANDS))
        self._elements = Counter(map(_element, self._by_id.values()))
        self._last = max(map(_local, self._by_id))

    def message(self) -> Message:
        own = {proto.NAME, proto.INSTRUCTIONS, proto.COMPUTATION_ID, proto.ROOT}
        instructions = [new for old in self._by_id.values() for new in self._written(old)]
        return Message(
            [
                proto.data(proto.NAME, f"{self._computation.text(proto.NAME)}.{self._id}"),
                *(proto.data(proto.INSTRUCTIONS, each) for each in instructions),
                *self._computation.without(*own),
                proto.integer(proto.COMPUTATION_ID, self._id),
                proto.integer(proto.ROOT, self._new(self._computation.integer(proto.ROOT))),
            ]
        )

    def _new(self, id_: int) -> int:
        return self._id << 32 | _local(id_)

    def _written(self, instruction: Message) -> Iterator[Message]:
        """An instruction, behind the copies that it needs."""
        opcode = instruction.text(proto.OPCODE)
        if opcode in _REFUSED:
            raise AcrossHosts(f"between these hosts it would take a {opcode}")
        operands = instruction.integers(proto.OPERANDS)
        if self._collective.has_layouts:
            if opcode == "all-to-all":
                yield from self._exchange(instruction)
                return
            if opcode == "reshape":
                opcode = "bitcast"
            for alias in instruction.messages(proto.ALIASES):
                index = alias.integer(proto.ALIAS_OPERAND)
                if not self._is_private(operands[index]):
                    self._last += 1
                    of_shape = self._by_id[operands[index]].only(proto.SHAPE)
                    yield self._rewritten(Message(of_shape), "copy", self._last, [operands[index]])
                    operands[index] = self._last
        yield self._rewritten(instruction, opcode, instruction.integer(proto.ID), operands)

    def _exchange(self, instruction: Message) -> Iterator[Message]:
        """An all-to-all with a block as each operand and result."""
        whole = Shape(instruction.message(proto.SHAPE)).with_default_layout()
        size, *rest = whole.dimensions
        block = whole.like([size // self._collective.num_hosts, *rest], whole.minor_to_major)
        limits = [[(i, i + block.dimensions[0]), *((0, n) for n in rest)] for i in range(0, size, block.dimensions[0])]

        def add(opcode: str, shape: Shape, operands: Sequence[int], fields: Sequence[proto.Field]) -> Message:
            self._last += 1
            made = Message([*fields, proto.data(proto.SHAPE, shape.message)])
            return self._rewritten(made, opcode, self._last, operands)

        sent = [add("slice", block, instruction.integers(proto.OPERANDS), slices(each)) for each in limits]
        exchange = instruction.without(proto.DIMENSIONS)
        received = add("all-to-all", tuple_shape([block] * self._collective.num_hosts), _ids(sent), exchange)
        blocks = [
            add("get-tuple-element", block, _ids([received]), [proto.integer(proto.TUPLE_INDEX, i)])
            for i in range(self._collective.num_hosts)
        ]
        yield from (*sent, received, *blocks)
        along = Message([proto.data(proto.SHAPE, whole.message), proto.packed(proto.DIMENSIONS, [0])])
        yield self._rewritten(along, "concatenate", instruction.integer(proto.ID), _ids(blocks))

    def _rewritten(self, instruction: Message, opcode: str, id_: int, operands: Sequence[int]) -> Message:
        # With the default layout a transpose moves data; with its own layout it moves nothing.
        shape = Shape(instruction.message(proto.SHAPE)).with_default_layout()
        fields = [
            *instruction.without(*_REWRITTEN),
            proto.data(proto.NAME, f"{opcode}.{self._id}.{_local(id_)}"),
            proto.data(proto.OPCODE, opcode),
            proto.data(proto.SHAPE, shape.message),
            proto.data(proto.METADATA, self._collective.instruction.raw(proto.METADATA)),
            proto.integer(proto.ID, self._new(id_)),
            proto.packed(proto.OPERANDS, map(self._new, operands)),
            proto.packed(proto.PREDECESSORS, map(self._new, instruction.integers(proto.PREDECESSORS))),
            proto.packed(proto.CALLED, self._called.get(id_, ())),
        ]
        if instruction.integer(proto.CHANNEL):
            fields.append(proto.integer(proto.CHANNEL, next(self._collective.channels)))
        return Message(fields)

    def _is_private(self, id_: int) -> bool:
        """Whether a value has its own buffer and one reader."""
        while self._uses[id_] == 1:
            instruction = self._by_id[id_]
            opcode = instruction.text(proto.OPCODE)
            if opcode not in ("bitcast", "reshape", "get-tuple-element"):
                return opcode not in _WITHOUT_BUFFER
            (id_,) = instruction.integers(proto.OPERANDS)
            if opcode == "get-tuple-element":
                made = self._by_id[id_].text(proto.OPCODE)
                return made not in _WITHOUT_BUFFER and self._elements[_element(instruction)] == 1
        return False


def _ids(instructions: Sequence[Message]) -> list[int]:
    return [each.integer(proto.ID) for each in instructions]


def _local(id_: int) -> int:
    return id_ & 0xFFFFFFFF


def _element(instruction: Message) -> tuple | None:
    if instruction.text(proto.OPCODE) != "get-tuple-element":
        return None
    return (*instruction.integers(proto.OPERANDS), instruction.integer(proto.TUPLE_INDEX))
