"""What can be differentiated: floats, not integers, whose gradients are float0; advice for whole models."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.options import check_arrays, path_text

_ADVICE = (
    "Of a model give the parameters alone. equinox: params, static = eqx.partition(model, eqx.is_inexact_array), and "
    "eqx.combine(params, static) in the loss. flax: graphdef, params, rest = nnx.split(model, nnx.Param, ...), and "
    "nnx.merge(graphdef, params, rest, copy=True) in the loss."
)


def is_inexact(x: Any) -> bool:
    """Whether an array has floats or complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats(tree: Any) -> list:
    """The leaves with floats or complex numbers."""
    return [x for x in jax.tree.leaves(tree) if is_inexact(x)]


def is_float0(x: Any) -> bool:
    """Whether x is the gradient of integers, which has no values."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


def with_float0(gradients: Iterable, like: Any) -> Any:
    """The gradients of a tree, from those of its floats."""
    rest = iter(gradients)
    return jax.tree.map(lambda x: next(rest) if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0), like)


def check_parameters(function: str, position: int, tree: Any, *, only_floats: bool) -> None:
    """Raises TypeError unless an argument's leaves are arrays (of floats or complex numbers, if required)."""
    try:
        check_arrays(function, f"argument {position}", tree)
    except TypeError as error:
        raise TypeError(f"{error}. {_ADVICE}") from None
    if not only_floats:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            # Uses JAX's words, so that a search finds them.
            raise TypeError(
                "grad requires real- or complex-valued inputs (input dtype that is a sub-dtype of np.inexact), but "
                f"{function} got {jax.typeof(leaf)} at {path_text(path)} of argument {position}. With allow_int=True "
                f"its gradient is of dtype float0. {_ADVICE}"
            )
