"""Sums along the tree across hosts: jax_ring within hosts; XLA moves data between them.

After a host's reduce-scatter, each rank has a chunk of the sums that the host alone can form: of the largest nodes
whose shards are all there. An all-to-all of XLA between ranks with the same chunk gives each a part of all hosts' sums.
They are added along the tree, in an order independent of hosts, and rounded. All-gathers of XLA between hosts and
jax_ring within them distribute the result. If the sums are small, each gets them whole, and XLA gathers nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat, shard_tree
from jax_ring.lowering import trees
from jax_ring.lowering.call import ALL_GATHER, REDUCE_SCATTER, CallSpec
from jax_ring.lowering.custom_call import blocks
from jax_ring.lowering.hierarchical import crossing, ranks_by_host
from jax_ring.lowering.hierarchical.all_reduce import from_chunks
from jax_ring.lowering.hierarchical.crossing import chunk_size
from jax_ring.lowering.hierarchical.two_levels import Steps
from jax_ring.lowering.passes import exchanges
from jax_ring.lowering.xla import bitcasts, ops
from jax_ring.lowering.xla.ops import aval_of


def emit(call: CallSpec, ctx: _compat.LoweringContext, operands: Sequence) -> Sequence:
    """Emits an all-reduce or a reduce-scatter; parts of all operands cross together."""
    levels, scatters, steps = call.levels, call.kind.scatters, Steps(ctx, call)
    num_ranks, num_hosts = levels.num_ranks, levels.num_hosts
    parts, group_of = call.service.group_trees, ranks_by_host.group_of(levels)
    layouts = [parts[i : i + num_hosts] for i in range(0, len(parts), num_hosts)]  # by group
    slots = trees.num_slots(call.groups, call.options)
    lead = (slots,) if slots > 1 else ()
    dtype = ctx.avals_in[0].dtype
    wide = trees.accumulator(dtype)
    # The elements of a rank's part of its host's chunk.
    sizes = [aval.size if scatters else chunk_size(aval.size, num_ranks * num_hosts) for aval in ctx.avals_out]
    num_roots = trees.num_roots(parts)
    roots = [aval_of(wide, num_roots, num_hosts * size) for size in sizes]
    num_bytes = sum(aval.size for aval in roots) * wide.itemsize
    copies = not scatters and exchanges.are_copied(call.service.engine, levels, num_bytes)

    def arrange(position, *xs):
        for x in xs:
            if scatters:
                group = jnp.asarray(group_of)[position]
                yield _in_parts_by_owner(x, lead=lead, group=group, layouts=layouts, dtype=wide, **call.blocks)
            else:
                yield _in_parts(x, lead=lead, num_ranks=num_ranks, num_hosts=num_hosts, dtype=wide)

    def fold(position, *received):
        different = sorted(set(layouts))
        folds = [partial(_fold_roots, layout=each, wide=wide, dtype=dtype) for each in different]
        if len(folds) == 1:
            return folds[0](*received)
        # The groups lie on hosts in different ways, but all ranks run one program.
        which = np.array([different.index(each) for each in layouts], np.int32)
        return lax.switch(jnp.asarray(which)[jnp.asarray(group_of)[position]], folds, *received)

    values = steps.intra(REDUCE_SCATTER, steps.run(arrange, operands), roots)
    values = steps.each(partial(_sent, num_hosts=num_hosts, copies=copies), values)
    values = steps.inter(partial(crossing.all_to_all, levels.inter), values)
    values = steps.run(fold, values)
    if scatters:
        return [ops.reshape(x, aval.shape) for x, aval in zip(values, ctx.avals_out, strict=True)]
    if not copies:
        values = steps.inter(partial(crossing.all_gather, levels.inter), steps.each(bitcasts.to_words, values))
        values = steps.each(lambda x: bitcasts.from_words(x, dtype).reshape(-1), values)
    values = steps.intra(ALL_GATHER, values, [aval_of(dtype, num_ranks, num_hosts * size) for size in sizes])
    return [from_chunks(x, aval) for x, aval in zip(values, ctx.avals_out, strict=True)]


# ---- The steps, as functions of a rank's values ---------------------------------------------------------------------


def _in_parts(x: jax.Array, *, lead: tuple, num_ranks: int, num_hosts: int, dtype) -> jax.Array:
    """An all-reduce's operand by slot, rank of a host, and element of its chunk."""
    flat = x.astype(dtype).reshape(*lead, -1)
    size = chunk_size(flat.shape[-1], num_ranks * num_hosts) * num_hosts
    padded = jnp.pad(flat, [(0, 0)] * len(lead) + [(0, num_ranks * size - flat.shape[-1])])
    return padded.reshape(*lead, num_ranks, size)


def _in_parts_by_owner(
    x: jax.Array, *, lead: tuple, group: jax.Array, layouts: Sequence[tuple[trees.GroupTree, ...]], dtype, **dimensions
) -> jax.Array:
    """A reduce-scatter's operand by slot, rank of a host, and element of its chunk.

    The j-th ranks of all hosts own the j-th chunk. group: the rank's, as an index.
    """
    first: Callable = partial(blocks.blocks_first, **dimensions)
    by_rank = jax.vmap(first)(x) if lead else first(x)
    owners = [np.array([part.ranks for part in parts], np.int32).T.reshape(-1) for parts in layouts]
    ordered = jnp.take(by_rank.astype(dtype), jnp.asarray(np.stack(owners))[group], axis=len(lead))
    return ordered.reshape(*lead, len(layouts[0][0].ranks), -1)


def _sent(x: jax.Array, *, num_hosts: int, copies: bool) -> jax.Array:
    """Words by receiving host and root, from elements by root. copies: whether each host gets all of them."""
    parts = x.reshape(x.shape[0], 1 if copies else num_hosts, -1)
    words = bitcasts.to_words(jnp.moveaxis(parts, 1, 0))
    return jnp.broadcast_to(words, (num_hosts, *words.shape[1:]))


def _fold_roots(*received: jax.Array, layout: tuple[trees.GroupTree, ...], wide, dtype) -> list[jax.Array]:
    """The sums of all hosts, rounded once. received: words by host, root and element."""
    found = sorted((root, host, i) for host, part in enumerate(layout) for i, root in enumerate(part.roots()))
    after = shard_tree.merges_of(layout[0].num_shards, [root for root, _, _ in found])
    terms = [shard_tree.Term(host, i, merges) for (_, host, i), merges in zip(found, after, strict=True)]

    def fold(words):
        x = bitcasts.from_words(words, wide)
        (total,) = shard_tree.run_fold(terms, lambda host, i: x[host, i], lax.add)
        return total.astype(dtype)

    return list(map(fold, received))
