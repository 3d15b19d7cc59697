"""Joins small all-to-alls between hosts, as XLA's combiner joins all-reduces but not these.

Each takes as long as its messages wait, whatever their size.
"""

import itertools
import math
from collections.abc import Hashable, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import runtime
from jax_ring.lowering.topology import Levels

# Bytes that leave each host. With twice as many, on a link of 1 Gbit/s, an all-reduce's are faster.
SMALL_BYTES = 192 << 10


def are_copied(engine: str, levels: Levels, num_bytes: int) -> bool:
    """Whether each rank sends this many bytes to its counterparts on all hosts. GPUs have other latencies."""
    return engine == "cpu" and _bytes_leaving(len(levels.inter), levels.num_hosts, num_bytes) <= SMALL_BYTES


def _bytes_leaving(num_groups: int, num_hosts: int, bytes_to_each: int) -> int:
    """The bytes that a host sends. num_groups: of one rank on each host."""
    return num_groups * (num_hosts - 1) * bytes_to_each


def is_one(op: ir.Operation) -> bool:
    """Whether an all-to-all is of integers, in blocks along the first dimension, and `wait_markers` encloses it."""
    marker, of_operand = op.operands[0].owner, ir.RankedTensorType(op.operands[0].type)
    return (
        not isinstance(marker, ir.Block)
        and "call_target_name" in marker.attributes
        and ir.StringAttr(marker.attributes["call_target_name"]).value == runtime.BETWEEN_HOSTS_TARGET
        and isinstance(of_operand.element_type, ir.IntegerType)
        and of_operand.rank > 1
        and all(ir.IntegerAttr(op.attributes[f"{name}_dimension"]).value == 0 for name in ("split", "concat"))
    )


def key(op: ir.Operation) -> Hashable:
    """What all-to-alls have in common that can be one: everything but the last dimension."""
    of_operand = ir.RankedTensorType(op.operands[0].type)
    return op.name, op.attributes["replica_groups"], of_operand.element_type, *of_operand.shape[:-1]


def num_bytes(op: ir.Operation) -> int:
    """The bytes that leave each host."""
    of_operand, groups = ir.RankedTensorType(op.operands[0].type), op.attributes["replica_groups"].type
    num_groups, num_hosts = ir.RankedTensorType(groups).shape
    itemsize = max(8, ir.IntegerType(of_operand.element_type).width) // 8
    return _bytes_leaving(num_groups, num_hosts, math.prod(of_operand.shape) // num_hosts * itemsize)


def build(members: Sequence[ir.Operation]) -> list[ir.Operation]:
    """Builds one for the members in front of the last, and passes on its results. Returns the new operations."""
    first, last = members[0], members[-1]
    shapes = [ir.RankedTensorType(op.operands[0].type).shape for op in members]
    lead = shapes[0][:-1]
    ends = [0, *itertools.accumulate(shape[-1] for shape in shapes)]
    attributes = first.attributes
    with ir.InsertionPoint(last), last.location:
        joined = hlo.concatenate([op.operands[0] for op in members], mlir.i64_attr(len(lead)))
        exchanged = hlo.AllToAllOp(
            [joined],
            split_dimension=ir.IntegerAttr(attributes["split_dimension"]),
            concat_dimension=ir.IntegerAttr(attributes["concat_dimension"]),
            split_count=ir.IntegerAttr(attributes["split_count"]),
            replica_groups=attributes["replica_groups"],
            channel_handle=attributes["channel_handle"],
        )
        parts = [
            hlo.slice(
                exchanged.result,
                *map(mlir.dense_int_array, ([0] * len(lead) + [begin], [*lead, end], [1] * len(shapes[0]))),
            )
            for begin, end in itertools.pairwise(ends)
        ]
    for op, part in zip(members, parts, strict=True):
        op.results[0].replace_all_uses_with(part)
    return [value.owner.operation for value in (joined, exchanged.result, *parts)]
