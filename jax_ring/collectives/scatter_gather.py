"""The halves of an all-reduce: a sum of which each rank keeps a block, and a gather of blocks."""

from functools import partial
from typing import Literal, TypeVar, get_args

import jax

# Bound here because users may replace them in `jax.lax`.
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
    divided_dimension,
    group_size,
    refuse_groups,
    split_axes,
)
from jax_ring.collectives.leaves import as_varying, belongs_to_lax, check_dtype, fused, moved, no_namesake
from jax_ring.collectives.shard_sums import prepare
from jax_ring.lowering.call import REDUCE_SCATTER
from jax_ring.options import Order, check_choice, make_options

T = TypeVar("T")  # a pytree: results keep the structure of the argument

To = Literal["varying", "invarying", "reduced"]


def ring_psum_scatter(
    x: T,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups | None = None,
    tiled: bool = False,
    order: Order = "rank",
    num_shards: int | None = None,
) -> T:
    """Like `ring_psum`, but rank r of p keeps only block r of the sum. A drop-in for `jax.lax.psum_scatter`.

        own_part = ring_psum_scatter(grads, "data", tiled=True)

    The bits are those of `ring_psum`. With `order="ring"` block r is folded over ranks r+1, r+2, ..., r. The transpose
    is `ring_all_gather`.

    Args:
      x: an array, or a pytree of arrays, of any dtype that can be added; with order="tree" also a `ShardSums`, whose
        first dimension is not counted.
      axis_name: a `shard_map`, `vmap` or `pmap` axis, or a sequence of them; no positional axes.
      scatter_dimension: the dimension of `x` to split. It has p elements, or a multiple of p if `tiled`.
      axis_index_groups: a list of lists of ranks, all of one length.
      tiled: whether a block keeps `scatter_dimension`, with 1/p of its elements. Otherwise the dimension is removed.
      order: "rank", "ring", "any" or "tree": the order of the additions, for which `ring_psum` has the definitions.
      num_shards: with order="tree": the number of shards of all ranks, checked against a `ShardSums`; default p.

    Returns:
      A pytree like `x`, with `scatter_dimension` p times smaller, or removed; for a `ShardSums` like its `terms`,
        without their first dimension. With vma tracking it varies over the axis.

    Raises:
      ValueError: if `scatter_dimension` does not exist or does not fit the number of ranks.
      Others: those of `ring_psum`.
    """
    function, options = "ring_psum_scatter", make_options("ring_psum_scatter", order=order)
    axes = _compat.skip_size_one_axes(axes_of(axis_name))
    if axes:
        check_named(function, axes)
    groups = check_groups(function, axis_index_groups, axes) if axes else None
    leaves, options, finish = prepare(function, x, options, num_shards, axes, groups)
    if not axes:
        return finish(leaves)
    has_slots = options.num_shards is not None
    size = group_size(function, axes, groups)

    def operand(leaf):
        check_dtype(function, REDUCE_SCATTER, "sum", leaf)
        return as_varying(function, leaf, axes, mixed=False)

    def divided(leaf):
        return divided_dimension(
            function, "scatter_dimension", scatter_dimension, leaf, size, tiled=tiled, first=int(has_slots)
        )

    def to_lax(leaf):
        return lax_psum_scatter(leaf, axes, scatter_dimension=scatter_dimension, axis_index_groups=groups, tiled=tiled)

    def run(operands, dimension):
        return primitives.ring_psum_scatter_p.bind(
            *operands, axes=axes, axis_index_groups=groups, axis_size=size, dimension=dimension, tiled=tiled,
            options=options,
        )  # fmt: skip

    namesake = no_namesake(f"{function} of a ShardSums") if has_slots else to_lax
    return finish(fused(leaves, partial(belongs_to_lax, axes=axes), namesake, operand, run, divided))


def ring_all_gather(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: To = "varying",
) -> T:
    """Gathers `x` from the ranks of a mapped axis, for every rank. A drop-in for `jax.lax.all_gather`.

        whole = ring_all_gather(own_part, "data", tiled=True)

    Bits are kept, NaNs included. The transpose is `ring_psum_scatter`.

    Args:
      x: an array, or a pytree of arrays, of any dtype. Random keys are sent as their bits.
      axis_name: a `shard_map`, `vmap` or `pmap` axis, or a sequence of them; no positional axes.
      axis_index_groups: a list of lists of ranks, all of one length.
      axis: the dimension of the result along which the ranks' blocks lie.
      tiled: whether to concatenate the blocks along `axis`, a dimension of `x`. Otherwise they are stacked along a new
        dimension.
      to: with vma tracking, "varying", or "invarying" for a result that is invariant over the axis; its transpose is a
        slice, without communication. "reduced" calls `lax.all_gather`. Without vma tracking it is "varying", as in JAX
        0.12.

    Returns:
      A pytree like `x` with a new dimension of p elements, or p times as many along `axis`.

    Raises:
      ValueError: if `axis` does not exist or `to` is no choice.
      Others: those of `ring_psum`.
    """
    function, options = "ring_all_gather", make_options("ring_all_gather")
    check_choice(function, "to", to, get_args(To))
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

    def gathered(leaf):
        return canonical_dimension(function, "axis", axis, leaf.ndim if tiled else leaf.ndim + 1)

    def run(operands, dimension):
        return gather.bind(
            *operands, axes=axes, axis_index_groups=groups, axis_size=size, dimension=dimension, tiled=tiled,
            options=options,
        )  # fmt: skip

    return moved(function, x, axes, namesake, run, gathered)
