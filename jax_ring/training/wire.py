"""What sends gradients: by whose collectives, in which dtype, and how a mean is kept in range."""

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_ring import collectives
from jax_ring.collectives.axes import AxisName
from jax_ring.collectives.leaves import bits_of_keys
from jax_ring.options import Order, bucketed, setting

_by_lax: ContextVar[bool] = ContextVar("by_lax", default=False)


def reduced_by(name: Literal["ring", "lax"]) -> contextlib.AbstractContextManager[None]:
    """A block for tests and benchmarks: what is traced in it reduces by these collectives.

    Also a decorator. `jax.lax` adds in XLA's order, whatever `order` says.
    """
    return setting(_by_lax, name == "lax")


def is_by_lax() -> bool:
    """Whether `jax.lax` reduces here."""
    return _by_lax.get()


class Collectives(NamedTuple):
    """The training layer's collectives, each (tree, axis_name) -> tree.

    Scattered and gathered along dimension 0, which stays; what is gathered is invariant over the axis with vma
    tracking. all_to_all takes split_axis and concat_axis, too, and broadcast the keyword argument `root`.
    """

    psum: Callable
    psum_scatter: Callable
    all_gather: Callable
    all_to_all: Callable
    broadcast: Callable


def collectives_here(overlap: bool = False, order: Order = "rank") -> Collectives:
    """The collectives by which training reduces here.

    overlap, order: of jax_ring's: whether GPUs run them beside computation, and in which order they add.
    """
    if is_by_lax():
        return Collectives(
            lax.psum,
            partial(lax.psum_scatter, tiled=True),
            partial(lax.all_gather, tiled=True, to="invarying"),
            lax.all_to_all,
            _lax_broadcast,
        )
    chosen = (
        partial(collectives.ring_psum, order=order),
        partial(collectives.ring_psum_scatter, tiled=True, order=order),
        partial(collectives.ring_all_gather, tiled=True, to="invarying"),
        collectives.ring_all_to_all,
        collectives.ring_broadcast,
    )
    return Collectives(*(partial(_bucketed, overlap, collective) for collective in chosen))


def _bucketed(overlap: bool, collective: Callable, *args: Any, **kwargs: Any) -> Any:
    with bucketed(overlap):
        return collective(*args, **kwargs)


def _lax_broadcast(tree: Any, axis_name: AxisName, *, root: int) -> Any:
    # jax.lax has no broadcast that keeps all bits and whose result is invariant over the axis.
    def broadcast(x):
        bits, from_bits = bits_of_keys(x)  # JAX up to 0.12 cannot lower an untiled all_gather of keys
        return from_bits(lax.all_gather(bits, axis_name, to="invarying")[root])

    return jax.tree.map(broadcast, tree)


@dataclass(frozen=True)
class FloatWire:
    """Sends leaves as they are, or floats rounded to a narrower dtype.

    What is sent is x / scale. For a mean the scale is the number of ranks if the wire has less range than float32 or
    the leaf: the sum is the mean, and overflows only with it. Otherwise it is 1, which rounds once.

    Attributes:
      dtype: to which wider floats are rounded; None for their own.
    """

    dtype: np.dtype | None = None

    def dtype_of(self, x: jax.Array) -> np.dtype:
        if self.dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x.dtype
        return self.dtype if jnp.finfo(self.dtype).bits < jnp.finfo(x.dtype).bits else x.dtype

    def scale_of(self, x: jax.Array, divisor: int, headroom: int) -> int:
        """The scale of `x`: by what it is divided before sending, if the sum will be divided by `divisor`.

        headroom: the scale where the sum is multiplied again, in a dtype of more range.
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

        saturate_for: if positive, how many values must fit the dtype in sum; finite ones are limited.
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
        """The sum times `scale` / `divisor`, in the dtype of `like`; integers keep theirs."""
        if not jnp.issubdtype(like.dtype, jnp.floating):
            return total if divisor == 1 else total / divisor
        # Use the wider of the two types: a sum may exceed the leaf's range although the mean does not.
        wide = like.dtype if jnp.finfo(like.dtype).bits >= jnp.finfo(total.dtype).bits else total.dtype
        total = total.astype(wide)
        if scale != divisor:
            total = total if scale == 1 else total * scale
            total = total if divisor == 1 else total / divisor
        return total.astype(like.dtype)

    def unsent(self, x: jax.Array, sent: jax.Array, scale: int) -> jax.Array:
        """What `sent` lacks of `x`; 0 where `x` is not finite, so that the next step recovers."""
        told = sent.astype(x.dtype)
        return jnp.where(jnp.isfinite(x), x - (told if scale == 1 else told * scale), jnp.zeros_like(x))


def _largest_of(dtype: np.dtype, count: int) -> np.ndarray:
    """The largest x of a dtype with `count` * x in range."""
    largest = float(jnp.finfo(dtype).max) / count
    rounded = np.asarray(largest, dtype)
    return rounded if float(rounded) <= largest else np.nextafter(rounded, np.zeros((), dtype))


@dataclass(frozen=True)
class Int8Wire:
    """Sends floats of more than 8 bits in scale groups of 8-bit integers, and other leaves unchanged.

    Attributes:
      key: for stochastic rounding, the same on all ranks; None rounds to nearest.
    """

    key: jax.Array | None = None

    def takes(self, x: Any) -> bool:
        """Whether `x` is sent in scale groups."""
        return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits > 8 and x.size > 0


UNCHANGED = FloatWire()  # every leaf in its own dtype


def wire_of(function: str, name: str, wire: DTypeLike | None, key: Any = None) -> FloatWire | Int8Wire:
    """The wire for argument `name` of `function`. Raises for a dtype or a key that is none for gradients."""
    try:
        dtype = None if wire is None else jnp.dtype(wire)
    except TypeError:
        dtype = None
    if dtype is not None and dtype == jnp.int8:
        _check_key(function, key)
        return Int8Wire(key)
    if key is not None:
        raise ValueError(
            f"{function}: key is for stochastic rounding, which only wire='int8' has, and {name} is {wire!r}. Leave "
            "key out, or pass wire='int8'."
        )
    if wire is None:
        return UNCHANGED
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{function}: {name} must be a floating-point dtype or 'int8', got {wire!r}")
    needed = np.array([0, -1, np.nan], np.float32)
    if not np.array_equal(needed, found := needed.astype(dtype).astype(np.float32), equal_nan=True):
        changed = ~np.isclose(needed, found, rtol=0, atol=0, equal_nan=True)
        becomes = ", ".join(f"{x:g} as {y:g}" for x, y in zip(needed[changed], found[changed], strict=True))
        raise TypeError(
            f"{function}: {name} must have a zero, a sign and NaN, so that no gradient becomes another number; {dtype} "
            f"would send {becomes}. Pass float8_e5m2, float8_e4m3fn, float16 or bfloat16."
        )
    return FloatWire(dtype)


def _check_key(function: str, key: Any) -> None:
    """Raises TypeError unless `key` is one random key, of `jax.random.key` or `jax.random.PRNGKey`, or None."""
    dtype, ndim = getattr(key, "dtype", None), getattr(key, "ndim", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and ndim == 0
    if key is not None and not is_typed and not (dtype == jnp.uint32 and ndim == 1):
        got = jax.typeof(key) if isinstance(key, jax.Array) else repr(key)
        raise TypeError(f"{function}: key must be one random key, such as jax.random.key(0), got {got}")
