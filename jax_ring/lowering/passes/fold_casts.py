"""Removes the casts around a sum of small floats that come from float32 and are widened again, as for a narrow wire.

A large sum between hosts reads float32, rounds each part as it adds, and returns float32. So neither operand nor sum
needs a rounded copy.
"""

from jax.extend.mlir import ir
from jax.typing import DTypeLike

from jax_ring import _compat
from jax_ring.lowering.module_state import ModuleState, state_of
from jax_ring.lowering.xla import ops


def unrounded(operand: ir.Value) -> ir.Value | None:
    """The float32 of which the operand is a rounded copy, in any shape; else None."""
    if isinstance(operand.owner, ir.Block):
        return None
    operation = operand.owner.operation
    if operation.name == "stablehlo.reshape":
        return unrounded(operation.operands[0])
    if operation.name != "stablehlo.convert":
        return None
    source = operation.operands[0]
    return source if isinstance(ir.RankedTensorType(source.type).element_type, ir.F32Type) else None


def rounded_again(ctx: _compat.LoweringContext, total: ir.Value, dtype: DTypeLike) -> ir.Value:
    """A sum rounded to its small floats; `drop_redundant_casts` removes this before widening."""
    rounded = ops.convert(total, dtype)
    state_of(ctx).rounded_sums.append((total, rounded))
    return rounded


def drop_redundant_casts(state: ModuleState) -> None:
    """Makes the module use sums as they are where it would widen them."""
    for total, rounded in state.rounded_sums:
        for use in list(rounded.uses):
            operation = use.owner.operation
            if operation.name == "stablehlo.convert" and operation.results[0].type == total.type:
                operation.results[0].replace_all_uses_with(total)
    state.rounded_sums.clear()
