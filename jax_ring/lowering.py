"""From primitive to HLO: who serves a call, its replica groups, and the custom call's operands and attributes."""

import logging
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat, runtime

logger = logging.getLogger("jax_ring")

# The platforms that have an engine of ours.
PLATFORMS = ("cpu",)

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


def lower(ctx, *operands, axes, axis_index_groups, options):
    """One custom call to an engine for all operands, or XLA's all_reduce where no engine serves them."""
    target, why_not = who_serves(ctx.platforms or ctx.module_context.platforms, ctx.module_context.axis_context)
    if target is None:
        ignored = f", which knows no {chosen}" if (chosen := options.chosen()) else ""
        if runtime.STRICT:
            raise NotImplementedError(
                f"ring_psum over {axes} would use XLA's all_reduce{ignored}: {why_not}. "
                f"{runtime.STRICT_VARIABLE}=1 forbids it; unset that to allow it."
            )
        logger.info("ring_psum over %s uses XLA's all_reduce%s: %s", axes, ignored, why_not)
        return _lower_to_xla(ctx, *operands, axes=axes, axis_index_groups=axis_index_groups)
    return _emit(ctx, target, operands, axes, axis_index_groups, options)


def who_serves(platforms: Sequence[str], axis_context) -> tuple[str | None, str]:
    """The custom call's target of the engine that serves a call; or none, and why XLA has to."""
    if tuple(platforms) != ("cpu",):
        return None, f"the program is lowered for {' and '.join(platforms)}"
    if not isinstance(axis_context, _compat.SPMDAxisContext):
        return None, f"its axes belong to {type(axis_context).__name__}, not to a shard_map"
    automatic = set(axis_context.mesh.axis_names) - set(axis_context.manual_axes)
    if automatic:
        return None, f"the enclosing shard_map leaves the axes {sorted(map(str, automatic))} to the compiler"
    if jax.process_count() > 1:
        return None, f"the program runs in {jax.process_count()} processes"
    return runtime.ALL_REDUCE_TARGET, ""


def _emit(ctx, target, operands, axes, axis_index_groups, options):
    """The custom call, and the conversions around it for types that the engine does not read."""
    groups = replica_groups(ctx.module_context.axis_context, axes, axis_index_groups)
    if all(len(group) == 1 for group in groups):
        return operands
    wide = _WIDENED.get(ctx.avals_in[0].dtype.name)
    avals = [aval.update(dtype=wide or aval.dtype) for aval in ctx.avals_in]
    if wide is not None:
        operands = [_convert(ctx, x, aval) for x, aval in zip(operands, avals, strict=True)]

    call = _describe(ctx, axes, axis_index_groups)
    runtime.note_call_site(call, _compat.call_site(ctx))
    # The caller's mesh position is a run-time value: one program serves all devices.
    position = hlo.partition_id()
    position_aval = jax.core.ShapedArray((), np.uint32)
    in_place = {1 + i: i for i, operand in enumerate(operands) if _may_overwrite(operand)}
    results = jax.ffi.ffi_lowering(target, operand_output_aliases=in_place)(
        ctx.replace(avals_in=[position_aval, *avals], avals_out=avals),
        position,
        *operands,
        partitions=np.array([i for group in groups for i in group], np.int64),
        group_sizes=np.array([len(group) for group in groups], np.int64),
        call=call,
        algorithm=options.algorithm,
        order=options.order,
    )
    if wide is not None:
        results = [_convert(ctx, x, aval) for x, aval in zip(results, ctx.avals_out, strict=True)]
    return results


def _lower_to_xla(ctx, *operands, **params):
    return [
        result
        for operand, aval_in, aval_out in zip(operands, ctx.avals_in, ctx.avals_out, strict=True)
        for result in _compat.lower_lax_psum(ctx.replace(avals_in=[aval_in], avals_out=[aval_out]), operand, **params)
    ]


def replica_groups(axis_context, axes, axis_index_groups):
    """The groups of mesh positions within which a call over `axes` communicates, each in rank order."""
    groups = _compat.replica_groups(axis_context, axes)
    if axis_index_groups is None:
        return groups
    return [[group[i] for i in members] for group in groups for members in axis_index_groups]


# Operations whose result is their operand's buffer under another shape, if both have as many elements.
_RESHAPES = ("stablehlo.reshape", "stablehlo.broadcast_in_dim")


def _may_overwrite(value) -> bool:
    """Whether the sum should take its operand's buffer, which saves memory and the traffic to it.

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


def _describe(ctx, axes, axis_index_groups) -> str:
    """The call in words, for the error of a rank that waits in vain. The same for equal calls, so that they merge."""
    shapes = [f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]" for aval in ctx.avals_in]
    message = ", ".join(shapes[:4]) + (f" and {len(shapes) - 4} more" if len(shapes) > 4 else "")
    axis = f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {axes!r}"
    groups = "" if axis_index_groups is None else f" in groups {[list(g) for g in axis_index_groups]}"
    return f"ring_psum of {message} over {axis}{groups}"
