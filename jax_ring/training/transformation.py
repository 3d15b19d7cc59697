"""The reduction of gradients as an optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName, axes_of
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.sync import Reduction, sync_gradients, sync_with_feedback


class FeedbackState(NamedTuple):
    """The state of `allreduce_gradients(..., error_feedback=True)`."""

    # What rounding took from this rank's gradients and is still to be sent: like them, with a first dimension of 1,
    # along which `shard_map` puts those of all ranks together.
    residual: Any


def allreduce_gradients(axis_name: AxisName, *, mean: bool = True, error_feedback: bool = False, **options: Any):
    """An optax `GradientTransformation` that replaces this rank's gradients by their mean over the ranks.

    It comes first in an `optax.chain`: `clip_by_global_norm` after it clips the norm of the mean, which is what one
    device with the whole batch would clip.

    Args:
      error_feedback: whether what rounding to `wire_dtype` takes from a rank's gradients is added to those of its next
        step, as by `sync_with_feedback`. The optimizer then has a state that differs between ranks, so that it enters
        and leaves `shard_map` by `feedback_specs`, and its `init` is called inside. Otherwise there is none.
      axis_name, mean, **options: as for `sync_gradients`.

    Raises:
      ImportError: if optax is not installed.
      ValueError: if there is `error_feedback`, but no `wire_dtype` to make up for.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "allreduce_gradients makes an optax transformation, and optax is not installed: pip install optax. "
            "Without it, call jax_ring.sync_gradients."
        ) from error
    reduction = Reduction(**options)  # refuses wrong options here rather than in the first step
    if not error_feedback:
        return optax.stateless(lambda updates, params: sync_gradients(updates, axis_name, mean=mean, **options))
    if reduction.wire_dtype is None:
        raise ValueError(
            "allreduce_gradients: error_feedback makes up for rounding to wire_dtype, and there is none. Pass, say, "
            "wire_dtype=jnp.bfloat16."
        )

    def init(params):
        return FeedbackState(jax.tree.map(lambda p: own_copy(jnp.zeros((1, *p.shape), p.dtype), axis_name), params))

    def update(updates, state, params=None):
        del params
        residual = jax.tree.map(lambda r: r[0], state.residual)
        synced, residual = sync_with_feedback(updates, residual, axis_name, mean=mean, **options)
        return synced, FeedbackState(jax.tree.map(lambda r: r[None], residual))

    return optax.GradientTransformation(init, update)


def feedback_specs(state: Any, axis_name: AxisName) -> Any:
    """The PartitionSpecs, for `in_specs` and `out_specs`, of the state of an optax optimizer with error feedback.

        optimizer = optax.chain(allreduce_gradients("data", wire_dtype=jnp.bfloat16, error_feedback=True), adam)
        specs = feedback_specs(jax.eval_shape(optimizer.init, params), "data")
        state = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)

    What was rounded off differs between ranks; the rest of the state is the same on all of them.
    """

    def is_feedback(node):
        return isinstance(node, FeedbackState)

    own = PartitionSpec(axes_of(axis_name))
    return jax.tree.map(lambda node: own if is_feedback(node) else PartitionSpec(), state, is_leaf=is_feedback)
