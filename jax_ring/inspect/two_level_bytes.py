"""The bytes of a call on two levels: jax_ring's collectives within each host, and XLA's between hosts."""

from collections.abc import Sequence

import jax
import numpy as np

from jax_ring.inspect import tree_bytes
from jax_ring.inspect.wire_bytes import num_bytes_of, wire_bytes
from jax_ring.lowering import host_places, trees, two_level, words
from jax_ring.lowering.reach import Groups, Levels
from jax_ring.lowering.two_level_crossing import shard_size, types_of
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
    if trees.adds_along_tree(kind, options):
        return tree_bytes.on_two_levels("all_reduce" if kind == "reduce" else kind, groups, levels, options, avals)
    ranks, hosts = [len(levels.within[0])], [levels.num_hosts]
    steps = {"within": 0.0, "across": 0.0}

    def within(kind: str, num_bytes: int) -> None:
        steps["within"] += wire_bytes(kind, num_bytes, ranks)

    def across(kind: str, num_bytes: int) -> None:
        steps["across"] += wire_bytes(kind, num_bytes, hosts)

    def all_reduce(op: str, size: int, dtype) -> None:
        types = types_of(op, dtype)
        exchanges = two_level.is_exchanged(op, size, types, levels, options, is_enclosed)
        shard = shard_size(size, *ranks, *(hosts if exchanges else ()))
        scattered, crossing, gathered = (_bytes(shard, dtype) for dtype in types)
        within("reduce_scatter", scattered * ranks[0])
        if exchanges:
            across("all_to_all", crossing)
            across("all_gather", gathered)
        else:
            across("all_reduce", crossing)
        within("all_gather", gathered * ranks[0])

    for aval in avals:
        num_bytes = num_bytes_of(aval)
        if kind in ("all_reduce", "reduce"):
            all_reduce(op, aval.size, aval.dtype)
        elif kind == "broadcast":
            all_reduce("sum", words.packed_size(aval.size, aval.dtype), np.dtype(np.uint32))
        elif kind == "reduce_scatter":
            summed = _bytes(aval.size, types_of("sum", aval.dtype).scattered)
            within("reduce_scatter", summed)
            across("all_to_all", summed // ranks[0])
        elif kind == "all_gather":
            across("all_gather", num_bytes * hosts[0])
            within("all_gather", num_bytes * hosts[0] * ranks[0])
        elif kind == "all_to_all":
            within("all_to_all", num_bytes)
            across("all_to_all", num_bytes)
        else:
            assert kind == "permute", kind
            split = host_places.split_permutation(groups, levels, perm)
            for _ in split.within:
                within("permute", num_bytes)
            if split.across:
                across("permute", num_bytes)
    return steps["within"], steps["across"]


def _bytes(num_elements: int, dtype) -> int:
    return num_bytes_of(jax.core.ShapedArray((num_elements,), dtype))
