"""Custom calls as operations of MLIR: attributes, shared buffers, comparison, and the description in errors."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring.lowering.call import CallSpec

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


# ---- Descriptions ----------------------------------------------------------------------------------------------------

_MAX_SHAPES = 4  # beyond which a text does not help


class Description(str):
    """A call in timeout errors, without its line; equal for equal calls.

    Attributes:
      function: the public function.
      shapes: of the first operands.
      num_operands: in total.
      over: axes and groups.
    """

    function: str
    shapes: tuple[str, ...]
    num_operands: int
    over: str

    def __new__(cls, function: str, shapes: Sequence[str], num_operands: int, over: str):
        shapes = tuple(shapes[:_MAX_SHAPES])
        more = f" and {num_operands - len(shapes)} more" if num_operands > len(shapes) else ""
        self = super().__new__(cls, f"{function} of {', '.join(shapes)}{more} over {over}")
        self.function, self.shapes, self.num_operands, self.over = function, shapes, num_operands, over
        return self


def describe(call: CallSpec, avals: Sequence[jax.core.ShapedArray]) -> Description:
    """The description of a call of operands of these types."""
    shapes = [f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]" for aval in avals]
    axis = f"axis {call.axes[0]!r}" if len(call.axes) == 1 else f"axes {call.axes!r}"
    groups = "" if call.axis_index_groups is None else f" in groups {list(map(list, call.axis_index_groups))}"
    return Description(call.function, shapes, len(shapes), axis + groups)


def describe_joined(calls: Sequence[str]) -> str:
    if all(isinstance(call, Description) for call in calls):
        first, num_operands = calls[0], 0
        shapes: list[str] = []
        for call in calls:
            num_operands += call.num_operands  # type: ignore[attr-defined]
            if len(shapes) < _MAX_SHAPES:
                shapes.extend(call.shapes)  # type: ignore[attr-defined]
        return Description(first.function, shapes, num_operands, first.over)  # type: ignore[attr-defined]
    different = list(dict.fromkeys(calls))
    return " and ".join(different[:2]) + (f" and {len(different) - 2} more calls" if len(different) > 2 else "")


def function_and_axes(description: str) -> str:
    """Function, axes and groups of a description; empty if unknown."""
    return f"{description.function} {description.over}" if isinstance(description, Description) else ""
