"""The hierarchical all-reduce across hosts: jax_ring's collectives within each host, XLA's all-reduce between hosts.

The ranks of a host reduce-scatter, after which each has the host's result for one shard of the message. The ranks with
the same shard on different hosts all-reduce it, served by XLA. Then the ranks of a host all-gather. In
total one message leaves each host, not one per rank.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring.lowering import between_hosts, crossing, custom_call, ops
from jax_ring.lowering.service import Service


class Types(NamedTuple):
    """The element types of the reduce-scatter, the all-reduce across hosts, and the all-gather."""

    scattered: np.dtype
    crossing: np.dtype
    gathered: np.dtype


def types_of(op: str, dtype) -> Types:
    """The element types of the steps of an all-reduce of `dtype` across hosts.

    Sums of small floats stay in float32 until they have crossed, so that they are rounded once, as on one host. On CPU
    devices this adds no network traffic, since XLA's all-reduce of them is in float32, too. Maxima and minima of floats
    cross as integers of the same order, because XLA's all-reduce of floats drops NaNs on CPU devices.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return Types(dtype, dtype, dtype)
    is_double = jnp.finfo(dtype).bits == 64
    if op != "sum":
        return Types(dtype, np.dtype(np.int64 if is_double else np.int32), dtype)
    accumulator = dtype if is_double else np.dtype(np.float32)
    return Types(accumulator, accumulator, dtype)


def emit(ctx, operands, *, kind: str, op: str, service: Service, call: str, options) -> list:
    """Emits an all-reduce that crosses hosts, and returns its results.

    Each operand is sharded separately. Concatenating them first would copy all of the data once more, and save less
    than one element of padding per operand and rank. One custom call takes all operands, and XLA combines its own
    all-reduces.
    """
    assert kind == "all_reduce"
    assert service.levels is not None
    num_shards = len(service.levels.within[0])
    sizes = [shard_size(aval.size, num_shards) for aval in ctx.avals_in]
    types = types_of(op, ctx.avals_in[0].dtype)
    within_hosts = service._replace(levels=service.levels._replace(across=()))

    def avals(dtype, *dimensions):
        return [jax.core.ShapedArray((*dimensions, size), dtype) for size in sizes]

    def within(kind: str, op: str, operands, avals_in, avals_out):
        return custom_call.emit(
            ctx.replace(avals_in=avals_in, avals_out=avals_out), operands, kind=kind, op=op, service=within_hosts,
            call=f"{call} ({kind.replace('_', '-')} within a host)", options=options,
            axis_size=num_shards, dimension=0, tiled=False,
        )  # fmt: skip

    full_avals, shard_avals = avals(types.scattered, num_shards), avals(types.scattered)
    values = [to_shards(ctx, x, aval) for x, aval in zip(operands, full_avals, strict=True)]
    values = within("reduce_scatter", op, values, full_avals, shard_avals)
    across = service.levels.across

    def cross(values):
        return [all_reduce_by_xla(ctx, op, across, x, aval, types) for x, aval in zip(values, shard_avals, strict=True)]

    crossed_avals = avals(types.gathered)
    crossed = between_hosts.enclose(
        ctx, values, cross, call=call, groups=across, avals_in=shard_avals, avals_out=crossed_avals
    )
    values = within("all_gather", "sum", crossed, crossed_avals, avals(types.gathered, num_shards))
    return [from_shards(x, aval) for x, aval in zip(values, ctx.avals_in, strict=True)]


def shard_size(num_elements: int, num_shards: int) -> int:
    """The number of elements of each shard. The last shard is padded."""
    return math.ceil(num_elements / num_shards)


def to_shards(ctx, x, aval):
    """x converted, flattened and padded to the type and shape of `aval`, (number of shards, shard size)."""
    num_elements = math.prod(ir.RankedTensorType(x.type).shape)
    x = ops.convert(ctx, ops.reshape(x, (num_elements,)), aval.dtype)
    if padding := aval.size - num_elements:
        zero = mlir.ir_constant(np.zeros((), aval.dtype))
        x = hlo.pad(x, zero, *(mlir.dense_int_array([n]) for n in (0, padding, 0)))
    return ops.reshape(x, aval.shape)


def from_shards(x, aval):
    """The inverse of `to_shards`, without the conversion: an array of the shape of `aval`."""
    x = ops.reshape(x, (math.prod(ir.RankedTensorType(x.type).shape),))
    x = hlo.slice(x, *(mlir.dense_int_array([n]) for n in (0, aval.size, 1)))
    return ops.reshape(x, aval.shape)


def all_reduce_by_xla(ctx, op: str, groups, x, aval, types: Types):
    """XLA's all-reduce of a shard of type `aval` in groups of mesh positions, converted to `types.gathered`."""
    if jnp.issubdtype(aval.dtype, jnp.floating) and op != "sum":
        keys = jax.core.ShapedArray(aval.shape, types.crossing)
        x = ops.inline(ctx, _to_ordered_integers, x, aval, keys, key_type=types.crossing, largest=op == "max")
        x = crossing.all_reduce(ctx, op, groups, x, types.crossing)
        return ops.inline(ctx, _from_ordered_integers, x, keys, aval, dtype=types.gathered)
    return ops.convert(ctx, crossing.all_reduce(ctx, op, groups, x, types.crossing), types.gathered)


def _to_ordered_integers(x, *, key_type, largest: bool):
    """Integers that compare as the floats do, with -0 below +0, and NaN as the largest or the smallest value."""
    keys = lax.bitcast_convert_type(x.astype(f"float{key_type.itemsize * 8}"), key_type)
    limits = jnp.iinfo(key_type)
    # The bits of negative floats order in reverse.
    keys = jnp.where(keys < 0, keys ^ limits.max, keys)
    return jnp.where(jnp.isnan(x), limits.max if largest else limits.min, keys)


def _from_ordered_integers(keys, *, dtype):
    """The inverse of `_to_ordered_integers`. The limits decode to NaN."""
    bits = jnp.where(keys < 0, keys ^ jnp.iinfo(keys.dtype).max, keys)
    return lax.bitcast_convert_type(bits, f"float{bits.dtype.itemsize * 8}").astype(dtype)
