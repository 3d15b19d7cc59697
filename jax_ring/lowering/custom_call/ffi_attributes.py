"""Custom-call attributes in XLA's form."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

CONFIG = "mhlo.backend_config"  # holds the attributes that the call's handler decodes


def from_values(values: Mapping) -> ir.DictAttr:
    """Attributes of 64-bit integers, sequences of these, booleans and texts."""
    return ir.DictAttr.get(
        {
            name: mlir.ir_attribute(value if isinstance(value, str | bool) else np.asarray(value, np.int64)[()])
            for name, value in values.items()
        }
    )


def named(attributes) -> list[tuple[str, ir.Attribute]]:
    """A dictionary's entries as Python values.

    Raises:
      TypeError: if Python has no type for one, such as a complex constant.
    """
    # Not `attributes[i].attr`: it ends the process where this raises.
    return [(name, attributes[name]) for i in range(len(attributes)) if (name := attributes[i].name)]


def fixed(target: str) -> dict[str, ir.Attribute]:
    return {
        "call_target_name": ir.StringAttr.get(target),
        "has_side_effect": ir.BoolAttr.get(False),
        "backend_config": ir.StringAttr.get(""),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1),
        "called_computations": ir.ArrayAttr.get([]),
    }


def layouts(types: Iterable[ir.Type]) -> ir.ArrayAttr:
    """Layouts of arrays of these types: dimensions, fastest first."""
    ranks = [ir.RankedTensorType(each).rank for each in types]
    by_rank: dict[int, ir.Attribute] = {}
    for rank in set(ranks):
        dimensions: Any = np.arange(rank, dtype=np.int64)[::-1].copy()
        by_rank[rank] = ir.DenseIntElementsAttr.get(dimensions, type=ir.IndexType.get())
    return ir.ArrayAttr.get(list(map(by_rank.__getitem__, ranks)))


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
