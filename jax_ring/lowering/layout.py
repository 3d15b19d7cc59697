"""Moves the blocks of a scatter or a gather between the user's dimension and the engine's, the leading one."""

import jax.numpy as jnp


def blocks_first(x, *, axis_size: int, dimension: int, tiled: bool):
    """The operand of a reduce-scatter over `dimension`, with one block per rank along a new leading dimension."""
    return jnp.moveaxis(split_dimension(x, dimension, axis_size) if tiled else x, dimension, 0)


def shape_of_blocks(shape: tuple, *, axis_size: int, dimension: int, tiled: bool) -> tuple:
    """The shape of `blocks_first` of an array of this shape."""
    kept = (shape[dimension] // axis_size,) if tiled else ()
    return axis_size, *shape[:dimension], *kept, *shape[dimension + 1 :]


def blocks_at(x, *, dimension: int, tiled: bool):
    """The result of an all-gather, with the blocks moved from the leading dimension to `dimension`."""
    x = jnp.moveaxis(x, 0, dimension)
    return merge_dimensions(x, dimension) if tiled else x


def split_dimension(x, dimension: int, num_blocks: int):
    """x with `dimension` split into two: the block, and the index in it."""
    return x.reshape(*x.shape[:dimension], num_blocks, x.shape[dimension] // num_blocks, *x.shape[dimension + 1 :])


def merge_dimensions(x, dimension: int):
    """x with `dimension` and the one after it merged."""
    return x.reshape(*x.shape[:dimension], x.shape[dimension] * x.shape[dimension + 1], *x.shape[dimension + 2 :])
