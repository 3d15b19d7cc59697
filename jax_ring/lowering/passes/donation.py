"""Sums donated arguments in place, once the program is lowered.

A custom call has its operand's buffer always or never. XLA would copy an argument that is not donated before the call,
and the result into a donated one after the call, unless the sum is in place. Only the whole program shows donation and
other readers.
"""

from collections import Counter
from typing import NamedTuple

from jax.extend.mlir import ir

from jax_ring import _compat, runtime
from jax_ring.lowering.custom_call import attributes, operation
from jax_ring.lowering.kinds import KINDS

_TARGETS = tuple(runtime.TARGETS[kind.name] for kind in KINDS.values() if kind.in_place)


class _Sum(NamedTuple):
    """A sum of a program's argument.

    Attributes:
      use: the operand.
      type: of the argument on one device, if known.
    """

    use: ir.OpOperand
    type: ir.Type | None


def sum_in_place(module: ir.Module) -> None:
    """Gives sums of donated arguments their buffers, where nothing else reads these."""
    functions = {_text(op.attributes["sym_name"]): op for op in _operations(module.body) if op.name == "func.func"}
    main = functions["main"].regions[0].blocks[0]
    marks = ir.ArrayAttr(functions["main"].attributes["arg_attrs"])
    donated = [value for value in main.arguments if _compat.is_donated(ir.DictAttr(marks[value.arg_number]))]
    num_donated = Counter(value.type for value in donated)
    num_callers = _num_callers(module) if len(functions) > 1 else Counter()
    bodies = {name: op.regions[0].blocks[0] for name, op in functions.items() if num_callers[name] == 1}
    results = [(value.type, _type_in_shard_map(value)) for value in _operations(main)[-1].operands]
    for value in donated:
        sum_ = _find_sum(value, bodies)
        if sum_ is None:
            continue
        # XLA gives a donated buffer to a result of its size. It copies an argument if no result takes its buffer.
        takers = [
            sum_.type == on_device if sum_.type and on_device else value.type == in_program
            for in_program, on_device in results
        ]
        if sum(takers) >= num_donated[value.type]:
            _alias(sum_.use)


def _text(attribute: ir.Attribute) -> str:
    return ir.StringAttr(attribute).value


def _operations(block: ir.Block) -> list[ir.Operation]:
    return [op.operation for op in block.operations]


def _num_callers(module: ir.Module) -> Counter[str]:
    callers = Counter[str]()

    def count(op) -> ir.WalkResult:
        if op.operation.name == "func.call":
            callers[_callee(op.operation)] += 1
        return ir.WalkResult.ADVANCE

    module.operation.walk(count)
    return callers


def _callee(call: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _type_in_shard_map(value: ir.Value) -> ir.Type | None:
    """A shard_map result's type on one device; None for other values."""
    value = _compat.unconstrained(value)
    if not isinstance(value, ir.OpResult) or value.owner.operation.name != "sdy.manual_computation":
        return None
    end = _operations(value.owner.operation.regions[0].blocks[0])[-1]
    return end.operands[value.result_number].type


def _find_sum(value: ir.Value, bodies: dict[str, ir.Block]) -> _Sum | None:
    """The only reader of a value, if a sum; not behind a reshape, which XLA would copy.

    bodies: of functions with one caller.
    """
    type_ = None
    while True:
        uses = list(value.uses)
        if len(uses) != 1:
            return None
        (use,) = uses
        op = use.owner.operation
        if op.name == "sdy.manual_computation":
            value = op.regions[0].blocks[0].arguments[use.operand_number]
            type_ = value.type
        elif op.name == "func.call" and "mhlo.frontend_attributes" not in op.attributes and _callee(op) in bodies:
            value = bodies[_callee(op)].arguments[use.operand_number]
        else:
            return _Sum(use, type_) if _can_alias(op, use.operand_number) else None


def _can_alias(op: ir.Operation, operand: int) -> bool:
    if op.name != "stablehlo.custom_call" or _text(op.attributes["call_target_name"]) not in _TARGETS:
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
    op.attributes["output_operand_aliases"] = attributes.aliases(pairs, len(op.results))
