"""Floats as 8-bit codes in scale groups of 256, each with one scale, and back."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

GROUP = 256  # elements of a scale group; a packet has their codes, and 4 bytes more for the scale

# Finite values have codes -126 to 126. The other codes:
_LARGEST, _INFINITY, _NAN = 126, 127, -128

# A scale has 17 significant bits and a code has 7, so their product is exact in float32. A sum of products is then the
# same whether or not the compiler fuses multiply and add.
_CLEARED = 0x7F

# Multiples of the smallest scale, and their sums, are never subnormal: some of XLA's threads flush those to zero.
_SMALLEST_SCALE = np.float32(2.0**-104)
# The largest of 17 bits with 126 * scale in range.
_LARGEST_SCALE = np.float32(float.fromhex("0x1.041p121"))


def encode(groups: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Rounds scale groups to packets.

    The scale is the largest finite magnitude divided by 126. Infinities and NaNs have codes of their own.

    Args:
      groups: float32[..., 256].
      key: for stochastic rounding, whose expected value is the element. By default to the nearest code, ties to even.

    Returns:
      int8[..., 260]: the codes, and the bytes of the scale.
    """
    finite = jnp.isfinite(groups)
    scale = _scale_of(jnp.max(jnp.where(finite, jnp.abs(groups), 0), axis=-1, keepdims=True))
    codes = groups / scale
    codes = jnp.round(codes) if key is None else jnp.floor(codes + _noise(key, groups.shape))
    codes = jnp.clip(codes, -_LARGEST, _LARGEST)
    special = jnp.where(jnp.isnan(groups), _NAN, jnp.sign(groups) * _INFINITY)
    codes = jnp.where(finite, codes, special).astype(jnp.int8)
    return jnp.concatenate([codes, jnp.squeeze(lax.bitcast_convert_type(scale, jnp.int8), -2)], axis=-1)


def decode(packets: jax.Array) -> jax.Array:
    """Packets, int8[..., 260], as scale groups, float32[..., 256]."""
    codes = packets[..., :GROUP].astype(jnp.float32)
    scale = lax.bitcast_convert_type(packets[..., GROUP:], jnp.float32)[..., None]
    special = jnp.where(codes == _NAN, jnp.nan, jnp.sign(codes) * jnp.inf)
    return jnp.where(jnp.abs(codes) > _LARGEST, special, codes * scale)


def rounding_error(groups: jax.Array, packets: jax.Array) -> jax.Array:
    """Scale groups less their decoded packets. Zero for infinities and NaNs."""
    return jnp.where(jnp.isfinite(groups), groups - decode(packets), 0)


def fold(packets: jax.Array) -> jax.Array:
    """The sum over the first dimension, int8[ranks, ..., 260] to float32[..., 256], in rank order."""
    return lax.scan(lambda total, packet: (total + decode(packet), None), decode(packets[0]), packets[1:])[0]


def _scale_of(largest: jax.Array) -> jax.Array:
    """The smallest scale with 126 * scale >= `largest`, however the compiler rounds the division."""
    bits = lax.bitcast_convert_type(largest / _LARGEST, jnp.int32) & ~_CLEARED
    below, above = (lax.bitcast_convert_type(b, jnp.float32) for b in (bits, bits + _CLEARED + 1))
    return jnp.clip(jnp.where(below * _LARGEST < largest, above, below), _SMALLEST_SCALE, _LARGEST_SCALE)


def _noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform numbers from [0, 1); added to an integer up to 126, none reaches the next one."""
    return (jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32) + 0.5) / (1 << 16)
