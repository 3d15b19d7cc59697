"""Joins calls that come one after the other in a program, as XLA's combiner does with its own all-reduces.

XLA cannot join custom calls. Without this, the gradients of a model, which JAX sums with an equation for each, would
be as many calls under `override_lax()`, where XLA has one all-reduce in the end.
"""

from collections.abc import Callable, Hashable

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat

# A call of this size does not grow: one call less would save a few microseconds, in milliseconds.
ENOUGH_BYTES = 25 << 20
# And neither does one of so many operands, because the call is built anew with each of them.
ENOUGH_OPERANDS = 100


class _Call:
    """A call in the program that is being built, which grows by an operand at a time while its results are unused."""

    def __init__(self, block: ir.Block) -> None:
        self.block = block
        self.operands: list = []
        self.avals: list = []
        self.results: list = []
        # What the rest of the program gets in their place, since the call is replaced by a larger one again and again.
        self.handles: list = []

    def is_closed(self, block: ir.Block) -> bool:
        num_bytes = sum(aval_in.size * aval_in.dtype.itemsize for aval_in, _ in self.avals)
        if self.block != block or num_bytes >= ENOUGH_BYTES or len(self.operands) >= ENOUGH_OPERANDS:
            return True
        return any(next(iter(handle.result.uses), None) is not None for handle in self.handles)

    def add(self, ctx, operand, emit: Callable):
        """The result for one operand more."""
        if operand in self.operands:
            return self.handles[self.operands.index(operand)].result
        self.operands.append(operand)
        self.avals.append((ctx.avals_in[0], ctx.avals_out[0]))
        avals_in, avals_out = zip(*self.avals, strict=True)
        before, self.results = self.results, emit(ctx.replace(avals_in=avals_in, avals_out=avals_out), *self.operands)
        for handle, result in zip(self.handles, self.results[:-1], strict=True):
            handle.operation.operands[0] = result
            handle.operation.move_after(self.results[-1].owner)
        if before:
            _erase(before)
        result_type = mlir.aval_to_ir_type(ctx.module_context, ctx.avals_out[0])
        self.handles.append(hlo.ReshapeOp(result_type, self.results[-1]))
        return self.handles[-1].result


def lower_joined(ctx, operand, key: Hashable, emit: Callable) -> list:
    """Emits the call for one operand, joined with the one of the same key before it if nothing has used that yet.

    The call then stands where the later one would. All ranks run the same program, so that they join the same.

    emit: (ctx, *operands) to the results of one call for all operands.
    """
    calls = _compat.notes_on_module(ctx)
    block = ir.InsertionPoint.current.block
    if key not in calls or calls[key].is_closed(block):
        calls[key] = _Call(block)
    return [calls[key].add(ctx, operand, emit)]


# What the lowering rule puts before a reduction's call.
_PREPARATIONS = ("stablehlo.partition_id", "stablehlo.convert")


def _erase(results) -> None:
    """Takes a reduction's call, whose results nothing uses, out of the program again, with what was made for it."""
    owners = [result.owner.operation for result in results]
    if owners[0].name == "stablehlo.convert":
        converts, owners = owners, [convert.operands[0].owner.operation for convert in owners]
        for convert in converts:
            convert.erase()
    call = owners[0]
    inputs = list(call.operands)
    call.erase()
    for value in inputs:
        made = not isinstance(value.owner, ir.Block) and value.owner.operation.name in _PREPARATIONS
        if made and next(iter(value.uses), None) is None:
            value.owner.operation.erase()
