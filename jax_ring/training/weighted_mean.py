"""`weighted_pmean`: the mean over ranks that hold uneven parts of a batch."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_ring.collectives.axes import AxisName, axes_of, check_named
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.implementations import Impl, implementation

T = TypeVar("T")  # a pytree: results have the structure of the argument


def weighted_pmean(x: T, weight: Any, axis_name: AxisName, *, impl: Impl = "ring") -> T:
    """The weighted mean of `x` over the ranks of a mapped axis: the sum of weight * x, over the sum of weight.

    For batches that are split unevenly: with the numbers of examples as weights, the weighted mean of the ranks' means
    is the mean over the whole batch. The value of a rank of weight 0 does not count, even if it is not finite.

    Args:
      x: an array, or a pytree of arrays. Floats keep their dtype.
      weight: this rank's weight, a scalar: not negative, and not zero on all ranks.
      axis_name: as for `ring_psum`.
      impl: "ring" or "lax", as for `sync_gradients`.

    Raises:
      NameError, TypeError, ValueError, jax.errors.JaxRuntimeError: as `ring_psum`.
    """
    check_named("weighted_pmean", axes_of(axis_name))
    weight = jnp.asarray(weight)
    # Not 0 * x, which is NaN for a mean over no examples.
    weighted = jax.tree.map(lambda x: jnp.where(weight == 0, jnp.zeros_like(x), x) * weight, x)
    local = jax.tree.map(lambda x: own_copy(x, axis_name), (weighted, weight))
    total, total_weight = implementation("weighted_pmean", impl).psum(local, axis_name)
    return jax.tree.map(lambda t, x: (t / total_weight).astype(jnp.result_type(x, float(0))), total, x)
