"""Data flow within a block: which of its operations can be joined, and the order after that; who calls a function.

Nothing else orders operations: XLA ignores their order, and ordered effects pass tokens. Prints, maybe in one process
alone, therefore change nothing for others.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

from jax_ring.lowering.custom_call.operation import compared

# They may have effects, or give another result next time.
_NOT_COMPARED = ("stablehlo.custom_call", "func.call", "stablehlo.rng", "stablehlo.infeed", "stablehlo.recv")


def equal_values(operations: Sequence[ir.Operation]) -> dict[ir.Value, ir.Value]:
    """The first of equal values, by each of the others."""
    first_of: dict[ir.Value, ir.Value] = {}
    computed: dict[Hashable, ir.Operation] = {}
    for op in operations:
        name = op.name
        if name in _NOT_COMPARED or len(op.regions):
            continue
        expression = (
            name,
            tuple([first_of.get(value, value) for value in op.operands]),
            compared(op),
            tuple([result.type for result in op.results]),
        )
        first = computed.setdefault(expression, op)
        if first is not op:
            first_of.update(zip(op.results, first.results, strict=True))
    return first_of


def choose_groups(
    operations: Sequence[ir.Operation],
    inputs: Sequence[Sequence[ir.Value]],
    candidates: Mapping[int, tuple[Hashable, int, int, int]],
    *,
    max_count: int,
) -> list[list[int]]:
    """Groups of operations with equal keys, none depending on another of its group.

    An operation joins the last group of its key, or begins one. Joining adds paths from all that members wait for to
    all that waits for them; later ones must not close a cycle.

    Args:
      inputs: of each operation, see `inputs_of`.
      candidates: key, number of results, size and the limit of a group's size, by index; a larger one joins none.
      max_count: of a group's results.
    """
    groups: list[list[int]] = []
    num_results: list[int] = []  # of each group
    num_bytes: list[int] = []
    behind: list[int] = []  # for each group, the set of groups that it waits for, as bits
    open_groups: dict[Hashable, int] = {}
    grown = 0  # groups that got an operation after others computed what they wait for
    waits: dict[ir.Value, int] = {}  # the groups that each value depends on; no entry if none

    def closure(mask: int) -> int:
        pending, seen = mask & grown, mask
        while pending:
            group = pending.bit_length() - 1
            pending &= ~(1 << group)
            pending |= behind[group] & ~seen & grown
            seen |= behind[group]
        return seen

    for i, op in enumerate(operations):
        mask = 0
        for value in inputs[i]:
            mask |= waits.get(value, 0)
        if i in candidates:
            key, count, size, max_bytes = candidates[i]
            mask = closure(mask)
            group = open_groups.get(key)
            if (
                group is None
                or mask >> group & 1
                or num_results[group] + count > max_count
                or num_bytes[group] + size > max_bytes
            ):
                group = len(groups)
                groups.append([])
                num_results.append(0)
                num_bytes.append(0)
                behind.append(0)
                if size <= max_bytes:
                    open_groups[key] = group
            else:
                grown |= 1 << group
            groups[group].append(i)
            num_results[group] += count
            num_bytes[group] += size
            behind[group] |= mask
            mask |= 1 << group
        if mask:
            for result in op.results:
                waits[result] = mask
    return [group for group in groups if len(group) > 1]


def reorder(
    operations: Sequence[ir.Operation],
    inputs: Sequence[Sequence[ir.Value]],
    groups: Sequence[Sequence[int]],
    join: Callable[[Sequence[int]], Sequence[ir.Operation]],
) -> None:
    """Puts other operations in place of each group, and moves what waits for them behind.

    join: creates these for a group, in order and in front of its last member, and gives their results to those who use
      the members' results. The members stay, unused, for the caller to erase.
    """
    node_of = {member: group[-1] for group in groups for member in group}
    group_at = {group[-1]: group for group in groups}
    first = min(group[0] for group in groups)
    last = max(group[-1] for group in groups)
    producers: dict[ir.Value, int] = {}
    needs: dict[int, set[int]] = {}
    for i in range(first, last + 1):
        node = node_of.get(i, i)
        needed = needs.setdefault(node, set())
        needed.update(producers[value] for value in inputs[i] if value in producers)
        needed.discard(node)
        for result in operations[i].results:
            producers[result] = node
    users: dict[int, list[int]] = {node: [] for node in needs}
    for node, needed in needs.items():
        for producer in needed:
            users[producer].append(node)
    missing = {node: len(needed) for node, needed in needs.items()}
    ready = [node for node, count in missing.items() if not count]
    heapq.heapify(ready)
    previous: ir.Operation | None = None
    furthest = -1
    while ready:
        node = heapq.heappop(ready)
        for op in join(group_at[node]) if node in group_at else [operations[node]]:
            if previous and node < furthest:  # it has waited for a later group
                op.move_after(previous)
            previous = op
        furthest = max(furthest, node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)


def only_callers(module: ir.Module) -> dict[ir.Block, ir.Operation]:
    """The call of each function that is called once, by the function's body."""
    callers: defaultdict[str, list[ir.Operation]] = defaultdict(list)
    for call in operations_of(module, func.CallOp):
        callers[ir.FlatSymbolRefAttr(call.attributes["callee"]).value].append(call)
    functions = ir.SymbolTable(module.operation)
    return {functions[name].regions[0].blocks[0]: calls[0] for name, calls in callers.items() if len(calls) == 1}


def operations_of(module: ir.Module | ir.Operation, op_class: type[ir.OpView]) -> list[ir.Operation]:
    """Operations of this class in a module or an operation, in order."""
    found: list[ir.Operation] = []

    def note(op) -> ir.WalkResult:
        found.append(op.operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(note, ir.WalkOrder.PRE_ORDER, op_class)
    return found


def inputs_of(op: ir.Operation) -> list[ir.Value]:
    """The values that an operation reads, also in its regions."""
    values = list(op.operands)
    for region in op.regions:
        for block in region:
            for inner in block.operations:
                values += inputs_of(inner.operation)
    return values
