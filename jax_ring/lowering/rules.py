"""The lowering rule of all primitives: a call to its engine, or to XLA."""

import logging
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jax_ring import _compat, runtime
from jax_ring.lowering import trees
from jax_ring.lowering.call_spec import CallSpec
from jax_ring.lowering.custom_call import emitter
from jax_ring.lowering.custom_call.emitter import Emit
from jax_ring.lowering.dispatch import lowering_key, platforms_of, replica_groups, service_of, symbolic_shapes
from jax_ring.lowering.hierarchical import other_collectives, ranks_by_host, wait_markers
from jax_ring.lowering.kinds import ALL_REDUCE, REDUCE_SCATTER
from jax_ring.lowering.xla import fallback, ops, tree_fallback

logger = logging.getLogger("jax_ring")

# Dtypes without engine support: XLA packs integers of fewer than 8 bits, and these floats are too rare to justify
# kernels. They are converted before the call, and rounded once after it.
WIDENED = {
    "int2": jnp.int8,
    "int4": jnp.int8,
    "uint2": jnp.uint8,
    "uint4": jnp.uint8,
    "float4_e2m1fn": jnp.float32,
    "float8_e8m0fnu": jnp.float32,
}


def lower(call: CallSpec, ctx, *operands, **params):
    """Emits one custom call for all operands, or XLA's collectives without an engine.

    Args:
      call: from its primitive.
      params: of the primitive.

    Raises:
      NotImplementedError: without an engine under `JAX_RING_STRICT=1`, or where XLA could be wrong; for a sum along the
        tree of a symbolic shape.
    """
    key = (call.function, *lowering_key(ctx, params))
    return _compat.once(ctx, key, prepare, call, ctx, params)(ctx, operands)


def prepare(call: CallSpec, ctx, params: dict) -> Emit:
    """How such calls are emitted, for any operands of the current types. params: of the primitive."""
    runtime.refuse_in_child(call.function)
    call = call._replace(**params)
    call = call._replace(groups=replica_groups(ctx.module_context.axis_context, call.axes, call.axis_index_groups))
    if call.options.num_shards is None or trees.num_slots(call.groups, call.options) != 1:
        return _prepare_operands(call, ctx)
    emit = _prepare_operands(call, _without_slots(ctx))

    def emit_without_slots(ctx, operands):
        ctx = _without_slots(ctx)
        return emit(ctx, [ops.reshape(x, aval.shape) for x, aval in zip(operands, ctx.avals_in, strict=True)])

    return emit_without_slots


def _without_slots(ctx):
    """The context without the dimension of terms, of ranks with one each."""
    return ctx.replace(avals_in=[jax.core.ShapedArray(aval.shape[1:], aval.dtype) for aval in ctx.avals_in])


def _prepare_operands(call: CallSpec, ctx) -> Emit:
    """The same without a dimension for a single term."""
    call = call._replace(service=service_of(ctx, call), description=emitter.describe(ctx, call))
    levels = call.service.levels
    if levels is None:
        return _prepare_by_xla(call, ctx)
    if not levels.inter:
        return _prepare_widened(ctx, partial(emitter.prepare, call))
    emit = _prepare_widened(ctx, lambda ctx: partial(other_collectives.emit, call))
    if not ranks_by_host.crosses_hosts(call.groups, levels, call.perm):
        return emit

    def emit_inter_host(ctx, operands):
        logger.info("%s over %s is served by XLA between %d hosts", call.function, call.axes, levels.num_hosts)
        return emit(ctx, operands)

    return emit_inter_host


def _prepare_by_xla(call: CallSpec, ctx) -> Emit:
    """The same without an engine."""
    if call.adds_along_tree:
        if shapes := symbolic_shapes(ctx):
            raise NotImplementedError(
                f"{call.function}(..., order='tree') over {call.axes} of the symbolic shape {shapes[0]}: no engine "
                "serves it, and the blocks that XLA would exchange need static shapes. Export with static shapes, or "
                "with order='rank'."
            )
        emit_tree = _prepare_widened(ctx, lambda ctx: partial(tree_fallback.emit, call))

        def emit_by_xla(ctx, operands):
            note_fallback(call, "all_to_all")
            return emit_tree(ctx, operands)
    else:
        emit_by_xla = partial(_fall_back, call)
    return lambda ctx, operands: wait_markers.enclose(
        ctx, operands, partial(emit_by_xla, ctx), call=call.description, groups=call.groups
    )


def note_fallback(call: CallSpec, by: str) -> None:
    """Logs that XLA serves a call, or raises if forbidden."""
    ignored = f", which ignores {chosen}" if (chosen := call.options.ignored_by_xla()) else ""
    by_xla = f"XLA's {by}{ignored}: {call.service.why_not}"
    if runtime.STRICT:
        raise NotImplementedError(
            f"{call.function} over {call.axes} would use {by_xla}. {runtime.STRICT_VARIABLE}=1 forbids it; unset "
            "the variable to allow it."
        )
    logger.info("%s over %s uses %s", call.function, call.axes, by_xla)


def _fall_back(call: CallSpec, ctx, operands):
    by = call.kind.by_xla(platforms_of(ctx))
    note_fallback(call, by)
    to_xla = call.to_xla
    assert to_xla is not None
    shapes = symbolic_shapes(ctx)
    if call.kind is REDUCE_SCATTER and by == ALL_REDUCE.name:
        if shapes:
            raise NotImplementedError(
                f"{call.function} over {call.axes} of the symbolic shape {shapes[0]}: XLA's reduce-scatter in this "
                "jaxlib can return wrong sums on CPU devices, and the all-reduce that replaces it needs static shapes. "
                "Install jaxlib 0.12 or newer, or export with static shapes."
            )
        to_xla = fallback.lower_psum_scatter_to_all_reduce
    if shapes and call.axis_index_groups is None and call.axis_size:
        # jaxlib 0.12 cannot infer the result's size from mesh axes.
        call = call._replace(axis_index_groups=(tuple(range(call.axis_size)),))
    return [
        result
        for operand, aval_in, aval_out in zip(operands, ctx.avals_in, ctx.avals_out, strict=True)
        for result in to_xla(ctx.replace(avals_in=[aval_in], avals_out=[aval_out]), operand, **call.params)
    ]


def _prepare_widened(ctx, prepare: Callable[..., Emit]) -> Emit:
    """`prepare(ctx)`, with conversions if the engines lack the dtype."""
    dtype = WIDENED.get(ctx.avals_in[0].dtype.name)
    if dtype is None:
        return prepare(ctx)
    emit = prepare(_with_dtype(ctx, dtype))

    def emit_widened(ctx, operands):
        results = emit(_with_dtype(ctx, dtype), [ops.convert(x, dtype) for x in operands])
        return [ops.convert(x, aval.dtype) for x, aval in zip(results, ctx.avals_out, strict=True)]

    return emit_widened


def _with_dtype(ctx, dtype):
    return ctx.replace(
        avals_in=[jax.core.ShapedArray(aval.shape, dtype) for aval in ctx.avals_in],
        avals_out=[jax.core.ShapedArray(aval.shape, dtype) for aval in ctx.avals_out],
    )
