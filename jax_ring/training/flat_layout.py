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
from jax_ring.training.sharded_optimizer import ShardedOptimizer, Stage, by_dtype, padded, vary
from jax_ring.training.sync import check_local, sync_gradients

if TYPE_CHECKING:
    import optax


def flat_layout(tx: optax.GradientTransformation, axis_name: AxisName, *, stage: Stage, impl: Impl) -> ShardedOptimizer:
    """The sharded optimizer that updates an equal part of each dtype's vector on every rank."""
    run = implementation("sharded_optimizer", impl)

    def init(params):
        check_named("sharded_optimizer", axes_of(axis_name))
        return vary(tx.init(_own_part(_flat(params, num_ranks(axes_of(axis_name))), axis_name)), axis_name)

    def update(gradients, state, params):
        check_local("sharded_optimizer", gradients, axis_name)
        p = num_ranks(axes_of(axis_name))
        if stage == 1:
            means = _own_part(_flat(sync_gradients(gradients, axis_name, impl=impl), p), axis_name)
        else:
            means = jax.tree.map(lambda g: g / p, run.psum_scatter(_flat(gradients, p), axis_name))
        updates, state = tx.update(means, state, _own_part(_flat(params, p), axis_name))
        return _unflat(run.all_gather(updates, axis_name), params), vary(state, axis_name)

    def specs(params):
        return jax.tree.map(lambda x: PartitionSpec(axis_name) if x.ndim else PartitionSpec(), _whole(tx, params))

    def repartition(state, params, num_ranks):
        def cut_and_fill(like, x):
            return padded(x[: like.size], num_ranks) if like.ndim else x

        return jax.tree.map(cut_and_fill, _whole(tx, params), state)

    return ShardedOptimizer(init, update, specs, repartition)


def _flat(tree: Any, num_ranks: int) -> dict[str, jax.Array]:
    leaves = jax.tree.leaves(tree)
    return {
        dtype: padded(jnp.concatenate([leaves[i].reshape(-1) for i in places]), num_ranks)
        for dtype, places in by_dtype(tree).items()
    }


def _unflat(vectors: dict[str, jax.Array], like: Any) -> Any:
    leaves, structure = jax.tree.flatten(like)
    for dtype, places in by_dtype(like).items():
        ends = np.cumsum([leaves[i].size for i in places])
        for i, end in zip(places, ends, strict=True):
            leaves[i] = vectors[dtype][end - leaves[i].size : end].reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


def _whole(tx: Any, params: Any) -> Any:
    """Shapes and dtypes of the state for a single rank."""
    return jax.eval_shape(lambda params: tx.init(_flat(params, 1)), params)


def _own_part(vectors: dict[str, jax.Array], axis_name: AxisName) -> dict[str, jax.Array]:
    rank, p = lax.axis_index(axis_name), num_ranks(axes_of(axis_name))
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rank * (x.size // p), x.size // p), vectors)
