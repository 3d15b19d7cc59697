"""Sums along the tree across hosts: jax_ring within hosts; XLA moves data between them.

After a host's reduce-scatter, each rank has a shard of the sums that the host alone can form: of the largest nodes
whose shards are all there. An all-to-all of XLA between ranks with the same shard gives each a part of all hosts' sums.
They are added along the tree, in an order independent of hosts, and rounded. All-gathers of XLA between hosts and
jax_ring within them distribute the result. If the sums are small, each gets them whole, and XLA gathers nothing.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import shard_tree
from jax_ring.lowering import trees
from jax_ring.lowering.call_spec import CallSpec
from jax_ring.lowering.custom_call import emitter, layout
from jax_ring.lowering.hierarchical import ranks_by_host, wait_markers
from jax_ring.lowering.kinds import ALL_GATHER, REDUCE_SCATTER
from jax_ring.lowering.passes import exchanges
from jax_ring.lowering.topology import Levels
from jax_ring.lowering.xla import ops
from jax_ring.lowering.xla.ops import aval_of


def part_size(num_elements: int, num_ranks: int, num_hosts: int) -> int:
    """The elements of a rank's part of its host's shard; the last parts are padded."""
    return math.ceil(num_elements / (num_ranks * num_hosts))


def emit(call: CallSpec, ctx, operands: Sequence) -> Sequence:
    """Emits an all-reduce or a reduce-scatter; parts of all operands cross together."""
    levels, scatters = call.levels, call.kind.scatters
    num_ranks, num_hosts = levels.num_ranks, levels.num_hosts
    hosts = trees.hosts_of(call.groups, levels.intra, call.options)
    slots = trees.num_slots(call.groups, call.options)
    lead = (slots,) if slots > 1 else ()
    dtype, axes = ctx.avals_in[0].dtype, tuple(ctx.module_context.axis_context.mesh.axis_names)
    wide = trees.accumulator(dtype)
    sizes = [aval.size if scatters else part_size(aval.size, num_ranks, num_hosts) for aval in ctx.avals_out]
    arrange: Callable = partial(_in_parts, lead=lead, num_ranks=num_ranks, num_hosts=num_hosts, dtype=wide)
    if scatters:
        arrange = partial(
            _in_parts_by_owner, lead=lead, levels=levels, hosts=hosts, axes=axes, dtype=wide, **call.blocks
        )
    shards = [aval_of(wide, *lead, num_ranks, num_hosts * size) for size in sizes]
    values: Sequence = [ops.inline_one(ctx, arrange, x, aval) for x, aval in zip(operands, ctx.avals_in, strict=True)]
    roots = [aval_of(wide, hosts.num_roots, num_hosts * size) for size in sizes]
    values = emitter.emit_within_hosts(ctx, values, call, REDUCE_SCATTER, shards, roots, group_trees=tuple(hosts.parts))
    num_bytes = sum(aval.size for aval in roots) * wide.itemsize
    copies = not scatters and exchanges.are_copied(call.service.engine, levels, num_bytes)
    cross = partial(_cross_hosts, levels=levels, hosts=hosts, axes=axes, dtype=dtype, scatters=scatters, copies=copies)
    crossed = [aval_of(dtype, size if scatters else num_hosts * size) for size in sizes]
    values = wait_markers.enclose(
        ctx, values, lambda values: ops.inline(ctx, cross, values, roots),
        call=call.description, groups=levels.inter, avals_in=roots, avals_out=crossed,
    )  # fmt: skip
    if scatters:
        return [ops.reshape(x, aval.shape) for x, aval in zip(values, ctx.avals_out, strict=True)]
    gathered = [aval_of(dtype, num_ranks, num_hosts * size) for size in sizes]
    values = emitter.emit_within_hosts(ctx, values, call, ALL_GATHER, crossed, gathered)
    return [
        ops.inline_one(ctx, partial(_unpadded, shape=aval.shape), x, full)
        for x, full, aval in zip(values, gathered, ctx.avals_out, strict=True)
    ]


# ---- The steps, as functions of a rank's values ---------------------------------------------------------------------


def _in_parts(x: jax.Array, *, lead: tuple, num_ranks: int, num_hosts: int, dtype) -> jax.Array:
    """An all-reduce's operand by slot, rank of a host, and element of its shard."""
    flat = x.astype(dtype).reshape(*lead, -1)
    size = part_size(flat.shape[-1], num_ranks, num_hosts) * num_hosts
    padded = jnp.pad(flat, [(0, 0)] * len(lead) + [(0, num_ranks * size - flat.shape[-1])])
    return padded.reshape(*lead, num_ranks, size)


def _in_parts_by_owner(
    x: jax.Array, *, lead: tuple, levels: Levels, hosts: trees.Hosts, axes: tuple, dtype, **dimensions
) -> jax.Array:
    """The same of a reduce-scatter: the j-th ranks of all hosts own the j-th shard."""
    first: Callable = partial(layout.blocks_first, **dimensions)
    blocks = jax.vmap(first)(x) if lead else first(x)
    owners = [np.array([part.ranks for part in parts], np.int32).T.reshape(-1) for parts in hosts.layouts]
    by_group = jnp.asarray(np.stack(owners))[_group_of(levels, axes)]
    ordered = jnp.take(blocks.astype(dtype), by_group, axis=len(lead))
    return ordered.reshape(*lead, levels.num_ranks, -1)


def _cross_hosts(
    *values: jax.Array, levels: Levels, hosts: trees.Hosts, axes: tuple, dtype, scatters: bool, copies: bool
) -> list[jax.Array]:
    """The sums of all hosts from this one's, by root and element of a shard.

    Args:
      scatters: whether of this rank's part, or of the whole shard.
      copies: whether each host is sent the whole shard.
    """
    inter, num_hosts = tuple(map(tuple, levels.inter)), levels.num_hosts
    parts = [x.reshape(x.shape[0], 1 if copies else num_hosts, -1) for x in values]
    together = jnp.moveaxis(jnp.concatenate(parts, axis=2), 1, 0)
    together = jnp.broadcast_to(together, (num_hosts, *together.shape[1:]))
    received = lax.all_to_all(together, axes, 0, 0, axis_index_groups=inter)
    layouts = sorted(set(hosts.layouts))
    folds = [partial(_fold_roots, layout=each) for each in layouts]
    if len(folds) == 1:
        total = folds[0](received)
    else:
        # The groups lie on hosts in different ways, but all ranks run one program.
        which = np.array([layouts.index(each) for each in hosts.layouts], np.int32)
        total = lax.switch(jnp.asarray(which)[_group_of(levels, axes)], folds, received)
    total = total.astype(dtype)[None]
    if not (scatters or copies):
        total = lax.all_gather(total[0], axes, axis_index_groups=inter)
    ends = np.cumsum([part.shape[2] for part in parts])[:-1]
    return [part.reshape(-1) for part in jnp.split(total, ends, axis=1)]


def _fold_roots(received: jax.Array, *, layout: tuple[trees.GroupTree, ...]) -> jax.Array:
    """The sum of all hosts. received: by host, root and element."""
    found = sorted((root, host, i) for host, part in enumerate(layout) for i, root in enumerate(part.roots()))
    after = shard_tree.merges_of(layout[0].num_shards, [root for root, _, _ in found])
    terms = [shard_tree.Term(host, i, merges) for (_, host, i), merges in zip(found, after, strict=True)]
    (total,) = shard_tree.run_fold(terms, lambda host, i: received[host, i], lax.add)
    return total


def _unpadded(x: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return x.reshape(-1)[: math.prod(shape)].reshape(shape)


def _group_of(levels: Levels, axes: tuple) -> jax.Array:
    return jnp.asarray(ranks_by_host.group_of(levels))[lax.axis_index(axes)]
