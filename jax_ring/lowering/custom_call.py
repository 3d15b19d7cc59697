"""The custom call to an engine: its operands and attributes, and the transposes around it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo

from jax_ring import _compat, runtime
from jax_ring.distributed import discovery
from jax_ring.lowering import layout, ops, reach, tuning
from jax_ring.lowering.service import Service, has_choice


def emit(
    ctx, operands, *, kind: str, op: str, service: Service, call: str, options, root=0, axis_size=None, **dimensions
) -> Sequence:
    """One custom call for all operands.

    The engine sees contiguous blocks, one for each rank, along a first dimension that it adds to the result of an
    all-gather and takes from the operand of a reduce-scatter. Where the user wants another, the data is moved here.
    """
    assert service.levels is not None
    scatters, gathers = kind == "reduce_scatter", kind == "all_gather"
    avals_in = [
        jax.core.ShapedArray((axis_size, *out.shape) if scatters else aval.shape, aval.dtype)
        for aval, out in zip(ctx.avals_in, ctx.avals_out, strict=True)
    ]
    avals_out = [
        jax.core.ShapedArray((axis_size, *aval.shape) if gathers else out.shape, aval.dtype)
        for aval, out in zip(ctx.avals_in, ctx.avals_out, strict=True)
    ]
    if scatters:
        operands = [
            ops.inline(ctx, layout.blocks_first, x, aval, blocks, axis_size=axis_size, **dimensions)
            for x, aval, blocks in zip(operands, ctx.avals_in, avals_in, strict=True)
        ]

    groups = service.levels.within
    if all(len(group) == 1 for group in groups):
        results: Sequence = [ops.reshape(x, aval.shape) for x, aval in zip(operands, avals_out, strict=True)]
    else:
        runtime.note_call_site(call, _compat.call_site(ctx))
        before, avals_before, attributes = _CALLERS[service.engine](ctx, groups)
        # The engine chooses when it knows what travels together.
        choice = has_choice(service.engine, service.levels)
        thresholds = [tuning.thresholds(service.engine, len(group)) for group in groups if choice]
        in_place = {
            len(before) + i: i for i, x in enumerate(operands) if not (scatters or gathers) and _may_overwrite(x)
        }
        results = jax.ffi.ffi_lowering(runtime.TARGETS[kind], operand_output_aliases=in_place)(
            ctx.replace(avals_in=[*avals_before, *avals_in], avals_out=avals_out),
            *before,
            *operands,
            collective=kind,
            op=op,
            root=np.int64(root),
            algorithm=options.algorithm,
            order=options.order,
            group_sizes=np.array([len(group) for group in groups], np.int64),
            one_shot_bytes=np.array([t.one_shot for t in thresholds], np.int64),
            two_shot_bytes=np.array([t.two_shot for t in thresholds], np.int64),
            call=call,
            **attributes,
        )

    if gathers:
        results = [
            ops.inline(ctx, layout.blocks_at, x, blocks, aval, **dimensions)
            for x, blocks, aval in zip(results, avals_out, ctx.avals_out, strict=True)
        ]
    return results


def describe(ctx, function: str, axes, axis_index_groups) -> str:
    """The call in words, for the error of a rank that waits in vain. The same for equal calls, so that they merge."""
    shapes = [f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]" for aval in ctx.avals_in]
    message = ", ".join(shapes[:4]) + (f" and {len(shapes) - 4} more" if len(shapes) > 4 else "")
    axis = f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {axes!r}"
    groups = "" if axis_index_groups is None else f" in groups {[list(g) for g in axis_index_groups]}"
    return f"{function} of {message} over {axis}{groups}"


# ---- Who makes the call ---------------------------------------------------------------------------------------------


class Caller(NamedTuple):
    """How an engine is told the groups, and which of their members it is called for."""

    operands: list  # that come before the user's
    avals: list
    attributes: dict


def _caller_on_cpu(ctx, groups) -> Caller:
    # The caller's mesh position is a run-time value: one program serves all devices.
    position = hlo.partition_id()
    members = [i for group in groups for i in group]
    processes = reach.processes_of_cpus(ctx.module_context.axis_context.mesh)
    assert processes is not None  # or the CPU engine would not serve the call
    attributes = {
        "partitions": np.array(members, np.int64),
        "processes": np.array([processes[i] for i in members], np.int64),
        "program": _program(ctx),
    }
    return Caller([position], [jax.core.ShapedArray((), np.uint32)], attributes)


def _program(ctx) -> str:
    """What names the program in all of its processes, so that each of its calls finds its like in the others.

    Up to the '#' it is the same in all of them. What follows counts programs of that name, of which a process may lower
    more than the others do: to look at one, or to run one by itself.
    """
    if jax.process_count() == 1:
        return ""
    notes = _compat.notes_on_module(ctx)
    if "program" not in notes:
        name = _compat.module_name(ctx)
        notes["program"] = f"{name}#{discovery.next_lowering(name)}"
    return notes["program"]


def _caller_on_cuda(ctx, groups) -> Caller:
    # Here the handler knows its GPU, and the position would lie in the GPU's memory, which the host cannot see.
    gpus = reach.gpus_of(ctx.module_context.axis_context.mesh)
    assert gpus is not None  # or the CUDA engine would not serve the call
    members = [gpus[i] for group in groups for i in group]
    processes = np.array([gpu.process for gpu in members], np.int64)
    return Caller([], [], {"processes": processes, "devices": np.array([gpu.number for gpu in members], np.int64)})


_CALLERS = {"cpu": _caller_on_cpu, "cuda": _caller_on_cuda}


# ---- In place -------------------------------------------------------------------------------------------------------

# Operations whose result is their operand's buffer under another shape, if both have as many elements.
_RESHAPES = ("stablehlo.reshape", "stablehlo.broadcast_in_dim")


def _may_overwrite(value) -> bool:
    """Whether the result should take its operand's buffer, which saves memory and the traffic to it.

    It should, unless the operand is an argument of the shard_map, whose buffer may be the caller's: it would have to be
    copied first. The compiler sees to it that a value which is needed later is copied, so this is about speed alone.
    """
    owner = value.owner
    if isinstance(owner, ir.Block):
        return owner.owner.operation.name != "sdy.manual_computation"
    operands = owner.operation.operands
    if owner.operation.name in _RESHAPES and _num_elements(operands[0]) == _num_elements(value):
        return _may_overwrite(operands[0])
    return True


def _num_elements(value) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)
