"""Custom calls as operations of MLIR: their attributes, what is compared of them, and which buffers they share."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

CONFIG = "mhlo.backend_config"  # holds the attributes that the call's handler decodes


def dictionary(values: Mapping) -> ir.DictAttr:
    """Attributes of 64-bit integers, sequences of these, booleans and texts."""
    return ir.DictAttr.get(
        {
            name: mlir.ir_attribute(value if isinstance(value, str | bool) else np.asarray(value, np.int64)[()])
            for name, value in values.items()
        }
    )


def entries(attributes: ir.DictAttr | ir.OpAttributeMap) -> list[tuple[str, ir.Attribute]]:
    """A dictionary's entries as Python values.

    Raises:
      TypeError: if Python has no type for one, such as a complex constant.
    """
    # Not `attributes[i].attr`: it ends the process where this raises.
    return [(name, attributes[name]) for i in range(len(attributes)) if (name := attributes[i].name)]


def attributes_without_config(
    target: str, operand_types: Sequence[ir.Type], types: Sequence[ir.Type], shared_buffers: Collection[tuple[int, int]]
) -> dict[str, ir.Attribute]:
    """Every attribute except CONFIG.

    Args:
      types: result types.
      shared_buffers: pairs of operand and result that may share a buffer.
    """
    ranks = [[ir.RankedTensorType(each).rank for each in group] for group in (operand_types, types)]
    layouts: dict[int, ir.Attribute] = {}
    for rank in {*ranks[0], *ranks[1]}:
        dimensions: Any = np.arange(rank, dtype=np.int64)[::-1].copy()  # fastest first
        layouts[rank] = ir.DenseIntElementsAttr.get(dimensions, type=ir.IndexType.get())
    attributes = {
        "call_target_name": ir.StringAttr.get(target),
        "has_side_effect": ir.BoolAttr.get(False),
        "backend_config": ir.StringAttr.get(""),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1),
        "called_computations": ir.ArrayAttr.get([]),
        "operand_layouts": ir.ArrayAttr.get([layouts[rank] for rank in ranks[0]]),
        "result_layouts": ir.ArrayAttr.get([layouts[rank] for rank in ranks[1]]),
    }
    if shared_buffers:
        attributes["output_operand_aliases"] = aliases(shared_buffers, len(types))
    return attributes


def custom_call(
    target: str,
    operands: Sequence[ir.Value],
    types: Sequence[ir.Type],
    shared_buffers: Collection[tuple[int, int]],
    config: ir.DictAttr,
) -> ir.Operation:
    attributes = attributes_without_config(target, [x.type for x in operands], types, shared_buffers)
    return ir.Operation.create(
        "stablehlo.custom_call", results=list(types), operands=operands, attributes={**attributes, CONFIG: config}
    )


def aliases(pairs: Collection[tuple[int, int]], num_results: int) -> ir.ArrayAttr:
    """Pairs of operand and result that may share a buffer."""
    return ir.ArrayAttr.get(
        [
            # A single result is no tuple.
            hlo.OutputOperandAlias.get(
                output_tuple_indices=[result] if num_results > 1 else [], operand_index=operand,
                operand_tuple_indices=[],
            )
            for operand, result in pairs
        ]
    )  # fmt: skip


def aliased_operands(operation: ir.Operation) -> set[int]:
    """Operands that may have a result's buffer."""
    if "output_operand_aliases" not in operation.attributes:
        return set()
    pairs = ir.ArrayAttr(operation.attributes["output_operand_aliases"])
    return {hlo.OutputOperandAlias(pair).operand_index for pair in pairs}


def compared(operation: ir.Operation) -> tuple:
    """An operation's attributes, to compare."""
    try:
        return tuple(entries(operation.attributes))
    except TypeError:
        return (str(operation).partition("=")[2],)
