"""The flat layout of a sharded optimizer: one vector of each dtype, divided equally over the ranks.

In stage 3 the parameters are divided as their state is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName
from jax_ring.options import path_text
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.rounding import each_rounded
from jax_ring.training.trees import is_float0
from jax_ring.training.zero.clip import order_given
from jax_ring.training.zero.elementwise import ElementwiseCheck
from jax_ring.training.zero.interface import (
    Shapes,
    ShardedOptimizer,
    ShardedParams,
    Stage,
    by_dtype,
    check_divided_alike,
    check_num_ranks,
    check_same_structure,
    check_same_tree,
    flat,
    has_shards,
    is_sharded,
    is_single,
    map_sharded,
    on_all_devices,
    own_partition,
    padded,
    size_of,
    unflat,
    vary,
)
from jax_ring.training.zero.reduction import LocalGradients, Reduction

if TYPE_CHECKING:
    import optax


def flat_layout(tx: optax.GradientTransformation, stage: Stage, reduction: Reduction) -> ShardedOptimizer:
    """The sharded optimizer that updates an equal partition of each dtype's vector on every rank.

    `tx` gets the partition in a dictionary by dtype, in stage 3 as a `ShardedParams`.
    """
    axis_name, is_divided = reduction.axis_name, stage == 3
    check = ElementwiseCheck(tx, axis_name, reduction.order)
    check.outside()

    def shard(params):
        check.inside(params)
        check_divided_alike(params, axis_name)
        vectors = flat(jax.tree.leaves(params), params, reduction.cut())
        return ShardedParams(own_partition(vectors, axis_name), Shapes.of(params))

    def gather(shards):
        return map_sharded(lambda own: gathered(own, reduction), checked_partitions(shards, reduction))

    def own_of(params):
        if not is_divided:
            return shard(params).vectors
        check.inside(params)
        return checked_partitions(params, reduction)

    def types_of(params):
        return _unpadded(params) if is_divided else _unpadded(params).vectors

    def init(params):
        return vary(tx.init(own_of(params)), axis_name)

    def update(gradients, state, params):
        own = own_of(params)
        check_state(tx, state, own)
        means = _means(gradients, params, stage, reduction)
        lacking = jax.tree.map(is_float0, means)
        updates, state = _updated(tx, _or_zeros(means, own, lacking), state, own, reduction)
        if is_divided:
            return _or_zeros(updates, own, lacking), vary(state, axis_name)
        return _from_all_ranks(updates, own, lacking, params, reduction), vary(state, axis_name)

    def specs(params):
        check.outside(params)
        return _specs(jax.eval_shape(tx.init, types_of(params)), axis_name)

    def param_specs(params):
        return _specs(_unpadded(params), axis_name)

    def repartition(state, params, num_ranks):
        multiple, like = reduction.cut(check_num_ranks(num_ranks)), types_of(params)
        of_state = jax.eval_shape(tx.init, like)
        if is_divided:
            return repartitioned((state, params), (of_state, like), multiple)
        return repartitioned(state, of_state, multiple)

    def unsharded(state, params):
        whole = repartition(state, params, 1)
        return _unsharded(whole[0] if is_divided else whole, jax.eval_shape(tx.init, _unpadded(params)))

    optimizer = ShardedOptimizer(init, update, specs, repartition, unsharded)
    return optimizer._replace(shard=shard, gather=gather, param_specs=param_specs) if is_divided else optimizer


def _means(gradients: Any, params: Any, stage: Stage, reduction: Reduction) -> Any:
    """The rank's partition of the means, of dtype float0 where there are no gradients."""
    if stage != 3:
        return LocalGradients.of(gradients, params, reduction).partition(params, stage=stage)
    if has_shards(gradients):
        check_same_tree("gradients", gradients, params, likes="shards")
        return gradients
    if is_single(params):
        return ShardedParams(LocalGradients.of(gradients, params.like, reduction).partition(params.like), params.shapes)
    raise ValueError(
        "sharded_optimizer: the shards are several ShardedParams, in a tree or stacked, so the gradients have "
        "to be such, too, as those of zero.sharded_layer are. For gradients of whole parameters make one "
        "ShardedParams of all parameters."
    )


def _or_zeros(tree: Any, own: Any, lacking: Any) -> Any:
    """Zeros where a rank's own parameters have no gradients."""
    return jax.tree.map(lambda x, own, lacks: jnp.zeros_like(own) if lacks else x, tree, own, lacking)


def _updated(tx: optax.GradientTransformation, means: Any, state: Any, own: Any, reduction: Reduction) -> Any:
    """What `tx` makes of the rank's partition."""
    with order_given(reduction.order):
        if not reduction.is_tree:
            return tx.update(means, state, own)
        # On one rank no collective keeps the compiler from fusing the update with the code before it. In stage 3
        # nothing ever keeps it from fusing apply_updates.
        means, own = fence((means, own))
        return fence(each_rounded(tx.update, means, state, own))


def _from_all_ranks(updates: Any, own: Any, lacking: Any, params: Any, reduction: Reduction) -> Any:
    """The updates of whole parameters, from all ranks' partitions; parameters without gradients keep their value."""
    sent = {name: x for name, x in updates.items() if not lacking[name]}
    zeros = {name: jnp.zeros(x.size * reduction.num_ranks, x.dtype) for name, x in own.items() if lacking[name]}
    return unflat(zeros | reduction.collectives.all_gather(sent, reduction.axis_name), params)


def gathered(shards: ShardedParams, reduction: Reduction) -> Any:
    """The whole parameters, on every rank."""
    params = unflat(reduction.gathered(shards.vectors), shards.like)
    return fence(params) if reduction.is_tree else params


def checked_partitions(tree: Any, reduction: Reduction) -> Any:
    """The argument. Raises ValueError unless it is a `ShardedParams` or a tree of such, divided as `reduction` says."""
    cut, ranks = reduction.cut(), reduction.num_ranks
    for path, shards in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sharded):
        if not is_sharded(shards):
            raise ValueError(
                f"sharded_optimizer: with stage=3 parameters are shards, a ShardedParams or a tree of such; that at "
                f"{path_text(path)} is of type {type(shards).__name__}. Make shards of parameters by "
                "optimizer.shard(params), once, under shard_map, and keep them instead."
            )
        for name, places in by_dtype(shards.like).items():
            size = -(-size_of(shards.like, places) // cut) * cut // ranks
            if (own := jnp.shape(shards.vectors[name])[-1]) != size:
                raise ValueError(
                    f"sharded_optimizer: a rank's shards have {size} elements of {name} here, and these have {own}. "
                    "Shards of another number of ranks, num_shards or order have to pass through `repartition` first."
                )
    return tree


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


def _unsharded(state: Any, of_shards: Any) -> Any:
    """A state of whole parameters, from one without zeros at its end, given its types for `ShardedParams`."""
    return map_sharded(ShardedParams.whole, jax.tree.unflatten(jax.tree.structure(of_shards), jax.tree.leaves(state)))


def _specs(types: Any, axis_name: AxisName) -> Any:
    """PartitionSpecs of vectors, which may be stacked, and of scalars."""
    return jax.tree.map(
        lambda x: PartitionSpec(*[None] * (x.ndim - 1), axis_name) if x.ndim else PartitionSpec(), types
    )


def _unpadded(params: Any) -> Any:
    """The types of the partition of a single rank, without zeros at its end, from parameters or from partitions."""

    def types(shapes, leading=()):
        sizes = {name: (*leading, size_of(shapes.params, places)) for name, places in by_dtype(shapes.params).items()}
        return ShardedParams({name: jax.ShapeDtypeStruct(s, np.dtype(name)) for name, s in sizes.items()}, shapes)

    if not has_shards(params):
        return types(Shapes.of(params))
    return map_sharded(lambda x: types(x.shapes, next((jnp.shape(v)[:-1] for v in x.vectors.values()), ())), params)
