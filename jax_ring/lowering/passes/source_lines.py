"""Writes the source lines into each custom call, for the error when a rank is missing.

XLA merges calls with equal operands and attributes, which a line would prevent. So calls equal but for lines get one
attribute that names all lines. Equality is by the expressions of operands: operations, constants and arguments, as the
compiler sees them.

Arguments of a function called from several places are equal by position and type. Operations with regions, such as
loops and branches, equal only themselves.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable

from jax.extend.mlir import ir

from jax_ring import _compat, runtime
from jax_ring.lowering.custom_call import operation
from jax_ring.lowering.custom_call.attributes import CONFIG, named
from jax_ring.lowering.custom_call.operation import Call, Lines, compared
from jax_ring.lowering.state import LoweringState, Numbers, state_of

# A text with more lines than this does not help.
_MAX_PLACES = 16
_MAX_LINES_OF_CALL = 4


def write(ctx, results, description: str) -> None:
    """Writes `site` of a call other than to the engines, just emitted."""
    call = results[0].owner.operation
    shared, line = ir.DictAttr(call.attributes[CONFIG]), state_of(ctx).site or _compat.call_site(ctx)
    call.attributes[CONFIG] = operation.config(named(shared), line)
    target = runtime.BETWEEN_HOSTS_TARGET
    known = Call(target, shared, description, (line,), num_hidden=1, itemsize=0, joins=False)
    operation.note(state_of(ctx), call.attributes[CONFIG], known)


def settle(state: LoweringState, calls: list[ir.Operation]) -> None:
    """Writes `site` of all calls in a lowered shard_map's body."""
    state.unsettled += [(call, state.calls[call.attributes[CONFIG]].lines) for call in calls]
    if len(state.calls) > 1:  # else all calls of the module name the same line
        state.call_sites = state.call_sites or Table(state.callers)
        for call, lines in state.unsettled:
            state.call_sites.add(state, call, lines)
        state.unsettled.clear()


class _Together:
    """Calls with one `site`, which names all lines."""

    def __init__(self) -> None:
        self.calls: list[tuple[ir.Operation, Lines]] = []
        self._places: Counter[Lines] = Counter()

    def has_only(self, lines: Lines) -> bool:
        return not self.calls or list(self._places) == [lines]

    def add(self, state: LoweringState, call: ir.Operation, lines: Lines) -> None:
        self.calls.append((call, lines))
        self._places[lines] += 1
        is_news = self._places[lines] == 1 and len(self._places) <= _MAX_PLACES + 1
        self._write(state, self.calls if is_news else [(call, lines)])

    def _write(self, state: LoweringState, calls: list[tuple[ir.Operation, Lines]]) -> None:
        site = _text(list(self._places))
        for call, lines in calls:
            written = call.attributes[CONFIG]
            if ir.StringAttr(ir.DictAttr(written)["site"]).value != site:
                known = state.calls[written]
                call.attributes[CONFIG] = operation.config(named(ir.DictAttr(written)), site)
                operation.note(state, call.attributes[CONFIG], known._replace(lines=lines))


class Table:
    """A module's calls, by numbered expressions, equal ones alike.

    Expressions cost time, so calls that differ in an attribute or a type, or share a line, need none. The module owns
    the table; a reference back would make a cycle, which lives on for a while with all devices.
    """

    def __init__(self, callers: dict[ir.Block, ir.Operation]) -> None:
        self._numbers = Numbers()
        self._values: dict[ir.Value, int] = {}
        self._alike: dict[int, _Together | None] = {}  # by attributes and types; None: distinguish by expression
        self._equal: defaultdict[int, _Together] = defaultdict(_Together)  # by expression
        self._callers = callers

    def add(self, state: LoweringState, call: ir.Operation, lines: Lines) -> None:
        types = tuple([value.type for value in (*call.operands, *call.results)])
        signature = self._numbers[_attributes(call), types]
        alike = self._alike.setdefault(signature, _Together())
        if alike is not None and alike.has_only(lines):
            alike.add(state, call, lines)
            return
        self._alike[signature] = None
        for each, its_lines in (*(alike.calls if alike else ()), (call, lines)):
            self._equal[self._numbers[self._operation(each), self._branch(each)]].add(state, each, its_lines)

    def _operation(self, operation: ir.Operation) -> int:
        """An operation's number: kind, attributes, types and operands, without regions."""
        operands = list(operation.operands)
        for operand in operands:
            self._value(operand)
        return self._operation_on(operation, operands)

    def _operation_on(self, operation: ir.Operation, operands: list) -> int:
        """The same; the operands' numbers must be known."""
        types = tuple([result.type for result in operation.results])
        numbers = tuple([self._values[operand] for operand in operands])
        return self._numbers[operation.name, _attributes(operation), types, numbers]

    def _value(self, value: ir.Value) -> int:
        pending = [] if value in self._values else [(value, *self._origin(value))]
        while pending:  # a loop, because programs are deeper than Python's stack
            value_, origin, inputs = pending[-1]
            if unknown := [operand for operand in inputs if operand not in self._values]:
                pending.extend([(operand, *self._origin(operand)) for operand in unknown])
            else:
                pending.pop()
                self._values[value_] = self._numbers[self._expression(value_, origin, inputs)]
        return self._values[value]

    def _origin(self, value: ir.Value) -> tuple[ir.Operation, list]:
        """The operation that computes a value or has it as a region's argument, and the values to compare."""
        if isinstance(value, ir.OpResult):
            operation = value.owner.operation
            return operation, list(operation.operands)
        index, block = ir.BlockArgument(value).arg_number, ir.BlockArgument(value).owner
        owner = block.owner.operation
        if block in self._callers:
            return owner, [self._callers[block].operands[index]]
        if owner.name == "sdy.manual_computation":
            return owner, [owner.operands[index]]
        return owner, [] if owner.name == "func.func" else list(owner.operands)

    def _expression(self, value: ir.Value, origin: ir.Operation, inputs: list) -> Hashable:
        if isinstance(value, ir.OpResult):
            return "result", value.result_number, self._operation_on(origin, inputs)
        index = ir.BlockArgument(value).arg_number
        if ir.BlockArgument(value).owner in self._callers:
            return "passed", self._values[inputs[0]]
        if origin.name == "sdy.manual_computation":  # the body of a shard_map
            return "shard", value.type, self._values[inputs[0]]
        if origin.name != "func.func":  # a loop
            return "argument", index, self._operation_on(origin, inputs)
        return "argument", index, value.type if _is_shared(origin) else value.owner

    def _branch(self, call: ir.Operation) -> Hashable:
        """A call's loops and branches; calls in unlike ones do not merge."""
        path: list[Hashable] = []
        block = ir.InsertionPoint(call).block
        while (owner := block.owner.operation).name not in ("func.func", "sdy.manual_computation") or (
            block in self._callers
        ):
            if block in self._callers:
                owner = self._callers[block]
            else:
                path.append((self._operation(owner), [region == block.region for region in owner.regions].index(True)))
            block = ir.InsertionPoint(owner).block
        if owner.parent is None:
            path.append(block)
        return tuple(path)


def _attributes(operation: ir.Operation) -> tuple:
    if operation.name == "func.call":
        return ()  # no function name: two functions may do the same
    attributes = operation.attributes
    if CONFIG not in attributes or "site" not in ir.DictAttr(attributes[CONFIG]):
        return compared(operation)
    of_engine = [pair for pair in named(ir.DictAttr(attributes[CONFIG])) if pair[0] != "site"]
    return (*[pair for pair in named(attributes) if pair[0] != CONFIG], *of_engine)


def _is_shared(function: ir.Operation) -> bool:
    """Whether a function may have several callers, so that arguments have no expressions.

    Without a parent it is a draft, whose body JAX copies to its use with the attributes of that moment.
    """
    return function.parent is not None and ir.StringAttr(function.attributes["sym_name"]).value != "main"


def _text(places: list[Lines]) -> str:
    """Equal calls' lines, as in errors."""
    texts = [_text_of_call(lines) for lines in places]
    if len(texts) == 1:
        return texts[0]
    if len(texts) > _MAX_PLACES:
        return f"one of more than {_MAX_PLACES} places, such as {', '.join(texts[:_MAX_PLACES])}"
    return f"one of {len(texts)} places: {', '.join(texts[:-1])} or {texts[-1]}"


def _text_of_call(lines: Lines) -> str:
    if len(lines) > _MAX_LINES_OF_CALL:
        return f"{', '.join(lines[:_MAX_LINES_OF_CALL])} and {len(lines) - _MAX_LINES_OF_CALL} more places"
    return " and ".join(lines)
