"""Lowers a ragged all-to-all: ranks gather sizes and offsets, then send slices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir

from jax_ring import _compat
from jax_ring.lowering.call import ALL_GATHER, CallSpec
from jax_ring.lowering.custom_call import engine
from jax_ring.lowering.plan import WIDENED, note_fallback, plan_call
from jax_ring.lowering.xla import fallback, ops


def lower(call: CallSpec, ctx: _compat.LoweringContext, *operands: ir.Value, **params: Any) -> list:
    """Emits two custom calls to an engine, or what XLA can do.

    Args:
      call: from its primitive. XLA cannot compile JAX's lowering for CPU devices: there ranks gather all operands, and
        take their slices.
      params: of the primitive.

    Raises:
      NotImplementedError: without an engine, under `JAX_RING_STRICT=1`.
    """
    call = plan_call(call, ctx, params).call
    size = len(call.groups[0])

    def by_gather(*xs):
        return [_receive_by_gather(*xs, axes=call.axes, axis_index_groups=call.axis_index_groups, size=size)]

    if size == 1:
        return ops.inline(ctx, by_gather, operands, ctx.avals_in)
    if call.service.levels is None:
        on_cpu = "cpu" in _compat.platforms_of(ctx)
        note_fallback(call, ALL_GATHER.name if on_cpu else call.kind.name)
        if on_cpu:
            return ops.inline(ctx, by_gather, operands, ctx.avals_in)
        assert call.to_xla is not None
        return call.to_xla(ctx, *operands, axis_name=call.axes, axis_index_groups=call.axis_index_groups)
    numbers = ctx.avals_in[2:]
    own = jax.core.ShapedArray((len(numbers), *numbers[0].shape), _dtype_of(numbers))
    everyones = jax.core.ShapedArray((size, *own.shape), own.dtype)
    sizes = call._replace(kind=ALL_GATHER, axis_size=size, description=f"{call.description} (its sizes)")
    rows_of_own = ops.inline(ctx, lambda *xs: [_table(*xs)], operands[2:], numbers)
    table = engine.emit(ctx.replace(avals_in=[own], avals_out=[everyones]), rows_of_own, sizes)
    rows, aval_out, given = ctx.avals_in[:2], ctx.avals_out[0], list(operands[:2])
    dtype = aval_out.dtype if jax.dtypes.itemsize_bits(aval_out.dtype) >= 8 else WIDENED[aval_out.dtype.name]
    if dtype != aval_out.dtype:
        # The engines count in bytes.
        given = [ops.convert(x, dtype) for x in given]
    ctx = ctx.replace(
        avals_in=[everyones, *(jax.core.ShapedArray(aval.shape, dtype) for aval in rows)],
        avals_out=[jax.core.ShapedArray(aval_out.shape, dtype)],
    )
    (result,) = engine.emit(ctx, [*table, *given], call)
    return [ops.convert(result, aval_out.dtype)]


def _dtype_of(numbers):
    return jnp.dtype(
        jnp.int64 if jax.config.jax_enable_x64 and any(x.dtype.itemsize > 4 for x in numbers) else jnp.int32
    )


def _table(*numbers: jax.Array) -> jax.Array:
    """A rank's sizes and offsets, a row each, in the order of arguments."""
    return jnp.stack([x.astype(_dtype_of(numbers)) for x in numbers])


def _receive_by_gather(operand, output, *numbers, axes, axis_index_groups, size: int) -> jax.Array:
    """What a rank receives, from gathered operands."""
    if size == 1:
        everyones, tables, rank = operand[None], _table(*numbers)[None], jnp.int32(0)
    else:
        gather = partial(lax.all_gather, axis_name=axes, axis_index_groups=axis_index_groups)
        everyones, tables, rank = (
            gather(operand),
            gather(_table(*numbers)),
            fallback.rank_in_group(axes, axis_index_groups),
        )
    num_rows, each = operand.shape[0], tables.shape[2] // size
    if num_rows == 0:
        return output
    own = lax.dynamic_slice_in_dim(tables, rank * each, each, axis=2)  # (p, 4, slices for this rank)
    rows = jnp.arange(output.shape[0], dtype=tables.dtype)

    def note_slice(i, sources):
        source = i // each
        begin, count, to, _ = own[source, :, i % each]
        is_within = (rows >= to) & (rows < to + count)
        return jnp.where(is_within, source * num_rows + begin + rows - to, sources)

    sources = lax.fori_loop(0, size * each, note_slice, jnp.full_like(rows, -1))
    received = everyones.reshape(size * num_rows, *operand.shape[1:])[sources]
    return jnp.where((sources >= 0).reshape(-1, *[1] * (output.ndim - 1)), received, output)
