"""The flat layout of a sharded optimizer: one vector of each dtype, divided equally over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import axes_of, check_named
from jax_ring.options import check_arrays, promoted
from jax_ring.training.implementations import implementation
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.zero.given_norms import order_given
from jax_ring.training.zero.interface import (
    ShardedOptimizer,
    Stage,
    by_dtype,
    check_divided_alike,
    check_num_ranks,
    check_same_structure,
    check_same_tree,
    on_all_devices,
    padded,
    vary,
)
from jax_ring.training.zero.local_gradients import LocalGradients, Reduction
from jax_ring.training.zero.vectors import flat, own_part, unflat

if TYPE_CHECKING:
    import optax


def flat_layout(tx: optax.GradientTransformation, *, stage: Stage, reduction: Reduction) -> ShardedOptimizer:
    """The sharded optimizer that updates an equal part of each dtype's vector on every rank."""
    axis_name = reduction.axis_name
    run = implementation("sharded_optimizer", reduction.impl, reduction.overlap)
    separated = fence if reduction.is_tree else lambda tree: tree

    def own_params(params):
        return own_part(flat(jax.tree.leaves(params), params, reduction.cut(reduction.num_ranks)), axis_name)

    def init(params):
        check_named("sharded_optimizer", axes_of(axis_name))
        return vary(tx.init(own_params(params)), axis_name)

    def update(gradients, state, params):
        check_divided_alike(params, axis_name)
        local = LocalGradients.of(gradients, params, reduction)
        own = own_params(params)
        check_state(tx, state, own)
        multiple = reduction.cut(reduction.num_ranks)
        if stage == 1:
            # Use the dtypes of the vectors, so that the sums have the bits of stage 2.
            dtypes = {
                name: promoted(*(local.types[i].dtype for i in places)) for name, places in by_dtype(params).items()
            }
            synced = local.synced([dtypes[np.dtype(jnp.result_type(x)).name] for x in jax.tree.leaves(params)])
            means = own_part(flat(synced, params, multiple), axis_name)
        else:
            means = local.scattered(params, multiple)
        # On one rank no collective keeps the compiler from fusing the update with the code around it.
        means, own = separated((means, own))
        with order_given(reduction.order):
            updates, state = separated(tx.update(means, state, own))
        updates = unflat(run.all_gather(updates, axis_name), params)
        # Parameters without a gradient keep their value.
        updates = jax.tree.map(
            lambda x, like, has: x if has else jnp.zeros_like(like),
            updates, params, jax.tree.unflatten(jax.tree.structure(params), local.has_gradient),
        )  # fmt: skip
        return updates, vary(state, axis_name)

    def specs(params):
        return jax.tree.map(lambda x: PartitionSpec(axis_name) if x.ndim else PartitionSpec(), _whole(tx, params))

    def repartition(state, params, num_ranks):
        check_arrays("sharded_optimizer", "the parameters", params)
        return repartitioned(state, _whole(tx, params), reduction.cut(check_num_ranks(num_ranks)))

    def unsharded(state, params):
        names = by_dtype(params).keys()

        def is_vectors(x):
            return isinstance(x, dict) and x.keys() == names

        whole = repartition(state, params, 1)
        return jax.tree.map(lambda x: unflat(x, params) if is_vectors(x) else x, whole, is_leaf=is_vectors)

    return ShardedOptimizer(init, update, specs, repartition, unsharded)


def _whole(tx: Any, params: Any) -> Any:
    """Shapes and dtypes of the state for a single rank."""
    return jax.eval_shape(lambda params: tx.init(flat(jax.tree.leaves(params), params, 1)), params)


def check_state(tx: Any, state: Any, own: Any) -> None:
    """Raises ValueError unless a state has the tree and the shapes of that for a rank's own parameters."""
    check_same_tree(
        "state", state, jax.eval_shape(tx.init, own), likes="state that init makes here",
        remedy=" A state that was made for another number of ranks, or with another order, has to pass through "
        "`repartition` first.",
    )  # fmt: skip


def repartitioned(state: Any, like: Any, multiple: int) -> Any:
    """A global state, whose vectors end with zeros up to a multiple of a number of elements; like has no such zeros."""

    def cut_and_fill(path, like, x):
        if x.ndim != like.ndim or x.size < like.size:
            raise ValueError(
                f"sharded_optimizer: repartition: the leaf of the state at {jax.tree_util.keystr(path)} has shape "
                f"{x.shape}, too small for these parameters, which need {like.size} elements. Give the global "
                "state, outside of shard_map, and the parameters that it was made for."
            )
        return padded(x[..., : like.shape[-1]], multiple) if like.ndim else x

    check_same_structure("state", state, like, likes="state that init makes here")
    return jax.tree_util.tree_map_with_path(cut_and_fill, like, on_all_devices(state))
