"""The mean over ranks that hold uneven parts of a batch."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_ring.collectives.axes import AxisName, axes_of, check_named
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.implementations import implementation


def weighted_pmean(x: Any, weight: Any, axis_name: AxisName, *, impl: str = "ring") -> Any:
    """The mean of `x` over the ranks of a mapped axis, each counted with its weight: sum of w x / sum of w.

    For batches of which the ranks hold uneven parts: the weighted mean of the ranks' means is the mean over the whole
    batch, if the weights are the numbers of examples. A rank of weight 0 does not count, even if its `x` is not finite.

    Args:
      x: an array, or a pytree of arrays. Floats keep their dtype.
      weight: a scalar, not negative, not zero on all ranks.
      axis_name: as for `ring_psum`.
      impl: "ring" or "lax", as for `sync_gradients`.

    Raises:
      NameError, TypeError, ValueError, jax.errors.JaxRuntimeError: as `ring_psum`.
    """
    check_named("weighted_pmean", axes_of(axis_name))
    weight = jnp.asarray(weight)
    # Not 0 * x, which is NaN for a mean over no examples; and of both branches of a where the gradient is taken.
    weighted = jax.tree.map(lambda x: jnp.where(weight == 0, jnp.zeros_like(x), x) * weight, x)
    local = jax.tree.map(lambda x: own_copy(x, axis_name), (weighted, weight))
    total, total_weight = implementation("weighted_pmean", impl).psum(local, axis_name)
    return jax.tree.map(lambda t, x: (t / total_weight).astype(jnp.result_type(x, float(0))), total, x)
