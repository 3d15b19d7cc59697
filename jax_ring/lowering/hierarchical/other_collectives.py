"""The collectives across hosts but for the sums that all ranks get: jax_ring within each host, XLA between hosts.

What a rank moves between hosts is at most its own operand, and 1/m of a message that all m ranks of its host need. It
moves as integers of its bits, so that XLA does not convert it.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring.lowering.custom_call import layout
from jax_ring.lowering.hierarchical import all_reduce, ranks_by_host, tree_sum, xla_ops
from jax_ring.lowering.hierarchical.inter_host import fold, types_of
from jax_ring.lowering.hierarchical.ranks_by_host import reorder
from jax_ring.lowering.hierarchical.steps import TwoLevelCall, Values
from jax_ring.lowering.trees import adds_along_tree
from jax_ring.lowering.xla import bitcasts


def emit(ctx, operands, *, kind: str, groups, service, call: str, options, **params) -> list:
    """Emits a call whose groups cross hosts, and returns its results."""
    split = TwoLevelCall(ctx, groups, service, call, options)
    if kind in ("all_reduce", "reduce") or adds_along_tree(kind, options):
        return _sum(split, operands, kind=kind, **params)
    params.pop("op")
    return list(_EMITTERS[kind](split, split.operands(operands), **params).values)


def _sum(call: TwoLevelCall, operands, *, kind: str, root: int | None = None, **params) -> list:
    """All sums of whole messages, also those that only the root gets, and all sums along the tree."""
    step: Callable = all_reduce.emit
    if adds_along_tree(kind, call.options):
        step = partial(tree_sum.emit, groups=call.groups)
    results = step(
        call.ctx, operands, kind="all_reduce" if kind == "reduce" else kind, service=call.service, call=call.call,
        options=call.options, **params,
    )  # fmt: skip
    if root is None:
        return results
    is_root = ranks_by_host.rank_of(call.groups) == root
    totals = Values(results, call.ctx.avals_out[0].dtype)

    def on_root(position, *totals):
        for x in totals:
            kept = _where(is_root, position, bitcasts.to_words(x.reshape(-1)))
            yield bitcasts.from_words(kept, x.dtype).reshape(x.shape)

    return list(call.run(on_root, totals, totals.dtype).values)


# ---- Blocks ---------------------------------------------------------------------------------------------------------


def _all_gather(call: TwoLevelCall, operands: Values, *, axis_size: int, dimension: int, tiled: bool) -> Values:
    """Each rank gathers the operands of its counterparts on all hosts, and the ranks of a host gather these."""
    dtype = operands.dtype
    orders, group = ranks_by_host.orders_of(call.groups, call.levels), ranks_by_host.group_of(call.levels)
    values = call.each(lambda x: bitcasts.to_words(x.reshape(-1)), operands, bitcasts.words_dtype(dtype))
    values, _ = call.inter(partial(xla_ops.all_gather, call.levels.inter), values, added=(call.num_hosts,))
    gathered = [_aval(aval, call.num_ranks, *aval.shape) for aval in values.avals]
    values = call.intra("all_gather", values, gathered)

    def finish(position, *gathered):
        for x, aval in zip(gathered, operands.avals, strict=True):
            blocks = reorder(x.reshape(axis_size, x.shape[-1]), orders.from_places, group, position)
            blocks = bitcasts.from_words(blocks, dtype).reshape(axis_size, *aval.shape)
            yield layout.blocks_at(blocks, dimension=dimension, tiled=tiled)

    return call.run(finish, values, dtype)


def _all_to_all(
    call: TwoLevelCall, operands: Values, *, axis_size: int, dimension: int, tiled: bool, concat_dimension=None
) -> Values:
    """Each rank gets from its host the blocks for its counterparts on all hosts, and exchanges these with them."""
    dtype, num_ranks, num_hosts = operands.dtype, call.num_ranks, call.num_hosts
    orders, group = ranks_by_host.orders_of(call.groups, call.levels), ranks_by_host.group_of(call.levels)
    first: Callable = partial(layout.blocks_first, axis_size=axis_size, dimension=dimension, tiled=tiled)
    shapes = [
        layout.shape_of_blocks(aval.shape, axis_size=axis_size, dimension=dimension, tiled=tiled)
        for aval in operands.avals
    ]

    def arrange(position, *xs):
        for x in xs:
            blocks = bitcasts.to_words(first(x).reshape(axis_size, _block_size(x, axis_size)))
            blocks = reorder(blocks, orders.by_place, group, position)
            yield blocks.reshape(num_ranks, num_hosts * blocks.shape[1])

    def by_host(x):
        size = x.shape[1] // num_hosts
        return x.reshape(num_ranks, num_hosts, size).swapaxes(0, 1).reshape(num_hosts, num_ranks * size)

    def finish(position, *received):
        for x, shape in zip(received, shapes, strict=True):
            blocks = reorder(x.reshape(axis_size, x.shape[1] // num_ranks), orders.from_hosts, group, position)
            blocks = bitcasts.from_words(blocks, dtype).reshape(shape)
            at = dimension if concat_dimension is None else concat_dimension
            yield layout.blocks_at(blocks, dimension=at, tiled=tiled)

    values = call.run(arrange, operands, bitcasts.words_dtype(dtype))
    values = call.intra("all_to_all", values, values.avals)
    values = call.each(by_host, values, values.dtype)
    values, _ = call.inter(partial(xla_ops.all_to_all, call.levels.inter), values)
    return call.run(finish, values, dtype)


def _reduce_scatter(call: TwoLevelCall, operands: Values, *, axis_size: int, dimension: int, tiled: bool) -> Values:
    """Each rank gets the host's sums of the blocks of its counterparts on all hosts, and exchanges these with them.

    It adds what it gets in the order of the hosts, and rounds once.
    """
    dtype, num_ranks, num_hosts = operands.dtype, call.num_ranks, call.num_hosts
    wide = types_of("sum", dtype).scattered
    orders, group = ranks_by_host.orders_of(call.groups, call.levels), ranks_by_host.group_of(call.levels)
    first: Callable = partial(layout.blocks_first, axis_size=axis_size, dimension=dimension, tiled=tiled)

    def arrange(position, *xs):
        for x in xs:
            size = _block_size(x, axis_size)
            blocks = reorder(first(x).reshape(axis_size, size), orders.by_place, group, position)
            yield blocks.astype(wide).reshape(num_ranks, num_hosts * size)

    def finish(_, *received):
        for x, aval in zip(received, call.ctx.avals_out, strict=True):
            yield fold(bitcasts.from_words(x, wide)).astype(dtype).reshape(aval.shape)

    values = call.run(arrange, operands, wide)
    values = call.intra("reduce_scatter", values, [_aval(aval, aval.shape[1]) for aval in values.avals])
    values = call.each(
        lambda x: bitcasts.to_words(x.reshape(num_hosts, x.size // num_hosts)), values, bitcasts.words_dtype(wide)
    )
    values, _ = call.inter(partial(xla_ops.all_to_all, call.levels.inter), values)
    return call.run(finish, values, dtype)


def _block_size(x: jax.Array, num_blocks: int) -> int:
    return x.size // num_blocks


def _aval(like, *shape: int):
    return jax.core.ShapedArray(shape, like.dtype)


# ---- Roots ----------------------------------------------------------------------------------------------------------


def _broadcast(call: TwoLevelCall, operands: Values, *, root: int) -> Values:
    """An all-reduce to which all ranks but the root contribute zeros."""
    dtype, avals = operands.dtype, operands.avals
    is_root = ranks_by_host.rank_of(call.groups) == root
    values = call.run(
        lambda position, *xs: [_where(is_root, position, bitcasts.packed(x)) for x in xs], operands, np.uint32
    )
    ctx = call.ctx.replace(avals_in=values.avals, avals_out=values.avals)
    totals = all_reduce.emit(
        ctx, values.values, kind="all_reduce", op="sum", service=call.service, call=call.call, options=call.options
    )

    def finish(_, *totals):
        return [bitcasts.unpacked(x, aval.shape, dtype) for x, aval in zip(totals, avals, strict=True)]

    return call.run(finish, Values(totals, values.dtype), dtype)


def _where(table: np.ndarray, position: jax.Array, bits: jax.Array) -> jax.Array:
    """Integers on the mesh positions for which the table says so, and zeros elsewhere."""
    return jnp.where(jnp.asarray(table)[position], bits, jnp.zeros_like(bits))


# ---- Permutations ---------------------------------------------------------------------------------------------------


def _permute(call: TwoLevelCall, operands: Values, *, perm) -> Values:
    """The pairs within hosts, then those that cross hosts. Each rank takes what is for it."""
    dtype, avals = operands.dtype, operands.avals
    split = ranks_by_host.split_permutation(call.groups, call.levels, perm)
    values = call.each(lambda x: bitcasts.to_words(x.reshape(-1)), operands, bitcasts.words_dtype(dtype))
    results = [call.intra("permute", values, values.avals, perm=pairs) for pairs in split.intra]
    if split.inter:
        crossed, results = call.inter(partial(xla_ops.permute, split.inter), values, after=results)
        results.append(crossed)

    def finish(position, *received):
        by_operand = [received[i :: len(avals)] for i in range(len(avals))]
        for choices, aval in zip(by_operand, avals, strict=True):
            if not split.inter:
                choices = (*choices, jnp.zeros_like(choices[0]))
            which = jnp.asarray(split.which)[position]
            chosen = lax.select_n(which, *choices) if len(choices) > 1 else choices[0]
            yield bitcasts.from_words(chosen, dtype).reshape(aval.shape)

    return call.run(finish, Values([x for each in results for x in each.values], values.dtype), dtype)


_EMITTERS: dict[str, Callable] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "permute": _permute,
}
