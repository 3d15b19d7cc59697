"""Emits the custom call to an engine: operands, attributes, and transposes around it."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat, runtime
from jax_ring.lowering.call_spec import CallSpec
from jax_ring.lowering.custom_call import attributes, layout, operation, partitioned, streams
from jax_ring.lowering.custom_call.operation import Call, Description
from jax_ring.lowering.state import state_of
from jax_ring.lowering.xla import ops

# Emits a call: (ctx, operands) to its results. It holds no reference to the module, because the module keeps it.
Emit = Callable[..., Sequence]


def emit(ctx, operands: Sequence, call: CallSpec) -> Sequence:
    """Emits one custom call for all operands, of the types in ctx."""
    return prepare(call, ctx)(ctx, operands)


def prepare(call: CallSpec, ctx) -> Emit:
    """A function that emits one custom call for operands of the types in ctx.

    The engine has contiguous blocks, one per rank, along a leading dimension, which it removes in a reduce-scatter,
    adds in an all-gather and keeps in an all-to-all. For other dimensions data is transposed here. Slots come before
    the blocks.
    """
    scatters, gathers = call.kind.scatters and not call.part, call.kind.gathers and not call.part
    group_trees = call.service.group_trees
    slots = int(bool(group_trees and group_trees[0].num_slots() > 1))
    avals_in, avals_out = ctx.avals_in, ctx.avals_out
    if scatters:
        shapes = [aval.shape[:slots] + layout.shape_of_blocks(aval.shape[slots:], **call.blocks) for aval in avals_in]
        avals_in = [jax.core.ShapedArray(shape, avals_in[0].dtype) for shape in shapes]
    if gathers:
        added = () if scatters else (call.axis_size,)
        avals_out = [jax.core.ShapedArray((*added, *aval.shape), aval.dtype) for aval in avals_in]
    if call.perm == ():
        return lambda ctx, operands: [
            ops.inline_one(ctx, jnp.zeros_like, x, aval) for x, aval in zip(operands, avals_in, strict=True)
        ]
    is_alone = max(map(len, call.groups)) == 1
    engine: Emit = partial(_reshape, avals_out) if is_alone else _prepare_engine(call, ctx, avals_in, avals_out, slots)
    if not (scatters or gathers):
        return engine
    at = call.dimension if call.concat_dimension is None else call.concat_dimension

    def emit(ctx, operands) -> Sequence:
        if scatters:
            operands = [layout.lower_blocks_first(x, slots=slots, **call.blocks) for x in operands]
        results = engine(ctx, operands)
        return [layout.lower_blocks_at(x, dimension=at, tiled=call.tiled) for x in results] if gathers else results

    return emit


def _reshape(avals: Sequence, ctx, operands: Sequence) -> Sequence:
    return [ops.reshape(x, aval.shape) for x, aval in zip(operands, avals, strict=True)]


def _prepare_engine(call: CallSpec, ctx, avals_in: Sequence, avals_out: Sequence, slots: int) -> Emit:
    """The same without transposes. slots: the number of dimensions before the blocks."""
    service = call.service
    stream = streams.stream_of(ctx, call.options) if service.engine == "cuda" else streams.MAIN
    target = (runtime.ASYNC_TARGETS if stream else runtime.TARGETS)[call.kind.name]
    shared = attributes.of(call, ctx, stream)
    may_alias = [] if stream else _may_alias(call, len(avals_in), slots)
    if stream and _compat.stream_of(ctx):
        stream = streams.MAIN  # JAX moves everything around the call to the user's stream
    # On CPU devices, which all run one program, the mesh position is a hidden operand. A GPU handler knows its GPU, and
    # could not read the position from device memory.
    takes_position, num_own = service.engine == "cpu", None
    if service.automatic_axes:
        num_own = (call.kind.scatters + slots, int(call.kind.gathers))
        shared = partitioned.attributes(shared, target, takes_position, num_own, stream)
        target, stream, takes_position = partitioned.TARGET, streams.MAIN, False
    known = Call(
        target=target,
        shared=shared,
        description=call.description,
        lines=(),
        num_hidden=int(takes_position),
        itemsize=avals_in[-1].dtype.itemsize,
        joins=call.kind.joins and not (call.options.apart or call.part),
        num_own=num_own,
    )
    types = [ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype)) for aval in avals_out]

    def emit(ctx, operands: Sequence) -> Sequence:
        state = state_of(ctx)
        hidden: list[ir.Value] = []
        if takes_position:
            # The calls of a block share the mesh position.
            hidden = [_compat.once(ctx, ("position", ir.InsertionPoint.current.block), hlo.partition_id)]
        aliases = [(len(hidden) + i, result) for i, result in may_alias if _should_alias(operands[i])]
        of_line = known._replace(lines=(state.site or _compat.call_site(ctx),))
        build = partial(operation.build, ctx, of_line, types, aliases, _compat.location_by_user(ctx))
        operands = [*hidden, *operands]
        if stream:
            return streams.emit_on(ctx, stream, build, operands, types)
        built = build(operands)
        if not state.may_leave_out:  # see passes/exit_barrier.py
            enclosing = ir.InsertionPoint(built).block.owner.operation
            state.may_leave_out = enclosing.name != "sdy.manual_computation"
        return list(built.results)

    return emit


def describe(ctx, call: CallSpec) -> Description:
    """The call in timeout errors, without its line; equal for equal calls."""
    shapes = [f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]" for aval in ctx.avals_in]
    axis = f"axis {call.axes[0]!r}" if len(call.axes) == 1 else f"axes {call.axes!r}"
    groups = "" if call.axis_index_groups is None else f" in groups {list(map(list, call.axis_index_groups))}"
    return Description(call.function, shapes, len(shapes), axis + groups)


# ---- Aliasing -------------------------------------------------------------------------------------------------------


def _may_alias(call: CallSpec, num_operands: int, slots: int) -> list[tuple[int, int]]:
    """Pairs of operand and result that can be one buffer, on the main stream.

    XLA of JAX 0.12 adds no copies for a call on another stream, which would overwrite an operand that is still read.
    """
    if call.part and call.kind.gathers:
        return [(1, 0)] if call.part[0] else []
    if call.kind.in_place and not slots:
        return [(i, i) for i in range(num_operands)]
    return [(num_operands - 1, 0)] if call.kind.is_ragged else []


# Ops whose result is a bitcast of the operand if both have the same number of elements. (A constraint can be more than
# that.)
_RESHAPE_OPS = ("stablehlo.reshape", "stablehlo.broadcast_in_dim", "sdy.sharding_constraint")


def _should_alias(value) -> bool:
    """Whether the result should take the operand's buffer, which saves memory and traffic.

    Not for an argument of the shard_map, which may be the caller's and would be copied. XLA also copies a value used
    later, so only speed depends on it.
    """
    owner = value.owner
    if isinstance(owner, ir.Block):
        return owner.owner.operation.name != "sdy.manual_computation"
    operands = owner.operation.operands
    if owner.operation.name in _RESHAPE_OPS and _num_elements(operands[0]) == _num_elements(value):
        return _should_alias(operands[0])
    return True


def _num_elements(value) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)
