"""From primitive to HLO: who serves a call, its replica groups, and the custom call's operands and attributes."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat, communicator, hosts, runtime

logger = logging.getLogger("jax_ring")

# The platforms that have an engine of ours.
PLATFORMS = ("cpu", "cuda")

# Types that the engine does not read: XLA packs the integers of fewer than 8 bits, and these floats are too rare to
# be worth a fold of their own. They are widened before the call and rounded once after it.
_WIDENED = {
    "int2": jnp.int8,
    "int4": jnp.int8,
    "uint2": jnp.uint8,
    "uint4": jnp.uint8,
    "float4_e2m1fn": jnp.float32,
    "float8_e8m0fnu": jnp.float32,
}


class Collective(NamedTuple):
    """What is to be lowered."""

    function: str  # the public function, for messages
    kind: str  # a key of runtime.TARGETS
    op: str  # how values of several ranks become one: "sum", "max" or "min"
    lower_to_xla: Callable  # (ctx, operand, **params) to the results, for one operand


class Service(NamedTuple):
    """Who serves a call."""

    engine: str | None  # "cpu" or "cuda"; None if XLA has to do it alone
    levels: communicator.Levels | None  # what the engine serves, and what is left to XLA across hosts
    why_not: str  # why no engine serves it


def lower(collective: Collective, ctx, *operands, axes, axis_index_groups, options, **details):
    """One custom call to an engine for all operands, or XLA's own collectives where no engine serves them.

    details: what else the collective's primitive has for parameters.
    """
    groups = replica_groups(ctx.module_context.axis_context, axes, axis_index_groups)
    service = _who_serves(ctx, groups, collective.kind)
    if service.engine is not None:
        call = _describe(ctx, collective.function, axes, axis_index_groups)
        return _emit(ctx, collective, service.engine, groups, operands, call, options, **details)
    xlas = collective.kind if collective.kind not in ("reduce", "broadcast") else "all_reduce"
    ignored = f", which knows no {chosen}" if (chosen := options.chosen()) else ""
    instead = f"XLA's {xlas}{ignored}: {service.why_not}"
    if runtime.STRICT:
        raise NotImplementedError(
            f"{collective.function} over {axes} would use {instead}. {runtime.STRICT_VARIABLE}=1 forbids it; unset "
            "that to allow it."
        )
    logger.info("%s over %s uses %s", collective.function, axes, instead)
    return [
        result
        for operand, aval_in, aval_out in zip(operands, ctx.avals_in, ctx.avals_out, strict=True)
        for result in collective.lower_to_xla(
            ctx.replace(avals_in=[aval_in], avals_out=[aval_out]), operand, axes=axes,
            axis_index_groups=axis_index_groups, **details,
        )
    ]  # fmt: skip


def _who_serves(ctx, groups, kind: str) -> Service:
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    return who_serves(platforms, ctx.module_context.axis_context, groups, kind)


def needs_call(ctx, axes, axis_index_groups, kind: str) -> bool:
    """Whether `lower` will make a custom call: an engine of ours serves it, and there is somebody to talk to."""
    groups = replica_groups(ctx.module_context.axis_context, axes, axis_index_groups)
    return _who_serves(ctx, groups, kind).engine is not None and any(len(group) > 1 for group in groups)


def who_serves(platforms: tuple[str, ...], axis_context, groups, kind: str) -> Service:
    """Who serves a call of this kind in these groups of mesh positions."""
    levels, why_not = _levels_served(platforms, axis_context, groups)
    if levels is not None and levels.across:
        why_not, levels = f"the ranks of a group are on {len(levels.across[0])} hosts", None
    return Service(platforms[0] if levels is not None else None, levels, why_not)


def _levels_served(platforms: tuple[str, ...], axis_context, groups) -> tuple[communicator.Levels | None, str]:
    if len(platforms) > 1 or platforms[0] not in PLATFORMS:
        return None, f"the program is lowered for {' and '.join(platforms)}"
    if not isinstance(axis_context, _compat.SPMDAxisContext):
        return None, f"its axes belong to {type(axis_context).__name__}, not to a shard_map"
    automatic = set(axis_context.mesh.axis_names) - set(axis_context.manual_axes)
    if automatic:
        return None, f"the enclosing shard_map leaves the axes {sorted(map(str, automatic))} to the compiler"
    return communicator.levels_of(platforms[0], axis_context.mesh, groups)


class Caller(NamedTuple):
    """How an engine is told the groups, and which of their members it is called for."""

    operands: list  # that come before the user's
    avals: list
    attributes: dict


def _caller_on_cpu(ctx, groups) -> Caller:
    # The caller's mesh position is a run-time value: one program serves all devices.
    position = hlo.partition_id()
    members = [i for group in groups for i in group]
    processes = communicator.processes_of_cpus(ctx.module_context.axis_context.mesh)
    assert processes is not None  # or the CPU engine would not serve the call
    attributes = {
        "partitions": np.array(members, np.int64),
        "processes": np.array([processes[i] for i in members], np.int64),
        "program": _program(ctx, processes),
    }
    return Caller([position], [jax.core.ShapedArray((), np.uint32)], attributes)


def _program(ctx, processes: Sequence[int]) -> str:
    """What names the program in all of its processes, so that each of its calls finds its like in the others."""
    if jax.process_count() == 1:
        return ""
    notes = _compat.notes_on_module(ctx)
    if "program" not in notes:
        notes["program"] = hosts.name_program(_compat.module_name(ctx), processes, _compat.module_text(ctx))
    return notes["program"]


def _caller_on_cuda(ctx, groups) -> Caller:
    # Here the handler knows its GPU, and the position would lie in the GPU's memory, which the host cannot see.
    gpus = communicator.gpus_of(ctx.module_context.axis_context.mesh)
    assert gpus is not None  # or the CUDA engine would not serve the call
    members = [gpus[i] for group in groups for i in group]
    processes = np.array([gpu.process for gpu in members], np.int64)
    return Caller([], [], {"processes": processes, "devices": np.array([gpu.number for gpu in members], np.int64)})


_CALLERS = {"cpu": _caller_on_cpu, "cuda": _caller_on_cuda}


def _emit(ctx, collective, engine, groups, operands, call: str, options, *, root=0, axis_size=None, **layout):
    """The custom call, and around it the conversions of types and layouts for the engine.

    The engine sees contiguous blocks, one for each rank, along a first dimension that it adds to the result of an
    all-gather and takes from the operand of a reduce-scatter. Where the user wants another, the data is moved here.
    """
    wide = _WIDENED.get(ctx.avals_in[0].dtype.name)
    dtype = wide or ctx.avals_in[0].dtype
    scatters, gathers = collective.kind == "reduce_scatter", collective.kind == "all_gather"
    avals_in = [
        jax.core.ShapedArray((axis_size, *out.shape) if scatters else aval.shape, dtype)
        for aval, out in zip(ctx.avals_in, ctx.avals_out, strict=True)
    ]
    avals_out = [
        jax.core.ShapedArray((axis_size, *aval.shape) if gathers else out.shape, dtype)
        for aval, out in zip(ctx.avals_in, ctx.avals_out, strict=True)
    ]
    given = [jax.core.ShapedArray(aval.shape, dtype) for aval in ctx.avals_in]
    if wide is not None:
        operands = [_convert(ctx, x, aval) for x, aval in zip(operands, given, strict=True)]
    if scatters:
        operands = [
            _inline(ctx, _blocks_first, x, aval, axis_size=axis_size, **layout)
            for x, aval in zip(operands, given, strict=True)
        ]

    if all(len(group) == 1 for group in groups):
        results: Sequence = [_reshape(ctx, x, aval) for x, aval in zip(operands, avals_out, strict=True)]
    else:
        runtime.note_call_site(call, _compat.call_site(ctx))
        before, avals_before, attributes = _CALLERS[engine](ctx, groups)
        in_place = {
            len(before) + i: i for i, x in enumerate(operands) if not (scatters or gathers) and _may_overwrite(x)
        }
        results = jax.ffi.ffi_lowering(runtime.TARGETS[collective.kind], operand_output_aliases=in_place)(
            ctx.replace(avals_in=[*avals_before, *avals_in], avals_out=avals_out),
            *before,
            *operands,
            collective=collective.kind,
            op=collective.op,
            root=np.int64(root),
            algorithm=options.algorithm,
            order=options.order,
            group_sizes=np.array([len(group) for group in groups], np.int64),
            call=call,
            **attributes,
        )

    if gathers:
        results = [_inline(ctx, _blocks_at, x, aval, **layout) for x, aval in zip(results, avals_out, strict=True)]
    if wide is not None:
        results = [_convert(ctx, x, aval) for x, aval in zip(results, ctx.avals_out, strict=True)]
    return results


# What `_emit` puts before a reduction's call.
_PREPARATIONS = ("stablehlo.partition_id", "stablehlo.convert")


def erase(results) -> None:
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


def _blocks_first(x, *, axis_size: int, dimension: int, tiled: bool):
    """The operand of a reduce-scatter over `dimension`, with the ranks' blocks along a first dimension."""
    return jnp.moveaxis(split_dimension(x, dimension, axis_size) if tiled else x, dimension, 0)


def _blocks_at(x, *, dimension: int, tiled: bool):
    """The result of an all-gather, with the ranks' blocks, which are along the first dimension, along `dimension`."""
    x = jnp.moveaxis(x, 0, dimension)
    return merge_dimensions(x, dimension) if tiled else x


def split_dimension(x, dimension: int, num_blocks: int):
    """x with `dimension` split into two: the block, and the place in it."""
    return x.reshape(*x.shape[:dimension], num_blocks, x.shape[dimension] // num_blocks, *x.shape[dimension + 1 :])


def merge_dimensions(x, dimension: int):
    """x with `dimension` and the one after it merged."""
    return x.reshape(*x.shape[:dimension], x.shape[dimension] * x.shape[dimension + 1], *x.shape[dimension + 2 :])


def lower_reduce_to_xla(ctx, operand, *, axes, axis_index_groups, root):
    """Lowers a reduce where only XLA's collectives are at hand, as a psum of which only the root keeps the result."""
    del axis_index_groups

    def reduce(x):
        return jnp.where(lax.axis_index(axes) == root, lax.psum(x, axes), jnp.zeros_like(x))

    return mlir.lower_fun(reduce, multiple_results=False)(ctx, operand)


def lower_broadcast_to_xla(ctx, operand, *, axes, axis_index_groups, root):
    """Lowers a broadcast where only XLA's collectives are at hand, as a psum to which the others add zero."""
    del axis_index_groups

    def broadcast(x):
        # Integers, because 0.0 + -0.0 is 0.0.
        if jnp.iscomplexobj(x):
            return lax.complex(broadcast(x.real), broadcast(x.imag))
        if x.dtype == jnp.bool_:
            return broadcast(x.astype(jnp.uint8)).astype(x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating):
            bits = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
            return lax.bitcast_convert_type(broadcast(bits), x.dtype)
        return lax.psum(jnp.where(lax.axis_index(axes) == root, x, jnp.zeros_like(x)), axes)

    return mlir.lower_fun(broadcast, multiple_results=False)(ctx, operand)


def replica_groups(axis_context, axes, axis_index_groups) -> Sequence[Sequence[int]]:
    """The groups of mesh positions within which a call over `axes` communicates, each in rank order."""
    groups = _compat.replica_groups(axis_context, axes)
    if axis_index_groups is None:
        return groups
    return [[group[i] for i in members] for group in groups for members in axis_index_groups]


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


def _convert(ctx, x, aval):
    return hlo.convert(mlir.aval_to_ir_type(ctx.module_context, aval), x)


def _reshape(ctx, x, aval):
    return hlo.reshape(mlir.aval_to_ir_type(ctx.module_context, aval), x)


def _inline(ctx, fun, x, aval, **params):
    """The operations of fun(x) in the program that is being built."""
    (result,) = mlir.lower_fun(fun, multiple_results=False)(ctx.replace(avals_in=[aval]), x, **params)
    return result


def _describe(ctx, function: str, axes, axis_index_groups) -> str:
    """The call in words, for the error of a rank that waits in vain. The same for equal calls, so that they merge."""
    shapes = [f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]" for aval in ctx.avals_in]
    message = ", ".join(shapes[:4]) + (f" and {len(shapes) - 4} more" if len(shapes) > 4 else "")
    axis = f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {axes!r}"
    groups = "" if axis_index_groups is None else f" in groups {[list(g) for g in axis_index_groups]}"
    return f"{function} of {message} over {axis}{groups}"
