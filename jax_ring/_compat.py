"""Every name of JAX that is private or differs between versions, and nothing else."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
from jax.extend import source_info_util as _source_info_util
from jax.extend.mlir import ir as _ir

OLDEST_JAX = (0, 10, 2)

if jax.__version_info__ < OLDEST_JAX:
    raise ImportError(
        f"jax_ring needs JAX {'.'.join(map(str, OLDEST_JAX))} or newer, and found {jax.__version__}. "
        "Upgrade with: pip install --upgrade jax"
    )

try:
    from jax._src import config as _config
    from jax._src import core as _core
    from jax._src import distributed as _distributed
    from jax._src.interpreters import mlir as _mlir
    from jax._src.interpreters.pxla import axis_groups as _axis_groups
    from jax._src.lax import parallel as _parallel
    from jax.interpreters.mlir import SPMDAxisContext as SPMDAxisContext
    from jax.interpreters.partial_eval import dce_rules as _dce_rules
    from jaxlib import xla_client as _xla_client

    psum_p = _parallel.psum_p
    psum_invariant_p = _parallel.psum_invariant_p
    _check_vma = _config._check_vma
    _auto_pcast = _config.auto_pcast
    _skip_size_one_axes = _parallel._maybe_skip_one_sized_axes
    _register_custom_type = _xla_client._xla.register_custom_type
    _common_lowerings = _mlir._lowerings
    _platform_lowerings = _mlir._platform_specific_lowerings
    _uncacheable_primitives = _mlir._uncacheable_primitives
    COLLECTIVE_CHANNEL_ID = _mlir.COLLECTIVE_CHANNEL_ID
    _trace_state_clean = _core.trace_state_clean
    pmax_p = _parallel.pmax_p
    pmin_p = _parallel.pmin_p
    reduce_scatter_p = _parallel.reduce_scatter_p
    all_gather_p = _parallel.all_gather_p
    all_gather_invariant_p = _parallel.all_gather_invariant_p
    _lax_rules = {p: _common_lowerings[p].rule for p in (psum_p, pmax_p, pmin_p, reduce_scatter_p, all_gather_p)}
except (ImportError, AttributeError, KeyError) as error:
    raise ImportError(
        f"jax_ring does not know JAX {jax.__version__}: {error}. "
        "Upgrade jax_ring, or install a JAX that it was tested with (see its README)."
    ) from error


# JAX then names the user's line, not ours, in error messages and in the metadata of compiled programs.
_source_info_util.register_exclusion(str(pathlib.Path(__file__).parent))


def call_site(lowering_context) -> str:
    """File, line and function of the user's call that is being lowered; empty if they are not known."""
    source = _source_info_util.new_source_info().replace(traceback=lowering_context.traceback)
    return _source_info_util.summarize(source)


def check_vma() -> bool:
    """Whether the enclosing shard_map tracks which axes a value varies over."""
    return _check_vma.value


def auto_pcast() -> bool:
    """Whether JAX casts a replicated operand of a collective to a varying one by itself."""
    return _auto_pcast.value


def skip_size_one_axes(axes: tuple) -> tuple:
    """The axes without those of size one, where JAX is set to leave them out of types."""
    return _skip_size_one_axes(axes)


def bound_axis_sizes() -> dict:
    """Name and size of every axis that a collective can name at this point of the trace."""
    return dict(_core.get_axis_env().axis_sizes)


def varying_axes(x) -> frozenset:
    """The mesh axes over which x differs between devices. Empty unless check_vma()."""
    return jax.typeof(x).mat.varying


def partially_reduced_axes(x) -> frozenset:
    """The mesh axes over which x is marked `unreduced` or `reduced`."""
    mat = jax.typeof(x).mat
    return mat.unreduced | mat.reduced


def abstract_psum(aval, *, axes, axis_index_groups):
    """JAX's own checks and effects for a psum that keeps its operand's type."""
    out, effects = psum_p.abstract_eval(aval, axes=axes, axis_index_groups=axis_index_groups)
    # JAX's rule is for code without vma tracking and drops it; ours may also be called with it.
    return out.update(sharding=aval.sharding, manual_axis_type=aval.mat), effects


def abstract_psum_invariant(aval, *, axes, axis_index_groups):
    """JAX's own checks, type and effects for a psum from varying to invariant."""
    del axis_index_groups
    return psum_invariant_p.abstract_eval(aval, axes=axes)


def abstract_reduce_scatter(aval, *, axes, axis_index_groups, axis_size, dimension, tiled):
    """JAX's own checks and effects for a psum_scatter, whose result varies as its operand does."""
    # JAX's rule refuses vmap axes where it tracks vma. Ours is for operands that have been cast before.
    with _check_vma(False):
        out, effects = reduce_scatter_p.abstract_eval(
            aval, axis_name=axes, axis_index_groups=axis_index_groups, axis_size=axis_size,
            scatter_dimension=dimension, tiled=tiled,
        )  # fmt: skip
    return out.update(manual_axis_type=aval.mat), effects


def abstract_all_gather(aval, *, axes, axis_index_groups, axis_size, dimension, tiled):
    """JAX's own checks and effects for an all_gather whose result varies as its operand does."""
    with _check_vma(False):
        out, effects = all_gather_p.abstract_eval(
            aval, axis_name=axes, axis_index_groups=axis_index_groups, axis_size=axis_size,
            all_gather_dimension=dimension, tiled=tiled,
        )  # fmt: skip
    return out.update(manual_axis_type=aval.mat), effects


def abstract_all_gather_invariant(aval, *, axes, axis_index_groups, axis_size, dimension, tiled):
    """JAX's own checks, type and effects for an all_gather from varying to invariant."""
    del axis_index_groups
    return all_gather_invariant_p.abstract_eval(
        aval, axis_name=axes, axis_size=axis_size, all_gather_dimension=dimension, tiled=tiled
    )


def lower_lax_reduction(primitive, ctx, operand, *, axes, axis_index_groups):
    """Lowers one operand as `primitive`, one of psum_p, pmax_p and pmin_p, does: to XLA's all_reduce."""
    return _lax_rules[primitive](
        ctx.replace(primitive=primitive), operand, axes=axes, axis_index_groups=axis_index_groups
    )


def lower_lax_psum_scatter(ctx, operand, *, axes, axis_index_groups, axis_size, dimension, tiled):
    """Lowers one operand as `lax.psum_scatter` does, to XLA's reduce_scatter."""
    return _lax_rules[reduce_scatter_p](
        ctx.replace(primitive=reduce_scatter_p), operand, axis_name=axes, axis_index_groups=axis_index_groups,
        axis_size=axis_size, scatter_dimension=dimension, tiled=tiled,
    )  # fmt: skip


def lower_lax_all_gather(ctx, operand, *, axes, axis_index_groups, axis_size, dimension, tiled):
    """Lowers one operand as `lax.all_gather` does, to XLA's all_gather."""
    return _lax_rules[all_gather_p](
        ctx.replace(primitive=all_gather_p), operand, axis_name=axes, axis_index_groups=axis_index_groups,
        axis_size=axis_size, all_gather_dimension=dimension, tiled=tiled,
    )  # fmt: skip


def replace_lowering(primitive, platforms: tuple[str, ...], make_rule: Callable) -> Callable[[], None]:
    """Replaces the lowering of one of JAX's primitives for some platforms, and returns a function that undoes it.

    A rule that JAX has for all platforms together stays one: split by platform, it would turn into a conditional in
    programs for several platforms, which JAX (up to 0.12) fails to make for primitives that are not cacheable. Such
    programs go to make_rule's rule as well, which tells them apart by `ctx`.

    make_rule: (JAX's rule) to the rule that takes its place.
    """
    registries = [_common_lowerings, *(_platform_lowerings[platform] for platform in platforms)]
    before = [(registry, registry[primitive]) for registry in registries if primitive in registry]
    for registry, entry in before:
        registry[primitive] = dataclasses.replace(entry, rule=make_rule(entry.rule))
    # For the reason that our own primitives are not: a cached lowering does not know where the call stands.
    cacheable = primitive not in _uncacheable_primitives
    _uncacheable_primitives.add(primitive)

    def undo() -> None:
        for registry, entry in before:
            registry[primitive] = entry
        if cacheable:
            _uncacheable_primitives.discard(primitive)

    return undo


def notes_on_module(lowering_context) -> dict:
    """A dictionary for notes of ours, which lives as long as the lowering of one module."""
    return lowering_context.module_context.cached_primitive_lowerings.setdefault("jax_ring", {})


def is_tracing() -> bool:
    """Whether some function is being traced in this thread."""
    return not _trace_state_clean()


def axis_context_within(shard_map_params: dict):
    """The axis context in which the body of a shard_map is lowered, from the parameters of its equation."""
    mesh = shard_map_params["mesh"]
    return SPMDAxisContext(mesh, frozenset(shard_map_params["newly_manual_axes"]) | set(mesh.manual_axes))


def replica_groups(axis_context, axes: tuple) -> tuple[tuple[int, ...], ...]:
    """The groups of mesh positions that a collective over `axes` spans, each in rank order."""
    return tuple(tuple(int(i) for i in group) for group in _axis_groups(axis_context, axes))


def mesh_devices(mesh) -> list | None:
    """The devices of a mesh, by mesh position; None for an abstract mesh."""
    return list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None


def module_name(lowering_context) -> str:
    """The name of the module that is being lowered, such as jit_f."""
    return _ir.StringAttr(lowering_context.module_context.module.operation.attributes["sym_name"]).value


def is_distributed() -> bool:
    """Whether `jax.distributed` is initialized now."""
    return _distributed.global_state.client is not None


def distributed_client():
    """The client of the distributed runtime.

    Raises:
      RuntimeError: while `jax.distributed` is not initialized.
    """
    client = _distributed.global_state.client
    if client is None:
        raise RuntimeError(
            f"jax_ring needs jax.distributed to be initialized in a program of {jax.process_count()} processes, so "
            "that they can find each other. Call jax.distributed.initialize() first."
        )
    return client


def distributed_process() -> int:
    """The index of this process. Unlike `jax.process_index()` it needs no backend, and so waits for nobody."""
    return _distributed.global_state.process_id


def key_value_store(timeout_s: float) -> tuple:
    """The table that all processes of `jax.distributed` share: publish(key, bytes), and fetch(key), which waits."""
    client = distributed_client()
    return client.key_value_set_bytes, lambda key: client.blocking_key_value_get_bytes(key, int(timeout_s * 1000))


def publish_once(key: str, value: str) -> str:
    """Publishes a value unless another process has published one under that key; which one holds, without waiting."""
    client = distributed_client()
    try:
        client.key_value_set(key, value)
    except jax.errors.JaxRuntimeError:
        # There is one, or the table is out of reach, which this then says.
        return client.key_value_try_get(key)
    return value


def register_cpu_ffi_type(name: str, registration: dict) -> None:
    """Registers the type of an FFI handler's state, now.

    `jax.ffi.register_ffi_type` waits for the CPU client, and then hands over the handlers before the types, which
    XLA refuses. Creating the client here instead would freeze the number of devices when jax_ring is imported.
    """
    _register_custom_type(name, registration)


def register_dead_code_rule(primitive, rule) -> None:
    """Registers how an equation shrinks when only some of its outputs are used: (used_outputs, eqn)."""
    # JAX 0.12 passes the liveness of the inputs as well, between the two.
    _dce_rules[primitive] = lambda used_outputs, *rest: rule(used_outputs, rest[-1])
