"""Stage 3 of a sharded optimizer: the parameters are divided as their state is, in the flat layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName, axes_of, check_named
from jax_ring.options import path_text
from jax_ring.training.parameters import is_float0
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.zero import wires
from jax_ring.training.zero.flat import check_state, repartitioned
from jax_ring.training.zero.given_norms import order_given
from jax_ring.training.zero.interface import (
    ShardedOptimizer,
    by_dtype,
    check_divided_alike,
    check_num_ranks,
    check_same_tree,
    vary,
)
from jax_ring.training.zero.local_gradients import LocalGradients, Reduction
from jax_ring.training.zero.vectors import (
    Shapes,
    ShardedParams,
    flat,
    has_shards,
    is_sharded,
    is_single,
    map_sharded,
    own_part,
    size_of,
    unflat,
)

if TYPE_CHECKING:
    import optax


def divided_layout(tx: optax.GradientTransformation, *, reduction: Reduction) -> ShardedOptimizer:
    """The sharded optimizer that updates each rank's shards of the parameters, which nobody has whole at rest."""
    axis_name = reduction.axis_name
    separated = fence if reduction.is_tree else lambda tree: tree

    def shard(params):
        check_named("sharded_optimizer", axes_of(axis_name))
        check_divided_alike(params, axis_name)
        vectors = flat(jax.tree.leaves(params), params, reduction.cut(reduction.num_ranks))
        return ShardedParams(own_part(vectors, axis_name), Shapes.of(params))

    def gather(shards):
        check_named("sharded_optimizer", axes_of(axis_name))
        return map_sharded(lambda own: gathered(own, reduction), checked_shards(shards, reduction))

    def init(shards):
        check_named("sharded_optimizer", axes_of(axis_name))
        return vary(tx.init(checked_shards(shards, reduction)), axis_name)

    def update(gradients, state, shards):
        check_state(tx, state, checked_shards(shards, reduction))
        if has_shards(gradients):
            check_same_tree("gradients", gradients, shards, likes="shards")
            means = gradients
        elif is_single(shards):
            means = scattered(gradients, shards, reduction)
        else:
            raise ValueError(
                "sharded_optimizer: the shards are several ShardedParams, in a tree or stacked, so the gradients have "
                "to be such, too, as those of zero.sharded_layer are. For gradients of whole parameters make one "
                "ShardedParams of all parameters."
            )
        lacking = jax.tree.map(is_float0, means)
        means = jax.tree.map(lambda x, own: jnp.zeros_like(own) if is_float0(x) else x, means, shards)
        # On one rank no collective keeps the compiler from fusing the update with the code before it. Nothing ever
        # keeps it from fusing apply_updates. The fences give the bits of the other stages.
        means, own = separated((means, shards))
        with order_given(reduction.order):
            updates, state = separated(tx.update(means, state, own))
        # Parameters without a gradient keep their value.
        updates = jax.tree.map(lambda x, own, lacks: jnp.zeros_like(own) if lacks else x, updates, shards, lacking)
        return updates, vary(state, axis_name)

    def specs(params):
        return _specs(jax.eval_shape(tx.init, _unpadded(params)), axis_name)

    def param_specs(params):
        return _specs(_unpadded(params), axis_name)

    def repartition(state, shards, num_ranks):
        like = _unpadded(shards)
        like = jax.eval_shape(tx.init, like), like
        return repartitioned((state, shards), like, reduction.cut(check_num_ranks(num_ranks)))

    def unsharded(state, shards):
        return map_sharded(ShardedParams.whole, repartition(state, shards, 1)[0])

    return ShardedOptimizer(
        init, update, specs, repartition, unsharded, None, shard=shard, gather=gather, param_specs=param_specs
    )


def gathered(shards: ShardedParams, reduction: Reduction) -> Any:
    """The whole parameters, on every rank."""
    params = unflat(whole_vectors(shards, reduction), shards.like)
    return fence(params) if reduction.is_tree else params


def whole_vectors(shards: ShardedParams, reduction: Reduction) -> dict[str, jax.Array]:
    """The vectors of the whole parameters, on every rank."""
    return wires.gathered(shards.vectors, reduction)


def scattered(gradients: Any, shards: ShardedParams, reduction: Reduction, *, mean: bool = True) -> ShardedParams:
    """The rank's part of mean gradients, or of their sums; of dtype float0 where no parameter of a dtype has one."""
    local = LocalGradients.of(gradients, shards.like, reduction)
    means: dict[str, Any] = local.scattered(shards.like, reduction.cut(reduction.num_ranks), mean=mean)
    for name, places in by_dtype(shards.like).items():
        if not any(local.has_gradient[i] for i in places):
            means[name] = np.zeros(means[name].shape, jax.dtypes.float0)
    return ShardedParams(means, shards.shapes)


def checked_shards(tree: Any, reduction: Reduction) -> Any:
    """The argument. Raises ValueError unless it is a `ShardedParams` or a tree of such, divided as `reduction` says."""
    for path, shards in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sharded):
        if not is_sharded(shards):
            raise ValueError(
                f"sharded_optimizer: with stage=3 parameters are shards, a ShardedParams or a tree of such; that at "
                f"{path_text(path)} is of type {type(shards).__name__}. Make shards of parameters by "
                "optimizer.shard(params), once, under shard_map, and keep them instead."
            )
        for name, like in _unpadded(shards).vectors.items():
            cut = reduction.cut(reduction.num_ranks)
            size, own = -(-like.shape[-1] // cut) * cut // reduction.num_ranks, jnp.shape(shards.vectors[name])[-1]
            if own != size:
                raise ValueError(
                    f"sharded_optimizer: a rank's shards have {size} elements of {name} here, and these have {own}. "
                    "Shards of another number of ranks, num_shards or order have to pass through `repartition` first."
                )
    return tree


def _specs(types: Any, axis_name: AxisName) -> Any:
    """PartitionSpecs of vectors, which may be stacked, and of scalars."""
    return jax.tree.map(
        lambda x: PartitionSpec(*[None] * (x.ndim - 1), axis_name) if x.ndim else PartitionSpec(), types
    )


def _unpadded(params: Any) -> Any:
    """The types of shards for a single rank, without zeros at their end, from parameters or from shards."""

    def types(shapes, leading=()):
        sizes = {name: (*leading, size_of(shapes.params, places)) for name, places in by_dtype(shapes.params).items()}
        return ShardedParams({name: jax.ShapeDtypeStruct(s, np.dtype(name)) for name, s in sizes.items()}, shapes)

    if not has_shards(params):
        return types(Shapes.of(params))
    return map_sharded(lambda x: types(x.shapes, next((jnp.shape(v)[:-1] for v in x.vectors.values()), ())), params)
