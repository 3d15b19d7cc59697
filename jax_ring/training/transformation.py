"""Gradient reduction as an optax transformation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName, axes_of, check_axis_name
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.sentinel import CheckedState, check_counted, check_every, digests_every, next_step
from jax_ring.training.sync import Reduction, ReductionOptions
from jax_ring.training.wire import UNCHANGED, Int8Wire

if TYPE_CHECKING:
    import optax


class FeedbackState(NamedTuple):
    """The state of `allreduce_gradients`, by which `feedback_specs` knows it. It has leaves with feedback or a key.

        reduce = jax_ring.allreduce_gradients("data", wire=jnp.bfloat16, error_feedback=True)
        residual = reduce.init(params).residual  # under shard_map

    Attributes:
      residual: this rank's errors still to be sent: a pytree like the gradients with a first dimension of 1, along
        which `shard_map` concatenates; None without `error_feedback`.
      key: for the next step, the same on all ranks; None without `key`.
    """

    residual: Any
    key: jax.Array | None = None


def allreduce_gradients(
    axis_name: AxisName,
    *,
    mean: bool = True,
    error_feedback: bool = False,
    check_replicas: int | None = None,
    **options: Unpack[ReductionOptions],
) -> optax.GradientTransformation:
    """An optax `GradientTransformation` to the gradients' mean over the ranks.

        optimizer = optax.chain(allreduce_gradients("data"), optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    Put it first: clipping then clips the norm of the mean, as one device would. Put it before wrappers, too, that
    decide whether to update, such as `optax.apply_if_finite`: around it, ranks would wait for each other.

    Args:
      axis_name: the name of a mapped axis, or a sequence of names.
      mean: whether to divide by the number of ranks, or of shards if the gradients are a `ShardSums`.
      **options: `ReductionOptions`. A `key` is split in every step; the state holds the next. Without key and
        `error_feedback` the state has no leaves.
      error_feedback: whether to add the error of rounding to `wire` to the next step's gradients, by
        `sync_with_feedback`. The state then differs between ranks: it passes `shard_map` by `feedback_specs`, and
        `init` is called inside.
      check_replicas: steps between comparisons by `jax_ring.check_replicas`, from the first on. Needs the parameters:
        `optimizer.update(gradients, state, params)`.

    Raises:
      ImportError: without optax.
      ValueError: for `error_feedback` without `wire`, or `check_replicas` not positive; from `update` for gradients
        that `sync_gradients` refuses.
      TypeError: for an unknown option.
      jax.errors.JaxRuntimeError: from a step in which `check_replicas` finds a difference.
    """
    optax = _optax()
    name = "allreduce_gradients"
    reduction = Reduction.of(name, options)
    check_axis_name(name, axis_name)
    check_every(name, check_replicas)
    if error_feedback and reduction.wire == UNCHANGED:
        raise ValueError(
            "allreduce_gradients: error_feedback corrects the rounding to wire, and wire is None. Pass, "
            "say, wire=jnp.bfloat16."
        )
    has_state = error_feedback or options.get("key") is not None

    def init(params):
        residual, key = None, options.get("key")
        if error_feedback:
            residual = jax.tree.map(lambda p: own_copy(jnp.zeros((1, *p.shape), p.dtype), axis_name), params)
        # A copy of the key: the caller still holds it when a step donates the state.
        inner = FeedbackState(residual, None if key is None else jax.random.fold_in(key, 0))
        return inner if check_replicas is None else CheckedState(jnp.zeros((), jnp.int32), inner)

    def update(updates, state, params=None):
        if check_replicas is not None:
            check_counted(name, state)
        inner = state if check_replicas is None else state.inner
        now, residual, next_key = reduction, None, None
        if has_state:
            if inner.key is not None:
                key, next_key = jax.random.split(inner.key)
                now = replace(reduction, wire=Int8Wire(key))
            residual = jax.tree.map(lambda r: r[0], inner.residual)
        table = None
        if check_replicas is not None:
            own = digests_every(name, params, axis_name, check_replicas, state.step)
            now, table = replace(now, after_last=True), own.table
        reduced = now.synced(updates, axis_name, mean, residual, table)
        if check_replicas is not None:
            step, tree = next_step(state.step, reduced.tree, own.verdict(reduced.value))
            reduced = reduced._replace(tree=tree)
        if has_state:
            inner = FeedbackState(jax.tree.map(lambda r: r[None], reduced.residual), next_key)
        return reduced.tree, inner if check_replicas is None else state._replace(step=step, inner=inner)

    return optax.GradientTransformation(init, update)


def _optax() -> Any:
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "allreduce_gradients makes an optax transformation, and optax is not installed: pip install optax. "
            "Without it, call jax_ring.sync_gradients."
        ) from error
    return optax


def feedback_specs(state: Any, axis_name: AxisName) -> Any:
    """PartitionSpecs, for `in_specs` and `out_specs`, of a state that differs in parts between ranks.

        optimizer = optax.chain(allreduce_gradients("data", wire=jnp.bfloat16, error_feedback=True), adam)
        specs = feedback_specs(jax.eval_shape(optimizer.init, params), "data")
        state = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)

    Each rank has its part along the first dimension of rounding errors, and of sums of
    `optax.MultiSteps(optax.chain(allreduce_gradients(...), ...), k)`, which adds before reducing; the rest is the same
    on all.

    Raises:
      ValueError: for such a sum of a scalar parameter.
    """
    import optax

    check_axis_name("feedback_specs", axis_name)
    own = PartitionSpec(axes_of(axis_name))

    def is_own(node):
        return isinstance(node, FeedbackState)

    def adds_local_gradients(node):
        return isinstance(node, optax.MultiStepsState) and any(
            map(is_own, jax.tree.leaves(node.inner_opt_state, is_leaf=is_own))
        )

    def own_partition(path, leaf):
        if leaf.ndim:
            return own
        raise ValueError(
            "feedback_specs: optax.MultiSteps adds each rank's gradients, and that at "
            f"{jax.tree_util.keystr(path)} has no dimension along which those of all ranks could be stored. Give the "
            "parameter the shape (1,), or reduce "
            "before adding: optax.chain(allreduce_gradients(...), optax.MultiSteps(...).gradient_transformation()) "
            "reduces as often, and its state is the same on all ranks."
        )

    def specs(node):
        if is_own(node):
            residual = jax.tree.map(lambda _: own, node.residual)
            return FeedbackState(residual, None if node.key is None else PartitionSpec())
        if not adds_local_gradients(node):
            return PartitionSpec()
        rest = jax.tree.map(lambda _: PartitionSpec(), node)
        sums = jax.tree_util.tree_map_with_path(own_partition, node.acc_grads)
        return rest._replace(acc_grads=sums, inner_opt_state=feedback_specs(node.inner_opt_state, axis_name))

    return jax.tree.map(specs, state, is_leaf=lambda node: is_own(node) or adds_local_gradients(node))
