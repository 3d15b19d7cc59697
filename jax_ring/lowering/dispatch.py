"""Decides who serves a call: an engine, XLA's collective, or both, the engine within hosts and XLA across them."""

from collections.abc import Sequence
from typing import NamedTuple

from jax_ring import _compat
from jax_ring.lowering import topology, trees, tuning
from jax_ring.lowering.custom_call import partitioned, streams
from jax_ring.lowering.hierarchical import ranks_by_host
from jax_ring.lowering.passes import program_id
from jax_ring.lowering.state import cached_in_module
from jax_ring.options import Options

_DEFAULT = Options()


class Service(NamedTuple):
    """Who serves a call.

    Attributes:
      levels: the groups that an engine serves, and those that XLA serves; None if XLA serves the whole call.
      engine: "cpu" or "cuda".
      why_not: why no engine serves the call, if `levels` is None.
      automatic_axes: the mesh axes that the enclosing shard_maps leave to the compiler, of more than one device.
    """

    levels: topology.Levels | None
    engine: str = ""
    why_not: str = ""
    automatic_axes: tuple[str, ...] = ()


def service_of(ctx, groups, kind: str, options: Options = _DEFAULT, perm: ranks_by_host.Pairs | None = None) -> Service:
    """Who serves the call under lowering. perm: of a permutation."""
    if shapes := symbolic_shapes(ctx):
        why_not = f"in a shard_map, JAX does not refine custom calls of a symbolic shape, here {shapes[0]}"
        return Service(None, why_not=why_not)
    pairs = None if perm is None else tuple(map(tuple, perm))
    key: tuple = (
        platforms_of(ctx),
        ctx.module_context.axis_context,
        tuple(map(tuple, groups)),
        kind,
        options,
        pairs,
    )
    return cached_in_module(ctx, ("service", *key), lambda: who_serves(*key))


def lowering_key(ctx, params: dict) -> tuple:
    """Cache key of the call under lowering: calls with equal keys lower identically, their lines apart.

    params: of its primitive.
    """
    return (
        ctx.primitive,
        *params.items(),
        *[(aval.shape, aval.dtype) for aval in ctx.avals_in],
        platforms_of(ctx),
        ctx.module_context.axis_context,
        streams.of_user(ctx),
        program_id.digest(ctx),
    )


def groups_of(ctx, axes, axis_index_groups) -> tuple[tuple[int, ...], ...]:
    """The groups of mesh positions within which the call under lowering communicates, each in rank order."""
    key = (ctx.module_context.axis_context, axes, axis_index_groups)
    return cached_in_module(ctx, ("groups", *key), lambda: tuple(map(tuple, replica_groups(*key))))


def symbolic_shapes(ctx) -> list[str]:
    """The shapes of the operands that have symbolic dimensions, in a program that `jax.export` lowers."""
    shapes = [aval.shape for aval in ctx.avals_in]
    return [f"({', '.join(map(str, shape))})" for shape in shapes if not all(isinstance(n, int) for n in shape)]


def platforms_of(ctx) -> tuple[str, ...]:
    """The platforms for which the call under lowering is lowered."""
    return tuple(ctx.platforms or ctx.module_context.platforms)


def who_serves(
    platforms: tuple[str, ...], axis_context, groups, kind: str, options: Options = _DEFAULT,
    perm: ranks_by_host.Pairs | None = None,
) -> Service:  # fmt: skip
    """Who serves a call of this kind in these groups of mesh positions. perm: of a permutation."""
    if len(platforms) > 1 or platforms[0] not in tuning.PLATFORMS:
        return Service(None, why_not=f"the program is lowered for {' and '.join(platforms)}")
    if not isinstance(axis_context, _compat.SPMDAxisContext):
        return Service(None, why_not=f"its axes belong to {type(axis_context).__name__}, not to a shard_map")
    if kind == "ragged_all_to_all" and platforms[0] != "cpu":
        return Service(None, why_not="the CUDA engine has no ragged all-to-all")
    levels, why_not = topology.levels_of(platforms[0], axis_context.mesh, groups)
    if automatic_axes := partitioned.axes_of(axis_context):
        if levels is not None:
            why_not = partitioned.why_not(automatic_axes, kind, options, levels.num_hosts)
        if why_not:
            return Service(None, why_not=why_not, automatic_axes=automatic_axes)
    along_tree = trees.adds_along_tree(kind, options)
    if levels is not None and levels.inter and (alone := ranks_by_host.why_not_split(kind, groups, levels, perm)):
        return Service(None, why_not=f"{topology.crossing_text(levels.num_hosts)}, {alone}")
    if levels is not None and along_tree and platforms[0] == "cuda":
        parts = trees.hosts_of(groups, levels.intra, options).parts
        if beyond := trees.why_beyond_kernels(parts):
            return Service(None, why_not=beyond)
    return Service(levels, platforms[0], why_not, automatic_axes)


def kind_by_xla(kind: str, platforms: Sequence[str]) -> str:
    """The kind of XLA's collective to which a call of this kind lowers where no engine serves it."""
    if kind in ("reduce", "broadcast"):
        return "all_reduce"  # XLA has neither
    if kind == "reduce_scatter" and "cpu" in platforms and _compat.WRONG_REDUCE_SCATTER_ON_CPU:
        return "all_reduce"
    return kind


def has_choice(engine: str, levels: topology.Levels) -> bool:
    """Whether the engine has several algorithms for a sum. The CPU engine has, but only between processes."""
    return engine == "cuda" or levels.num_processes > 1


def replica_groups(axis_context, axes, axis_index_groups) -> Sequence[Sequence[int]]:
    """The groups of mesh positions within which a call over `axes` communicates, each in rank order."""
    groups = _compat.replica_groups(axis_context, axes)
    if axis_index_groups is None:
        return groups
    return [[group[i] for i in members] for group in groups for members in axis_index_groups]
