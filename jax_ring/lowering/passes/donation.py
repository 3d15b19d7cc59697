"""Sums donated arguments in place, once the program is lowered.

A custom call has its operand's buffer always or never. XLA would copy an argument that is not donated before the call,
and the result into a donated one after the call, unless the sum is in place. Only the whole program shows donation and
other readers.
"""

import functools
from collections import Counter
from collections.abc import Callable

from jax.extend.mlir import ir

from jax_ring import _compat, runtime
from jax_ring.lowering.call import KINDS
from jax_ring.lowering.custom_call import operation
from jax_ring.lowering.passes import dataflow

_TARGETS = tuple(runtime.TARGETS[kind.name] for kind in KINDS.values() if kind.in_place)


def sum_in_place(module: ir.Module) -> None:
    """Gives sums of donated arguments their buffers, where nothing else reads these."""
    function = ir.SymbolTable(module.operation)["main"].operation
    main, marks = function.regions[0].blocks[0], ir.ArrayAttr(function.attributes["arg_attrs"])
    donated = [value for value in main.arguments if _compat.is_donated(ir.DictAttr(marks[value.arg_number]))]
    num_donated = Counter(value.type for value in donated)

    @functools.cache  # most programs need none
    def bodies() -> dict[ir.Attribute, ir.Block]:
        return {call.attributes["callee"]: body for body, call in dataflow.only_callers(module).items()}

    results = [(value.type, _type_in_shard_map(value)) for value in _end(main).operands]
    for value in donated:
        use, type_ = _find_sum(value, bodies)
        if use is None:
            continue
        # XLA gives a donated buffer to a result of its size. It copies an argument if no result takes its buffer.
        takers = [
            type_ == on_device if type_ and on_device else value.type == in_program for in_program, on_device in results
        ]
        if sum(takers) >= num_donated[value.type]:
            _alias(use)


def _end(block: ir.Block) -> ir.Operation:
    *_, end = block.operations
    return end.operation


def _type_in_shard_map(value: ir.Value) -> ir.Type | None:
    """A shard_map result's type on one device; None for other values."""
    value = _compat.unconstrained(value)
    if not isinstance(value, ir.OpResult) or value.owner.operation.name != "sdy.manual_computation":
        return None
    return _end(value.owner.operation.regions[0].blocks[0]).operands[value.result_number].type


def _find_sum(
    value: ir.Value, bodies: Callable[[], dict[ir.Attribute, ir.Block]]
) -> tuple[ir.OpOperand | None, ir.Type | None]:
    """A value's only use, if it is a sum's operand, and the value's type on one device, if known.

    Not behind a reshape, which XLA would copy.

    bodies: returns those of functions with one caller, by symbol.
    """
    type_ = None
    while True:
        uses = list(value.uses)
        if len(uses) != 1:
            return None, None
        (use,) = uses
        op = use.owner.operation
        if op.name == "sdy.manual_computation":
            value = op.regions[0].blocks[0].arguments[use.operand_number]
            type_ = value.type
        elif (
            op.name == "func.call"
            and "mhlo.frontend_attributes" not in op.attributes
            and (body := bodies().get(op.attributes["callee"]))
        ):
            value = body.arguments[use.operand_number]
        else:
            return (use if _can_alias(op, use.operand_number) else None), type_


def _can_alias(op: ir.Operation, operand: int) -> bool:
    if op.name != "stablehlo.custom_call" or ir.StringAttr(op.attributes["call_target_name"]).value not in _TARGETS:
        return False
    result = operand - _num_hidden(op)
    # The terms of a tree sum have another type than the result.
    return result >= 0 and op.operands[operand].type == op.results[result].type


def _num_hidden(op: ir.Operation) -> int:
    """A sum's operands before the user's, each with a result."""
    return len(op.operands) - len(op.results)


def _alias(use: ir.OpOperand) -> None:
    op = use.owner.operation
    operands = sorted({*operation.aliased_operands(op), use.operand_number})
    pairs = [(operand, operand - _num_hidden(op)) for operand in operands]
    op.attributes["output_operand_aliases"] = operation.aliases(pairs, len(op.results))
