"""The operands of a call: leaves of a pytree, grouped by dtype and cast to the primitives' types."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, split_axes
from jax_ring.lowering.call import Kind, is_number

_BOOL = np.dtype(bool)
_ARRAYS = (Tracer, jax.Array)  # testing for a tracer takes a tenth of the time


def fused(
    tree, left_to_lax: Callable, namesake: Callable, to_operand: Callable, run: Callable, key_of: Callable | None = None
):
    """Runs a collective over the leaves of a tree, with one call for all leaves that can share one.

    left_to_lax: (leaf) -> whether `namesake` handles the leaf instead.
    namesake: (leaf) -> result, by the function of the same name in `jax.lax`.
    to_operand: (leaf, an array) -> operand. Operands of equal dtype share a call. Random keys, which only collectives
      that move data leave here, become their bits.
    run: (operands, *key) -> results.
    key_of: (operand, before it becomes bits) -> key, if operands that share a call need to have equal ones.
    """
    leaves, structure = jax.tree.flatten(tree)
    together, from_bits = defaultdict(list), {}
    for i, leaf in enumerate(leaves):
        if left_to_lax(leaf):
            leaves[i] = namesake(leaf)
            continue
        leaves[i] = to_operand(leaf if isinstance(leaf, Tracer) else jnp.asarray(leaf))
        key = (key_of(leaves[i]),) if key_of else ()
        dtype = leaves[i].dtype
        if not is_number(dtype):
            leaves[i], from_bits[i] = bits_of_keys(leaves[i])
            dtype = leaves[i].dtype
        together[dtype, key].append(i)
    for (_, key), members in together.items():
        results = run([leaves[i] for i in members], *key)
        for i, result in zip(members, results, strict=True):
            leaves[i] = from_bits[i](result) if i in from_bits else result
    return jax.tree.unflatten(structure, leaves)


def moved(function: str, tree, axes: tuple, namesake: Callable, run: Callable, key_of: Callable | None = None):
    """`fused` for a collective that only moves data, and so takes random keys."""
    left_to_lax = partial(belongs_to_lax, axes=axes, moved=True)
    return fused(tree, left_to_lax, namesake, partial(as_varying, function, axes=axes), run, key_of)


def bits_of_keys(x: jax.Array) -> tuple[jax.Array, Callable]:
    """The bits of random keys, with one more dimension, and the way back; else x."""
    if not _are_keys(x):
        return x, lambda bits: bits
    return jax.random.key_data(x), partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))


def _are_keys(x: jax.Array) -> bool:
    return not is_number(x.dtype) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def check_dtype(function: str, kind: Kind, op: str, leaf: jax.Array) -> None:
    if refusal := kind.refusal(op, leaf.dtype):
        raise TypeError(refusal.format(function=function, type=jax.typeof(leaf)))


def belongs_to_lax(leaf, axes: tuple, *, moved: bool = False) -> bool:
    """Whether the engines cannot take a leaf: it has no numbers, or is reduced or unreduced.

    moved: whether the collective only moves, so that it takes random keys.
    """
    if not isinstance(leaf, _ARRAYS):
        return getattr(leaf, "dtype", None) == jax.dtypes.float0
    aval = jax.typeof(leaf)
    if not is_number(aval.dtype) and not (moved and _are_keys(leaf)):
        return True
    return not _compat.partially_reduced_axes(aval).isdisjoint(axes)


def no_namesake(function: str) -> Callable:
    """The `namesake` of a function that has none in `jax.lax`: raises TypeError."""

    def refuse(leaf):
        raise TypeError(
            f"{function} takes arrays of numbers that are not marked as reduced or unreduced, got {jax.typeof(leaf)}. "
            "For random keys, use jax.random.key_data and jax.random.wrap_key_data."
        )

    return refuse


def counted(leaf):
    """x, with booleans as int32, as which `lax.psum` counts them."""
    return leaf.astype(jnp.int32) if leaf.dtype == _BOOL else leaf


def as_varying(function: str, operand, axes: tuple, *, mixed: bool = True):
    """Casts to a value that varies over all of the axes, as JAX does implicitly. No-op without vma tracking.

    mixed: whether an operand may vary over only some of the axes.
    """
    if not _compat.check_vma():
        return operand
    varying = _compat.varying_axes(operand)
    if varying.issuperset(axes):
        return operand
    _, axes = split_axes(axes)
    missing = tuple(axis for axis in axes if axis not in varying)
    if not missing:
        return operand
    if (mixed or len(missing) == len(axes)) and _compat.auto_pcast():
        return lax.pcast(operand, missing, to="varying")
    raise ValueError(
        f"{function} over {axes} got an operand of type {jax.typeof(operand)}, which is the same on all ranks of "
        f"{missing}. If it has already been summed over them, like the gradient of a replicated parameter, another sum "
        "would be too large by the number of ranks: leave those axes out. If every rank should contribute its copy, "
        f'cast it first: lax.pcast(x, {missing}, to="varying").'
    )


def own_copy(x: Any, axis_name: AxisName) -> Any:
    """x as a value that varies over all of the axes. No-op without vma tracking."""
    if not _compat.check_vma():
        return x
    missing = tuple(axis for axis in split_axes(axes_of(axis_name))[1] if axis not in _compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
