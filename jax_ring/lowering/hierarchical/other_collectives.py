"""Collectives across hosts other than sums for all: jax_ring within hosts, XLA between them.

A rank sends at most its operand, and 1/m of a message for all m ranks of its host. Integers of its bits move, which XLA
does not convert.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat
from jax_ring.lowering import trees
from jax_ring.lowering.call import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PERMUTE,
    REDUCE,
    REDUCE_SCATTER,
    CallSpec,
    Kind,
)
from jax_ring.lowering.custom_call.blocks import blocks_at, blocks_first, shape_of_blocks
from jax_ring.lowering.hierarchical import all_reduce, crossing, ranks_by_host, tree_sum
from jax_ring.lowering.hierarchical.crossing import fold
from jax_ring.lowering.hierarchical.two_levels import Steps
from jax_ring.lowering.topology import rank_table
from jax_ring.lowering.xla import bitcasts
from jax_ring.lowering.xla.ops import aval_of, aval_of_value


def emit(call: CallSpec, ctx: _compat.LoweringContext, operands: Sequence) -> Sequence:
    if call.kind is REDUCE or call.kind is ALL_REDUCE:
        return _sum(call, ctx, operands)
    if call.adds_along_tree:
        return tree_sum.emit(call, ctx, operands)
    return _EMITTERS[call.kind](Steps(ctx, call), operands)


def _sum(call: CallSpec, ctx, operands: Sequence) -> Sequence:
    """Sums of whole messages, for all or for the root."""
    total = call._replace(kind=ALL_REDUCE)
    results = (tree_sum if call.adds_along_tree else all_reduce).emit(total, ctx, operands)
    if call.kind is ALL_REDUCE:
        return results

    def on_root(position, *totals):
        for x in totals:
            kept = _on_root(call, position, bitcasts.to_words(x.reshape(-1)))
            yield bitcasts.from_words(kept, x.dtype).reshape(x.shape)

    return Steps(ctx, call).run(on_root, results)


# ---- Blocks ---------------------------------------------------------------------------------------------------------


def _all_gather(steps: Steps, operands: Sequence) -> list:
    """Ranks gather their counterparts' operands from all hosts, then a host's ranks gather these."""
    call, avals = steps.call, steps.ctx.avals_in
    orders = ranks_by_host.orders_of(call.groups, call.levels)
    values = steps.each(lambda x: bitcasts.to_words(x.reshape(-1)), operands)
    values = steps.inter(partial(crossing.all_gather, call.levels.inter), values)
    gathered = [aval_of(aval.dtype, call.levels.num_ranks, *aval.shape) for aval in map(aval_of_value, values)]
    values = steps.intra(ALL_GATHER, values, gathered)

    def finish(position, *gathered):
        for x, aval in zip(gathered, avals, strict=True):
            blocks = orders.from_places(x.reshape(call.axis_size, x.shape[-1]), position)
            blocks = bitcasts.from_words(blocks, aval.dtype).reshape(call.axis_size, *aval.shape)
            yield blocks_at(blocks, dimension=call.dimension, tiled=call.tiled)

    return steps.run(finish, values)


def _all_to_all(steps: Steps, operands: Sequence) -> list:
    """A rank gets its host's blocks for its counterparts, and exchanges them with these."""
    call, avals = steps.call, steps.ctx.avals_in
    num_ranks, num_hosts = call.levels.num_ranks, call.levels.num_hosts
    orders = ranks_by_host.orders_of(call.groups, call.levels)
    first: Callable = partial(blocks_first, **call.blocks)

    def arrange(position, *xs):
        for x in xs:
            blocks = bitcasts.to_words(first(x).reshape(call.axis_size, x.size // call.axis_size))
            blocks = orders.by_place(blocks, position)
            yield blocks.reshape(num_ranks, num_hosts * blocks.shape[1])

    def by_host(x):
        size = x.shape[1] // num_hosts
        return x.reshape(num_ranks, num_hosts, size).swapaxes(0, 1).reshape(num_hosts, num_ranks * size)

    def finish(position, *received):
        for x, aval in zip(received, avals, strict=True):
            blocks = orders.from_hosts(x.reshape(call.axis_size, x.shape[1] // num_ranks), position)
            shape = shape_of_blocks(aval.shape, **call.blocks)
            blocks = bitcasts.from_words(blocks, aval.dtype).reshape(shape)
            at = call.dimension if call.concat_dimension is None else call.concat_dimension
            yield blocks_at(blocks, dimension=at, tiled=call.tiled)

    values = steps.intra(ALL_TO_ALL, steps.run(arrange, operands))
    values = steps.inter(partial(crossing.all_to_all, call.levels.inter), steps.each(by_host, values))
    return steps.run(finish, values)


def _reduce_scatter(steps: Steps, operands: Sequence) -> list:
    """A rank gets its host's sums for its counterparts, exchanges them, adds in the order of hosts, and rounds once."""
    call, avals_out = steps.call, steps.ctx.avals_out
    num_ranks, num_hosts = call.levels.num_ranks, call.levels.num_hosts
    wide = trees.accumulator(avals_out[0].dtype)
    orders = ranks_by_host.orders_of(call.groups, call.levels)
    first: Callable = partial(blocks_first, **call.blocks)

    def arrange(position, *xs):
        for x in xs:
            size = x.size // call.axis_size
            blocks = orders.by_place(first(x).reshape(call.axis_size, size), position)
            yield blocks.astype(wide).reshape(num_ranks, num_hosts * size)

    def finish(_, *received):
        for x, aval in zip(received, avals_out, strict=True):
            yield fold(bitcasts.from_words(x, wide)).astype(aval.dtype).reshape(aval.shape)

    scattered = [aval_of(wide, num_hosts * aval.size) for aval in avals_out]
    values = steps.intra(REDUCE_SCATTER, steps.run(arrange, operands), scattered)
    values = steps.each(lambda x: bitcasts.to_words(x.reshape(num_hosts, x.size // num_hosts)), values)
    values = steps.inter(partial(crossing.all_to_all, call.levels.inter), values)
    return steps.run(finish, values)


# ---- Roots ----------------------------------------------------------------------------------------------------------


def _broadcast(steps: Steps, operands: Sequence) -> list:
    """An all-reduce with zeros from all but the root."""
    call = steps.call
    values = steps.run(lambda position, *xs: [_on_root(call, position, bitcasts.packed(x)) for x in xs], operands)
    packed = list(map(aval_of_value, values))
    ctx = steps.ctx.replace(avals_in=packed, avals_out=packed)

    def finish(_, *totals):
        for x, aval in zip(totals, steps.ctx.avals_in, strict=True):
            yield bitcasts.unpacked(x, aval.shape, aval.dtype)

    return steps.run(finish, all_reduce.emit(call._replace(kind=ALL_REDUCE), ctx, values))


def _on_root(call: CallSpec, position: jax.Array, bits: jax.Array) -> jax.Array:
    """Integers on the root, zeros elsewhere."""
    is_root = rank_table(call.groups) == call.root
    return jnp.where(jnp.asarray(is_root)[position], bits, jnp.zeros_like(bits))


# ---- Permutations ---------------------------------------------------------------------------------------------------


def _permute(steps: Steps, operands: Sequence) -> list:
    """Pairs within hosts, then those across; each rank takes its own."""
    call, avals = steps.call, steps.ctx.avals_in
    split = ranks_by_host.split_permutation(call.groups, call.levels, call.perm or ())
    values = steps.each(lambda x: bitcasts.to_words(x.reshape(-1)), operands)
    results = [x for pairs in split.intra for x in steps.intra(PERMUTE, values, perm=pairs)]
    if split.inter:
        both = steps.inter(partial(crossing.permute, split.inter), values, after=results)
        results = [*both[len(avals) :], *both[: len(avals)]]

    def finish(position, *received):
        by_operand = [received[i :: len(avals)] for i in range(len(avals))]
        for choices, aval in zip(by_operand, avals, strict=True):
            if not split.inter:
                choices = (*choices, jnp.zeros_like(choices[0]))
            chosen = lax.select_n(jnp.asarray(split.which)[position], *choices)
            yield bitcasts.from_words(chosen, aval.dtype).reshape(aval.shape)

    return steps.run(finish, results)


_EMITTERS: dict[Kind, Callable[[Steps, Sequence], list]] = {
    ALL_GATHER: _all_gather,
    ALL_TO_ALL: _all_to_all,
    REDUCE_SCATTER: _reduce_scatter,
    BROADCAST: _broadcast,
    PERMUTE: _permute,
}
