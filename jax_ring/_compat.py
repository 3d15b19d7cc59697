"""Every name of JAX that is private or differs between versions, and nothing else."""

import pathlib

import jax
from jax.extend import source_info_util as _source_info_util

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
    from jax._src.interpreters.pxla import axis_groups as _axis_groups
    from jax._src.lax import parallel as _parallel
    from jax.interpreters.mlir import SPMDAxisContext as SPMDAxisContext
    from jax.interpreters.mlir import _lowerings
    from jax.interpreters.partial_eval import dce_rules as _dce_rules
    from jaxlib import xla_client as _xla_client

    psum_p = _parallel.psum_p
    psum_invariant_p = _parallel.psum_invariant_p
    _check_vma = _config._check_vma
    _auto_pcast = _config.auto_pcast
    _skip_size_one_axes = _parallel._maybe_skip_one_sized_axes
    _register_custom_type = _xla_client._xla.register_custom_type
    pmax_p = _parallel.pmax_p
    pmin_p = _parallel.pmin_p
    reduce_scatter_p = _parallel.reduce_scatter_p
    all_gather_p = _parallel.all_gather_p
    all_gather_invariant_p = _parallel.all_gather_invariant_p
    _lax_rules = {p: _lowerings[p].rule for p in (psum_p, pmax_p, pmin_p, reduce_scatter_p, all_gather_p)}
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


def replica_groups(axis_context, axes: tuple) -> tuple[tuple[int, ...], ...]:
    """The groups of mesh positions that a collective over `axes` spans, each in rank order."""
    return tuple(tuple(int(i) for i in group) for group in _axis_groups(axis_context, axes))


def key_value_store():
    """What the processes of a program share: `key_value_set` and `blocking_key_value_get`."""
    return _distributed.global_state.client


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
