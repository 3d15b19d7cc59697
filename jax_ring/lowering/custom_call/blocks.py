"""Moves blocks between the user's dimension and the engine's leading one.

Each move exists twice, for traced arrays and, as `lower_...`, for values of the program: tracing takes longer than the
rest of a call.
"""

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from jax_ring.lowering.xla import ops


def blocks_first(x: jax.Array, *, axis_size: int, dimension: int, tiled: bool):
    """A reduce-scatter's operand, with a block per rank along a new leading dimension."""
    return jnp.moveaxis(split_dimension(x, dimension, axis_size) if tiled else x, dimension, 0)


def shape_of_blocks(shape: tuple, *, axis_size: int, dimension: int, tiled: bool) -> tuple:
    kept = (shape[dimension] // axis_size,) if tiled else ()
    return axis_size, *shape[:dimension], *kept, *shape[dimension + 1 :]


def blocks_at(x: jax.Array, *, dimension: int, tiled: bool):
    """An all-gather's result, with blocks moved to `dimension`."""
    x = jnp.moveaxis(x, 0, dimension)
    return merge_dimensions(x, dimension) if tiled else x


def split_dimension(x: jax.Array, dimension: int, num_blocks: int):
    """x with `dimension` split into block and index."""
    return x.reshape(*x.shape[:dimension], num_blocks, x.shape[dimension] // num_blocks, *x.shape[dimension + 1 :])


def merge_dimensions(x: jax.Array, dimension: int):
    return x.reshape(*x.shape[:dimension], x.shape[dimension] * x.shape[dimension + 1], *x.shape[dimension + 2 :])


def lower_blocks_first(x: ir.Value, *, slots: int, axis_size: int, dimension: int, tiled: bool):
    """`blocks_first` of a value, behind its slots."""
    shape, dimension = ir.RankedTensorType(x.type).shape, slots + dimension
    if tiled:
        kept = shape[dimension] // axis_size
        x = ops.reshape(x, (*shape[:dimension], axis_size, kept, *shape[dimension + 1 :]))
    return ops.move_dimension(x, dimension, slots)


def lower_blocks_at(x: ir.Value, *, dimension: int, tiled: bool):
    x = ops.move_dimension(x, 0, dimension)
    if not tiled:
        return x
    shape = ir.RankedTensorType(x.type).shape
    return ops.reshape(x, (*shape[:dimension], shape[dimension] * shape[dimension + 1], *shape[dimension + 2 :]))
