"""The public collectives: arguments, pytrees, and the errors that a user sees."""

import operator
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat
from jax_ring.options import Options, make_options
from jax_ring.primitives import ring_psum_invariant_p, ring_psum_p

AxisName = Hashable | Sequence[Hashable]


def ring_psum(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    algorithm: str = "auto",
    order: str = "rank",
) -> Any:
    """Sums `x` over the ranks of a mapped axis; every rank gets the sum. A drop-in for `jax.lax.psum`.

    The result is the fold `((x_0 + x_1) + x_2) + ...` over ranks 0, 1, ..., p-1, added in float32 for floats of 16
    bits and fewer and in the type itself otherwise, and rounded once. All ranks get the same bits. Leaves of one
    dtype are reduced by one custom call together, without being copied into one buffer first. Where XLA's all-reduce
    serves the call (see docs/sharp_bits.md), and over a vmap axis, the order of adding is XLA's.

    Args:
      x: an array, or a pytree of arrays, of any shape and any dtype that `lax.psum` takes. Booleans are summed as
        int32. A Python number or another constant is multiplied by the number of ranks, or of those in a group,
        without communication.
      axis_name: the name of a `shard_map`, `vmap` or `pmap` axis, or a sequence of names. With several, rank r is
        the row-major index over them in the order given. Without vma tracking, integers among them name positional
        axes of `x`, which are summed on each device first.
      axis_index_groups: a list of lists of ranks: the sum is then taken within each group. Together they must hold
        every rank exactly once; their sizes may differ. Only under `shard_map(..., check_vma=False)` and `pmap`.
      algorithm: "auto", "one_shot", "two_shot" or "ring": how the engine moves the data. It changes the speed, never
        the result; on CPU devices there is one algorithm, and it changes nothing.
      order: "rank" is the fold above. "ring" is the order of a ring reduce-scatter, which needs the least bandwidth
        of an interconnect without all-to-all links: each operand, flattened, is cut into packs of 16 bytes and the
        packs into p equal blocks of ceil(packs / p), of which the last may be shorter or empty; block i is folded
        over ranks i+1, i+2, ..., i (modulo p), rank i's value being added last. Accumulator and rounding are the same,
        and so is the result on every rank and platform. It needs algorithm "auto" or "ring".

    Returns:
      A pytree like `x`. With vma tracking (`check_vma=True`) the sums are invariant over the axis.

    Raises:
      NameError: if no enclosing transformation binds an axis of that name.
      ValueError: if `axis_index_groups` do not partition the ranks, if an axis is named twice, if `x` varies over
        only some of the axes, or if `algorithm` or `order` is none of those listed or they do not go together.
      NotImplementedError: for `axis_index_groups` with vma tracking, or over a `vmap` axis.
      TypeError: if a leaf is not a valid JAX type.
      jax.errors.JaxRuntimeError: when the program runs, if a rank of the group does not make the call within
        `JAX_RING_TIMEOUT_S` seconds (60 by default).
    """
    options = make_options("ring_psum", algorithm, order)
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    axes = _compat.skip_size_one_axes(axes)
    if not axes:
        return x
    positional = tuple(axis for axis in axes if isinstance(axis, int))
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    _check_axes(axes, named, positional)
    groups = _check_groups(axis_index_groups, named, positional)
    uneven = groups is not None and len({len(group) for group in groups}) > 1

    leaves, tree = jax.tree.flatten(x)
    fused = defaultdict(list)  # by dtype: positions of the leaves that take part in communication
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.core.Tracer) and uneven:
            # lax.psum multiplies a constant by the size of the first group, on all ranks; this is the sum.
            leaf = jnp.asarray(leaf)
        elif _left_to_lax(leaf, named):
            leaves[i] = lax.psum(leaf, axes, axis_index_groups=groups)
            continue
        leaf = lax.psum(leaf, positional) if positional else leaf
        leaves[i] = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        fused[leaves[i].dtype].append(i)
    for members in fused.values() if named else ():
        sums = _sum_over_ranks([leaves[i] for i in members], named, groups, options)
        for i, total in zip(members, sums, strict=True):
            leaves[i] = total
    return jax.tree.unflatten(tree, leaves)


def _left_to_lax(leaf, named: tuple) -> bool:
    """Whether a leaf needs no communication of ours: constants, what cannot be summed, and partly reduced values."""
    if not isinstance(leaf, jax.core.Tracer):
        return True
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return True
    return not _compat.partially_reduced_axes(leaf).isdisjoint(named)


def _sum_over_ranks(operands: list, axes: tuple, groups, options: Options) -> Sequence:
    if not _compat.check_vma():
        return ring_psum_p.bind(*operands, axes=axes, axis_index_groups=groups, options=options)
    if groups is not None:
        raise NotImplementedError(
            "ring_psum: axis_index_groups are not supported under shard_map(..., check_vma=True), because sums that "
            "differ between groups are not invariant over the axis (lax.psum refuses them as well). Use "
            "check_vma=False, or a mesh with an axis for the groups."
        )
    # Values do not vary over a vmap axis in the sense of vma, whose rules are for mesh axes alone.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    batch_axes = tuple(axis for axis in axes if axis not in manual)
    mesh_axes = tuple(axis for axis in axes if axis in manual)
    if batch_axes:
        operands = ring_psum_p.bind(*operands, axes=batch_axes, axis_index_groups=None, options=options)
    if not mesh_axes:
        return operands
    operands = [_as_varying(operand, mesh_axes) for operand in operands]
    return ring_psum_invariant_p.bind(*operands, axes=mesh_axes, axis_index_groups=None, options=options)


def _as_varying(operand, axes: tuple):
    """The operand if it varies over the axes, or JAX's implicit cast to that of one that varies over none of them."""
    varying = _compat.varying_axes(operand)
    missing = tuple(axis for axis in axes if axis not in varying)
    if not missing:
        return operand
    if len(missing) == len(axes) and _compat.auto_pcast():
        return lax.pcast(operand, missing, to="varying")
    raise ValueError(
        f"ring_psum over {axes} got an operand of type {jax.typeof(operand)}, which is the same on all ranks of "
        f"{missing}. If it has been summed over them already, as the gradient with respect to a replicated parameter "
        "has been, a further sum would be too large by the number of ranks: leave those axes out. If every rank is "
        f'to add its own copy, cast it first: lax.pcast(x, {missing}, to="varying").'
    )


def _check_axes(axes: tuple, named: tuple, positional: tuple) -> None:
    bound = _compat.bound_axis_sizes()
    for axis in named:
        if axis not in bound:
            known = ", ".join(repr(name) for name in bound) or "none"
            raise NameError(
                f"ring_psum: unbound axis name {axis!r}; the axes bound here: {known}. Call it under jax.shard_map, "
                "jax.vmap or jax.pmap with an axis of that name."
            )
    if len(set(axes)) != len(axes):
        raise ValueError(f"ring_psum: each axis may be named once, got {axes}")
    if positional and _compat.check_vma():
        raise ValueError(
            f"ring_psum: positional axes {positional} cannot be summed under shard_map(..., check_vma=True). "
            "Use jnp.sum for them, and name the mesh axes only."
        )


def _check_groups(axis_index_groups, named: tuple, positional: tuple) -> tuple[tuple[int, ...], ...] | None:
    if axis_index_groups is None:
        return None
    if positional:
        raise ValueError(
            f"ring_psum: axis_index_groups are for named axes, got the positional axes {positional} as well"
        )
    groups = tuple(tuple(map(operator.index, group)) for group in axis_index_groups)
    bound = _compat.bound_axis_sizes()
    size = 1
    for axis in named:
        size *= bound[axis]
    members = [rank for group in groups for rank in group]
    if len(members) != size or set(members) != set(range(size)) or not all(groups):
        raise ValueError(
            f"ring_psum: axis_index_groups must hold every rank of {named} exactly once, that is 0 to {size - 1}, in "
            f"groups that are not empty; got {[list(group) for group in groups]}"
        )
    return groups
