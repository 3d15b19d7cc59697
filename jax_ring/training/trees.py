"""Trees of parameters and gradients: floats among integers, whose gradients are float0; leaves taken apart."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_inexact(x: Any) -> bool:
    """Whether an array has floats or complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats(tree: Any) -> list:
    """The leaves with floats or complex numbers, in order."""
    return [x for x in jax.tree.leaves(tree) if is_inexact(x)]


def is_float0(x: Any) -> bool:
    """Whether x is the gradient of integers, which has no values."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def with_float0(gradients: Iterable, like: Any) -> Any:
    """The gradients of a tree, from those of its floats."""
    rest = iter(gradients)
    return jax.tree.map(lambda x: next(rest) if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0), like)


def split(tree: Any, chosen: Any) -> tuple[Any, Any]:
    """Two trees: the leaves for which `chosen` is true, and the others, with None for the rest."""
    first = jax.tree.map(lambda x, c: x if c else None, tree, chosen)
    return first, jax.tree.map(lambda x, c: None if c else x, tree, chosen)


def merge(first: Any, second: Any) -> Any:
    """The tree of which `split` made two."""
    return jax.tree.map(lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None)
