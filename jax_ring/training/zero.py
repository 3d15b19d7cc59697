"""ZeRO: an optimizer that is sharded over the data-parallel ranks.

Stages 1 and 2 of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020):
parameters are replicated. Each rank holds the optimizer state for one of p equal parts of them, updates that part, and
gathers the updates of the other parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName, axes_of, check_named, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.implementations import Impl, implementation
from jax_ring.training.sync import check_local, sync_gradients

if TYPE_CHECKING:
    import optax

Stage = Literal[1, 2]


class ShardedOptimizer(NamedTuple):
    """The result of `sharded_optimizer`. Call `init` and `update` inside `shard_map`, the others outside.

    Attributes:
      init: (params) -> this rank's state.
      update: (gradients, state, params) -> (updates of all parameters, the same on all ranks; this rank's state).
      specs: (params) -> the PartitionSpecs of the state, for `in_specs` and `out_specs`.
      repartition: (state, params, num_ranks) -> the state, sharded over that many ranks.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    specs: Callable[[Any], Any]
    repartition: Callable[[Any, Any, int], Any]


def sharded_optimizer(
    tx: optax.GradientTransformation, axis_name: AxisName, *, stage: Stage = 2, impl: Impl = "ring"
) -> ShardedOptimizer:
    """Shards an optax optimizer over the ranks of a mapped axis: each holds 1/p of its state.

    Parameters and gradients of each dtype are concatenated to one vector, in the order of `jax.tree.leaves`, and padded
    with zeros to a multiple of p elements. Rank r updates the r-th of p equal parts. `tx` gets these parts in a
    dictionary, by the name of their dtype. An elementwise `tx` gives the same results as without sharding. One that is
    not elementwise (`clip_by_global_norm`, masks, LARS) gives wrong results; for `clip_by_global_norm` use the one of
    this module.

        optimizer = zero.sharded_optimizer(optax.adam(1e-3), "data")
        specs = optimizer.specs(params)
        state = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)
        # in a train step, under shard_map with `specs` in in_specs and out_specs for the state:
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)

    Args:
      tx: an elementwise optax `GradientTransformation`.
      axis_name: the name of a mapped axis, or a sequence of names, as for `ring_psum`.
      stage: 2 reduces the gradients so that each rank gets only the part that it updates (`ring_psum_scatter`); 1
        gives every rank all gradients, as `sync_gradients` does. The updates are the same.
      impl: "ring" or "lax", as for `sync_gradients`.

    Returns:
      A `ShardedOptimizer`. Its `update` takes this rank's gradients, not reduced yet, and applies `tx` to their mean.

    Raises:
      ValueError: if `stage` is neither 1 nor 2, or `impl` is none of its choices; from `update`, with vma tracking, if
        gradients are already the same on all ranks, because they have been summed before.
    """
    if stage not in (1, 2):
        raise ValueError(
            f"sharded_optimizer: stage must be 1 or 2, got {stage!r}; stage 3, sharded parameters, is not supported"
        )
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


def clip_by_global_norm(max_norm: float, axis_name: AxisName, *, impl: Impl = "ring") -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` for a sharded optimizer: `optax.chain(clip_by_global_norm(...), adam)`.

    The squares of the ranks' parts are added over the axis, so the norm is that of the whole mean gradient.

    Args:
      max_norm: the largest norm that is not clipped.
      axis_name, impl: as for `sharded_optimizer`.
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
    """For each dtype, the positions of its leaves in jax.tree.leaves."""
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
    """Shapes and dtypes of the state for a single rank."""
    return jax.eval_shape(lambda params: tx.init(_flat(params, 1)), params)


def _own_part(vectors: dict[str, jax.Array], axis_name: AxisName) -> dict[str, jax.Array]:
    rank, p = lax.axis_index(axis_name), num_ranks(axes_of(axis_name))
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rank * (x.size // p), x.size // p), vectors)


def _vary(state: Any, axis_name: AxisName) -> Any:
    """Casts the state's vectors to varying over the axis. Zeros are invariant otherwise, and the type would change."""
    return jax.tree.map(lambda x: own_copy(x, axis_name) if x.ndim else x, state)
