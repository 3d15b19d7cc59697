"""The flat layout of a sharded optimizer: one vector of each dtype, of which every rank has an equal part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName, axes_of, check_named, num_ranks
from jax_ring.training.implementations import Impl, implementation
from jax_ring.training.sync import sync_gradients
from jax_ring.training.zero.interface import (
    ShardedOptimizer,
    Stage,
    by_dtype,
    check_same_tree,
    gradient_leaves,
    padded,
    vary,
)

if TYPE_CHECKING:
    import optax


_STALE = " A state that was made for another number of ranks has to pass through `repartition` first."


def flat_layout(
    tx: optax.GradientTransformation, axis_name: AxisName, *, stage: Stage, impl: Impl, overlap: bool
) -> ShardedOptimizer:
    """The sharded optimizer that updates an equal part of each dtype's vector on every rank."""
    run = implementation("sharded_optimizer", impl, overlap)

    def own_params(params):
        return _own_part(_flat(jax.tree.leaves(params), params, num_ranks(axes_of(axis_name))), axis_name)

    def init(params):
        check_named("sharded_optimizer", axes_of(axis_name))
        return vary(tx.init(own_params(params)), axis_name)

    def update(gradients, state, params):
        leaves, has_gradient = gradient_leaves(gradients, params, axis_name)
        own = own_params(params)
        check_same_tree("state", state, jax.eval_shape(tx.init, own), likes="state that init makes here", remedy=_STALE)
        p = num_ranks(axes_of(axis_name))
        if stage == 1:
            # In the dtypes of the vectors, so that the sums have the bits of stage 2.
            synced = sync_gradients(_promoted(leaves, params), axis_name, impl=impl, overlap=overlap)
            means = _own_part(_flat(synced, params, p), axis_name)
        else:
            means = jax.tree.map(lambda g: g / p, run.psum_scatter(_flat(leaves, params, p), axis_name))
        updates, state = tx.update(means, state, own)
        updates = _unflat(run.all_gather(updates, axis_name), params, has_gradient)
        return updates, vary(state, axis_name)

    def specs(params):
        return jax.tree.map(lambda x: PartitionSpec(axis_name) if x.ndim else PartitionSpec(), _whole(tx, params))

    def repartition(state, params, num_ranks):
        def cut_and_fill(path, like, x):
            if x.ndim != like.ndim or x.size < like.size:
                raise ValueError(
                    f"sharded_optimizer: repartition: the leaf of the state at {jax.tree_util.keystr(path)} has shape "
                    f"{x.shape}, too small for these parameters, which need {like.size} elements. Give the global "
                    "state, outside of shard_map, and the parameters that it was made for."
                )
            return padded(x[: like.size], num_ranks) if like.ndim else x

        return jax.tree_util.tree_map_with_path(cut_and_fill, _whole(tx, params), state)

    return ShardedOptimizer(init, update, specs, repartition)


def _flat(leaves: list[jax.Array], params: Any, num_ranks: int) -> dict[str, jax.Array]:
    """One vector of the leaves for each dtype of the parameters. Leaves of several dtypes are promoted to one."""
    return {
        dtype: padded(jnp.concatenate([jnp.ravel(leaves[i]) for i in places]), num_ranks)
        for dtype, places in by_dtype(params).items()
    }


def _promoted(leaves: list[jax.Array], params: Any) -> list[jax.Array]:
    """The leaves, in the dtypes that they have in `_flat`."""
    leaves = list(leaves)
    for places in by_dtype(params).values():
        dtype = jnp.result_type(*(leaves[i] for i in places))
        for i in places:
            leaves[i] = leaves[i].astype(dtype)
    return leaves


def _unflat(vectors: dict[str, jax.Array], params: Any, has_gradient: list[bool]) -> Any:
    """The updates of the parameters. Those without a gradient keep their value."""
    leaves, structure = jax.tree.flatten(params)
    for dtype, places in by_dtype(params).items():
        ends = np.cumsum([jnp.size(leaves[i]) for i in places])
        for i, end in zip(places, ends, strict=True):
            update = vectors[dtype][end - jnp.size(leaves[i]) : end].reshape(jnp.shape(leaves[i]))
            leaves[i] = update if has_gradient[i] else jnp.zeros_like(leaves[i])
    return jax.tree.unflatten(structure, leaves)


def _whole(tx: Any, params: Any) -> Any:
    """Shapes and dtypes of the state for a single rank."""
    return jax.eval_shape(lambda params: tx.init(_flat(jax.tree.leaves(params), params, 1)), params)


def _own_part(vectors: dict[str, jax.Array], axis_name: AxisName) -> dict[str, jax.Array]:
    rank, p = lax.axis_index(axis_name), num_ranks(axes_of(axis_name))
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rank * (x.size // p), x.size // p), vectors)
