"""Joins calls into one, as XLA's combiner joins all-reduces but not custom calls, and their exchanges between hosts.

`lax.psum` of a tree has an equation per leaf, programs call `ring_psum` for each, and autodiff sums gradients where
they are computed. Calls of one kind in one block are joined up to a limit, if none depends on another. The joined call
replaces the last one; users of earlier results move behind it. At most the limit's data wait for it.

All ranks lower the same program, and join alike.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from jax.extend.mlir import ir

from jax_ring import _compat
from jax_ring.lowering.custom_call import engine
from jax_ring.lowering.custom_call.operation import CONFIG, aliased_operands, describe_joined, function_and_axes
from jax_ring.lowering.module_state import CustomCall, ModuleState, Numbers
from jax_ring.lowering.passes import dataflow, exchanges

# Joining larger calls saves a few microseconds of a few milliseconds.
COMBINE_THRESHOLD_BYTES = 25 << 20
# An engine sends this many operands in a few messages.
COMBINE_THRESHOLD_COUNT = 256


def join(ctx: _compat.LoweringContext, state: ModuleState, parent: ir.Operation) -> None:
    """Joins the calls in each block of a lowered shard_map, or of an operation or function within."""
    for block in [block for region in parent.regions for block in region]:
        operations: list[ir.Operation] = []
        calls: dict[int, CustomCall] = {}
        exchanged: dict[int, ir.Operation] = {}
        for i, view in enumerate(block.operations):
            op = view.operation
            operations.append(op)
            name = op.name
            if name == "stablehlo.custom_call":
                attributes = op.attributes
                call = state.calls.get(attributes[CONFIG]) if CONFIG in attributes else None
                if call is not None:
                    calls[i] = call
            elif name == "stablehlo.all_to_all" and exchanges.is_one(op):
                exchanged[i] = op
            elif name == "func.call":
                _join_function(ctx, state, op)
            elif len(op.regions) and name != "sdy.manual_computation":  # a nested shard_map has been looked at already
                join(ctx, state, op)
        if len(calls) + len(exchanged) > 1:
            _join_calls(ctx, state, operations, calls, exchanged)


def _join_function(ctx, state: ModuleState, caller: ir.Operation) -> None:
    """Joins the calls in a called function, once."""
    name = caller.attributes["callee"]
    if name not in state.joined_functions:
        state.joined_functions.add(name)
        join(ctx, state, _compat.called_function(ctx, caller))


def _join_calls(
    ctx,
    state: ModuleState,
    operations: Sequence[ir.Operation],
    calls: dict[int, CustomCall],
    exchanged: dict[int, ir.Operation],
) -> None:
    """Joins a block's calls and exchanges, by place."""
    elements = functools.cache(_elements)  # many calls share a few types
    keys: dict[int, Hashable] = {i: _key(operations[i], call, elements) for i, call in calls.items() if call.joins}
    keys.update({i: exchanges.key(op) for i, op in exchanged.items()})
    count = Counter(keys.values())
    keys = {i: key for i, key in keys.items() if count[key] > 1}
    if not keys:
        return
    first, last = min(keys), max(keys)
    part = operations[first : last + 1]
    inputs = list(map(dataflow.inputs_of, part))
    candidates = {}
    for i, key in keys.items():
        op = operations[i]
        size = exchanges.num_bytes(op) if i in exchanged else _num_bytes(op, calls[i], elements)
        limit = exchanges.SMALL_BYTES if i in exchanged else COMBINE_THRESHOLD_BYTES
        candidates[i - first] = key, len(op.results), size, limit
    groups = dataflow.choose_groups(part, inputs, candidates, max_count=COMBINE_THRESHOLD_COUNT)
    if not groups:
        return
    first_of = dataflow.equal_values(operations[:last])

    def build(group: Sequence[int]) -> list[ir.Operation]:
        places = [first + i for i in group]
        if places[0] in exchanged:
            return exchanges.build([operations[i] for i in places])
        return [_build(ctx, state, [(operations[i], calls[i]) for i in places], first_of)]

    dataflow.reorder(part, inputs, groups, build)
    for group in groups:
        for i in group:
            part[i].erase()


def _key(op: ir.Operation, call: CustomCall, elements: Callable) -> Hashable:
    """What calls have in common that can be one."""
    return call.target, call.shared, function_and_axes(call.description), elements(op.operands[call.num_hidden].type)[0]


def _num_bytes(op: ir.Operation, call: CustomCall, elements: Callable) -> int:
    """The size of a call's larger side: a gather's results, else operands."""
    sides = list(op.operands)[call.num_hidden :], op.results
    return max([sum([elements(value.type)[1] for value in side]) for side in sides]) * call.itemsize


def _elements(tensor: ir.Type) -> tuple[ir.Type, int]:
    """Element type and number."""
    ranked = ir.RankedTensorType(tensor)
    return ranked.element_type, math.prod(ranked.shape)


def _build(
    ctx, state: ModuleState, members: Sequence[tuple[ir.Operation, CustomCall]], first_of: Mapping[ir.Value, ir.Value]
) -> ir.Operation:
    """Builds a call for the members in front of the last, and passes on its results.

    first_of: values that equal others, sent once.
    """
    (first, call), (last, _) = members[0], members[-1]
    hidden = list(first.operands)[: call.num_hidden]
    operands: list[ir.Value] = []
    types: list[ir.Type] = []
    aliases: list[tuple[int, int]] = []
    places = Numbers()
    served: list[tuple[ir.OpResult, int]] = []
    for op, _ in members:
        aliased = aliased_operands(op)
        values = list(op.operands)[len(hidden) :]
        for i, (value, result) in enumerate(zip(values, op.results, strict=True)):
            place = places[first_of.get(value, value), result.type]
            if place == len(operands):
                operands.append(value)
                types.append(result.type)
                if len(hidden) + i in aliased:
                    aliases.append((len(hidden) + place, place))
            served.append((result, place))
    new_call = call._replace(
        description=describe_joined([each.description for _, each in members]),
        lines=tuple(dict.fromkeys(line for _, each in members for line in each.lines)),
    )
    with ir.InsertionPoint(last):
        new = engine.build_call(ctx, state, new_call, types, aliases, last.location, [*hidden, *operands])
    for result, place in served:
        result.replace_all_uses_with(new.results[place])
    return new
