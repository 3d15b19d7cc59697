"""Collectives with a root: a sum for one rank, and a broadcast from one."""

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat
from jax_ring.collectives import primitives
from jax_ring.collectives.axes import AxisName, axes_of, check_named, check_root, split_axes
from jax_ring.collectives.leaves import as_varying, belongs_to_lax, counted, fused, moved, no_namesake
from jax_ring.collectives.shard_sums import prepare
from jax_ring.lowering.xla.bitcasts import from_bits, to_bits
from jax_ring.options import Algorithm, Order, make_options

T = TypeVar("T")  # a pytree: results keep the structure of the argument


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
