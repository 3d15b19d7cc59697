"""The reduction of gradients as an optax transformation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName, axes_of
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.quantized import Int8Wire
from jax_ring.training.sync import Reduction, ReductionOptions
from jax_ring.training.wire import UNCHANGED

if TYPE_CHECKING:
    import optax


class FeedbackState(NamedTuple):
    """The state of `allreduce_gradients` with `error_feedback`, a `key`, or both.

    Attributes:
      residual: this rank's rounding errors, which are still to be sent: a pytree like the gradients, with an additional
        first dimension of 1, along which `shard_map` concatenates those of all ranks; None without `error_feedback`.
      key: for the next step, the same on all ranks; None without `key`.
    """

    residual: Any
    key: jax.Array | None = None


def allreduce_gradients(
    axis_name: AxisName, *, mean: bool = True, error_feedback: bool = False, **options: Unpack[ReductionOptions]
) -> optax.GradientTransformation:
    """An optax `GradientTransformation` that replaces this rank's gradients by their mean over the ranks.

    Put it first in an `optax.chain`. `clip_by_global_norm` after it clips the norm of the mean, as one device with the
    whole batch would.

    Args:
      axis_name, mean, **options: as for `sync_gradients`. A `key` is split in every step, and the state holds the next;
        with neither a key nor `error_feedback` there is no state.
      error_feedback: whether to add the error of rounding a rank's gradients to `wire` to its gradients of the
        next step, as `sync_with_feedback` does. The optimizer then has a state that differs between ranks: it enters
        and leaves `shard_map` by `feedback_specs`, and `init` is called inside.

    Raises:
      ImportError: if optax is not installed.
      ValueError: if `error_feedback` is given without `wire`.
      TypeError: for an unknown option.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "allreduce_gradients makes an optax transformation, and optax is not installed: pip install optax. "
            "Without it, call jax_ring.sync_gradients."
        ) from error
    reduction = Reduction.of("allreduce_gradients", options)
    if not error_feedback and options.get("key") is None:
        return optax.stateless(lambda updates, params: reduction.synced(updates, axis_name, mean).tree)
    if reduction.wire == UNCHANGED:
        raise ValueError(
            "allreduce_gradients: error_feedback corrects the rounding to wire, and wire is None. Pass, "
            "say, wire=jnp.bfloat16."
        )

    def init(params):
        residual = None
        if error_feedback:
            residual = jax.tree.map(lambda p: own_copy(jnp.zeros((1, *p.shape), p.dtype), axis_name), params)
        key = options.get("key")
        # Not the key itself, which the caller still has when a step donates the state.
        return FeedbackState(residual, None if key is None else jax.random.fold_in(key, 0))

    def update(updates, state, params=None):
        del params
        now, next_key = reduction, None
        if state.key is not None:
            key, next_key = jax.random.split(state.key)
            now = replace(reduction, wire=Int8Wire(key))
        residual = jax.tree.map(lambda r: r[0], state.residual)
        reduced = now.synced(updates, axis_name, mean, residual)
        return reduced.tree, FeedbackState(jax.tree.map(lambda r: r[None], reduced.residual), next_key)

    return optax.GradientTransformation(init, update)


def feedback_specs(state: Any, axis_name: AxisName) -> Any:
    """The PartitionSpecs, for `in_specs` and `out_specs`, of the state of an optax optimizer with error feedback.

        optimizer = optax.chain(allreduce_gradients("data", wire=jnp.bfloat16, error_feedback=True), adam)
        specs = feedback_specs(jax.eval_shape(optimizer.init, params), "data")
        state = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)

    The rounding errors differ between ranks; the rest of the state is the same on all of them.
    """

    own = PartitionSpec(axes_of(axis_name))

    def specs(node):
        if not isinstance(node, FeedbackState):
            return PartitionSpec()
        return FeedbackState(jax.tree.map(lambda _: own, node.residual), None if node.key is None else PartitionSpec())

    return jax.tree.map(specs, state, is_leaf=lambda node: isinstance(node, FeedbackState))
