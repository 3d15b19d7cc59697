"""An optimizer for parameters that every rank has whole, with the bits of the one that is sharded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from jax_ring.training.same_bits.rounding import each_rounded
from jax_ring.training.zero.analysis.optax_parts import check_transformation
from jax_ring.training.zero.clip import norm_of_whole
from jax_ring.training.zero.given_norms import norm_given_by, order_given

if TYPE_CHECKING:
    import optax


def replicated_optimizer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` for replicated parameters, with the bits that `sharded_optimizer(tx, ..., order="tree")` gives.

        optimizer = zero.replicated_optimizer(optax.adamw(1e-3))
        value, grads = value_and_grad(loss, "data", num_shards=24)(params, x, y)      # under shard_map
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    A training with it can go on with stage 1, 2 or 3 in the flat layout, and has the same parameters and the same
    state, `unsharded`, on any number of ranks. A plain optax update has other last bits (docs/zero.md). Derivatives
    through an update are those of `tx`, without that promise.

    Args:
      tx: an elementwise optax `GradientTransformation`, as for `sharded_optimizer`. `zero.clip_by_global_norm` within
        it takes the norm of what each rank has.

    Returns:
      An optax `GradientTransformation` with the state of `tx`. It works on one device as well, without any mesh.

    Raises:
      TypeError: if `tx` has no `init` and `update`.
    """
    import optax

    check_transformation("replicated_optimizer", tx)

    def update(updates: Any, state: Any, params: Any = None):
        like = updates if params is None else params
        with order_given("tree"), norm_given_by(partial(norm_of_whole, like)):
            return each_rounded(tx.update, updates, state, params)

    return optax.GradientTransformation(tx.init, update)
