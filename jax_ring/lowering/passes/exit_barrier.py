"""Ends a shard_map with a barrier if ranks may leave out a call.

Such a rank would finish its part, while those that wait for it fail at the deadline. The next program would have
operands on that rank alone, and XLA's collectives wait there until XLA ends the process. With the barrier all ranks
fail together.
"""

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo

from jax_ring import _compat, runtime
from jax_ring.lowering import topology


def end(ctx: _compat.LoweringContext, body: ir.Operation, params: dict) -> None:
    """Ends a lowered shard_map's body with a barrier if needed.

    params: of its equation.
    """
    if _covers_whole_mesh(ctx, params) and _has_optional_call(ctx, body, False, set()):
        _end_with_barrier(ctx, body, params)


def _covers_whole_mesh(ctx, params: dict) -> bool:
    """Whether the body is one rank's program, and all execute it."""
    mesh = params["mesh"]
    is_nested = bool(mesh.manual_axes)
    is_for_cpu = tuple(ctx.module_context.platforms) == ("cpu",) and not _compat.is_exported(ctx)
    return is_for_cpu and not is_nested and set(params["newly_manual_axes"]) == set(mesh.axis_names)


def _has_optional_call(ctx, operation: ir.Operation, is_optional: bool, without: set) -> bool:
    """Whether calls are in branches, or in loops of a length known at run time.

    is_optional: whether the operation is in one. without: functions known to have none, and whether.
    """
    for region in operation.regions:
        for block in region:
            for op in block.operations:
                child = op.operation
                name = child.name
                if name == "stablehlo.custom_call":
                    target = ir.StringAttr(child.attributes["call_target_name"]).value
                    if is_optional and target in runtime.TARGETS.values():
                        return True
                elif name == "func.call":
                    key = (child.attributes["callee"], is_optional)
                    if key in without:
                        continue
                    if _has_optional_call(ctx, _compat.called_function(ctx, child), is_optional, without):
                        return True
                    without.add(key)
                elif _has_optional_call(ctx, child, is_optional or _is_conditional(child), without):
                    return True
    return False


def _is_conditional(operation: ir.Operation) -> bool:
    if operation.name == "stablehlo.while":
        return not _is_counted(operation)
    return operation.name in ("stablehlo.case", "stablehlo.if")


def _is_counted(loop: ir.Operation) -> bool:
    """Whether a loop counts between constants, so that ranks repeat it equally often."""
    (condition,), (body,) = loop.regions
    *head, end = condition.operations
    compare = end.operation.operands[0].owner
    if any(op.operation.name != "stablehlo.constant" and op != compare for op in head) or compare == condition:
        return False
    counters = [value for value in compare.operation.operands if value.owner == condition]
    if len(counters) != 1 or not all(value in counters or _is_constant(value) for value in compare.operation.operands):
        return False
    index = ir.BlockArgument(counters[0]).arg_number
    *_, end = body.operations
    step = end.operation.operands[index].owner
    is_sum = step != body and step.operation.name == "stablehlo.add"
    counter = body.arguments[index]
    return (
        is_sum
        and all(value == counter or _is_constant(value) for value in step.operation.operands)
        and _is_constant(loop.operands[index])
    )


def _is_constant(value: ir.Value) -> bool:
    return not isinstance(value.owner, ir.Block) and value.owner.operation.name == "stablehlo.constant"


def _end_with_barrier(ctx, body: ir.Operation, params: dict) -> None:
    """Emits the barrier, which awaits the body's results and does not read them."""
    processes = topology.processes_of_cpus(_compat.axis_context_within(params).mesh)
    if processes is None:
        return
    (block,) = body.regions[0]
    *_, end = block.operations
    awaited = [value for value in end.operation.operands if isinstance(value.type, ir.RankedTensorType)]
    emit = jax.ffi.ffi_lowering(runtime.BARRIER_TARGET, has_side_effect=True, skip_ffi_layout_processing=True)
    with ir.InsertionPoint(end):
        emit(
            ctx.replace(avals_in=[], avals_out=[]),
            hlo.partition_id(),
            *awaited,
            members=np.arange(len(processes)),
            processes=np.array(processes, np.int64),
        )
