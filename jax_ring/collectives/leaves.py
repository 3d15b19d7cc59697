"""The arrays of a call: leaves of a pytree, grouped by dtype, and typed as values that differ between ranks."""

from collections import defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, split_axes
from jax_ring.distributed import discovery


def fused(tree, left_to_lax: Callable, namesake: Callable, to_operand: Callable, run: Callable):
    """A collective over the leaves of a tree, those that one call can carry together in one call.

    left_to_lax: (leaf) to whether its namesake in jax.lax takes it, since it needs no communication of ours.
    to_operand: (leaf) to the array that takes part, and what operands of one call must have in common besides dtype.
    run: (operands, what they have in common) to their results.
    """
    discovery.publish()  # the lowering of another process may be waiting for this one
    leaves, structure = jax.tree.flatten(tree)
    together = defaultdict(list)
    for i, leaf in enumerate(leaves):
        if left_to_lax(leaf):
            leaves[i] = namesake(leaf)
        else:
            leaves[i], common = to_operand(leaf)
            together[leaves[i].dtype, common].append(i)
    for (_, common), members in together.items():
        results = run([leaves[i] for i in members], common)
        for i, result in zip(members, results, strict=True):
            leaves[i] = result
    return jax.tree.unflatten(structure, leaves)


def belongs_to_lax(leaf, axes: tuple) -> bool:
    """Whether a leaf is one that the engines cannot take: no number, or partly reduced."""
    if not isinstance(leaf, jax.Array):
        return False
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return True
    return not _compat.partially_reduced_axes(leaf).isdisjoint(axes)


def no_namesake(function: str) -> Callable:
    """What stands for the namesake in jax.lax of a function that has none: an error."""

    def refuse(leaf):
        raise TypeError(
            f"{function} takes arrays of numbers that are not marked as reduced or unreduced, got {jax.typeof(leaf)}. "
            "For random keys, use jax.random.key_data and jax.random.wrap_key_data."
        )

    return refuse


def counted(leaf):
    """Booleans as the integers that lax.psum adds in their place."""
    return leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf


def as_varying(function: str, operand, axes: tuple, *, mixed: bool = True):
    """The operand cast, as JAX does it implicitly, to one that varies over all of the axes, where vma is tracked.

    mixed: whether it may vary over some of the axes already.
    """
    if not _compat.check_vma():
        return operand
    _, axes = split_axes(axes)
    varying = _compat.varying_axes(operand)
    missing = tuple(axis for axis in axes if axis not in varying)
    if not missing:
        return operand
    if (mixed or len(missing) == len(axes)) and _compat.auto_pcast():
        return lax.pcast(operand, missing, to="varying")
    raise ValueError(
        f"{function} over {axes} got an operand of type {jax.typeof(operand)}, which is the same on all ranks of "
        f"{missing}. If it has been summed over them already, as the gradient with respect to a replicated parameter "
        "has been, a further sum would be too large by the number of ranks: leave those axes out. If every rank is "
        f'to contribute its own copy, cast it first: lax.pcast(x, {missing}, to="varying").'
    )


def own_copy(x, axis_name: AxisName):
    """The array, typed as each rank's own over all of the axes, where vma is tracked."""
    if not _compat.check_vma():
        return x
    missing = tuple(axis for axis in split_axes(axes_of(axis_name))[1] if axis not in _compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
