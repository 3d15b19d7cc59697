"""The reduction of gradients as an optax transformation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName, axes_of
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.sync import Reduction, ReductionOptions

if TYPE_CHECKING:
    import optax


class FeedbackState(NamedTuple):
    """The state of `allreduce_gradients(..., error_feedback=True)`."""

    # This rank's rounding errors, which are still to be sent: a pytree like the gradients, with an additional first
    # dimension of 1, along which `shard_map` concatenates those of all ranks.
    residual: Any


def allreduce_gradients(
    axis_name: AxisName, *, mean: bool = True, error_feedback: bool = False, **options: Unpack[ReductionOptions]
) -> optax.GradientTransformation:
    """An optax `GradientTransformation` that replaces this rank's gradients by their mean over the ranks.

    Put it first in an `optax.chain`. `clip_by_global_norm` after it clips the norm of the mean, as one device with the
    whole batch would.

    Args:
      axis_name, mean, **options: as for `sync_gradients`.
      error_feedback: whether to add the error of rounding a rank's gradients to `wire` to its gradients of the
        next step, as `sync_with_feedback` does. The optimizer then has a state that differs between ranks: it enters
        and leaves `shard_map` by `feedback_specs`, and `init` is called inside. Otherwise there is no state.

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
    if not error_feedback:
        return optax.stateless(lambda updates, params: reduction.synced(updates, axis_name, mean).tree)
    if reduction.wire.dtype is None:
        raise ValueError(
            "allreduce_gradients: error_feedback corrects the rounding to wire, and wire is None. Pass, "
            "say, wire=jnp.bfloat16."
        )

    def init(params):
        return FeedbackState(jax.tree.map(lambda p: own_copy(jnp.zeros((1, *p.shape), p.dtype), axis_name), params))

    def update(updates, state, params=None):
        del params
        residual = jax.tree.map(lambda r: r[0], state.residual)
        reduced = reduction.synced(updates, axis_name, mean, residual)
        return reduced.tree, FeedbackState(jax.tree.map(lambda r: r[None], reduced.residual))

    return optax.GradientTransformation(init, update)


def feedback_specs(state: Any, axis_name: AxisName) -> Any:
    """The PartitionSpecs, for `in_specs` and `out_specs`, of the state of an optax optimizer with error feedback.

        optimizer = optax.chain(allreduce_gradients("data", wire=jnp.bfloat16, error_feedback=True), adam)
        specs = feedback_specs(jax.eval_shape(optimizer.init, params), "data")
        state = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)

    The rounding errors differ between ranks; the rest of the state is the same on all of them.
    """

    def is_feedback(node):
        return isinstance(node, FeedbackState)

    own = PartitionSpec(axes_of(axis_name))
    return jax.tree.map(lambda node: own if is_feedback(node) else PartitionSpec(), state, is_leaf=is_feedback)
