"""Sums along the tree without an engine: XLA moves the data, the program adds.

XLA's sums choose their order. An all-to-all gives each rank one block of all operands, which it folds along the tree in
the accumulator's dtype, and rounds once. An all-reduce ends with an all-gather of the blocks. With groups of different
sizes, XLA gathers all operands on all ranks.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import shard_tree
from jax_ring.lowering import trees
from jax_ring.lowering.call_spec import CallSpec
from jax_ring.lowering.custom_call import layout
from jax_ring.lowering.kinds import ALL_REDUCE, REDUCE, REDUCE_SCATTER, Kind
from jax_ring.lowering.topology import group_table
from jax_ring.lowering.xla import fallback, ops


def emit(call: CallSpec, ctx, operands: Sequence) -> list:
    """Emits a sum along the tree without an engine.

    operands: with slots, if several (`trees.num_slots`).
    """
    sizes, num_shards = [len(group) for group in call.groups], call.options.num_shards
    total = partial(_SUMS[call.kind], sizes=sizes, num_shards=num_shards, **call.params)
    run = total if trees.num_slots(call.groups, call.options) > 1 else lambda x: total(x[None])
    return [ops.inline_one(ctx, run, x, aval) for x, aval in zip(operands, ctx.avals_in, strict=True)]


# ---- The sums, as functions of a rank's operand, by slot -------------------------------------------------------------


def _all_reduce(x: jax.Array, *, axes: tuple, axis_index_groups, num_shards: int | None, sizes: list[int]) -> jax.Array:
    if len(set(sizes)) > 1:
        return _fold_everything(x, axes, axis_index_groups)
    size, slots, shape = sizes[0], x.shape[0], x.shape[1:]
    count, block = math.prod(shape), math.ceil(math.prod(shape) / size)
    padded = jnp.pad(x.reshape(slots, count), ((0, 0), (0, size * block - count)))
    blocks = padded.reshape(slots, size, block)
    total = _fold_blocks(blocks, axes, axis_index_groups, num_shards, size)
    gathered = lax.all_gather(total, axes, axis_index_groups=axis_index_groups)
    return gathered.reshape(-1)[:count].reshape(shape)


def _reduce_scatter(
    x: jax.Array, *, axes: tuple, axis_index_groups, num_shards: int | None, sizes: list[int], **dimensions
) -> jax.Array:
    first: Callable = partial(layout.blocks_first, **dimensions)
    blocks = jax.vmap(first)(x)
    flat = blocks.reshape(*blocks.shape[:2], -1)
    return _fold_blocks(flat, axes, axis_index_groups, num_shards, sizes[0]).reshape(blocks.shape[2:])


def _reduce(x: jax.Array, *, root: int, axes: tuple, **params) -> jax.Array:
    return fallback.on_root(_all_reduce(x, axes=axes, **params), axes, root)


_SUMS: dict[Kind, Callable] = {ALL_REDUCE: _all_reduce, REDUCE_SCATTER: _reduce_scatter, REDUCE: _reduce}


def _fold_blocks(blocks: jax.Array, axes: tuple, axis_index_groups, num_shards: int | None, size: int) -> jax.Array:
    """This rank's block of the sum. blocks: by slot, block and element."""
    received = lax.all_to_all(jnp.moveaxis(blocks, 1, 0), axes, 0, 0, axis_index_groups=axis_index_groups)
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
