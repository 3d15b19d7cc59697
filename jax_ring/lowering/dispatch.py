"""Decides who serves a call: an engine, XLA, or the engine within hosts and XLA across them."""

from collections.abc import Callable, Sequence

from jax.extend.core import Primitive

from jax_ring import _compat
from jax_ring.lowering import topology, trees, tuning
from jax_ring.lowering.call_spec import CallSpec, Pairs, Service
from jax_ring.lowering.custom_call import partitioned
from jax_ring.lowering.hierarchical import ranks_by_host
from jax_ring.lowering.kinds import Kind
from jax_ring.lowering.state import state_of
from jax_ring.options import Options

# Primitives that lower to several collectives, for `explain()`: (platforms, axis context, **params) to a function of
# the operands, which is lowered in the primitive's place.
STEPS: dict[Primitive, Callable] = {}


def service_of(ctx, call: CallSpec) -> Service:
    if shapes := symbolic_shapes(ctx):
        why_not = f"in a shard_map, JAX does not refine custom calls of a symbolic shape, here {shapes[0]}"
        return Service(None, why_not=why_not)
    key = (platforms_of(ctx), ctx.module_context.axis_context, call.groups, call.kind, call.options, call.perm)
    return _compat.once(ctx, ("service", *key), who_serves, *key)


def lowering_key(ctx, params: dict) -> tuple:
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


def symbolic_shapes(ctx) -> list[str]:
    """Operand shapes with symbolic dimensions, in a program of `jax.export`."""
    return [f"({', '.join(map(str, aval.shape))})" for aval in ctx.avals_in if set(map(type, aval.shape)) - {int}]


def platforms_of(ctx) -> tuple[str, ...]:
    return tuple(ctx.platforms or ctx.module_context.platforms)


def who_serves(
    platforms: tuple[str, ...], axis_context, groups, kind: Kind, options: Options, perm: Pairs | None = None
) -> Service:
    """Who serves a call of this kind in these groups. perm: of a permutation."""
    if len(platforms) > 1 or platforms[0] not in tuning.PLATFORMS:
        return Service(None, why_not=f"the program is lowered for {' and '.join(platforms)}")
    if not isinstance(axis_context, _compat.SPMDAxisContext):
        return Service(None, why_not=f"its axes belong to {type(axis_context).__name__}, not to a shard_map")
    if kind.is_ragged and platforms[0] != "cpu":
        return Service(None, why_not="the CUDA engine has no ragged all-to-all")
    levels, why_not = topology.levels_of(platforms[0], axis_context.mesh, groups)
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
    return Service(levels, platforms[0], why_not, automatic_axes, group_trees)


def replica_groups(axis_context, axes, axis_index_groups: Sequence | None) -> tuple[tuple[int, ...], ...]:
    """The groups of mesh positions of a call over `axes`, in rank order."""
    groups = [tuple(map(int, group)) for group in _compat.axis_groups(axis_context, axes)]
    if axis_index_groups is None:
        return tuple(groups)
    return tuple([tuple([group[i] for i in members]) for group in groups for members in axis_index_groups])
