"""Runs the passes: on each shard_map, before and after its body is lowered, and on the whole program."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
from jax.extend.core import ClosedJaxpr
from jax.extend.mlir import ir

from jax_ring import _compat
from jax_ring.lowering.hlo import hook
from jax_ring.lowering.module_state import state_of
from jax_ring.lowering.override_state import enabled
from jax_ring.lowering.passes import (
    combiner,
    donation,
    exit_barrier,
    fold_casts,
    merge_equations,
    program_id,
    source_lines,
)


def _lower_shard_map(jax_rule, ctx, *operands, **params):
    jaxpr = source_lines.inherit(params["jaxpr"], ctx.traceback)
    if jax.process_count() > 1:
        program_id.note_body(ctx, jaxpr)  # before its calls are lowered
    else:
        # Which are joined depends on lines, which may differ between processes.
        jaxpr = merge_equations.join(jaxpr)
    results = jax_rule(ctx, *operands, **{**params, "jaxpr": jaxpr})
    state = state_of(ctx)
    if state.rounded_sums:
        fold_casts.drop_redundant_casts(state)
    if state.calls:
        values = map(_compat.unconstrained, results)
        owners = [value.owner.operation for value in values if isinstance(value, ir.OpResult)]
        # A mesh of one rank has no such operation.
        if owners and (body := owners[0]).name == "sdy.manual_computation":
            combiner.join(ctx, state, body)
            if state.may_leave_out:
                exit_barrier.end(ctx, body, params)
    if len({call.lines for call in state.calls.values()}) > 1:
        source_lines.request(ctx.module_context.module)
    return results


def rule(jax_rule: Callable) -> Callable:
    """A shard_map's lowering, in place of JAX's."""
    return partial(_lower_shard_map, jax_rule)


def end_program(
    module: ir.Module,
    jaxpr: ClosedJaxpr,
    platforms: tuple[str, ...],
    donates: bool,
    meshes: Sequence,
    is_exported: bool,
) -> None:
    """Passes on a program lowered from a jaxpr. meshes: of arguments and results."""
    if source_lines.REQUEST in module.operation.attributes:
        source_lines.settle(module)
    if is_exported:
        return  # its caller decides on donation and sharding
    if donates:
        # Donated arguments are known only once the whole program is lowered.
        donation.sum_in_place(module)
    if enabled.value and enabled.value.partitioner is not False and len(platforms) == 1:
        hook.mark(module, jaxpr, platforms[0], meshes, enabled.value)
