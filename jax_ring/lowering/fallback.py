"""Lowers collectives to XLA's all-reduce: those that XLA lacks, and those that it gets wrong.

The all-reduce is emitted by JAX's rule, not traced as a `lax.psum`, which `override_lax()` would lower to jax_ring.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat
from jax_ring.lowering import ops


def _all_reduce(ctx, operand, aval, *, axes, axis_index_groups=None):
    """XLA's all-reduce of an operand of type `aval`."""
    ctx = ctx.replace(avals_in=[aval], avals_out=[aval])
    (total,) = _compat.lower_lax_reduction(_compat.psum_p, ctx, operand, axes=axes, axis_index_groups=axis_index_groups)
    return total


def lower_reduce_to_xla(ctx, operand, *, axes, axis_index_groups, root):
    """Lowers a reduce to an all-reduce whose result only the root keeps. The others get zeros."""
    del axis_index_groups
    (aval,) = ctx.avals_in

    def keep_on_root(total):
        return jnp.where(lax.axis_index(axes) == root, total, jnp.zeros_like(total))

    total = _all_reduce(ctx, operand, aval, axes=axes)
    return [ops.inline(ctx, keep_on_root, total, aval, ctx.avals_out[0])]


def lower_broadcast_to_xla(ctx, operand, *, axes, axis_index_groups, root):
    """Lowers a broadcast to an all-reduce to which all ranks but the root contribute zeros."""
    del axis_index_groups
    (aval,) = ctx.avals_in

    def bits_of_root(x):
        bits = _to_bits(x)
        return jnp.where(lax.axis_index(axes) == root, bits, jnp.zeros_like(bits))

    bits_aval = jax.eval_shape(_to_bits, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    bits_aval = jax.core.ShapedArray(bits_aval.shape, bits_aval.dtype)
    bits = ops.inline(ctx, bits_of_root, operand, aval, bits_aval)
    bits = _all_reduce(ctx, bits, bits_aval, axes=axes)
    return [ops.inline(ctx, _from_bits, bits, bits_aval, ctx.avals_out[0], dtype=aval.dtype)]


def _to_bits(x):
    """The bits of x as integers, because 0.0 + -0.0 is 0.0. Those of a complex number are two."""
    if jnp.iscomplexobj(x):
        return jnp.stack([_to_bits(x.real), _to_bits(x.imag)])
    if jnp.issubdtype(x.dtype, jnp.floating):
        return lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    return x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x


def _from_bits(bits, *, dtype):
    """The inverse of `_to_bits`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = np.finfo(dtype).dtype
        return lax.complex(_from_bits(bits[0], dtype=part), _from_bits(bits[1], dtype=part))
    return lax.bitcast_convert_type(bits, dtype) if jnp.issubdtype(dtype, jnp.floating) else bits.astype(dtype)


def lower_psum_scatter_to_all_reduce(ctx, operand, *, axes, axis_index_groups, axis_size, dimension, tiled):
    """Lowers a psum_scatter to an all-reduce of which each rank keeps its block."""
    (aval,) = ctx.avals_in

    def own_block(total):
        rank = lax.axis_index(axes)
        if axis_index_groups is not None:
            rank_in_group = {member: i for group in axis_index_groups for i, member in enumerate(group)}
            rank = jnp.array([rank_in_group[i] for i in range(len(rank_in_group))])[rank]
        size = total.shape[dimension] // axis_size
        block = lax.dynamic_slice_in_dim(total, rank * size, size, dimension)
        return block if tiled else lax.squeeze(block, [dimension])

    total = _all_reduce(ctx, operand, aval, axes=axes, axis_index_groups=axis_index_groups)
    return [ops.inline(ctx, own_block, total, aval, ctx.avals_out[0])]
