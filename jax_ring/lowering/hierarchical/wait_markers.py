"""Marks XLA's collectives between CPU processes, so that errors can name the call."""

from collections.abc import Callable, Sequence

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo

from jax_ring import _compat, runtime
from jax_ring.distributed import discovery, xla_timeouts
from jax_ring.lowering import topology
from jax_ring.lowering.custom_call import operation
from jax_ring.lowering.module_state import state_of
from jax_ring.lowering.passes import source_lines


def enclose(
    ctx: _compat.LoweringContext, operands: Sequence, emit: Callable, *, call: str, groups: topology.Groups
) -> Sequence:
    """Results of `emit(operands)`, which emits XLA's collectives in these groups.

    A custom call before them notes that the call begins, one after them that it has ended; both pass operands on in
    place. Omitted where useless: in one process, on GPUs, in exported programs.

    Args:
      call: its description.
      groups: of mesh positions.
    """
    processes = _processes_of(ctx, groups)
    if processes is None:
        return emit(operands)
    members = [i for group in groups for i in group]
    xla_timeouts.watch(discovery.host_names({processes[i] for i in members}))
    of_call = {
        "call": call,
        "members": members,
        "processes": [processes[i] for i in members],
        "group_sizes": list(map(len, groups)),
    }
    site = state_of(ctx).site or _compat.call_site(ctx)
    source_lines.request(ctx.module_context.module)
    results = emit(_pass_through(operands, begins=1, site=site, **of_call))
    return _pass_through(results, begins=0, site="", **of_call)


def are_enclosed(ctx: _compat.LoweringContext, groups: topology.Groups) -> bool:
    """Whether `enclose` marks collectives in these groups."""
    return _processes_of(ctx, groups) is not None


def _processes_of(ctx, groups: topology.Groups) -> list[int] | None:
    """The process of each mesh position; None if not worth marking."""
    if jax.process_count() == 1 or _compat.platforms_of(ctx) != ("cpu",) or _compat.is_exported(ctx):
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


def _pass_through(values: Sequence, **config) -> Sequence:
    operands, types = [hlo.partition_id(), *values], [x.type for x in values]
    in_place = [(1 + i, i) for i, type_ in enumerate(types) if ir.RankedTensorType(type_).rank]
    return operation.custom_call(
        runtime.BETWEEN_HOSTS_TARGET, operands, types, in_place, operation.dictionary(config)
    ).results
