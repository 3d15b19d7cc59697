"""Reductions: sum, mean, maximum and minimum for every rank, and the sum for one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

# Bound here because users may replace them: `jax.lax.psum = ring_psum` is one way to use this library.
from jax.lax import pmax as lax_pmax
from jax.lax import pmin as lax_pmin
from jax.lax import psum as lax_psum

from jax_ring import _compat
from jax_ring.collectives import primitives
from jax_ring.collectives.axes import (
    AxisName,
    Groups,
    axes_of,
    check_named,
    check_reduction,
    check_root,
    refuse_groups,
    refuse_mixed_axes,
    split_axes,
    warn_of_equal_values,
)
from jax_ring.collectives.leaves import as_varying, belongs_to_lax, check_dtype, counted, fused, no_namesake
from jax_ring.collectives.primitives import PMAX, PMIN, PSUM, Pair
from jax_ring.collectives.shard_sums import ShardSums, prepare
from jax_ring.lowering.call import ALL_REDUCE
from jax_ring.options import Algorithm, Options, Order, make_options

T = TypeVar("T")  # a pytree: results keep the structure of the argument


def ring_psum(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups | None = None,
    algorithm: Algorithm = "auto",
    order: Order = "rank",
    num_shards: int | None = None,
) -> T:
    """Sums `x` over the ranks of a mapped axis; every rank gets the sum. A drop-in for `jax.lax.psum`.

        total = jax.shard_map(lambda x: ring_psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())(x)

    The result is the fold `((x_0 + x_1) + x_2) + ...` over ranks 0 to p-1, with the same bits on all ranks. Floats of
    16 bits and fewer are added in float32, other types in themselves, and rounded once. All leaves of one dtype are one
    custom call. Where XLA serves the call (docs/sharp_bits.md), and over a vmap axis, XLA chooses the order, unless it
    is "tree".

    Args:
      x: an array, or a pytree of arrays, of any shape and any dtype that `lax.psum` takes. Booleans are summed as
        int32. A constant is multiplied by the size of the group. With order="tree" also a `ShardSums`.
      axis_name: a `shard_map`, `vmap` or `pmap` axis, or a sequence of them. With several, rank r is the row-major
        index over them in the order given. Without vma tracking, integers name positional axes of `x`, which each
        device sums first.
      axis_index_groups: a list of lists that partition the ranks; sums are taken within each group. Sizes may differ.
        Only under `shard_map(..., check_vma=False)` and `pmap`.
      algorithm: "auto", "one_shot", "two_shot" or "ring": how the engine moves the data, never the result. One process
        of CPU devices has only one.
      order: "rank" is the fold above. "ring" is that of a ring reduce-scatter
        (docs/how_it_works.md#another-order-for-rings); with algorithm "auto" or "ring". "any" leaves it to the engine:
        all ranks get the same bits, which may differ elsewhere (docs/algorithms.md#any-order). "tree" adds along a
        fixed binary tree over V shards: the same bits for any number of ranks that divides V
        (docs/any_number_of_devices.md); not with algorithm "ring".
      num_shards: with order="tree": the number of shards V, checked against a `ShardSums`; default p.

    Returns:
      A pytree like `x`; for a `ShardSums` like its `terms`, without their first dimension and in its `dtypes`. With vma
        tracking (`check_vma=True`) the sums are invariant over the axis.

    Raises:
      NameError: if no enclosing transformation binds an axis of that name.
      ValueError: if `axis_index_groups` do not partition the ranks, an axis is named twice, `x` varies over only some
        of the axes, or `algorithm` and `order` are unknown or do not go together. With order="tree" also if p does not
        divide V, V is not `num_shards`, or a `ShardSums` meets groups of different sizes, positional axes or another
        order.
      NotImplementedError: for `axis_index_groups` with vma tracking, or over a `vmap` axis; for order="tree" over a
        `vmap` axis and others in one call.
      TypeError: if a leaf is not a valid JAX type.
      jax.errors.JaxRuntimeError: at run time, if a rank does not arrive within `JAX_RING_TIMEOUT_S` seconds (60).
        `jax.Array.block_until_ready` raises it as a ValueError.
    """
    return _psum("ring_psum", x, axis_name, axis_index_groups, make_options("ring_psum", algorithm, order), num_shards)


def ring_pmean(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups | None = None,
    algorithm: Algorithm = "auto",
    order: Order = "rank",
    num_shards: int | None = None,
) -> T:
    """The mean of `x` over the ranks of a mapped axis: `ring_psum`, divided. A drop-in for `jax.lax.pmean`.

        loss = ring_pmean(loss, "data")  # under shard_map

    Arguments are those of `ring_psum`. Means of integers and booleans are floats, but integers are added in their own
    dtype, as in `lax.pmean`, and may wrap around. Integers of 2 bits, which `lax.pmean` refuses, are added as int32.
    Each group divides by its own size (`lax.pmean`: by the first's), a `ShardSums` by its number of shards.

    Warns:
      UserWarning: if JAX knows that `x` is already the same on all ranks, like a gradient that it has summed.
    """
    options = make_options("ring_pmean", algorithm, order)
    if isinstance(x, ShardSums):
        total = _psum("ring_pmean", x, axis_name, axis_index_groups, options, num_shards)
        return jax.tree.map(lambda leaf: _averageable(leaf) / x.num_shards, total)
    total = _psum("ring_pmean", jax.tree.map(_averageable, x), axis_name, axis_index_groups, options, num_shards)
    warn_of_equal_values("ring_pmean", x, axis_name)
    count = _psum("ring_pmean", 1, axis_name, axis_index_groups, options)
    return jax.tree.map(partial(_divided, count=count), total)


def ring_pmax(
    x: T, axis_name: AxisName, *, axis_index_groups: Groups | None = None, algorithm: Algorithm = "auto"
) -> T:
    """The maximum of `x` over the ranks of a mapped axis, by element. A drop-in for `jax.lax.pmax`.

        highest = ring_pmax(lax.stop_gradient(logits).max(), "model")  # under shard_map

    Arguments are those of `ring_psum`, but booleans stay booleans, and `x` may vary over only some of the axes. On CPU
    devices `algorithm` matters between processes alone. A NaN on any rank makes the result NaN, and +0 is larger than
    -0, as in `jnp.maximum`; XLA's all-reduce on CPU devices drops NaNs. It has no derivative, like `lax.pmax`: stop its
    operand's gradient.

    Raises:
      TypeError: for complex numbers, which have no order.
    """
    return _extremum("max", PMAX, lax_pmax, x, axis_name, axis_index_groups, algorithm)


def ring_pmin(
    x: T, axis_name: AxisName, *, axis_index_groups: Groups | None = None, algorithm: Algorithm = "auto"
) -> T:
    """The minimum of `x` over the ranks of a mapped axis, by element. A drop-in for `jax.lax.pmin`.

        shortest = ring_pmin(length, "data")  # under shard_map

    Arguments are those of `ring_psum`, but booleans stay booleans, and `x` may vary over only some of the axes. A NaN
    on any rank makes the result NaN, and -0 is smaller than +0. It has no derivative: stop its operand's gradient.

    Raises:
      TypeError: for complex numbers, which have no order.
    """
    return _extremum("min", PMIN, lax_pmin, x, axis_name, axis_index_groups, algorithm)


def ring_reduce(
    x: T,
    axis_name: AxisName,
    *,
    root: int = 0,
    algorithm: Algorithm = "auto",
    order: Order = "rank",
    num_shards: int | None = None,
) -> T:
    """Sums `x` over the ranks of a mapped axis, for rank `root` only; the others get zeros.

        loss_on_rank_0 = ring_reduce(loss, "data", root=0)

    The bits are those of `ring_psum`. The transpose is `ring_broadcast`.

    Args:
      x: an array, or a pytree of arrays, of any dtype that can be added; with order="tree" also a `ShardSums`. Booleans
        are summed as int32.
      axis_name: a `shard_map`, `vmap` or `pmap` axis, or a sequence of them; no positional axes.
      root: the rank that gets the sum, a Python integer, the same on all ranks.
      algorithm: "auto", "one_shot", "two_shot" or "ring": how the engine moves the data, never the result.
      order: "rank", "ring", "any" or "tree": the order of the additions, for which `ring_psum` has the definitions.
      num_shards: with order="tree": the number of shards of all ranks, checked against a `ShardSums`; default p.

    Returns:
      A pytree like `x`, or like the `terms` of a `ShardSums` without their first dimension. With vma tracking it varies
        over the axis.

    Raises:
      ValueError: if there is no rank `root`.
      Others: those of `ring_psum`.
    """
    function, options = "ring_reduce", make_options("ring_reduce", algorithm, order)
    axes = axes_of(axis_name)
    check_named(function, axes)
    leaves, options, finish = prepare(function, x, options, num_shards, axes, None)
    if not axes:
        return finish(leaves)
    root = check_root(function, axes, root)

    def operand(leaf):
        return as_varying(function, counted(leaf), axes, mixed=False)

    def run(operands):
        return primitives.ring_reduce_p.bind(*operands, axes=axes, axis_index_groups=None, root=root, options=options)

    return finish(fused(leaves, partial(belongs_to_lax, axes=axes), no_namesake(function), operand, run))


# ---- All-reduces ----------------------------------------------------------------------------------------------------


def _averageable(leaf):
    """A leaf of a mean. JAX has no float type for integers of 2 bits."""
    return leaf.astype(jnp.int32) if getattr(leaf, "dtype", None) in (jnp.int2, jnp.uint2) else leaf


def _divided(total, count):
    if not isinstance(count, jax.Array):
        return total / count
    # The groups differ in size. Two arrays would promote differently from an array and a Python number.
    total = total / 1
    return total / count.astype(total.dtype)


def _psum(
    function: str,
    x: Any,
    axis_name: AxisName,
    axis_index_groups: Groups | None,
    options: Options,
    num_shards: int | None = None,
):
    axes, named, positional, groups = check_reduction(function, axis_name, axis_index_groups)
    if positional and isinstance(x, ShardSums):
        raise ValueError(
            f"{function}: a ShardSums is summed over named axes, got the positional axes {positional}. Sum them before "
            "ShardSums.of."
        )
    leaves, options, finish = prepare(function, x, options, num_shards, named, groups)
    if not axes:
        return finish(leaves)
    has_slots = options.num_shards is not None
    uneven = groups is not None and len({len(group) for group in groups}) > 1

    def left_to_lax(leaf):
        # lax.psum multiplies a constant by the size of the first group. That is wrong for groups of other sizes and for
        # a rank with several terms.
        is_constant = not (isinstance(leaf, Tracer) or uneven or has_slots)
        return is_constant or belongs_to_lax(leaf, named)

    def to_lax(leaf):
        return lax_psum(leaf, axes, axis_index_groups=groups)

    def operand(leaf):
        leaf = counted(lax_psum(leaf, positional) if positional else leaf)
        return as_varying(function, leaf, named, mixed=False)

    def run(operands):
        return _all_reduce(function, PSUM, operands, named, groups, options)

    namesake = no_namesake(f"{function} of a ShardSums") if has_slots else to_lax
    return finish(fused(leaves, left_to_lax, namesake, operand, run))


def _extremum(
    op: str, pair: Pair, namesake: Callable, x, axis_name: AxisName, axis_index_groups: Groups | None, algorithm
):
    function = f"ring_p{op}"
    options = make_options(function, algorithm)
    axes, named, positional, groups = check_reduction(function, axis_name, axis_index_groups)
    if not axes:
        return x

    def operand(leaf):
        check_dtype(function, ALL_REDUCE, op, leaf)
        return as_varying(function, namesake(leaf, positional) if positional else leaf, named)

    def run(operands):
        return _all_reduce(function, pair, operands, named, groups, options)

    to_lax = partial(namesake, axis_name=axes, axis_index_groups=groups)
    return fused(x, partial(belongs_to_lax, axes=named), to_lax, operand, run)


def _all_reduce(function: str, pair: Pair, operands: list, axes: tuple, groups, options: Options) -> Sequence:
    """Binds the plain primitive over vmap axes, and that of the vma mode over mesh axes."""
    plain, invariant = pair
    if not axes:
        return operands
    if not _compat.check_vma():
        return plain.bind(*operands, axes=axes, axis_index_groups=groups, options=options)
    refuse_groups(function, groups)
    batch_axes, mesh_axes = split_axes(axes)
    if batch_axes and mesh_axes and options.order == "tree":
        refuse_mixed_axes(function, axes, batch_axes)
    if batch_axes:
        operands = plain.bind(*operands, axes=batch_axes, axis_index_groups=None, options=options)
    if mesh_axes:
        operands = invariant.bind(*operands, axes=mesh_axes, axis_index_groups=None, options=options)
    return operands
