"""How a leaf is sent: the dtype on the wire, and the division that keeps a mean in its range."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


@dataclass(frozen=True)
class FloatWire:
    """Sends every leaf as it is, or floats rounded to a narrower dtype.

    A value is sent as x / scale. For a mean the scale is the number of ranks if the dtype on the wire has less range
    than float32 or the leaf: the sum of what is sent is then the mean, and overflows only if the mean does. Otherwise
    it is 1, which does not round twice.

    Attributes:
      dtype: floats of more bits are rounded to it; None sends all leaves in their own dtype.
    """

    dtype: np.dtype | None = None

    def dtype_of(self, x: jax.Array) -> np.dtype:
        """The dtype in which `x` is sent."""
        if self.dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x.dtype
        return self.dtype if jnp.finfo(self.dtype).bits < jnp.finfo(x.dtype).bits else x.dtype

    def scale_of(self, x: jax.Array, num_ranks: int) -> int:
        """By which number `x` is divided before it is sent, if the sum of `num_ranks` values has to fit."""
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return 1
        enough = max(jnp.finfo(jnp.float32).maxexp, jnp.finfo(x.dtype).maxexp)
        return num_ranks if jnp.finfo(self.dtype_of(x)).maxexp < enough else 1

    def sent(self, x: jax.Array, scale: int, *, saturate: bool = False) -> jax.Array:
        """What is sent for `x`. Finite values outside of the range become the largest ones if `saturate` is set."""
        dtype = self.dtype_of(x)
        x = x if scale == 1 else x / scale
        if dtype == x.dtype:
            return x
        if saturate:
            largest = jnp.finfo(dtype).max.astype(x.dtype)
            x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
        return x.astype(dtype)

    def received(self, total: jax.Array, like: jax.Array, scale: int, divisor: int) -> jax.Array:
        """The sum of what is sent, multiplied by `scale` / `divisor`, in the dtype of `like`; integers keep theirs."""
        total = total.astype(like.dtype) if jnp.issubdtype(like.dtype, jnp.floating) else total
        if scale == divisor:
            return total
        total = total if scale == 1 else total * scale
        return total if divisor == 1 else total / divisor

    def lost(self, x: jax.Array, sent: jax.Array, scale: int) -> jax.Array:
        """The part of `x` that is not in `sent`; 0 where `x` is not finite."""
        told = sent.astype(x.dtype)
        return jnp.where(jnp.isfinite(x), x - (told if scale == 1 else told * scale), jnp.zeros_like(x))


UNCHANGED = FloatWire()  # every leaf in its own dtype


def float_wire(function: str, name: str, dtype: DTypeLike | None) -> FloatWire:
    """The wire for the argument `name` of `function`.

    Raises:
      TypeError: if `dtype` is not a floating-point dtype.
    """
    if dtype is None:
        return UNCHANGED
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{function}: {name} must be a floating-point dtype or 'int8', got {dtype!r}")
    return FloatWire(jnp.dtype(dtype))


def is_float0(x: Any) -> bool:
    """Whether `x` is the gradient of an integer, which has no value and is never sent."""
    return getattr(x, "dtype", None) == jax.dtypes.float0
