"""Calls in a partial-manual shard_map, some of whose mesh axes are the compiler's.

There the program has the shapes that its author wrote, and XLA's partitioner divides every array over the automatic
axes. A collective over manual axes treats all elements alike, so its operands may be divided in any way: each device
then makes the call with its part, in the groups of the whole mesh. So the program gets a call that partitioner.py
replaces when it is compiled, with a rule that says which dimensions of operands and results belong together. It has all
attributes of the engine's call, so that any process can compile the program.
"""

from collections.abc import Sequence

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from jax_ring.lowering.custom_call import ffi_attributes, partitioner
from jax_ring.lowering.custom_call.ffi_attributes import named
from jax_ring.lowering.kinds import Kind
from jax_ring.options import Options


def axes_of(axis_context) -> tuple[str, ...]:
    """The mesh axes that the enclosing shard_maps leave to the compiler, and over which it can divide an array."""
    mesh = axis_context.mesh
    names = [axis for axis, size in mesh.shape.items() if axis not in axis_context.manual_axes and size > 1]
    return tuple(sorted(map(str, names)))


def why_not(axes: Sequence[str], kind: Kind, options: Options, num_hosts: int) -> str:
    """Why no engine serves a call of this kind, whose groups span so many hosts, where these axes are automatic."""
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
    """The attributes of a call that the partitioner divides, from those of the engine's call.

    Each operand may be divided as its result is, along the dimensions that they share, which are the last ones. The
    dimensions before these number ranks or terms, and each device needs all of them.

    Args:
      target: the engine's custom call.
      takes_position: whether that takes the caller's mesh position, before the operands.
      num_own: how many dimensions of an operand, and of a result, are not shared.
      stream: the GPU stream on which the call runs, unless it is that of its surroundings.
    """
    own = {
        partitioner.ENGINE_TARGET: target,
        partitioner.TAKES_POSITION: takes_position,
        partitioner.NUM_OWN: num_own,
        partitioner.STREAM: stream,
    }
    return ir.DictAttr.get(dict([*named(shared), *named(ffi_attributes.from_values(own))]))


def rule(operand_types: Sequence[ir.Type], result_types: Sequence[ir.Type], num_own: tuple[int, int]) -> ir.Attribute:
    """Shardy's rule for a call that the partitioner divides."""
    sizes: list[int] = []  # of the factors: dimensions that are divided alike
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
