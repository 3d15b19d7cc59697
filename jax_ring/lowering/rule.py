"""The lowering rule of every primitive: finds out who serves the call, and emits it."""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ring import runtime
from jax_ring.lowering import custom_call, ops, two_level
from jax_ring.lowering.service import replica_groups, service_of

logger = logging.getLogger("jax_ring")

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


def lower(collective: Collective, ctx, *operands, axes, axis_index_groups, options, **details):
    """One custom call to an engine for all operands, or XLA's own collectives where no engine serves them.

    details: what else the collective's primitive has for parameters.
    """
    groups = replica_groups(ctx.module_context.axis_context, axes, axis_index_groups)
    service = service_of(ctx, groups, collective.kind)
    if service.levels is not None:
        if service.levels.across:
            logger.info("%s over %s is XLA's between %d hosts", collective.function, axes, service.levels.num_hosts)
        call = custom_call.describe(ctx, collective.function, axes, axis_index_groups)
        emit = two_level.emit if service.levels.across else custom_call.emit
        emit = partial(emit, kind=collective.kind, op=collective.op, service=service, call=call, options=options)
        return _widened(ctx, operands, partial(emit, **details))
    xlas = collective.kind if collective.kind not in ("reduce", "broadcast") else "all_reduce"
    ignored = f", which knows no {chosen}" if (chosen := options.non_default()) else ""
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


def _widened(ctx, operands, emit: Callable):
    """The results of `emit(ctx, operands)`, converted where the engine does not read the operands' dtype."""
    dtype = _WIDENED.get(ctx.avals_in[0].dtype.name)
    if dtype is None:
        return emit(ctx, operands)
    wide = ctx.replace(
        avals_in=[jax.core.ShapedArray(aval.shape, dtype) for aval in ctx.avals_in],
        avals_out=[jax.core.ShapedArray(aval.shape, dtype) for aval in ctx.avals_out],
    )
    results = emit(wide, [ops.convert(ctx, x, dtype) for x in operands])
    return [ops.convert(ctx, x, aval.dtype) for x, aval in zip(results, ctx.avals_out, strict=True)]
