"""Collectives over a `vmap` axis: local computations along a batch dimension.

Each takes an operand, its batch dimension (None if unbatched), the batch size, options and own parameters, and returns
the result with its batch dimension (None if the same for all).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching

from jax_ring import _compat, shard_tree
from jax_ring.lowering.custom_call.blocks import merge_dimensions, split_dimension
from jax_ring.lowering.trees import accumulator
from jax_ring.options import Options


def accumulator_dtype(dtype: Any) -> jnp.dtype:
    """The dtype of an addition: at least float32 for floats, at least int32 for integers."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32:
        return jnp.dtype(jnp.int32)
    return accumulator(dtype)


def _sum(x: jax.Array, dim: int | None, size: int, options: Options) -> jax.Array:
    wide = x.astype(accumulator_dtype(x.dtype))
    if options.order == "tree":
        return _tree_sum(wide, dim, size, options.num_shards).astype(x.dtype)
    total = wide * jnp.asarray(size, wide.dtype) if dim is None else jnp.sum(wide, dim, dtype=wide.dtype)
    return total.astype(x.dtype)


def _tree_sum(x: jax.Array, dim: int | None, size: int, num_shards: int | None) -> jax.Array:
    """The sum along the tree; each member has one shard, or a dimension with its terms."""
    x = x if dim is None else _compat.undivided(x, dim)

    def term(rank: int, slot: int) -> jax.Array:
        of_member = x if dim is None else lax.index_in_dim(x, rank, dim, keepdims=False)
        return of_member if num_shards is None else of_member[slot]

    (total,) = shard_tree.run_fold(shard_tree.fold_of(num_shards or size, size), term, lax.add)
    return total


def psum(x: jax.Array, dim: int | None, size: int, options: Options) -> tuple[jax.Array, int | None]:
    """The sum; of an unbatched operand a product, except along the tree."""
    return _sum(x, dim, size, options), None


def pmax(x: jax.Array, dim: int | None, size: int, options: Options) -> tuple[jax.Array, int | None]:
    return x if dim is None else jnp.max(x, dim), None


def pmin(x: jax.Array, dim: int | None, size: int, options: Options) -> tuple[jax.Array, int | None]:
    return x if dim is None else jnp.min(x, dim), None


def psum_scatter(
    x: jax.Array, dim: int | None, size: int, options: Options, *, dimension: int, tiled: bool
) -> tuple[jax.Array, int | None]:
    total = _sum(x, dim, size, options)
    return split_dimension(total, dimension, size) if tiled else total, dimension


def all_gather(
    x: jax.Array, dim: int | None, size: int, options: Options, *, dimension: int, tiled: bool
) -> tuple[jax.Array, int | None]:
    if dim is None:
        stacked = jnp.broadcast_to(jnp.expand_dims(x, dimension), (*x.shape[:dimension], size, *x.shape[dimension:]))
    else:
        stacked = jnp.moveaxis(x, dim, dimension)
    return merge_dimensions(stacked, dimension) if tiled else stacked, None


def all_to_all(
    x: jax.Array, dim: int | None, size: int, options: Options, *, dimension: int, concat_dimension: int, tiled: bool
) -> tuple[jax.Array, int | None]:
    """Member i gets block i of every member, along `concat_dimension`."""
    batch = batching.bdim_at_front(x, dim, size)
    # (receiver, source, ...)
    blocks = jnp.moveaxis(split_dimension(batch, dimension + 1, size), dimension + 1, 0)
    return merge_dimensions(jnp.moveaxis(blocks, 1, concat_dimension + 1), concat_dimension + 1), 0


def permute(
    x: jax.Array, dim: int | None, size: int, options: Options, *, perm: tuple[tuple[int, int], ...]
) -> tuple[jax.Array, int | None]:
    """What each member receives; zeros if that is nothing."""
    if dim is None and len(perm) == size:
        return x, None
    batch = batching.bdim_at_front(x, dim, size)
    sources, receivers = (np.array([pair[i] for pair in perm], np.int32) for i in (0, 1))
    return jnp.zeros_like(batch).at[receivers].set(batch[sources], unique_indices=True), 0


def reduce(x: jax.Array, dim: int | None, size: int, options: Options, *, root: int) -> tuple[jax.Array, int | None]:
    total = _sum(x, dim, size, options)
    shape, sharding = (size, *total.shape), _compat.stacked_sharding(total, _compat.explicit_axes(x, dim))
    totals = jnp.broadcast_to(total, shape, out_sharding=sharding)
    is_root = lax.broadcasted_iota(jnp.int32, shape, 0, out_sharding=sharding) == root
    return jnp.where(is_root, totals, jnp.zeros_like(totals)), 0


def broadcast(x: jax.Array, dim: int | None, size: int, options: Options, *, root: int) -> tuple[jax.Array, int | None]:
    return x if dim is None else lax.index_in_dim(_compat.undivided(x, dim), root, dim, keepdims=False), None
