"""Sums along the tree by an all-gather and a fold of everything on every rank."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat, shard_tree
from jax_ring.collectives.axes import axes_of, num_ranks
from jax_ring.collectives.shard_sums import ShardSums, accumulator


def tree_sum(x: Any, axis_name, groups=None) -> Any:
    """The sum of arrays, or of `ShardSums`, over the ranks of an axis, along the tree."""
    axes = axes_of(axis_name)
    size = num_ranks(axes) if groups is None else len(groups[0])
    if isinstance(x, ShardSums):
        leaves, structure = jax.tree.flatten(x.terms)
        dtypes, num_shards = list(x.dtypes), x.num_shards
    else:
        leaves, structure = jax.tree.flatten(x)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        dtypes, num_shards = [leaf.dtype for leaf in leaves], size
        leaves = [leaf[None].astype(accumulator(leaf.dtype)) for leaf in leaves]

    def of_leaf(leaf, dtype):
        kinds = {"to": "invarying"} if _compat.check_vma() and groups is None else {}
        gathered = lax.all_gather(leaf, axes, axis_index_groups=groups, **kinds)
        (total,) = shard_tree.run_fold(
            shard_tree.fold_of(num_shards, size), lambda rank, slot: gathered[rank, slot], lambda a, b: a + b
        )
        return total.astype(dtype)

    return jax.tree.unflatten(structure, [of_leaf(x, dtype) for x, dtype in zip(leaves, dtypes, strict=True)])


def tree_scatter(x: Any, axis_name, dimension: int, tiled: bool, groups=None) -> Any:
    """Block r of the same, on rank r."""
    axes = axes_of(axis_name)
    size = num_ranks(axes) if groups is None else len(groups[0])

    def own_block(total):
        count = total.shape[dimension] // size
        block = lax.dynamic_slice_in_dim(total, lax.axis_index(axes) * count, count, dimension)
        return block if tiled else lax.squeeze(block, [dimension])

    return jax.tree.map(own_block, tree_sum(x, axis_name, groups))
