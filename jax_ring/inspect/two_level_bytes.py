"""The bytes of a call on two levels: jax_ring's collectives within each host, and XLA's between hosts."""

from collections.abc import Sequence

import jax
import numpy as np

from jax_ring.inspect import tree_bytes
from jax_ring.inspect.wire_bytes import num_bytes_of, wire_bytes
from jax_ring.lowering.group_tables import Groups
from jax_ring.lowering.hierarchical import all_reduce, ranks_by_host
from jax_ring.lowering.hierarchical.inter_host import shard_size, types_of
from jax_ring.lowering.kinds import KINDS
from jax_ring.lowering.topology import Levels
from jax_ring.lowering.xla import bitcasts
from jax_ring.options import Options


def on_two_levels(
    kind: str,
    op: str,
    groups: Groups,
    levels: Levels,
    options: Options,
    avals: Sequence,
    perm=None,
    *,
    is_enclosed: bool,
) -> tuple[float, float]:
    """Bytes that a rank sends within its host, and to other hosts, in a call on two levels.

    Args:
      groups: those of the call, in mesh positions.
      avals: the types of the operands, without slots.
      perm: of a permutation.
      is_enclosed: whether calls of jax_ring are around what crosses hosts.
    """
    if KINDS[kind].adds_along_tree(options):
        return tree_bytes.on_two_levels("all_reduce" if kind == "reduce" else kind, groups, levels, options, avals)
    ranks, hosts = [len(levels.intra[0])], [levels.num_hosts]
    steps = {"within": 0.0, "across": 0.0}

    def intra(kind: str, num_bytes: int) -> None:
        steps["within"] += wire_bytes(kind, num_bytes, ranks)

    def inter(kind: str, num_bytes: int) -> None:
        steps["across"] += wire_bytes(kind, num_bytes, hosts)

    def add_all_reduce(op: str, size: int, dtype) -> None:
        types = types_of(op, dtype)
        exchanges = all_reduce.is_exchanged(op, size, types, levels, options, is_enclosed)
        shard = shard_size(size, *ranks, *(hosts if exchanges else ()))
        scattered, crossing, gathered = (_bytes(shard, dtype) for dtype in types)
        intra("reduce_scatter", scattered * ranks[0])
        if exchanges:
            inter("all_to_all", crossing)
            inter("all_gather", gathered)
        else:
            inter("all_reduce", crossing)
        intra("all_gather", gathered * ranks[0])

    for aval in avals:
        num_bytes = num_bytes_of(aval)
        if kind in ("all_reduce", "reduce"):
            add_all_reduce(op, aval.size, aval.dtype)
        elif kind == "broadcast":
            add_all_reduce("sum", bitcasts.packed_size(aval.size, aval.dtype), np.dtype(np.uint32))
        elif kind == "reduce_scatter":
            summed = _bytes(aval.size, types_of("sum", aval.dtype).scattered)
            intra("reduce_scatter", summed)
            inter("all_to_all", summed // ranks[0])
        elif kind == "all_gather":
            inter("all_gather", num_bytes * hosts[0])
            intra("all_gather", num_bytes * hosts[0] * ranks[0])
        elif kind == "all_to_all":
            intra("all_to_all", num_bytes)
            inter("all_to_all", num_bytes)
        else:
            assert kind == "permute", kind
            split = ranks_by_host.split_permutation(groups, levels, perm)
            for _ in split.intra:
                intra("permute", num_bytes)
            if split.inter:
                inter("permute", num_bytes)
    return steps["within"], steps["across"]


def _bytes(num_elements: int, dtype) -> int:
    return num_bytes_of(jax.core.ShapedArray((num_elements,), dtype))
