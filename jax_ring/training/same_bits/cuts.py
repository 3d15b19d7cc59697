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


def dimensions_of_cuts(function: str, in_axes: Any, data: tuple, count: int, parts: str, whole: str) -> dict[int, int]:
    """By position in the leaves of the arguments after the parameters, the dimension that is cut into `count` blocks.

    Dimensions count from the front. Leaves that are not cut are missing.

    parts, whole: words for errors: what the blocks are, and who gets an uncut leaf.
    """
    axes, leaves = _axes_of_leaves(function, in_axes, data), jax.tree_util.tree_leaves_with_path(data)
    dimensions = {}
    for i, (axis, (path, leaf)) in enumerate(zip(axes, leaves, strict=True)):
        if axis is None:
            continue
        where, shape = jax.tree_util.keystr(path), jnp.shape(leaf)
        if not shape:
            raise ValueError(
                f"{function}: the argument at {where} after the first is a scalar, which cannot be split. To give it "
                f"to {whole}, give it None in in_axes, or pass it as a keyword argument."
            )
        dimensions[i] = canonical_dimension(function, f"in_axes{where}:", axis, len(shape))
        if shape[dimensions[i]] % count:
            raise ValueError(
                f"{function}: {count} {parts} do not divide dimension {axis} of the argument at {where} after the "
                f"first, of shape {shape}"
            )
    return dimensions


def _axes_of_leaves(function: str, in_axes: Any, data: tuple) -> list[int | None]:
    """The entry of `in_axes` for each leaf."""
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


def _is_none(x: Any) -> bool:
    return x is None
