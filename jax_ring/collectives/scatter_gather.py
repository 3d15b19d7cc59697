"""The two halves of an all-reduce: a sum of which each rank keeps a block, and a gather of blocks."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

# JAX's own, whoever is put in their place later.
from jax.lax import all_gather as lax_all_gather
from jax.lax import psum_scatter as lax_psum_scatter

from jax_ring import _compat
from jax_ring.collectives import primitives
from jax_ring.collectives.axes import (
    AxisName,
    Groups,
    axes_of,
    canonical_dimension,
    check_groups,
    check_named,
    group_size,
    refuse_groups,
    split_axes,
)
from jax_ring.collectives.leaves import as_varying, belongs_to_lax, fused
from jax_ring.options import make_options


def ring_psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups | None = None,
    tiled: bool = False,
    algorithm: str = "auto",
    order: str = "rank",
) -> Any:
    """Like `ring_psum`, but rank r of p keeps only block r of the sum. A drop-in for `jax.lax.psum_scatter`.

    Each element is the fold over ranks 0, 1, ..., p-1 that `ring_psum` promises, with the same bits; with
    `order="ring"` block r is folded over ranks r+1, r+2, ..., r. The transpose is `ring_all_gather`.

    Args:
      x: an array, or a pytree of arrays, of any dtype that can be added.
      axis_name: the name of a mapped axis, or a sequence of names, as for `ring_psum`; no positional axes.
      scatter_dimension: the dimension of `x` that is split: of p elements, or of a multiple of p if `tiled`.
      axis_index_groups: a list of lists of ranks, all of one length; "rank r of p" is then that in its group.
      tiled: whether a block keeps `scatter_dimension`, with 1/p of its elements. It is removed otherwise.
      algorithm, order: as for `ring_psum`.

    Returns:
      A pytree like `x` with a smaller dimension, or one dimension less. With vma tracking it varies over the axis.

    Raises:
      ValueError: if `scatter_dimension` does not exist or its size does not suit the number of ranks, besides the
        cases of `ring_psum`.
      NameError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError: as `ring_psum`.
    """
    function, options = "ring_psum_scatter", make_options("ring_psum_scatter", algorithm, order)
    axes = _compat.skip_size_one_axes(axes_of(axis_name))
    if not axes:
        return x
    check_named(function, axes)
    groups = check_groups(function, axis_index_groups, axes)
    size = group_size(function, axes, groups)

    def operand(leaf):
        leaf = jnp.asarray(leaf)
        if leaf.dtype == jnp.bool_:
            raise TypeError(f"{function} does not add booleans, got {jax.typeof(leaf)}. Use x.astype(jnp.int32).")
        leaf = as_varying(function, leaf, axes, mixed=False)
        return leaf, canonical_dimension(function, "scatter_dimension", scatter_dimension, leaf.ndim)

    def namesake(leaf):
        return lax_psum_scatter(
            leaf, axes, scatter_dimension=scatter_dimension, axis_index_groups=groups, tiled=tiled
        )  # fmt: skip

    def run(operands, dimension):
        return primitives.ring_psum_scatter_p.bind(
            *operands, axes=axes, axis_index_groups=groups, axis_size=size, dimension=dimension, tiled=tiled,
            options=options,
        )  # fmt: skip

    return fused(x, partial(belongs_to_lax, axes=axes), namesake, operand, run)


def ring_all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    algorithm: str = "auto",
) -> Any:
    """Gathers `x` from the ranks of a mapped axis; every rank gets all of it. A drop-in for `jax.lax.all_gather`.

    The bits of `x` are not changed, NaNs included. The transpose is `ring_psum_scatter`.

    Args:
      x: an array, or a pytree of arrays, of any dtype.
      axis_name: the name of a mapped axis, or a sequence of names, as for `ring_psum`; no positional axes.
      axis_index_groups: a list of lists of ranks, all of one length: ranks then gather within their group.
      axis: the dimension of the result along which the ranks' blocks lie.
      tiled: whether blocks are concatenated along `axis`, which then is a dimension of `x`. They are stacked along a
        new dimension otherwise.
      to: with vma tracking, "varying", or "invarying" for a result that is invariant over the axis, which makes the
        transpose a slice, without communication; "reduced" is left to `lax.all_gather`. Without vma tracking
        "invarying" is "varying", as in JAX 0.12.
      algorithm: as for `ring_psum`.

    Returns:
      A pytree like `x` with an additional dimension of p elements, or p times as many elements along `axis`.

    Raises:
      ValueError: if `axis` does not exist or `to` is none of those listed, besides the cases of `ring_psum`.
      NameError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError: as `ring_psum`.
    """
    function, options = "ring_all_gather", make_options("ring_all_gather", algorithm)
    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(f"{function}: to must be 'varying', 'invarying' or 'reduced', got {to!r}")
    axes = axes_of(axis_name)
    if not axes:
        return x
    check_named(function, axes)
    groups = check_groups(function, axis_index_groups, axes)
    size = group_size(function, axes, groups)
    invariant = to == "invarying" and _compat.check_vma() and not split_axes(axes)[0]
    if invariant:
        refuse_groups(function, groups)
    gather = primitives.ring_all_gather_invariant_p if invariant else primitives.ring_all_gather_p

    def namesake(leaf):
        return lax_all_gather(leaf, axes, axis_index_groups=groups, axis=axis, tiled=tiled, to=to)

    if to == "reduced":
        return jax.tree.map(namesake, x)

    def operand(leaf):
        leaf = as_varying(function, jnp.asarray(leaf), axes)
        return leaf, canonical_dimension(function, "axis", axis, leaf.ndim if tiled else leaf.ndim + 1)

    def run(operands, dimension):
        return gather.bind(
            *operands, axes=axes, axis_index_groups=groups, axis_size=size, dimension=dimension, tiled=tiled,
            options=options,
        )  # fmt: skip

    return fused(x, partial(belongs_to_lax, axes=axes), namesake, operand, run)
