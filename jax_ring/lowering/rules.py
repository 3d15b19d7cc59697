"""The lowering rule of all primitives: emits the call for the engine that serves it, or for XLA."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ring import runtime
from jax_ring.lowering import trees
from jax_ring.lowering.custom_call import emitter
from jax_ring.lowering.dispatch import groups_of, kind_by_xla, lowering_key, platforms_of, service_of, symbolic_shapes
from jax_ring.lowering.hierarchical import other_collectives, ranks_by_host, wait_markers
from jax_ring.lowering.state import cached_in_module
from jax_ring.lowering.xla import fallback, ops, tree_fallback

logger = logging.getLogger("jax_ring")

# Dtypes that the engines do not support: XLA packs integers of fewer than 8 bits, and these floats are too rarely
# used to have kernels. They are converted before the call, and rounded once after it.
WIDENED = {
    "int2": jnp.int8,
    "int4": jnp.int8,
    "uint2": jnp.uint8,
    "uint4": jnp.uint8,
    "float4_e2m1fn": jnp.float32,
    "float8_e8m0fnu": jnp.float32,
}


# How a call is emitted: (ctx, operands) to its results.
Emit = Callable[..., Sequence]


class Collective(NamedTuple):
    """A collective to lower.

    Attributes:
      function: the name of the public function, for messages.
      kind: a key of `runtime.TARGETS`.
      op: the reduction: "sum", "max" or "min".
      lower_to_xla: (ctx, operand, **params) to the results for one operand, by XLA's collectives.
    """

    function: str
    kind: str
    op: str
    lower_to_xla: Callable


def lower(collective: Collective, ctx, *operands, **params):
    """Emits one custom call to an engine for all operands, or XLA's collectives where no engine serves the call.

    params: those of the primitive.

    Raises:
      NotImplementedError: if no engine serves the call, and `JAX_RING_STRICT` is 1 or XLA's collective could be wrong;
        or if a sum along the tree has a symbolic shape.
    """
    key = ("lower", collective.function, *lowering_key(ctx, params))
    return cached_in_module(ctx, key, lambda: prepare(collective, ctx, **params))(ctx, operands)


def prepare(collective: Collective, ctx, *, axes, axis_index_groups, options, **params) -> Emit:
    """How calls like the one under lowering are emitted, for any operands of its types.

    The module keeps the answer, which therefore keeps no reference to the module.
    """
    groups = groups_of(ctx, axes, axis_index_groups)
    if trees.adds_along_tree(collective.kind, options) and (shapes := symbolic_shapes(ctx)):
        raise NotImplementedError(
            f"{collective.function}(..., order='tree') over {axes} of the symbolic shape {shapes[0]}: no engine serves "
            "it, and the blocks that XLA would exchange need static shapes. Export with static shapes, or with "
            "order='rank'."
        )
    prepare_operands: Callable[..., Emit] = partial(
        _prepare_operands, collective, groups=groups, options=options,
        axes=axes, axis_index_groups=axis_index_groups, **params,
    )  # fmt: skip
    if trees.num_slots(groups, options) != 1:
        return prepare_operands(ctx)
    emit = prepare_operands(_without_slots(ctx))

    def emit_without_slots(ctx, operands):
        ctx = _without_slots(ctx)
        return emit(ctx, [ops.reshape(x, aval.shape) for x, aval in zip(operands, ctx.avals_in, strict=True)])

    return emit_without_slots


def _without_slots(ctx):
    """The context of ranks that have one term each, without the dimension for it."""
    return ctx.replace(avals_in=[jax.core.ShapedArray(aval.shape[1:], aval.dtype) for aval in ctx.avals_in])


def _prepare_operands(collective: Collective, ctx, *, groups, options, axes, axis_index_groups, **params) -> Emit:
    """The same for operands without a dimension for a single term."""
    service = service_of(ctx, groups, collective.kind, options, params.get("perm"))
    call = emitter.describe(ctx, collective.function, axes, axis_index_groups)
    if service.levels is not None:
        of_engine = {
            "kind": collective.kind, "op": collective.op, "service": service, "call": call, "options": options, **params
        }  # fmt: skip
        if service.levels.inter:
            emit = _prepare_widened(ctx, lambda ctx: partial(other_collectives.emit, groups=groups, **of_engine))
        else:
            emit = _prepare_widened(ctx, lambda ctx: emitter.prepare(ctx, **of_engine))
        if not ranks_by_host.crosses_hosts(collective.kind, groups, service.levels, params.get("perm")):
            return emit
        num_hosts = service.levels.num_hosts

        def emit_between_hosts(ctx, operands):
            logger.info("%s over %s is served by XLA between %d hosts", collective.function, axes, num_hosts)
            return emit(ctx, operands)

        return emit_between_hosts
    if trees.adds_along_tree(collective.kind, options):
        by_xla = partial(
            tree_fallback.emit, kind=collective.kind, groups=groups, options=options,
            axes=axes, axis_index_groups=axis_index_groups, **params,
        )  # fmt: skip
        emit_tree = _prepare_widened(ctx, lambda ctx: by_xla)

        def emit_by_xla(ctx, operands):
            note_fallback(collective.function, axes, "all_to_all", service.why_not, options)
            return emit_tree(ctx, operands)
    else:
        emit_by_xla = partial(
            _fall_back, collective, why_not=service.why_not, options=options,
            axes=axes, axis_index_groups=axis_index_groups, **params,
        )  # fmt: skip
    return lambda ctx, operands: wait_markers.enclose(
        ctx, operands, lambda values: emit_by_xla(ctx, values),
        call=call, groups=groups, avals_in=ctx.avals_in, avals_out=ctx.avals_out,
    )  # fmt: skip


def note_fallback(function: str, axes, kind: str, why_not: str, options) -> None:
    """Logs that XLA's collective of this kind serves a call, or raises if that is forbidden."""
    ignored = f", which ignores {chosen}" if (chosen := options.ignored_by_xla()) else ""
    by_xla = f"XLA's {kind}{ignored}: {why_not}"
    if runtime.STRICT:
        raise NotImplementedError(
            f"{function} over {axes} would use {by_xla}. {runtime.STRICT_VARIABLE}=1 forbids it; unset "
            "the variable to allow it."
        )
    logger.info("%s over %s uses %s", function, axes, by_xla)


def _fall_back(collective: Collective, ctx, operands, why_not: str, options, *, axes, axis_index_groups, **params):
    """Emits XLA's collective for each operand."""
    kind = kind_by_xla(collective.kind, platforms_of(ctx))
    note_fallback(collective.function, axes, kind, why_not, options)
    lower_to_xla = collective.lower_to_xla
    shapes = symbolic_shapes(ctx)
    if (collective.kind, kind) == ("reduce_scatter", "all_reduce"):
        if shapes:
            raise NotImplementedError(
                f"{collective.function} over {axes} of the symbolic shape {shapes[0]}: XLA's reduce-scatter in this "
                "jaxlib can return wrong sums on CPU devices, and the all-reduce that replaces it needs static shapes. "
                "Install jaxlib 0.12 or newer, or export with static shapes."
            )
        lower_to_xla = fallback.lower_psum_scatter_to_all_reduce
    if shapes and axis_index_groups is None and "axis_size" in params:
        # jaxlib 0.12 cannot infer the result's size from mesh axes.
        axis_index_groups = (tuple(range(params["axis_size"])),)
    return [
        result
        for operand, aval_in, aval_out in zip(operands, ctx.avals_in, ctx.avals_out, strict=True)
        for result in lower_to_xla(
            ctx.replace(avals_in=[aval_in], avals_out=[aval_out]), operand, axes=axes,
            axis_index_groups=axis_index_groups, **params,
        )
    ]  # fmt: skip


def _prepare_widened(ctx, prepare: Callable[..., Emit]) -> Emit:
    """The answer of `prepare(ctx)`, with conversions around it if the engines do not support the dtype."""
    dtype = WIDENED.get(ctx.avals_in[0].dtype.name)
    if dtype is None:
        return prepare(ctx)
    emit = prepare(_with_dtype(ctx, dtype))

    def emit_widened(ctx, operands):
        results = emit(_with_dtype(ctx, dtype), [ops.convert(ctx, x, dtype) for x in operands])
        return [ops.convert(ctx, x, aval.dtype) for x, aval in zip(results, ctx.avals_out, strict=True)]

    return emit_widened


def _with_dtype(ctx, dtype):
    return ctx.replace(
        avals_in=[jax.core.ShapedArray(aval.shape, dtype) for aval in ctx.avals_in],
        avals_out=[jax.core.ShapedArray(aval.shape, dtype) for aval in ctx.avals_out],
    )
