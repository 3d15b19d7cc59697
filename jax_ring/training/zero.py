"""ZeRO: an optimizer whose state, and the work on it, is divided among the data-parallel ranks.

Stages 1 and 2 of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020):
parameters are replicated, each rank holds the optimizer's state for one of p equal parts of them, updates that part,
and gathers the updates of the others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName, axes_of, check_named, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.implementations import implementation
from jax_ring.training.sync import check_local, sync_gradients


class ShardedOptimizer(NamedTuple):
    """What `sharded_optimizer` returns. `init` and `update` are called inside `shard_map`."""

    # (params) to this rank's state.
    init: Callable[[Any], Any]
    # (gradients, state, params) to the updates of all parameters, the same on all ranks, and this rank's state.
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    # (params) to the PartitionSpecs of the state, for in_specs and out_specs.
    specs: Callable[[Any], Any]
    # (state, params, num_ranks) to the state as it is divided among that many ranks; outside shard_map.
    repartition: Callable[[Any, Any, int], Any]


def sharded_optimizer(tx: Any, axis_name: AxisName, *, stage: int = 2, impl: str = "ring") -> ShardedOptimizer:
    """Divides an optax optimizer among the ranks of a mapped axis: each holds 1/p of its state.

    Parameters and gradients are laid out, for each dtype, as one vector in the order of `jax.tree.leaves`, filled up
    with zeros to a multiple of p elements, of which rank r updates the r-th of p equal parts. `tx` is given vectors, in
    a dictionary by the name of their dtype; whatever treats every element alike, by itself, comes out as without
    sharding. What does not (`clip_by_global_norm`, masks, LARS) does not belong here; `clip_by_global_norm` has a
    counterpart in this module.

        optimizer = zero.sharded_optimizer(optax.adam(1e-3), "data")
        specs = optimizer.specs(params)
        state = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)
        # in a train step, under shard_map with in_specs and out_specs that have `specs` for the state:
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)

    Args:
      tx: an elementwise optax `GradientTransformation`.
      axis_name: the name of a mapped axis, or a sequence of names, as for `ring_psum`.
      stage: 2 reduces the gradients in such a way that each rank gets only the part it updates (`ring_psum_scatter`);
        1 gives every rank all of them, as `sync_gradients` does, for those who look at them. The updates are the same.
      impl: "ring" or "lax", as for `sync_gradients`.

    Returns:
      A `ShardedOptimizer`. `update` takes this rank's own gradients, not reduced yet, and applies `tx` to their mean.

    Raises:
      ValueError: if `stage` is neither 1 nor 2, or `impl` is none of its choices; by `update`, with vma tracking, if
        gradients are the same on all ranks, because they have been summed already.
    """
    if stage not in (1, 2):
        raise ValueError(f"sharded_optimizer: stage must be 1 or 2, got {stage!r}; parameters are not sharded")
    run = implementation("sharded_optimizer", impl)

    def init(params):
        check_named("sharded_optimizer", axes_of(axis_name))
        return _vary(tx.init(_own_part(_flat(params, num_ranks(axes_of(axis_name))), axis_name)), axis_name)

    def update(gradients, state, params):
        check_local("sharded_optimizer", gradients, axis_name)
        p = num_ranks(axes_of(axis_name))
        if stage == 1:
            means = _own_part(_flat(sync_gradients(gradients, axis_name, impl=impl), p), axis_name)
        else:
            means = jax.tree.map(lambda g: g / p, run.psum_scatter(_flat(gradients, p), axis_name))
        updates, state = tx.update(means, state, _own_part(_flat(params, p), axis_name))
        return _unflat(run.all_gather(updates, axis_name), params), _vary(state, axis_name)

    def specs(params):
        return jax.tree.map(lambda x: PartitionSpec(axis_name) if x.ndim else PartitionSpec(), _whole(tx, params))

    def repartition(state, params, num_ranks):
        def cut_and_fill(like, x):
            return _padded(x[: like.size], num_ranks) if like.ndim else x

        return jax.tree.map(cut_and_fill, _whole(tx, params), state)

    return ShardedOptimizer(init, update, specs, repartition)


def clip_by_global_norm(max_norm: float, axis_name: AxisName, *, impl: str = "ring"):
    """`optax.clip_by_global_norm` for use within a sharded optimizer: `optax.chain(clip_by_global_norm(...), adam)`.

    The squares of the ranks' parts are added over the axis, so that the norm is that of the whole mean gradient.
    """
    import optax

    def update(updates, params):
        del params
        squares = sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(updates))
        norm = jnp.sqrt(implementation("clip_by_global_norm", impl).psum(squares, axis_name))
        return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, g / norm.astype(g.dtype) * max_norm), updates)

    return optax.stateless(update)


# ---- The layout -----------------------------------------------------------------------------------------------------


def _by_dtype(tree: Any) -> dict[str, list[int]]:
    """The places in jax.tree.leaves of the leaves of each dtype."""
    places: dict[str, list[int]] = {}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        places.setdefault(np.dtype(leaf.dtype).name, []).append(i)
    return places


def _flat(tree: Any, num_ranks: int) -> dict[str, jax.Array]:
    leaves = jax.tree.leaves(tree)
    return {
        dtype: _padded(jnp.concatenate([leaves[i].reshape(-1) for i in places]), num_ranks)
        for dtype, places in _by_dtype(tree).items()
    }


def _padded(vector: jax.Array, num_ranks: int) -> jax.Array:
    return jnp.pad(vector, (0, -vector.size % num_ranks))


def _unflat(vectors: dict[str, jax.Array], like: Any) -> Any:
    leaves, structure = jax.tree.flatten(like)
    for dtype, places in _by_dtype(like).items():
        ends = np.cumsum([leaves[i].size for i in places])
        for i, end in zip(places, ends, strict=True):
            leaves[i] = vectors[dtype][end - leaves[i].size : end].reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


def _whole(tx: Any, params: Any) -> Any:
    """Shapes and dtypes of the state of one rank alone."""
    return jax.eval_shape(lambda params: tx.init(_flat(params, 1)), params)


def _own_part(vectors: dict[str, jax.Array], axis_name: AxisName) -> dict[str, jax.Array]:
    rank, p = lax.axis_index(axis_name), num_ranks(axes_of(axis_name))
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rank * (x.size // p), x.size // p), vectors)


def _vary(state: Any, axis_name: AxisName) -> Any:
    """The state's vectors typed as varying over the axis even where they are zeros, so that the type never changes."""
    return jax.tree.map(lambda x: own_copy(x, axis_name) if x.ndim else x, state)
