"""How a leaf is sent: the dtype on the wire, and the division that keeps a mean in its range."""

from dataclasses import dataclass

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

    def scale_of(self, x: jax.Array, divisor: int, headroom: int) -> int:
        """By which number `x` is divided before it is sent, if the sum will be divided by `divisor`.

        headroom: the same where the sum is multiplied again, in a dtype that has more range than the one on the wire.
        """
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return 1
        dtype = self.dtype_of(x)
        enough = max(jnp.finfo(jnp.float32).maxexp, jnp.finfo(x.dtype).maxexp)
        if jnp.finfo(dtype).maxexp >= enough:
            return 1
        return divisor if dtype == x.dtype else headroom

    def sent(self, x: jax.Array, scale: int, *, saturate_for: int = 0) -> jax.Array:
        """What is sent for `x`.

        saturate_for: if positive, finite values are limited so that the sum of so many fits the dtype on the wire.
        """
        dtype = self.dtype_of(x)
        x = x if scale == 1 else x / scale
        if dtype == x.dtype:
            return x
        if saturate_for:
            largest = _largest_of(dtype, saturate_for).astype(x.dtype)
            x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
        return x.astype(dtype)

    def received(self, total: jax.Array, like: jax.Array, scale: int, divisor: int) -> jax.Array:
        """The sum of what is sent, multiplied by `scale` / `divisor`, in the dtype of `like`; integers keep theirs."""
        if not jnp.issubdtype(like.dtype, jnp.floating):
            return total if divisor == 1 else total / divisor
        # In the wider of the two types: a sum may be out of the range of the leaf although the mean is not.
        wide = like.dtype if jnp.finfo(like.dtype).bits >= jnp.finfo(total.dtype).bits else total.dtype
        total = total.astype(wide)
        if scale != divisor:
            total = total if scale == 1 else total * scale
            total = total if divisor == 1 else total / divisor
        return total.astype(like.dtype)

    def unsent(self, x: jax.Array, sent: jax.Array, scale: int) -> jax.Array:
        """The part of `x` that is not in `sent`; 0 where `x` is not finite, so that the next step recovers."""
        told = sent.astype(x.dtype)
        return jnp.where(jnp.isfinite(x), x - (told if scale == 1 else told * scale), jnp.zeros_like(x))


def _largest_of(dtype: np.dtype, count: int) -> np.ndarray:
    """The largest number x of a dtype with `count` * x in its range."""
    largest = float(jnp.finfo(dtype).max) / count
    rounded = np.asarray(largest, dtype)
    return rounded if float(rounded) <= largest else np.nextafter(rounded, np.zeros((), dtype))


UNCHANGED = FloatWire()  # every leaf in its own dtype


def float_wire(function: str, name: str, dtype: DTypeLike | None) -> FloatWire:
    """The wire for the argument `name` of `function`.

    Raises:
      TypeError: if `dtype` is not a floating-point dtype, or one in which some gradients would become other numbers.
    """
    if dtype is None:
        return UNCHANGED
    try:
        wire = jnp.dtype(dtype)
    except TypeError:
        wire = None
    if wire is None or not jnp.issubdtype(wire, jnp.floating):
        raise TypeError(f"{function}: {name} must be a floating-point dtype or 'int8', got {dtype!r}")
    needed = np.array([0, -1, np.nan], np.float32)
    if not np.array_equal(needed, found := needed.astype(wire).astype(np.float32), equal_nan=True):
        changed = ~np.isclose(needed, found, rtol=0, atol=0, equal_nan=True)
        becomes = ", ".join(f"{x:g} as {y:g}" for x, y in zip(needed[changed], found[changed], strict=True))
        raise TypeError(
            f"{function}: {name} must have a zero, a sign and NaN, so that no gradient becomes another number; {wire} "
            f"would send {becomes}. Pass float8_e5m2, float8_e4m3fn, float16 or bfloat16."
        )
    return FloatWire(wire)
