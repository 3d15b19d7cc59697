"""Collectives without an engine that XLA lacks, gets wrong, or adds in another order.

Most become XLA's all-reduce, by JAX's rule, as `override_lax()` would lower a traced `lax.psum` to jax_ring. For sums
along the tree XLA moves the data, and the program adds.
"""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo

from jax_ring import _compat, shard_tree
from jax_ring.lowering import trees
from jax_ring.lowering.call import ALL_REDUCE, REDUCE, REDUCE_SCATTER, CallSpec, Kind
from jax_ring.lowering.custom_call import blocks
from jax_ring.lowering.topology import group_table, rank_table
from jax_ring.lowering.xla import bitcasts, ops


def _all_reduce(ctx, operand, aval, *, axes, axis_index_groups=None):
    ctx = ctx.replace(avals_in=[aval], avals_out=[aval])
    (total,) = _compat.lower_as_lax(_compat.psum_p, ctx, operand, axes=axes, axis_index_groups=axis_index_groups)
    return total


def lower_reduce_to_xla(
    ctx: _compat.LoweringContext, operand: ir.Value, *, axes: tuple, axis_index_groups: Sequence | None, root: int
):
    """A reduce: an all-reduce, then zeros off the root."""
    del axis_index_groups
    (aval,) = ctx.avals_in

    total = _all_reduce(ctx, operand, aval, axes=axes)
    return [ops.inline_one(ctx, partial(on_root, axes=axes, root=root), total, aval)]


def on_root(total: jax.Array, axes: tuple, root: int):
    if jnp.iscomplexobj(total):
        return lax.complex(on_root(total.real, axes, root), on_root(total.imag, axes, root))
    return bitcasts.from_bits(_or_zeros(bitcasts.to_bits(total), axes, root), total.dtype)


def lower_extremum_to_xla(
    op: str, primitive: Primitive, ctx: _compat.LoweringContext, operand: ir.Value, **params: Any
):
    """A maximum or minimum: of floats as integers of the same order, because XLA's all-reduce drops NaNs on CPUs."""
    (aval,) = ctx.avals_in
    lower = partial(_compat.lower_as_lax, primitive)
    if "cpu" not in _compat.platforms_of(ctx) or not jnp.issubdtype(aval.dtype, jnp.floating):
        return lower(ctx, operand, **params)
    keys_aval = aval.update(dtype=bitcasts.ordered_dtype(aval.dtype))
    to_keys = partial(bitcasts.to_ordered_integers, key_type=keys_aval.dtype, largest=op == "max")
    keys = ops.inline_one(ctx, to_keys, operand, aval)
    (keys,) = lower(ctx.replace(avals_in=[keys_aval], avals_out=[keys_aval]), keys, **params)
    return [ops.inline_one(ctx, partial(bitcasts.from_ordered_integers, dtype=aval.dtype), keys, keys_aval)]


def lower_broadcast_to_xla(
    ctx: _compat.LoweringContext, operand: ir.Value, *, axes: tuple, axis_index_groups: Sequence | None, root: int
):
    """A broadcast: an all-reduce with zeros off the root."""
    (aval,) = ctx.avals_in
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        part = aval.update(dtype=jnp.finfo(aval.dtype).dtype)
        lower = partial(
            lower_broadcast_to_xla, ctx.replace(avals_in=[part], avals_out=[part]),
            axes=axes, axis_index_groups=axis_index_groups, root=root,
        )  # fmt: skip
        return [hlo.complex(*lower(hlo.real(operand)), *lower(hlo.imag(operand)))]
    # As integers, because 0.0 + -0.0 is 0.0.
    bits_aval = aval.update(dtype=bitcasts.bits_dtype(aval.dtype))
    bits = ops.inline_one(ctx, lambda x: _or_zeros(bitcasts.to_bits(x), axes, root), operand, aval)
    bits = _all_reduce(ctx, bits, bits_aval, axes=axes)
    return [ops.inline_one(ctx, partial(bitcasts.from_bits, dtype=aval.dtype), bits, bits_aval)]


def lower_dynamic_broadcast_to_sum(
    ctx: _compat.LoweringContext, operand: ir.Value, source: ir.Value, axes: tuple, lower_sum: Callable
):
    """A broadcast from the rank in a scalar: a sum of bits with zeros elsewhere.

    lower_sum: (ctx, operand) -> results.
    """
    aval, source_aval = ctx.avals_in
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        part = jax.core.ShapedArray(aval.shape, jnp.finfo(aval.dtype).dtype)
        ctx = ctx.replace(avals_in=[part, source_aval], avals_out=[part])
        lower = partial(lower_dynamic_broadcast_to_sum, ctx, source=source, axes=axes, lower_sum=lower_sum)
        return [hlo.complex(*lower(hlo.real(operand)), *lower(hlo.imag(operand)))]
    bits_aval = jax.core.ShapedArray(aval.shape, bitcasts.bits_dtype(aval.dtype))

    def masked(x, source):
        bits = bitcasts.to_bits(x)
        return [jnp.where(lax.axis_index(axes) == source, bits, jnp.zeros_like(bits))]

    (bits,) = ops.inline(ctx, masked, [operand, source], ctx.avals_in)
    (bits,) = lower_sum(ctx.replace(avals_in=[bits_aval], avals_out=[bits_aval]), bits)
    return [ops.inline_one(ctx, partial(bitcasts.from_bits, dtype=aval.dtype), bits, bits_aval)]


def _or_zeros(bits, axes, root):
    # For symbolic shapes: in a shard_map, jaxlib crashes on scalar conversions that `==` can insert.
    coordinates = np.unravel_index(root, [lax.axis_size(axis) for axis in axes])
    is_root = [lax.eq(lax.axis_index(axis), np.int32(c)) for axis, c in zip(axes, coordinates, strict=True)]
    return lax.select(functools.reduce(lax.bitwise_and, is_root), bits, bitcasts.zeros_like(bits))


def lower_psum_scatter_to_all_reduce(
    ctx: _compat.LoweringContext,
    operand: ir.Value,
    *,
    axes: tuple,
    axis_index_groups: Sequence | None,
    axis_size: int,
    dimension: int,
    tiled: bool,
):
    """A psum_scatter: an all-reduce, then this rank's block."""
    (aval,) = ctx.avals_in
    keep = partial(
        own_block, axes=axes, axis_index_groups=axis_index_groups, axis_size=axis_size, dimension=dimension, tiled=tiled
    )
    total = _all_reduce(ctx, operand, aval, axes=axes, axis_index_groups=axis_index_groups)
    return [ops.inline_one(ctx, keep, total, aval)]


def rank_in_group(axes: tuple, axis_index_groups: Sequence | None) -> jax.Array:
    rank = lax.axis_index(axes)
    if axis_index_groups is None:
        return rank
    return jnp.asarray(rank_table(axis_index_groups))[rank]


def own_block(
    total: jax.Array, *, axes: tuple, axis_index_groups: Sequence | None, axis_size: int, dimension: int, tiled: bool
):
    """This rank's block of a total."""
    rank = rank_in_group(axes, axis_index_groups)
    size = total.shape[dimension] // axis_size
    block = lax.dynamic_slice_in_dim(total, rank * size, size, dimension)
    return block if tiled else lax.squeeze(block, [dimension])


# ---- Sums along the tree ---------------------------------------------------------------------------------------------
#
# XLA's sums choose their order. An all-to-all gives each rank one block of all operands, which it folds along the tree
# in the accumulator's dtype, and rounds once. An all-reduce ends with an all-gather of the blocks. With groups of
# different sizes, XLA gathers all operands on all ranks.


def emit_along_tree(call: CallSpec, ctx: _compat.LoweringContext, operands: Sequence) -> list:
    """Emits a sum along the tree without an engine.

    operands: with slots, if several (`trees.num_slots`).
    """
    sizes, num_shards = [len(group) for group in call.groups], call.options.num_shards
    total = partial(_TREE_SUMS[call.kind], sizes=sizes, num_shards=num_shards, **call.params)
    run = total if trees.num_slots(call.groups, call.options) > 1 else lambda x: total(x[None])
    return [ops.inline_one(ctx, run, x, aval) for x, aval in zip(operands, ctx.avals_in, strict=True)]


def _tree_all_reduce(
    x: jax.Array, *, axes: tuple, axis_index_groups, num_shards: int | None, sizes: list[int]
) -> jax.Array:
    if len(set(sizes)) > 1:
        return _fold_everything(x, axes, axis_index_groups)
    size, slots, shape = sizes[0], x.shape[0], x.shape[1:]
    count, block = math.prod(shape), math.ceil(math.prod(shape) / size)
    padded = jnp.pad(x.reshape(slots, count), ((0, 0), (0, size * block - count)))
    total = _fold_blocks(padded.reshape(slots, size, block), axes, axis_index_groups, num_shards, size)
    gathered = lax.all_gather(total, axes, axis_index_groups=axis_index_groups)
    return gathered.reshape(-1)[:count].reshape(shape)


def _tree_reduce_scatter(
    x: jax.Array, *, axes: tuple, axis_index_groups, num_shards: int | None, sizes: list[int], **dimensions
) -> jax.Array:
    first: Callable = partial(blocks.blocks_first, **dimensions)
    by_block = jax.vmap(first)(x)
    flat = by_block.reshape(*by_block.shape[:2], -1)
    return _fold_blocks(flat, axes, axis_index_groups, num_shards, sizes[0]).reshape(by_block.shape[2:])


def _tree_reduce(x: jax.Array, *, root: int, axes: tuple, **params) -> jax.Array:
    return on_root(_tree_all_reduce(x, axes=axes, **params), axes, root)


_TREE_SUMS: dict[Kind, Callable] = {
    ALL_REDUCE: _tree_all_reduce,
    REDUCE_SCATTER: _tree_reduce_scatter,
    REDUCE: _tree_reduce,
}


def _fold_blocks(values: jax.Array, axes: tuple, axis_index_groups, num_shards: int | None, size: int) -> jax.Array:
    """This rank's block of the sum. values: by slot, block and element."""
    received = lax.all_to_all(jnp.moveaxis(values, 1, 0), axes, 0, 0, axis_index_groups=axis_index_groups)
    return fold(received, num_shards or size, size)


def fold(terms: jax.Array, num_shards: int, size: int) -> jax.Array:
    """The sum along the tree, rounded once. terms: by rank, slot and element."""
    wide = terms.astype(trees.accumulator(terms.dtype))
    value_of = lambda rank, slot: lax.index_in_dim(  # noqa: E731
        lax.index_in_dim(wide, rank, keepdims=False), slot, keepdims=False
    )
    (total,) = shard_tree.run_fold(shard_tree.fold_of(num_shards, size), value_of, lax.add)
    return total.astype(terms.dtype)


def _fold_everything(x: jax.Array, axes: tuple, axis_index_groups) -> jax.Array:
    """A group's sum, one slot per rank, from all operands."""
    gathered = lax.all_gather(x, axes)
    folds = [partial(_fold_members, members=members) for members in axis_index_groups]
    return lax.switch(jnp.asarray(group_table(axis_index_groups))[lax.axis_index(axes)], folds, gathered)


def _fold_members(gathered: jax.Array, *, members: tuple[int, ...]) -> jax.Array:
    return fold(jnp.stack([gathered[rank] for rank in members]), len(members), len(members))
