"""Collectives over a `vmap` axis: local computations along a batch dimension, because the axis is within a device.

Each takes an operand, its batch dimension (None if unbatched), the size of the batch and the collective's own
parameters, and returns the result with its batch dimension (None if it is the same for the whole batch).
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring.lowering.layout import merge_dimensions, split_dimension


def accumulator_dtype(dtype) -> jnp.dtype:
    """The dtype in which values of `dtype` are added: at least float32 for floats, at least int32 for integers."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32:
        return jnp.dtype(jnp.int32)
    return jnp.dtype(dtype)


def _sum(x: jax.Array, dim: int | None, size: int) -> jax.Array:
    wide = x.astype(accumulator_dtype(x.dtype))
    total = wide * jnp.asarray(size, wide.dtype) if dim is None else jnp.sum(wide, dim, dtype=wide.dtype)
    return total.astype(x.dtype)


def psum(x, dim, size):
    """The sum of the batch, or `size` times an unbatched operand."""
    return _sum(x, dim, size), None


def pmax(x, dim, size):
    """The largest of the batch."""
    del size
    return x if dim is None else jnp.max(x, dim), None


def pmin(x, dim, size):
    """The smallest of the batch."""
    del size
    return x if dim is None else jnp.min(x, dim), None


def psum_scatter(x, dim, size, *, dimension, tiled):
    """The sum of the batch; member i keeps block i along `dimension`."""
    total = _sum(x, dim, size)
    return split_dimension(total, dimension, size) if tiled else total, dimension


def all_gather(x, dim, size, *, dimension, tiled):
    """The batch along `dimension`."""
    if dim is None:
        stacked = jnp.broadcast_to(jnp.expand_dims(x, dimension), (*x.shape[:dimension], size, *x.shape[dimension:]))
    else:
        stacked = jnp.moveaxis(x, dim, dimension)
    return merge_dimensions(stacked, dimension) if tiled else stacked, None


def reduce(x, dim, size, *, root):
    """The sum of the batch for member `root`, and zeros for the others."""
    total = _sum(x, dim, size)
    return jnp.zeros((size, *total.shape), total.dtype).at[root].set(total), 0


def broadcast(x, dim, size, *, root):
    """Member `root` of the batch."""
    del size
    return x if dim is None else lax.index_in_dim(x, root, dim, keepdims=False), None
