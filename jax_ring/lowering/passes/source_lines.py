"""The user's lines of calls: inherited before a shard_map is lowered, and written into equal calls afterwards.

Errors name the lines when a rank is missing. XLA merges calls with equal operands and attributes, which a line would
prevent. So once a program is lowered, calls equal but for lines get one attribute that names all lines. Equality is by
the expressions of operands: operations, constants and arguments, as the compiler sees them.

Arguments of a function called from several places are equal by position and type. Loops, branches and functions are
compared by the operations in them, without operands.
"""

import operator
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo

from jax_ring import _compat
from jax_ring.lowering.custom_call.operation import CONFIG, compared, entries
from jax_ring.lowering.module_state import Numbers
from jax_ring.lowering.passes import dataflow

REQUEST = "jax_ring.several_lines"  # a module's attribute
_BODIES = ("func.func", "sdy.manual_computation")
# A text with more lines than this does not help.
_MAX_PLACES = 16


# ---- Before lowering -------------------------------------------------------------------------------------------------

_JAXPRS = (Jaxpr, ClosedJaxpr)


def inherit(jaxpr: Any, traceback: Any):
    """A jaxpr in which collectives without a line of the user have that of the equation around them.

    JAX cuts tracebacks off at the function that it traces, which may be the collective itself, as in
    `lax.map(partial(ring_psum, axis_name="data"), x)`, or a function of jax_ring.

    Functions are not shared between lines, nor within one: what is lowered must not depend on lines, which may differ
    between processes.

    traceback: of the equation that has the jaxpr.
    """
    body = getattr(jaxpr, "jaxpr", jaxpr)
    # A collective has effects, and so has what contains it.
    equations = [_inherit(eqn, traceback) if eqn.effects else eqn for eqn in body.eqns]
    if all(map(operator.is_, equations, body.eqns)):
        return jaxpr
    new = body.replace(eqns=equations)
    return new if body is jaxpr else jaxpr.replace(jaxpr=new)


def _inherit(eqn, traceback):
    source, params = eqn.source_info, dict(eqn.params)
    if not _compat.call_site(source):
        source = source.replace(traceback=traceback)
    for name, value in eqn.params.items():
        if isinstance(value, _JAXPRS):
            params[name] = inherit(value, source.traceback)
        elif type(value) is tuple and value and isinstance(value[0], _JAXPRS):  # branches
            params[name] = tuple([inherit(each, source.traceback) for each in value])
    return eqn if source is eqn.source_info and params == eqn.params else eqn.replace(source_info=source, params=params)


# ---- After lowering --------------------------------------------------------------------------------------------------


def request(module: ir.Module) -> None:
    """Asks for `settle` once the program is lowered."""
    module.operation.attributes[REQUEST] = ir.UnitAttr.get()


def settle(module: ir.Module) -> None:
    """Writes `site` of all calls in a lowered program that asks for it."""
    del module.operation.attributes[REQUEST]
    alike: defaultdict[Hashable, list[ir.Operation]] = defaultdict(list)  # by attributes and types
    for call in dataflow.operations_of(module, hlo.CustomCallOp):
        if _site(call):
            types = tuple([value.type for value in (*call.operands, *call.results)])
            alike[_attributes(call), types].append(call)
    # Expressions cost time: calls that differ in an attribute or a type, or share a line, need none.
    unclear = [call for calls in alike.values() if len(set(map(_site, calls))) > 1 for call in calls]
    if not unclear:
        return
    expressions = _Expressions(module)
    equal: defaultdict[Hashable, list[ir.Operation]] = defaultdict(list)
    for call in unclear:
        equal[expressions.of_call(call)].append(call)
    for calls in equal.values():
        site = ir.StringAttr.get(_text(list(dict.fromkeys(map(_site, calls)))))
        for call in calls:
            attributes = entries(ir.DictAttr(call.attributes[CONFIG]))
            call.attributes[CONFIG] = ir.DictAttr.get({**dict(attributes), "site": site})


class _Expressions:
    """Numbers for what a program computes, equal expressions alike."""

    def __init__(self, module: ir.Module) -> None:
        self._callers = dataflow.only_callers(module)
        self._functions = ir.SymbolTable(module.operation)
        self._numbers = Numbers()
        self._values: dict[ir.Value, int] = {}
        self._contents: dict[ir.Operation, frozenset[Hashable]] = {}

    def of_call(self, call: ir.Operation) -> Hashable:
        """What calls have in common that XLA can merge: equal operands, and the loops and branches around them."""
        branches: list[Hashable] = []
        block = ir.InsertionPoint(call).block
        while (owner := self._callers.get(block, block.owner.operation)).name not in _BODIES:
            if owner.name != "func.call":
                branches.append((self._of_operation(owner), list(owner.regions).index(block.region)))
            block = ir.InsertionPoint(owner).block
        return self._of_operation(call), *branches

    def _of_operation(self, operation: ir.Operation) -> int:
        """An operation's number: kind, attributes, types and operands, and what is in regions."""
        return self._numbers[self._described(operation), tuple(map(self._of_value, list(operation.operands)))]

    def _of_value(self, value: ir.Value) -> int:
        pending = [] if value in self._values else [(value, *self._origin(value))]
        while pending:  # a loop, because programs are deeper than Python's stack
            current, origin, inputs = pending[-1]
            if unknown := [each for each in inputs if each not in self._values]:
                pending.extend([(each, *self._origin(each)) for each in unknown])
            else:
                pending.pop()
                numbers = tuple([self._values[each] for each in inputs])
                self._values[current] = self._numbers[origin, numbers] if origin else numbers[0]
        return self._values[value]

    def _origin(self, value: ir.Value) -> tuple[Hashable, list[ir.Value]]:
        """What computes a value, if it is not passed on, and from which values."""
        if isinstance(value, ir.OpResult):
            operation = value.owner.operation
            return ("result", value.result_number, self._described(operation)), list(operation.operands)
        index, block = ir.BlockArgument(value).arg_number, ir.BlockArgument(value).owner
        if block in self._callers:
            return None, [self._callers[block].operands[index]]
        owner = block.owner.operation
        if owner.name == "sdy.manual_computation":
            return ("shard", value.type), [owner.operands[index]]
        if owner.name != "func.func":  # a loop
            return ("argument", index, self._described(owner)), list(owner.operands)
        is_main = ir.StringAttr(owner.attributes["sym_name"]).value == "main"
        return ("argument", index, value.type, is_main), []

    def _described(self, operation: ir.Operation) -> Hashable:
        """Kind, attributes and types, and those of all that its regions or the called function have."""
        within = self._numbers[self._within(operation)] if len(operation.regions) or _is_call(operation) else None
        return _described(operation), within

    def _within(self, body: ir.Operation) -> frozenset[Hashable]:
        """The operations in a body, without order and each once: XLA merges equal ones there, too.

        Called functions are taken apart.
        """
        if _is_call(body):
            body = self._functions[ir.FlatSymbolRefAttr(body.attributes["callee"]).value].operation
        if body not in self._contents:
            inner = [each for each in dataflow.operations_of(body, ir.OpView)[1:] if each.name != "func.return"]
            own = frozenset(_described(each) for each in inner if not _is_call(each))
            self._contents[body] = own.union(*(self._within(each) for each in inner if _is_call(each)))
        return self._contents[body]


def _is_call(operation: ir.Operation) -> bool:
    return operation.name == "func.call"


def _described(operation: ir.Operation) -> Hashable:
    return operation.name, _attributes(operation), tuple([result.type for result in operation.results])


def _attributes(operation: ir.Operation) -> tuple:
    if _is_call(operation):
        return ()  # no function name: two functions may do the same
    if not _site(operation):
        return compared(operation)
    attributes = operation.attributes
    of_engine = [pair for pair in entries(ir.DictAttr(attributes[CONFIG])) if pair[0] != "site"]
    return (*[pair for pair in entries(attributes) if pair[0] != CONFIG], *of_engine)


def _site(operation: ir.Operation) -> str:
    """The lines of a call to an engine, or to a marker between hosts; else empty."""
    if CONFIG not in operation.attributes:
        return ""
    config = ir.DictAttr(operation.attributes[CONFIG])
    return ir.StringAttr(config["site"]).value if "site" in config else ""


def _text(sites: list[str]) -> str:
    """Equal calls' lines, as in errors."""
    if len(sites) == 1:
        return sites[0]
    if len(sites) > _MAX_PLACES:
        return f"one of more than {_MAX_PLACES} places, such as {', '.join(sites[:_MAX_PLACES])}"
    return f"one of {len(sites)} places: {', '.join(sites[:-1])} or {sites[-1]}"
