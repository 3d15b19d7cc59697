"""The plan of a call: who serves it, in which dtype and groups, and how its operands become its results.

An engine serves a call, or XLA does, or an engine within each host and XLA across hosts.
"""

import contextvars
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir

from jax_ring import _compat, runtime
from jax_ring.lowering import topology, trees, tuning
from jax_ring.lowering.call import ALL_REDUCE, REDUCE_SCATTER, CallSpec, Kind, Pairs, Service
from jax_ring.lowering.custom_call import partitioned
from jax_ring.lowering.custom_call.engine import EnginePlan, plan_engine
from jax_ring.lowering.custom_call.operation import describe
from jax_ring.lowering.hierarchical import other_collectives, ranks_by_host, wait_markers
from jax_ring.lowering.module_state import state_of
from jax_ring.lowering.xla import fallback, ops
from jax_ring.options import Options, setting

logger = logging.getLogger("jax_ring")

# Dtypes without engine support: XLA packs integers of fewer than 8 bits, and these floats are too rare to justify
# kernels. They are converted before the call, and rounded once after it.
WIDENED = {
    "int2": np.dtype(jnp.int8),
    "int4": np.dtype(jnp.int8),
    "uint2": np.dtype(jnp.uint8),
    "uint4": np.dtype(jnp.uint8),
    "float4_e2m1fn": np.dtype(jnp.float32),
    "float8_e8m0fnu": np.dtype(jnp.float32),
}

# Primitives that lower to several collectives, for `explain()`: (platforms, axis context, **params) to a function of
# the operands, which is lowered in the primitive's place.
STEPS: dict[Primitive, Callable] = {}


def lower(call: CallSpec, ctx: _compat.LoweringContext, *operands: ir.Value, **params: Any) -> Sequence:
    """The lowering rule of all primitives but ragged ones: makes a plan, once for equal calls, and emits it.

    Args:
      call: from its primitive.
      params: of the primitive.

    Raises:
      NotImplementedError: without an engine under `JAX_RING_STRICT=1`, or where XLA could be wrong; for a sum along the
        tree of a symbolic shape.
    """
    key = (call.function, *lowering_key(ctx, params))
    return _compat.once(ctx, key, plan_call, call, ctx, params).emit(ctx, operands)


def lowering_key(ctx: _compat.LoweringContext, params: dict) -> tuple:
    """Cache key: calls with equal keys lower identically, except for lines. params: of the primitive."""
    return (
        ctx.primitive,
        *params.items(),
        *[(aval.shape, aval.dtype) for aval in ctx.avals_in],
        ctx.platforms and tuple(ctx.platforms),  # None: those of the module
        ctx.module_context.axis_context,
        _compat.stream_of(ctx),
        state_of(ctx).digest,
    )


# ---- The plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plan:
    """Who serves a call, and how its operands become its results.

    Attributes:
      call: with its groups, its description and its service, which says who serves it.
      drops_slots: whether operands have a dimension for slots, of size 1, which is dropped first.
      widened: the dtype to which operands are then converted; None if it is theirs.
      engine: the engine's custom call, with its layout and stream; None if XLA serves the call, or a part of it, or if
        it is ragged.
      crosses_hosts: whether XLA serves the part between hosts.
    """

    call: CallSpec
    drops_slots: bool
    widened: np.dtype | None
    engine: EnginePlan | None
    crosses_hosts: bool

    def emit(self, ctx: _compat.LoweringContext, operands: Sequence) -> Sequence:
        """Emits the call for operands of the planned types, and returns its results."""
        call = self.call
        if self.drops_slots:
            ctx = _without_slots(ctx)
            operands = [ops.reshape(x, aval.shape) for x, aval in zip(operands, ctx.avals_in, strict=True)]
        if call.service.levels is None:
            emit_by_xla = partial(self._emit_by_xla, ctx)
            return wait_markers.enclose(ctx, operands, emit_by_xla, call=call.description, groups=call.groups)
        if self.crosses_hosts:
            num_hosts = call.levels.num_hosts
            logger.info("%s over %s is served by XLA between %d hosts", call.function, call.axes, num_hosts)
        asked = ctx.avals_out
        if self.widened is not None:
            ctx, operands = _widened(ctx, self.widened), [ops.convert(x, self.widened) for x in operands]
        results = self.engine.emit(ctx, operands) if self.engine else other_collectives.emit(call, ctx, operands)
        return results if self.widened is None else _converted(results, asked)

    def _emit_by_xla(self, ctx, operands: Sequence) -> Sequence:
        call = self.call
        if not call.adds_along_tree:
            return _fall_back(call, ctx, operands)
        note_fallback(call, "all_to_all")
        if self.widened is None:
            return fallback.emit_along_tree(call, ctx, operands)
        operands = [ops.convert(x, self.widened) for x in operands]
        return _converted(fallback.emit_along_tree(call, _widened(ctx, self.widened), operands), ctx.avals_out)


def plan_call(call: CallSpec, ctx: _compat.LoweringContext, params: dict) -> Plan:
    """The plan of a call of operands and results of the types in ctx, without a reference to ctx.

    params: of the primitive.
    """
    runtime.refuse_in_child(call.function)
    call = call._replace(**params)
    call = call._replace(groups=replica_groups(ctx.module_context.axis_context, call.axes, call.axis_index_groups))
    drops_slots = call.options.num_shards is not None and trees.num_slots(call.groups, call.options) == 1
    if drops_slots:
        ctx = _without_slots(ctx)
    call = call._replace(service=service_of(ctx, call), description=describe(call, ctx.avals_in))
    levels = call.service.levels
    if levels is None and call.adds_along_tree and (shapes := symbolic_shapes(ctx)):
        raise NotImplementedError(
            f"{call.function}(..., order='tree') over {call.axes} of the symbolic shape {shapes[0]}: no engine "
            "serves it, and the blocks that XLA would exchange need static shapes. Export with static shapes, or "
            "with order='rank'."
        )
    widened = None
    if levels is not None or call.adds_along_tree:  # XLA's own sums take any dtype
        widened = WIDENED.get(ctx.avals_in[0].dtype.name)
    engine, crosses_hosts = None, False
    if levels is not None and levels.inter:
        crosses_hosts = ranks_by_host.crosses_hosts(call.groups, levels, call.perm)
    elif levels is not None and not call.kind.is_ragged:
        engine = plan_engine(call, ctx if widened is None else _widened(ctx, widened))
    plan = Plan(call, drops_slots, widened, engine, crosses_hosts)
    if (noted := _noted.get()) is not None:
        noted.append(plan)
    return plan


_noted: contextvars.ContextVar[list[Plan] | None] = contextvars.ContextVar("noted", default=None)


def noting(plans: list[Plan]) -> AbstractContextManager[None]:
    """Adds the plans made in the block to a list, for `explain()`."""
    return setting(_noted, plans)


def _without_slots(ctx):
    """The context without the dimension of slots."""
    return ctx.replace(avals_in=[jax.core.ShapedArray(aval.shape[1:], aval.dtype) for aval in ctx.avals_in])


def _widened(ctx, dtype: np.dtype):
    """The context with operands and results of another dtype."""
    return ctx.replace(
        avals_in=[jax.core.ShapedArray(aval.shape, dtype) for aval in ctx.avals_in],
        avals_out=[jax.core.ShapedArray(aval.shape, dtype) for aval in ctx.avals_out],
    )


def _converted(results: Sequence, avals: Sequence[jax.core.ShapedArray]) -> list:
    """The results in the dtypes of these types."""
    return [ops.convert(x, aval.dtype) for x, aval in zip(results, avals, strict=True)]


def replica_groups(axis_context: Any, axes: tuple, axis_index_groups: Sequence | None) -> tuple[tuple[int, ...], ...]:
    """The groups of mesh positions of a call over `axes`, in rank order."""
    groups = [tuple(map(int, group)) for group in _compat.axis_groups(axis_context, axes)]
    if axis_index_groups is None:
        return tuple(groups)
    return tuple([tuple([group[i] for i in members]) for group in groups for members in axis_index_groups])


def symbolic_shapes(ctx: _compat.LoweringContext) -> list[str]:
    """Operand shapes with symbolic dimensions, in a program of `jax.export`."""
    return [f"({', '.join(map(str, aval.shape))})" for aval in ctx.avals_in if set(map(type, aval.shape)) - {int}]


# ---- Who serves ------------------------------------------------------------------------------------------------------


def service_of(ctx: _compat.LoweringContext, call: CallSpec) -> Service:
    """Who serves a call of operands of the types in ctx."""
    if shapes := symbolic_shapes(ctx):
        why_not = f"in a shard_map, JAX does not refine custom calls of a symbolic shape, here {shapes[0]}"
        return Service(None, why_not=why_not)
    platforms, axis_context = _compat.platforms_of(ctx), ctx.module_context.axis_context
    key = (platforms, axis_context, call.groups, call.kind, call.options, call.perm)
    return _compat.once(ctx, ("service", *key), who_serves, *key)


def who_serves(
    platforms: tuple[str, ...],
    axis_context: Any,
    groups: tuple[tuple[int, ...], ...],
    kind: Kind,
    options: Options,
    perm: Pairs | None = None,
) -> Service:
    """Who serves a call of this kind in these groups. perm: of a permutation."""
    if len(platforms) > 1 or platforms[0] not in tuning.PLATFORMS:
        return Service(None, why_not=f"the program is lowered for {' and '.join(platforms)}")
    if not isinstance(axis_context, _compat.SPMDAxisContext):
        return Service(None, why_not=f"its axes belong to {type(axis_context).__name__}, not to a shard_map")
    if kind.is_ragged and platforms[0] != "cpu":
        return Service(None, why_not="the CUDA engine has no ragged all-to-all")
    members = topology.members_of(platforms[0], axis_context.mesh)
    levels, why_not = topology.levels_of(platforms[0], axis_context.mesh, groups, members)
    sizes, manual = axis_context.mesh.shape, axis_context.manual_axes
    # The compiler can divide an array over these.
    if automatic_axes := tuple(sorted([str(axis) for axis in sizes if axis not in manual and sizes[axis] > 1])):
        if levels is not None:
            why_not = partitioned.why_not(automatic_axes, kind, options, levels.num_hosts)
        if why_not:
            return Service(None, why_not=why_not, automatic_axes=automatic_axes)
    if levels is not None and levels.inter and (alone := ranks_by_host.why_not_split(kind, groups, levels, perm)):
        return Service(None, why_not=f"{topology.crossing_text(levels.num_hosts)}, {alone}")
    group_trees: tuple[trees.GroupTree, ...] = ()
    if levels is not None and kind.adds and options.order == "tree":
        group_trees = trees.trees_of(groups, levels.intra, options)
        if platforms[0] == "cuda" and (beyond := trees.why_beyond_kernels(group_trees)):
            return Service(None, why_not=beyond)
    return Service(levels, platforms[0], tuple(members or ()), why_not, automatic_axes, group_trees)


# ---- XLA, where no engine serves a call ------------------------------------------------------------------------------


def note_fallback(call: CallSpec, by: str) -> None:
    """Logs that XLA serves a call, or raises if forbidden."""
    ignored = f", which ignores {chosen}" if (chosen := call.options.ignored_by_xla()) else ""
    by_xla = f"XLA's {by}{ignored}: {call.service.why_not}"
    if runtime.STRICT:
        raise NotImplementedError(
            f"{call.function} over {call.axes} would use {by_xla}. {runtime.STRICT_VARIABLE}=1 forbids it; unset "
            "the variable to allow it."
        )
    logger.info("%s over %s uses %s", call.function, call.axes, by_xla)


def _fall_back(call: CallSpec, ctx, operands: Sequence) -> list:
    by = call.kind.by_xla(_compat.platforms_of(ctx))
    note_fallback(call, by)
    to_xla = call.to_xla
    assert to_xla is not None
    shapes = symbolic_shapes(ctx)
    if call.kind is REDUCE_SCATTER and by == ALL_REDUCE.name:
        if shapes:
            raise NotImplementedError(
                f"{call.function} over {call.axes} of the symbolic shape {shapes[0]}: XLA's reduce-scatter in this "
                "jaxlib can return wrong sums on CPU devices, and the all-reduce that replaces it needs static shapes. "
                "Install jaxlib 0.12 or newer, or export with static shapes."
            )
        to_xla = fallback.lower_psum_scatter_to_all_reduce
    if shapes and call.axis_index_groups is None and call.axis_size:
        # jaxlib 0.12 cannot infer the result's size from mesh axes.
        call = call._replace(axis_index_groups=(tuple(range(call.axis_size)),))
    return [
        result
        for operand, aval_in, aval_out in zip(operands, ctx.avals_in, ctx.avals_out, strict=True)
        for result in to_xla(ctx.replace(avals_in=[aval_in], avals_out=[aval_out]), operand, **call.params)
    ]
