"""Calls in a partial-manual shard_map, some of whose axes are the compiler's.

The program has its author's shapes there, and XLA's partitioner divides arrays over the automatic axes. A collective
treats all elements alike, so each device can call with its part, in groups of the whole mesh. The program gets a call
that partitioner.py replaces at compilation, with a rule that says which dimensions of operands and results belong
together. It has all attributes of the engine's call, so any process can compile it.
"""

from collections.abc import Sequence

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from jax_ring.lowering.custom_call import partitioner
from jax_ring.lowering.custom_call.attributes import from_values, named
from jax_ring.lowering.kinds import Kind
from jax_ring.options import Options


def why_not(axes: Sequence[str], kind: Kind, options: Options, num_hosts: int) -> str:
    """Why no engine serves such a call on so many hosts, with these axes automatic."""
    left = f"the enclosing shard_map leaves the axes {list(axes)} to the compiler"
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        return f"{left}, and jax_use_shardy_partitioner is off"
    if kind.is_ragged:
        return f"{left}, and the rows of a ragged all-to-all cannot be divided"
    if options.order == "ring":
        return f"{left}, and the blocks of order='ring' would depend on how it divides the operand"
    return f"{left}, and the ranks of a group are on {num_hosts} hosts" if num_hosts > 1 else ""


def attributes(
    shared: ir.DictAttr, target: str, takes_position: bool, num_own: tuple[int, int], stream: str
) -> ir.DictAttr:
    """The attributes of a call to be divided, from the engine's.

    An operand is divided like its result, along their last dimensions. Those before number ranks or terms; each device
    needs all.

    Args:
      target: the engine's custom call.
      takes_position: whether it takes the mesh position before the operands.
      num_own: dimensions that operand and result do not share.
      stream: of the GPU, unless that of its surroundings.
    """
    own = {
        partitioner.ENGINE_TARGET: target,
        partitioner.TAKES_POSITION: takes_position,
        partitioner.NUM_OWN: num_own,
        partitioner.STREAM: stream,
    }
    return ir.DictAttr.get(dict([*named(shared), *named(from_values(own))]))


def rule(operand_types: Sequence[ir.Type], result_types: Sequence[ir.Type], num_own: tuple[int, int]) -> ir.Attribute:
    """Shardy's rule for it."""
    sizes: list[int] = []  # one factor for dimensions that are divided alike
    undivided: list[int] = []
    mappings: tuple[list, list] = ([], [])
    for types in zip(operand_types, result_types, strict=True):
        shapes = [ir.RankedTensorType(each).shape for each in types]
        shared = range(len(sizes), len(sizes) + len(shapes[0]) - num_own[0])
        sizes += shapes[0][num_own[0] :]
        for shape, num, mapping in zip(shapes, num_own, mappings, strict=True):
            own = range(len(sizes), len(sizes) + num)
            sizes += shape[:num]
            undivided += own
            dimensions = [sdy.DimMappingAttr.get(factor_indices=[i]) for i in (*own, *shared)]
            mapping.append(sdy.TensorMappingAttr.get(dim_mappings=dimensions))
    return sdy.OpShardingRuleAttr.get(
        factor_sizes=sizes, operand_mappings=mappings[0], result_mappings=mappings[1],
        need_replication_factors=undivided, is_custom=True,
    )  # fmt: skip
