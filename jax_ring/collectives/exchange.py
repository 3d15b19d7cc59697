"""Collectives that send blocks or whole values from rank to rank: all-to-all, permutations and broadcasts."""

from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

# Bound here because users may replace them in `jax.lax`.
from jax.lax import all_to_all as lax_all_to_all
from jax.lax import ppermute as lax_ppermute

from jax_ring import _compat
from jax_ring.collectives import primitives
from jax_ring.collectives.axes import (
    AxisName,
    Groups,
    axes_of,
    canonical_dimension,
    check_groups,
    check_named,
    check_root,
    divided_dimension,
    group_size,
    num_ranks,
    split_axes,
)
from jax_ring.collectives.leaves import moved, no_namesake
from jax_ring.lowering.xla.bitcasts import from_bits, to_bits
from jax_ring.options import integer, make_options

T = TypeVar("T")  # a pytree: results keep the structure of the argument


def ring_all_to_all(
    x: T,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups | None = None,
    tiled: bool = False,
) -> T:
    """Splits `x` into a block for each rank of a mapped axis, and sends each rank its blocks.

        heads = ring_all_to_all(x, "data", split_axis=2, concat_axis=1, tiled=True)

    A drop-in for `jax.lax.all_to_all`. It keeps the bits of `x`, NaNs included. The transpose is the call with
    `split_axis` and `concat_axis` exchanged.

    Args:
      x: an array, or a pytree of arrays, of any dtype. Random keys are sent as their bits.
      axis_name: a `shard_map`, `vmap` or `pmap` axis, or a sequence of them; no positional axes.
      split_axis: the dimension of `x` to split. It has p elements, or a multiple of p if `tiled`.
      concat_axis: the dimension of the result along which the blocks lie, in rank order.
      axis_index_groups: a list of lists of ranks, all of one length; p then counts within the group.
      tiled: whether `split_axis` is kept, with 1/p of its elements, and the blocks are concatenated along
        `concat_axis`. Otherwise `split_axis` is removed, and the blocks are stacked along a new dimension.

    Returns:
      A pytree like `x`, with p times as many elements along `concat_axis` and 1/p along `split_axis` if `tiled`;
        otherwise of the shape `np.insert(np.delete(x.shape, split_axis), concat_axis, p)`. With vma tracking it varies
        over the axis.

    Raises:
      ValueError: if a dimension does not exist or does not fit the number of ranks.
      Others: those of `ring_psum`.
    """
    function, options = "ring_all_to_all", make_options("ring_all_to_all")
    axes = axes_of(axis_name)
    check_named(function, axes)
    groups = check_groups(function, axis_index_groups, axes)
    size = group_size(function, axes, groups)

    def dimensions(leaf):
        split = divided_dimension(function, "split_axis", split_axis, leaf, size, tiled=tiled)
        concat = canonical_dimension(function, "concat_axis", concat_axis, leaf.ndim)
        return split, concat

    def to_lax(leaf):
        return lax_all_to_all(leaf, axes, split_axis, concat_axis, axis_index_groups=groups, tiled=tiled)

    def run(operands, at):
        split, concat = at
        moves = not tiled and split != concat
        if moves:
            # The position of the arriving blocks, counted without the split dimension.
            concat += split < concat
            operands = [lax.expand_dims(x, [concat]) for x in operands]
            split += concat <= split
        if axes:
            operands = primitives.ring_all_to_all_p.bind(
                *operands, axes=axes, axis_index_groups=groups, axis_size=size, dimension=split,
                concat_dimension=concat, tiled=True, options=options,
            )  # fmt: skip
        return [lax.squeeze(x, [split]) for x in operands] if moves else operands

    return moved(function, x, axes, to_lax, run, dimensions)


def ring_pswapaxes(x: T, axis_name: AxisName, axis: int, *, axis_index_groups: Groups | None = None) -> T:
    """Swaps a mapped axis with dimension `axis` of `x`, of the same size. A drop-in for `jax.lax.pswapaxes`.

        columns = ring_pswapaxes(rows, "data", 0)  # on 8 ranks: rows of shape (8, N), row i becomes rank i's

    Short for `ring_all_to_all(x, axis_name, axis, axis)`.
    """
    return ring_all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def ring_ppermute(x: T, axis_name: AxisName, perm: Iterable[tuple[int, int]]) -> T:
    """Sends `x` from rank to rank of a mapped axis. A drop-in for `jax.lax.ppermute`.

        from_the_left = ring_ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])

    It keeps the bits of `x`, NaNs included. The transpose is the inverse permutation.

    Args:
      x: an array, or a pytree of arrays, of any dtype. Random keys are sent as their bits.
      axis_name: a `shard_map`, `vmap` or `pmap` axis, or a sequence of them; no positional axes.
      perm: pairs (source, receiver) of ranks. Sources are unique, and so are receivers. Other ranks get zeros. Negative
        ranks count from the end. Over several axes ranks are counted as in `jax.lax`: JAX 0.10 counts in the mesh's
        order of the axes, and later ones refuse another.

    Returns:
      A pytree like `x`. With vma tracking it varies over the axis.

    Raises:
      ValueError: if sources or receivers repeat.
      IndexError: if there is no such rank.
      RuntimeError: if several axes are not in the mesh's order, unless JAX's option allows it.
      TypeError: if `perm` does not consist of pairs of integers. Others: those of `ring_psum`.
    """
    function, options = "ring_ppermute", make_options("ring_ppermute")
    axes = axes_of(axis_name)
    check_named(function, axes)
    axes = _compat.axes_of_permutation(axes, jax.sharding.get_abstract_mesh())
    pairs = _check_permutation(function, perm, num_ranks(axes))

    def to_lax(leaf):
        return lax_ppermute(leaf, axes, pairs)

    def run(operands):
        if not axes:
            return operands if pairs else [jnp.zeros_like(x) for x in operands]
        return primitives.ring_ppermute_p.bind(
            *operands, axes=axes, axis_index_groups=None, perm=pairs, options=options
        )

    return moved(function, x, axes, to_lax, run)


def ring_pshuffle(x: T, axis_name: AxisName, perm: Iterable[int]) -> T:
    """Sends `x` from rank `perm[i]` of a mapped axis to rank i. A drop-in for `jax.lax.pshuffle`.

        from_the_left = ring_pshuffle(x, "data", [7, 0, 1, 2, 3, 4, 5, 6])  # on 8 ranks

    Short for `ring_ppermute(x, axis_name, list(zip(perm, range(p))))`; a ValueError if `perm` is no permutation.
    """
    perm = list(perm)
    if set(perm) != set(range(len(perm))):
        raise ValueError(f"ring_pshuffle: perm must hold every rank from 0 to {len(perm) - 1} once, got {perm}")
    return ring_ppermute(x, axis_name, list(zip(perm, range(len(perm)), strict=True)))


def ring_broadcast(x: T, axis_name: AxisName, *, root: int = 0) -> T:
    """Sends `x` from rank `root` to every rank of a mapped axis.

        params = ring_broadcast(params, "data", root=0)

    Bits are kept, NaNs included. The transpose is `ring_reduce`.

    Args:
      x: an array, or a pytree of arrays, of any dtype. Random keys are sent as their bits.
      axis_name: a `shard_map`, `vmap` or `pmap` axis, or a sequence of them; no positional axes.
      root: the sender, a Python integer, the same on all ranks.

    Returns:
      A pytree like `x`. With vma tracking it is invariant over the axis.

    Raises:
      ValueError: if there is no rank `root`.
      Others: those of `ring_psum`.
    """
    function, options = "ring_broadcast", make_options("ring_broadcast")
    axes = axes_of(axis_name)
    if not axes:
        return x
    check_named(function, axes)
    root = check_root(function, axes, root)

    def run(operands):
        # vma tracks mesh axes only.
        tracked = _compat.check_vma() and not split_axes(axes)[0]
        broadcast = primitives.ring_broadcast_invariant_p if tracked else primitives.ring_broadcast_p
        return broadcast.bind(*operands, axes=axes, axis_index_groups=None, root=root, options=options)

    return moved(function, x, axes, no_namesake(function), run)


def ring_pbroadcast(x: T, axis_name: AxisName, source: int | jax.Array) -> T:
    """Sends `x` from rank `source` to every rank of a mapped axis. A drop-in for `jax.lax.pbroadcast`.

        params = ring_pbroadcast(params, "data", source=0)  # under shard_map

    Bits are kept, NaNs included. The type is that of `lax.pbroadcast`: JAX does not know that results are the same on
    all ranks; `ring_broadcast` tells it.

    Args:
      x: an array, or a pytree of arrays, of any dtype. Random keys are sent as their bits.
      axis_name: a `shard_map`, `vmap` or `pmap` axis, or a sequence of them; no positional axes.
      source: the sender, the same on all ranks: a Python integer, or an integer array of no dimensions. With an array
        the call is a sum with zeros of the other ranks.

    Returns:
      A pytree like `x`. With vma tracking it varies over the axis.

    Raises:
      ValueError: if there is no rank `source`, or it has dimensions. A rank in an array is not checked: results are
        zeros if it does not exist.
      Others: those of `ring_psum`.
    """
    function, options = "ring_pbroadcast", make_options("ring_pbroadcast")
    axes = axes_of(axis_name)
    check_named(function, axes)
    if not isinstance(source, jax.Array):
        source = check_root(function, axes, source, "source")
    elif source.shape:
        raise ValueError(f"{function}: source must have no dimensions, got {jax.typeof(source)}")
    elif not jnp.issubdtype(source.dtype, jnp.integer):
        raise TypeError(f"{function}: source must be an integer, got {jax.typeof(source)}")

    def run(operands):
        if not axes:
            return operands
        if isinstance(source, jax.Array):
            return _from_dynamic_source(source, operands, axes, options)
        return primitives.ring_broadcast_p.bind(
            *operands, axes=axes, axis_index_groups=None, root=source, options=options
        )

    return moved(function, x, axes, no_namesake(function), run)


def _check_permutation(function: str, perm: Iterable[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    """The pairs (source, receiver), from 0 to p-1. Raises unless both are unique."""
    try:
        perm = [(source, receiver) for source, receiver in perm]
    except (TypeError, ValueError) as error:  # ValueError: not exactly two elements, as in `lax`
        raise type(error)(f"{function}: perm must consist of pairs (source, receiver), got {perm!r}") from None
    pairs = tuple((integer(function, "a rank in perm", i), integer(function, "a rank in perm", j)) for i, j in perm)
    if beyond := sorted({rank for pair in pairs for rank in pair if not -size <= rank < size}):
        raise IndexError(
            f"{function}: perm has the ranks {beyond}, but there are the ranks 0 to {size - 1}, also counted from the "
            f"end as -1 to {-size}: {perm}"
        )
    pairs = tuple((source % size, receiver % size) for source, receiver in pairs)
    for i, name in enumerate(("source", "receiver")):
        ranks = [pair[i] for pair in pairs]
        if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
            raise ValueError(
                f"{function}: a rank may be the {name} of one pair only, but perm has {twice} in several: {perm}"
            )
    return pairs


def _from_dynamic_source(source: jax.Array, operands: list, axes: tuple, options) -> list:
    """The operands of rank `source`: a sum of bits with zeros of the others, and so unchanged."""

    def total(is_source, terms):
        masked = [jnp.where(is_source, x, jnp.zeros_like(x)) for x in terms]
        return primitives.ring_psum_p.bind(*masked, axes=axes, axis_index_groups=None, options=options)

    @jax.custom_jvp
    def send(is_source, *operands):
        dtype = operands[0].dtype
        if jnp.issubdtype(dtype, jnp.complexfloating):
            parts = send(is_source, *(part for x in operands for part in (x.real, x.imag)))
            return [lax.complex(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return [from_bits(bits, dtype) for bits in total(is_source, [to_bits(x) for x in operands])]

    # An operand: a rule that closes over it would keep it alive beyond a jax.checkpoint.
    send.defjvp(lambda primals, tangents: (send(*primals), total(primals[0], tangents[1:])))
    return send(lax.axis_index(axes) == source, *operands)
