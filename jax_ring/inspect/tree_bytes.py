"""The bytes of a sum along the tree where it is more than one collective: across hosts, and without an engine."""

from collections.abc import Sequence

import jax

from jax_ring.inspect.wire_bytes import num_bytes_of, wire_bytes
from jax_ring.lowering import trees
from jax_ring.lowering.hierarchical import tree_sum
from jax_ring.lowering.topology import Levels
from jax_ring.lowering.xla import tree_fallback
from jax_ring.options import Options


def on_two_levels(
    kind: str, groups: trees.Groups, levels: Levels, options: Options, avals: Sequence
) -> tuple[float, float]:
    """Bytes that a rank sends within its host, and to other hosts, for an all-reduce or reduce-scatter on two levels.

    avals: the types of the values that are added, without slots.
    """
    hosts = trees.hosts_of(groups, levels.intra, options)
    ranks_each, num_hosts = len(levels.intra[0]), levels.num_hosts
    ranks = [ranks_each]
    num_terms = trees.mean_terms(hosts.parts)
    intra = inter = 0.0
    for aval in avals:
        shard = tree_sum.part_size(aval.size, ranks_each, num_hosts) * num_hosts
        wide, narrow = (_bytes(shard, dtype) for dtype in (trees.accumulator(aval.dtype), aval.dtype))
        intra += wire_bytes("reduce_scatter", wide * ranks_each, ranks, num_terms=num_terms)
        inter += wire_bytes("all_to_all", wide * hosts.num_roots, [num_hosts])
        if kind == "all_reduce":
            intra += wire_bytes("all_gather", narrow * ranks_each, ranks)
            inter += wire_bytes("all_gather", narrow, [num_hosts])
    return intra, inter


def by_xla(kind: str, sizes: Sequence[int], num_ranks: int, options: Options, avals: Sequence) -> float:
    """Bytes that a rank sends for a sum that XLA serves by moving data.

    sizes: of the groups.
    num_ranks: of the axes of the call.
    avals: the types of the values that are added, without slots.
    """
    slots = 1
    if options.num_shards is not None:
        slots = trees.GroupTree(options.num_shards, sizes[0], ()).num_slots()
    sent = 0.0
    for aval in avals:
        if tree_fallback.gathers_everything(sizes):
            sent += wire_bytes("all_gather", num_bytes_of(aval) * num_ranks, [num_ranks])
            continue
        padded = _bytes(tree_fallback.block_size(aval.size, sizes[0]) * sizes[0], aval.dtype)
        sent += wire_bytes("all_to_all", padded * slots, sizes)
        if kind != "reduce_scatter":
            sent += wire_bytes("all_gather", padded, sizes)
    return sent


def _bytes(num_elements: int, dtype) -> int:
    return num_bytes_of(jax.core.ShapedArray((num_elements,), dtype))
