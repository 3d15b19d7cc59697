"""Sums of squares in blocks of fixed size, whose bits do not depend on how an array is cut between blocks."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_ring.options import promoted
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.zero.interface import padded

# Elements in a block. With order="tree" a rank's part of an array begins and ends between blocks.
BLOCK = 1024

# Factors of the block size, for the fold of a block, and factors for the sums of blocks. Each is one loop over
# written-out additions: a reduction of XLA adds in an order that depends on the shape.
_FACTORS = (8, 8, 16)
_FACTOR = 16


def up_to_blocks(size: int) -> int:
    """The smallest multiple of `BLOCK` that is not smaller than a number of elements."""
    return -(-size // BLOCK) * BLOCK


def block_sums(x: jax.Array) -> jax.Array:
    """The sum of the squares of each block of an array, flattened and filled up with zeros, in float32 or wider."""
    flat = padded(jnp.ravel(x), BLOCK)
    wide = jnp.abs(flat) if jnp.iscomplexobj(flat) else flat
    sums = wide.astype(promoted(wide.dtype, jnp.float32))
    for i, factor in enumerate(_FACTORS):
        rows = sums.reshape(flat.size // BLOCK, -1)
        width = rows.shape[1] // factor
        parts = [rows[:, j * width : (j + 1) * width] for j in range(factor)]
        sums = fence(_fold([*map(jnp.square, parts)] if i == 0 else parts))
    return sums.reshape(-1)


def sum_of_blocks(sums: jax.Array) -> jax.Array:
    """The sum of a vector along a tree that zeros at its end do not change."""
    while sums.size > 1:
        sums = jnp.pad(sums, (0, -sums.size % _FACTOR)).reshape(-1, _FACTOR)
        sums = fence(_fold([sums[:, j] for j in range(_FACTOR)]))
    return sums.reshape(())


def _fold(values: Sequence[jax.Array]) -> jax.Array:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
