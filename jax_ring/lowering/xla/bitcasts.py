"""Arrays as integers of their bits, which XLA moves and selects unchanged, or orders like the floats."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

_PACKED = jnp.uint32


def bits_dtype(dtype: DTypeLike):
    """The dtype of `to_bits`."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")
    return jnp.dtype(jnp.uint8) if dtype == jnp.bool_ else dtype


def to_bits(x: jax.Array) -> jax.Array:
    """Integers of the bits of x, not complex."""
    to = bits_dtype(x.dtype)
    return lax.bitcast_convert_type(x, to) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(to)


def from_bits(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    if dtype == jnp.bool_:
        return lax.ne(bits, zeros_like(bits))
    return lax.bitcast_convert_type(bits, dtype) if jnp.issubdtype(dtype, jnp.floating) else bits.astype(dtype)


def zeros_like(bits: jax.Array) -> jax.Array:
    # In a shard_map, JAX cannot compile a constant of symbolic shape.
    return lax.bitwise_xor(bits, bits)


def words_dtype(dtype: DTypeLike):
    return bits_dtype(jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype)


def to_words(x: jax.Array) -> jax.Array:
    """Integers of the bits of x; of complex numbers, imaginary behind real parts along the last dimension."""
    if jnp.iscomplexobj(x):
        return jnp.concatenate([to_bits(x.real), to_bits(x.imag)], axis=-1)
    return to_bits(x)


def from_words(words: jax.Array, dtype: DTypeLike) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(*(from_bits(part, jnp.finfo(dtype).dtype) for part in jnp.split(words, 2, axis=-1)))
    return from_bits(words, dtype)


def packed(x: jax.Array) -> jax.Array:
    """The bits of x as uint32[n], padded."""
    words = to_words(x.reshape(-1))
    ratio = jnp.dtype(_PACKED).itemsize // words.dtype.itemsize
    if ratio > 1:
        words = jnp.pad(words, (0, -words.size % ratio)).reshape(-1, ratio)
    return lax.bitcast_convert_type(words, _PACKED).reshape(-1)


def unpacked(words: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    to = words_dtype(dtype)
    ratio = to.itemsize // words.dtype.itemsize
    if ratio > 1:
        words = words.reshape(-1, ratio)
    parts = 2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1
    bits = lax.bitcast_convert_type(words, to).reshape(-1)
    return from_words(bits[: parts * math.prod(shape)], dtype).reshape(shape)


def ordered_dtype(dtype: DTypeLike):
    """The dtype of `to_ordered_integers`."""
    return jnp.dtype(jnp.int64 if jnp.finfo(dtype).bits == 64 else jnp.int32)


def to_ordered_integers(x: jax.Array, *, key_type: np.dtype, largest: bool):
    """Integers ordered like the floats, -0 below +0, NaN largest or smallest."""
    keys = lax.bitcast_convert_type(x.astype(f"float{key_type.itemsize * 8}"), key_type)
    highest = _highest(keys)
    return lax.select(lax.ne(x, x), highest if largest else lax.bitwise_not(highest), _negative_reversed(keys))


def from_ordered_integers(keys: jax.Array, *, dtype: DTypeLike):
    """The floats of which `to_ordered_integers` made these; the limits decode to NaN."""
    bits = _negative_reversed(keys)
    return lax.bitcast_convert_type(bits, f"float{bits.dtype.itemsize * 8}").astype(dtype)


def _negative_reversed(keys):
    """The bits of negative floats order in reverse."""
    return lax.select(lax.lt(keys, zeros_like(keys)), lax.bitwise_xor(keys, _highest(keys)), keys)


def _highest(keys):
    """The largest integers, like `zeros_like` without a constant."""
    minus_one = lax.bitwise_not(zeros_like(keys))
    return lax.shift_right_logical(minus_one, lax.neg(minus_one))
