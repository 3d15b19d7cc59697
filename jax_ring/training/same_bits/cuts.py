"""The dimensions along which a loss's arguments are cut: `in_axes`."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_ring.collectives.axes import canonical_dimension


def check_in_axes(function: str, in_axes: Any) -> None:
    """Raises TypeError unless the leaves of `in_axes` are integers or None."""
    if not all(axis is None or type(axis) is int for axis in jax.tree.leaves(in_axes, is_leaf=_is_none)):
        raise TypeError(
            f"{function}: in_axes must be an int, None, or a tuple with an entry for each argument after the "
            f"parameters, whose leaves are ints or None; got {in_axes!r}"
        )


def axes_of_leaves(function: str, in_axes: Any, data: tuple) -> list[int | None]:
    """The axis of each leaf of the arguments that are not parameters.

    Raises:
      ValueError: if `in_axes` does not fit the arguments.
    """
    entries = list(in_axes) if isinstance(in_axes, tuple | list) else [in_axes] * len(data)
    if len(entries) != len(data):
        raise ValueError(
            f"{function}: in_axes has {len(entries)} entries for the {len(data)} arguments after the "
            f"parameters: {in_axes}"
        )
    axes: list[int | None] = []

    def note(axis, part):
        axes.extend([axis] * len(jax.tree.leaves(part)))

    for i, (entry, argument) in enumerate(zip(entries, data, strict=True)):
        try:
            jax.tree.map(note, entry, argument, is_leaf=_is_none)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{function}: in_axes[{i}] is {entry}, which is not a prefix of the argument: {error}"
            ) from None
    return axes


def dimension_of_cut(function: str, path, x: Any, axis: int, count: int, parts: str, whole: str) -> int:
    """The dimension along which an argument is cut into `count` blocks, from the front.

    Args:
      path: of the leaf, for errors.
      parts: of the blocks, such as "micro-batches".
      whole: who gets an uncut leaf, such as "every micro-batch".

    Raises:
      ValueError: if there is no such dimension, or `count` does not divide it.
    """
    where, shape = jax.tree_util.keystr(path), jnp.shape(x)
    if not shape:
        raise ValueError(
            f"{function}: the argument at {where} after the first is a scalar, which cannot be split. To give it to "
            f"{whole}, give it None in in_axes, or pass it as a keyword argument."
        )
    dimension = canonical_dimension(function, f"in_axes{where}:", axis, len(shape))
    if shape[dimension] % count:
        raise ValueError(
            f"{function}: {count} {parts} do not divide dimension {axis} of the argument at {where} after the first, "
            f"of shape {shape}"
        )
    return dimension


def _is_none(x: Any) -> bool:
    return x is None
