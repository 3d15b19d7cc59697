"""Checks the axes, groups and ranks that a call names."""

import math
import warnings
from collections.abc import Hashable, Sequence

import jax
import numpy as np

from jax_ring import _compat
from jax_ring.options import integer

AxisName = Hashable | Sequence[Hashable]
Groups = Sequence[Sequence[int]]


def axes_of(axis_name: AxisName) -> tuple:
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def split_axes(axes: tuple) -> tuple[tuple, tuple]:
    """Splits axes into `vmap` axes and mesh axes; only mesh axes are tracked by vma."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in manual), tuple(axis for axis in axes if axis in manual)


def num_ranks(axes: tuple) -> int:
    bound = _compat.bound_axis_sizes()
    return math.prod(bound[axis] for axis in axes)


def axes_of_difference(x: jax.Array, axis_name: AxisName) -> tuple:
    """The axes over which x may differ: all vmap axes, and all mesh axes without vma tracking."""
    axes = _compat.skip_size_one_axes(axes_of(axis_name))
    if not _compat.check_vma():
        return axes
    _, tracked = split_axes(axes)
    return tuple(axis for axis in axes if axis not in tracked or axis in _compat.varying_axes(x))


def axes_of_equality(x: jax.Array, axis_name: AxisName) -> list:
    """The axes over which x is the same by its type; none without vma tracking."""
    axes = _compat.skip_size_one_axes(axes_of(axis_name))
    different = axes_of_difference(x, axes)
    return [axis for axis in axes if axis not in different]


def warn_of_equal_values(function: str, x, axis_name: AxisName) -> None:
    """Warns of a mean over equal values, probably a gradient that JAX has summed."""
    axes = _compat.skip_size_one_axes(axes_of(axis_name))
    leaves = [leaf for leaf in jax.tree.leaves(x) if isinstance(leaf, jax.core.Tracer)]
    equal = [leaf for leaf in leaves if axes and not axes_of_difference(leaf, axes)]
    if equal:
        warnings.warn(
            f"{function} over {axes}: a value of type {jax.typeof(equal[0])} is already the same on all "
            f"{num_ranks(axes)} ranks, so its mean is the value itself. If it is a gradient with respect to replicated "
            f"parameters, JAX has summed it over the ranks, and it is {num_ranks(axes)} times too large: use "
            f"jax_ring.value_and_grad, or cast the parameters before jax.grad with jax.lax.pcast(params, {axes}, "
            f"to='varying'). Otherwise drop {function}.",
            stacklevel=3,
        )


def check_axis_name(function: str, axis_name: AxisName) -> None:
    """Raises unless `axis_name` can name axes; tracing decides whether they are bound."""
    axes = axes_of(axis_name)
    try:
        is_name = None not in set(axes)
    except TypeError:  # not hashable
        is_name = False
    if not is_name:
        raise TypeError(
            f"{function}: axis_name must be the name of a mapped axis, or a tuple or list of names; got {axis_name!r}"
        )
    _refuse_positional(function, axes)
    _refuse_repeated(function, axes)


def _refuse_positional(function: str, axes: tuple) -> None:
    positional = tuple(axis for axis in axes if isinstance(axis, int))
    if positional:
        raise ValueError(f"{function} is over named axes, got the positional axes {positional}")


def _refuse_repeated(function: str, axes: tuple) -> None:
    if len(set(axes)) != len(axes):
        raise ValueError(f"{function}: each axis may be named once, got {axes}")


def _check_axes(function: str, axes: tuple, named: tuple) -> None:
    bound = _compat.bound_axis_sizes()
    known = ", ".join(repr(name) for name in bound) or "none"
    for axis in named:
        is_array = isinstance(axis, jax.Array)  # not hashable
        if is_array or isinstance(axis, jax.sharding.PartitionSpec | jax.sharding.Mesh | jax.sharding.Sharding):
            raise (TypeError if is_array else NameError)(
                f"{function}: axis_name must be the name of an axis, not a {type(axis).__name__}, got {axis!r}; "
                f"the axes bound here: {known}"
            )
        if axis not in bound:
            raise NameError(
                f"{function}: unbound axis name {axis!r}; the axes bound here: {known}. Call it under jax.shard_map, "
                "jax.vmap or jax.pmap with an axis of that name."
            )
    _refuse_repeated(function, axes)


def check_named(function: str, axes: tuple) -> None:
    """Raises unless each axis is bound, named and unique."""
    _refuse_positional(function, axes)
    _check_axes(function, axes, axes)


def check_groups(function: str, axis_index_groups: Groups | None, named: tuple) -> tuple[tuple[int, ...], ...] | None:
    """The groups as tuples. Raises unless they partition the ranks."""
    if axis_index_groups is None:
        return None
    groups = tuple(tuple(integer(function, "a rank in groups", rank) for rank in group) for group in axis_index_groups)
    size = num_ranks(named)
    members = [rank for group in groups for rank in group]
    if len(members) != size or set(members) != set(range(size)) or not all(groups):
        raise ValueError(
            f"{function}: axis_index_groups must hold every rank of {named} exactly once, that is 0 to {size - 1}, in "
            f"groups that are not empty; got {[list(group) for group in groups]}"
        )
    return groups


def group_size(function: str, axes: tuple, groups: tuple[tuple[int, ...], ...] | None) -> int:
    """The groups' size. Raises unless they have one: results have one shape."""
    sizes = {num_ranks(axes)} if groups is None else {len(group) for group in groups}
    if len(sizes) > 1:
        raise ValueError(
            f"{function}: axis_index_groups must all be of one size, got {[list(group) for group in groups or ()]}"
        )
    return sizes.pop()


def refuse_groups(function: str, groups) -> None:
    """Raises for groups: their results differ, so none is invariant over the axis."""
    if groups is not None:
        raise NotImplementedError(
            f"{function}: axis_index_groups are not supported under shard_map(..., check_vma=True), because results "
            "that differ between groups are not invariant over the axis (lax.psum refuses them as well). Use "
            "check_vma=False, or a mesh with an axis for the groups."
        )


def check_divisible(function: str, count: int, size: int, parts: str = "shards") -> int:
    """The number of shards as a Python integer. Raises unless the ranks can hold equally many."""
    count = integer(function, f"num_{parts}", count)
    if count < 1 or count % size:
        raise ValueError(
            f"{function}: num_{parts} must be a positive multiple of the number of ranks, {size}, because all hold "
            f"equally many {parts}; got {count}"
        )
    return count


def refuse_mixed_axes(function: str, axes: tuple, batch_axes: tuple) -> None:
    """Raises for a sum along the tree over vmap and other axes together."""
    raise NotImplementedError(
        f"{function}(..., order='tree') over {axes} includes the vmap axis {batch_axes[0]!r}, which must be the only "
        "axis: a sum over one axis after the other is not the sum along the tree over all ranks. Use one call for each "
        "axis if their sums need not be one tree, sum the batch as the shards of a jax_ring.ShardSums, or map all axes "
        "over devices with shard_map."
    )


def check_root(function: str, axes: tuple, root: int, name: str = "root") -> int:
    """The argument `name` as a Python integer. Raises unless it is a rank."""
    root, size = integer(function, name, root), num_ranks(axes)
    if not 0 <= root < size:
        raise ValueError(f"{function}: {name} must be a rank of {axes}, that is 0 to {size - 1}, got {root}")
    return root


def canonical_dimension(function: str, name: str, dimension: int, ndim: int) -> int:
    """The dimension, counted from the front. Raises if there is none."""
    dimension = integer(function, name, dimension)
    if not -ndim <= dimension < ndim:
        raise np.exceptions.AxisError(
            f"{function}: {name} {dimension} is out of bounds for an array of dimension {ndim}"
        )
    return dimension % ndim


def divided_dimension(function: str, name: str, dimension: int, leaf, size: int, *, tiled: bool, first: int = 0) -> int:
    """The dimension of a leaf that is cut into a block per rank, counted from the front. Raises unless its size fits.

    first: leading dimensions of the leaf that are not counted.
    """
    shape = leaf.shape[first:]
    dimension = canonical_dimension(function, name, dimension, len(shape))
    if tiled and shape[dimension] % size != 0:
        raise ValueError(
            f"{function}: with tiled=True the size of {name} {dimension}, {shape[dimension]}, must be a multiple of "
            f"the number of ranks, {size}; got {leaf.dtype}{list(shape)}"
        )
    if not tiled and shape[dimension] != size:
        raise ValueError(
            f"{function}: {name} {dimension} must have as many elements as there are ranks, {size}; got "
            f"{leaf.dtype}{list(shape)}. For several elements in each block use tiled=True."
        )
    return dimension


def check_reduction(function: str, axis_name: AxisName, axis_index_groups: Groups | None):
    """Checks a reduction: (all axes, named axes, positional axes, groups)."""
    axes = _compat.skip_size_one_axes(axes_of(axis_name))
    positional = tuple([axis for axis in axes if isinstance(axis, int)])
    named = tuple([axis for axis in axes if not isinstance(axis, int)]) if positional else axes
    if not axes:
        return axes, named, positional, None
    _check_axes(function, axes, named)
    if positional and _compat.check_vma():
        raise ValueError(
            f"{function}: positional axes {positional} cannot be reduced under shard_map(..., check_vma=True). "
            "Use jnp.sum, jnp.max or jnp.min for them, and name the mesh axes only."
        )
    if positional and axis_index_groups is not None:
        raise ValueError(
            f"{function}: axis_index_groups are for named axes, got the positional axes {positional} as well"
        )
    return axes, named, positional, check_groups(function, axis_index_groups, named)
