"""Combines adjacent calls of a program into one, as XLA's all-reduce combiner does with its own all-reduces.

XLA cannot combine custom calls. JAX sums the gradients of a model with one equation per leaf, so without a combiner
`override_lax()` would emit one call per leaf, where XLA ends up with one all-reduce.
"""

from collections.abc import Callable, Hashable

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering import call_sites

# Combining a call of this size saves a few microseconds of a few milliseconds.
COMBINE_THRESHOLD_BYTES = 25 << 20
# Each further operand rebuilds the call, so that the time to lower it is quadratic.
COMBINE_THRESHOLD_COUNT = 100


class _CombinedCall:
    """A call in the program under construction. It can take further operands while its results are unused."""

    def __init__(self, block: ir.Block) -> None:
        self.block = block
        self.operands: list = []
        self.avals: list = []
        self.results: list = []
        # The ops whose results the program uses. They outlive the call, which is rebuilt with each further operand.
        self.placeholders: list = []

    def can_grow(self, block: ir.Block) -> bool:
        num_bytes = sum(aval_in.size * aval_in.dtype.itemsize for aval_in, _ in self.avals)
        if self.block != block or num_bytes >= COMBINE_THRESHOLD_BYTES or len(self.operands) >= COMBINE_THRESHOLD_COUNT:
            return False
        return all(next(iter(placeholder.result.uses), None) is None for placeholder in self.placeholders)

    def add(self, ctx, operand, emit: Callable):
        """Rebuilds the call with one more operand, and returns the result for that operand."""
        if operand in self.operands:
            return self.placeholders[self.operands.index(operand)].result
        self.operands.append(operand)
        self.avals.append((ctx.avals_in[0], ctx.avals_out[0]))
        avals_in, avals_out = zip(*self.avals, strict=True)
        replaced, self.results = self.results, emit(ctx.replace(avals_in=avals_in, avals_out=avals_out), *self.operands)
        for placeholder, result in zip(self.placeholders, self.results[:-1], strict=True):
            placeholder.operation.operands[0] = result
            placeholder.operation.move_after(self.results[-1].owner)
        if replaced:
            call_sites.write(ctx, _call_of(self.results).results, _erase(ctx, replaced))
        result_type = mlir.aval_to_ir_type(ctx.module_context, ctx.avals_out[0])
        self.placeholders.append(hlo.ReshapeOp(result_type, self.results[-1]))
        return self.placeholders[-1].result


def lower_combined(ctx, operand, key: Hashable, emit: Callable) -> list:
    """Emits the call for one operand, combined with the previous call of the same key if its results are unused.

    The combined call takes the place of the later one. All ranks run the same program, so all combine the same calls.

    Args:
      ctx: the lowering context of the equation.
      operand: its operand.
      key: equal for calls that may be combined: axes, groups, reduction and dtype.
      emit: (ctx, *operands) to the results of one call for all operands.
    """
    calls = _compat.module_state(ctx)
    block = ir.InsertionPoint.current.block
    if key not in calls or not calls[key].can_grow(block):
        calls[key] = _CombinedCall(block)
    return [calls[key].add(ctx, operand, emit)]


# Ops that the lowering rule emits before the call of a reduction.
_PREPARATION_OPS = ("stablehlo.partition_id", "stablehlo.convert")


def _call_of(results):
    """The call with these results, which may be conversions of its own."""
    owner = results[0].owner
    return (owner.operands[0].owner if owner.operation.name == "stablehlo.convert" else owner).operation


def _erase(ctx, results) -> call_sites.Lines:
    """Erases a reduction's call whose results are unused, and the ops that were emitted to prepare it.

    Returns the lines that it served.
    """
    call = _call_of(results)
    for result in results:
        if result.owner.operation != call:
            result.owner.operation.erase()
    inputs = list(call.operands)
    lines = call_sites.forget(ctx, call)
    call.erase()
    for value in inputs:
        is_preparation = not isinstance(value.owner, ir.Block) and value.owner.operation.name in _PREPARATION_OPS
        if is_preparation and next(iter(value.uses), None) is None:
            call_sites.forget(ctx, value.owner.operation)
            value.owner.operation.erase()
    return lines
