"""Marks XLA's collectives between CPU processes, so that errors can name the call."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend.mlir.dialects import stablehlo as hlo

from jax_ring import _compat, runtime
from jax_ring.distributed import discovery, xla_timeouts
from jax_ring.lowering import dispatch, topology
from jax_ring.lowering.passes import source_lines
from jax_ring.lowering.state import state_of


def enclose(ctx, operands, emit: Callable, *, call: str, groups: topology.Groups, avals_in, avals_out) -> Sequence:
    """Results of `emit(operands)`, which emits XLA's collectives in these groups.

    A custom call before them notes that the call begins, one after them that it has ended; both pass operands on in
    place. Omitted where useless: in one process, on GPUs, in exported programs.

    Args:
      call: its description.
      groups: of mesh positions.
      avals_in, avals_out: of operands and results.
    """
    processes = _processes_of(ctx, groups)
    if processes is None:
        return emit(operands)
    members = [i for group in groups for i in group]
    xla_timeouts.watch(discovery.host_names({processes[i] for i in members}))
    attributes = {
        "call": call,
        "members": np.array(members, np.int64),
        "processes": np.array([processes[i] for i in members], np.int64),
        "group_sizes": np.array([len(group) for group in groups], np.int64),
    }
    site = state_of(ctx).site or _compat.call_site(ctx)
    source_lines.request(ctx.module_context.module)
    operands = _pass_through(ctx, operands, avals_in, begins=np.int64(1), site=site, **attributes)
    return _pass_through(ctx, emit(operands), avals_out, begins=np.int64(0), site="", **attributes)


def are_enclosed(ctx, groups: topology.Groups) -> bool:
    """Whether `enclose` marks collectives in these groups."""
    return _processes_of(ctx, groups) is not None


def _processes_of(ctx, groups: topology.Groups) -> list[int] | None:
    """By mesh position, its process; None if not worth marking."""
    if jax.process_count() == 1 or dispatch.platforms_of(ctx) != ("cpu",) or _compat.is_exported(ctx):
        return None
    axis_context = ctx.module_context.axis_context
    if not isinstance(axis_context, _compat.SPMDAxisContext):
        return None
    mesh = axis_context.mesh
    has_automatic_axes = set(mesh.axis_names) != set(axis_context.manual_axes)
    if has_automatic_axes or _compat.is_compile_only(mesh):
        return None
    processes = topology.processes_of_cpus(mesh)
    if processes is None or all(len({processes[i] for i in group}) == 1 for group in groups):
        return None
    return processes


def _pass_through(ctx, values, avals, **attributes) -> Sequence:
    return jax.ffi.ffi_lowering(
        runtime.BETWEEN_HOSTS_TARGET, operand_output_aliases={1 + i: i for i, aval in enumerate(avals) if aval.shape}
    )(
        ctx.replace(avals_in=[jax.core.ShapedArray((), np.uint32), *avals], avals_out=list(avals)),
        hlo.partition_id(),
        *values,
        **attributes,
    )
