"""`weighted_pmean`: the mean over uneven parts of a batch."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.collectives.axes import AxisName, axes_of, check_named
from jax_ring.collectives.leaves import own_copy
from jax_ring.collectives.vmap_axis import accumulator_dtype
from jax_ring.options import check_arrays, promoted
from jax_ring.training.wire import collectives_here

T = TypeVar("T")  # a pytree: results keep the structure of the argument


def weighted_pmean(x: T, weight: Any, axis_name: AxisName) -> T:
    """The weighted mean over the ranks: the sum of weight * x, over the sum of weight.

        mean = weighted_pmean(total / jnp.maximum(count, 1), count, "data")  # over all examples

    A value of weight 0 does not count, even if not finite, nor does its gradient if finite. Derivatives of `total / 0`
    are not, and make all gradients NaN: hence the maximum above.

    Products and sums are float32, float64 for 64 bits, and must be finite there.

    Args:
      x: an array, or a pytree of arrays. Integers and booleans have float means; floats keep their dtype.
      weight: a real scalar, or an array that broadcasts to those of `x`; not negative. Zeros on all ranks give NaN.
      axis_name: the name of a mapped axis, or a sequence of names.

    Raises:
      ValueError: for a constant `weight` of zero or less, or one of a larger shape than `x`.
      TypeError: for a `weight` that is no real number.
      NameError, ValueError, jax.errors.JaxRuntimeError: where `ring_psum` raises them.
    """
    check_named("weighted_pmean", axes_of(axis_name))
    psum = collectives_here().psum
    weight = _checked(weight)
    check_arrays("weighted_pmean", "x", x)
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, x))
    for leaf in leaves:
        pairs = zip(weight.shape[::-1], leaf.shape[::-1], strict=False)
        if weight.ndim > leaf.ndim or any(size not in (1, of_leaf) for size, of_leaf in pairs):
            raise ValueError(
                f"weighted_pmean: weight has shape {weight.shape}, which does not broadcast to {leaf.shape} of x. Pass "
                "the sum of a mask: the number of examples of this rank."
            )
    dtypes = [_accumulator(leaf.dtype, weight.dtype) for leaf in leaves]
    # All leaves share one sum of weights.
    weight = weight.astype(promoted(jnp.float32, *map(_real, dtypes)))
    products = [
        _product(leaf.astype(dtype), weight.astype(_real(dtype))) for leaf, dtype in zip(leaves, dtypes, strict=True)
    ]
    totals, total_weight = psum(jax.tree.map(lambda x: own_copy(x, axis_name), (products, weight)), axis_name)
    means = [
        (total / total_weight.astype(_real(total.dtype))).astype(_mean_dtype(leaf.dtype))
        for total, leaf in zip(totals, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, means)


def _checked(weight: Any) -> jax.Array:
    """The weight as an array. Raises if no mean has it."""
    try:
        array = None if isinstance(weight, type) else jnp.asarray(weight)  # `float` would become the array 0.0
    except (TypeError, ValueError):
        array = None
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if array is None or not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(
            "weighted_pmean: weight must be a real number, got "
            f"{repr(weight) if array is None else array.dtype}. Pass the number of examples of this rank."
        )
    if not isinstance(weight, jax.core.Tracer):  # a constant is the same on all ranks
        constant = np.asarray(weight)
        if (constant < 0).any():
            raise ValueError(f"weighted_pmean: weight must not be negative, got {constant}")
        if not constant.any():
            raise ValueError(
                f"weighted_pmean: weight is {constant} on all ranks, because it is a constant: the sum of the weights "
                "would be 0. Pass the number of examples of each rank."
            )
    return array


def _accumulator(dtype, weight_dtype) -> jnp.dtype:
    """The dtype for products of values and weights."""
    wide = accumulator_dtype(weight_dtype) if jnp.issubdtype(weight_dtype, jnp.floating) else jnp.dtype(jnp.float32)
    return promoted(accumulator_dtype(_mean_dtype(dtype)), wide)


def _mean_dtype(dtype) -> jnp.dtype:
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def _real(dtype) -> jnp.dtype:
    return jnp.finfo(dtype).dtype


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    # 0 times the NaN of a mean over no examples would be NaN. Finite values stay, for the gradient of the weight.
    return jnp.where((weight == 0) & ~jnp.isfinite(x), jnp.zeros_like(x), x) * weight
