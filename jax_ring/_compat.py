"""The only module that uses names of JAX that are private or differ between versions."""

import dataclasses
import functools
import inspect
import itertools
import math
import operator
import pathlib
import re
import sys
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

import jax
import jax.extend.backend
import jax.extend.core
import jaxlib.version as _jaxlib_version
import numpy as np
from jax.extend import source_info_util as _source_info_util
from jax.extend import xla as _xla
from jax.extend.mlir import ir as _ir
from jax.extend.mlir.dialects import func as _func

OLDEST_JAX = (0, 10, 2)
T = TypeVar("T")
# JAX's `mlir.LoweringRuleContext`, by whose own annotations operands could be of types without a shape.
LoweringContext: TypeAlias = Any
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Primitive = jax.extend.core.Primitive

if jax.__version_info__ < OLDEST_JAX:
    raise ImportError(
        f"jax_ring needs JAX {'.'.join(map(str, OLDEST_JAX))} or newer, found {jax.__version__}. "
        "Upgrade with: pip install --upgrade jax"
    )

try:
    from jax._src import api as _api
    from jax._src import callback as _callback
    from jax._src import compiler as _compiler
    from jax._src import config as _config
    from jax._src import core as _core
    from jax._src import distributed as _distributed
    from jax._src import effects as _effects
    from jax._src import xla_bridge as _xla_bridge
    from jax._src.interpreters import mlir as _mlir
    from jax._src.interpreters import partial_eval as _partial_eval
    from jax._src.interpreters import pxla as _pxla
    from jax._src.interpreters.pxla import axis_groups as axis_groups
    from jax._src.lax import parallel as _parallel
    from jax._src.shard_map import shard_map_p as shard_map_p
    from jax._src.source_info_util import user_frame as _user_frame
    from jax.interpreters.mlir import SPMDAxisContext as SPMDAxisContext
    from jax.interpreters.partial_eval import dce_jaxpr as dce_jaxpr
    from jax.interpreters.partial_eval import dce_rules as _dce_rules
    from jaxlib import xla_client as _xla_client

    psum_p = _parallel.psum_p
    psum_invariant_p = _parallel.psum_invariant_p
    _check_vma = _config._check_vma
    _auto_pcast = _config.auto_pcast
    _source_file_pattern = _config.hlo_source_file_canonicalization_regex
    skip_size_one_axes = _parallel._maybe_skip_one_sized_axes  # if JAX leaves these out of types
    # `jax.ffi.register_ffi_type` waits for the CPU client and then registers handlers before types, which XLA rejects.
    # Creating the client on import would fix the number of devices.
    register_cpu_ffi_type = _xla_client._xla.register_custom_type
    _CompileOnlyClient = _xla_client._xla.CompileOnlyPyClient
    _common_lowerings = _mlir._lowerings
    _platform_lowerings = _mlir._platform_specific_lowerings
    _uncacheable_primitives = _mlir._uncacheable_primitives
    _source_info_to_location = _mlir.source_info_to_location
    _rules_for_knowns = _partial_eval.custom_partial_eval_rules
    _rules_for_remat = _partial_eval.partial_eval_jaxpr_custom_rules
    _remat_case = _partial_eval.ensure_enum
    COLLECTIVE_CHANNEL_ID = _mlir.COLLECTIVE_CHANNEL_ID
    _module_of = _mlir.build_mlir_module_helper
    _to_xla = _xla_client._xla.mlir.mlir_module_to_xla_computation
    _extend_axis_env = _core.extend_axis_env_nd
    _trace_state_clean = _core.trace_state_clean
    _after_launches = _api._post_hook_state
    _check_for_nans = _api._nan_check_posthook
    _launch = _pxla.ExecuteReplicated.__call__
    _PjitFunction = type(jax.jit(len))
    has_backend = _xla_bridge.backends_are_initialized  # which fixes the numbers of devices and processes
    _register_plugin_callbacks = _xla_bridge.register_plugin_callbacks
    _visible_gpus = _xla_bridge.CUDA_VISIBLE_DEVICES
    pmax_p = _parallel.pmax_p
    pmin_p = _parallel.pmin_p
    reduce_scatter_p = _parallel.reduce_scatter_p
    all_gather_p = _parallel.all_gather_p
    all_gather_invariant_p = _parallel.all_gather_invariant_p
    all_to_all_p = _parallel.all_to_all_p
    ppermute_p = _parallel.ppermute_p
    pbroadcast_p = _parallel.pbroadcast_p
    ragged_all_to_all_p = _parallel.ragged_all_to_all_p
    # Its source is an operand. JAX 0.10 lacks it.
    pbroadcast_dynamic_p = getattr(_parallel, "pbroadcast_dynamic_p", None)
    # As at import: `override_lax()` replaces them.
    _lax_rules = {primitive: entry.rule for primitive, entry in _common_lowerings.items()}
    # Asynchronous collectives: each primitive that starts one, with its synchronous primitive, and those that wait.
    STARTS = {
        getattr(_parallel, name): getattr(_parallel, name.replace("_start_p", "_p"))
        for name in dir(_parallel)
        if name.endswith("_start_p")
    }
    DONES = [getattr(_parallel, name) for name in dir(_parallel) if name.endswith("_done_p")]
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"jax_ring does not support JAX {jax.__version__}: {error}. "
        "Upgrade jax_ring, or install a version of JAX that it was tested with (see its README)."
    ) from error


# Before jaxlib 0.12 Gloo's reduce-scatter returns wrong sums without an error: a rank can overwrite data that it is
# still sending. Blocks of 16 MiB and more show it on one machine. XLA uses Gloo once jax.distributed is initialized,
# also between devices of one process.
WRONG_REDUCE_SCATTER_ON_CPU = _jaxlib_version.__version_info__ < (0, 12)

# A program that `register_hlo_transformation` changes forgets its aliases, so nothing is donated.
CHANGED_HLO_LOSES_ALIASES = _jaxlib_version.__version_info__ < (0, 11)

# JAX before 0.11 hands over programs for GPUs only if it is asked before it has started.
PLATFORMS_WITH_HOOK = ("cpu",) if CHANGED_HLO_LOSES_ALIASES else ("cpu", "cuda")

# Before JAX 0.12 a launch holds a thread of the execution pool while it waits for its device to have fewer executions
# in flight. The pool has NPROC threads, or one for each core or device.
LAUNCHES_HOLD_THREADS = jax.__version_info__ < (0, 12)

# The flag in XLA_FLAGS for the time limit, in whole seconds, of XLA's collectives between CPU processes. XLA ends the
# process on an unknown flag, so check each later jaxlib before allowing it here.
FLAG_OF_CPU_LIMIT = "--xla_cpu_collective_timeout_seconds"
HAS_FLAG_OF_CPU_LIMIT = _jaxlib_version.__version_info__ < (0, 13)


def leave_out_of_call_sites() -> None:
    _source_info_util.register_exclusion(str(pathlib.Path(__file__).parent))


def call_site(lowering_context: LoweringContext | _source_info_util.SourceInfo) -> str:
    """File, line and function of the user's call; empty if unknown.

    As in the metadata of compiled programs, `jax_hlo_source_file_canonicalization_regex` shortens the name of the file.
    """
    frame = _user_frame(lowering_context.traceback)
    if frame is None:
        return ""
    pattern = _source_file_pattern.value
    file_name = re.sub(pattern, "", frame.file_name) if pattern else frame.file_name
    return f"{file_name}:{frame.start_line} ({frame.function_name})"


# Names that JAX itself adds to the name stack.
_SCOPES_OF_JAX = re.compile(
    r".*\(.*|shard_map|while|body|cond|scan|closed_call|eval_jaxpr|checkpoint|rematted_computation|branch_\d+_fun"
)


def location_by_user(lowering_context: LoweringContext):
    """A location that names an operation, in compiled programs and profiles, after the user's part of the program.

    That is the innermost `jax.named_scope`, or else the function that makes the call.
    """
    ctx = lowering_context
    frame = _user_frame(ctx.traceback)
    names = [name for scope in reversed(ctx.name_stack.stack) if not _SCOPES_OF_JAX.fullmatch(name := str(scope.name))]
    names += [name for name in (frame.function_name.split(".")[::-1] if frame else ()) if name.isidentifier()]
    function = function_name(ctx.primitive)
    named = types.SimpleNamespace(name=f"{names[0].replace('/', '.')}.{function}" if names else function)
    return _source_info_to_location(ctx.module_context, named, ctx.name_stack, ctx.traceback)  # type: ignore[arg-type]


def call_location(lowering_context: LoweringContext) -> tuple[str, int]:
    """File and line of the user's call; ("<unknown>", 0) if unknown."""
    frame = _user_frame(lowering_context.traceback)
    return (frame.file_name, frame.start_line) if frame else ("<unknown>", 0)


def check_vma() -> bool:
    """Whether shard_map tracks which axes a value varies over."""
    return _check_vma.value


def without_vma():
    return _check_vma(False)


def auto_pcast() -> bool:
    """Whether JAX casts replicated operands of collectives to varying ones."""
    return _auto_pcast.value


def bound_axis_sizes() -> Mapping:
    """Name and size of every axis that a collective can name here."""
    return _core.get_axis_env().axis_sizes


def varying_axes(x: Any) -> frozenset:
    """The mesh axes over which a value or type varies. Empty unless check_vma()."""
    return (x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)).mat.varying


def partially_reduced_axes(aval: Any) -> frozenset:
    """The mesh axes over which a type is marked `unreduced` or `reduced`."""
    mat = aval.mat
    return mat.unreduced | mat.reduced if mat.unreduced else mat.reduced


def without_first_dimension(aval: Any) -> Any:
    """The type of an element along the first dimension."""
    spec = aval.sharding.spec
    sharding = aval.sharding.update(spec=spec.update(partitions=spec.partitions[1:]))
    return aval.update(shape=aval.shape[1:], sharding=sharding)


def undivided(x: jax.Array, dimension: int) -> jax.Array:
    """x with a dimension that no explicit axis of a mesh divides. Slices of a divided one must fit the axis."""
    if explicit_axes(x, dimension) is None:
        return x
    sharding = jax.typeof(x).sharding
    partitions = list(sharding.spec.partitions)
    partitions[dimension] = None
    return jax.sharding.reshard(x, sharding.update(spec=sharding.spec.update(partitions=tuple(partitions))))


def stacked_sharding(x: Any, axes: Any = None) -> jax.sharding.NamedSharding:
    """The sharding of a stack of arrays or types like x, whose first dimension is divided over explicit axes."""
    sharding = (x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)).sharding
    return sharding.update(spec=sharding.spec.update(partitions=(axes, *sharding.spec.partitions)))


def explicit_axes(x: jax.Array, dimension: int | None) -> Any:
    """The explicit axes of a mesh over which a dimension of x is divided; None if there are none."""
    return None if dimension is None else jax.typeof(x).sharding.spec.partitions[dimension]


def abstract_psum(aval: Any, **params: Any) -> tuple:
    """JAX's checks and effects for a psum that keeps its operand's type."""
    out, effects = psum_p.abstract_eval(aval, **_params_of_lax(psum_p, params))
    # JAX's rule is for code without vma tracking and drops the type; this one may also be called with it.
    return out.update(sharding=aval.sharding, manual_axis_type=aval.mat), effects


def abstract_varying(primitive: Primitive, aval: Any, **params: Any) -> tuple:
    """Checks and effects of one of JAX's primitives whose result varies as its operand does."""
    # Some of JAX's rules reject vmap axes while they track vma. The operands here have already been cast.
    with _check_vma(False):
        out, effects = primitive.abstract_eval(aval, **_params_of_lax(primitive, params))
    return out.update(manual_axis_type=aval.mat), effects


def abstract_invariant(primitive: Primitive, aval: Any, **params: Any) -> tuple:
    """Checks, type and effects of one of JAX's primitives, from varying to invariant."""
    return primitive.abstract_eval(aval, **_params_of_lax(primitive, params))


def with_weak_type(abstract_eval: Callable, aval: Any, **params: Any) -> tuple:
    """What `abstract_eval` gives, but with the operand's weak type: the value is one of the operands."""
    out, effects = abstract_eval(aval, **params)
    return out.update(weak_type=aval.weak_type), effects


def weakly_typed(x: np.ndarray) -> jax.Array:
    """An array of a weak type."""
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def axes_of_permutation(axes: tuple, mesh: Mesh) -> tuple:
    """The axes of a ppermute in JAX's order of ranks. Raises JAX's RuntimeError."""
    if not all(axis in mesh.axis_names for axis in axes):
        return axes
    in_order = tuple(axis for axis in mesh.axis_names if axis in axes)
    if [axis for axis in in_order if mesh.shape[axis] > 1] == [axis for axis in axes if mesh.shape[axis] > 1]:
        return axes
    if not hasattr(_config, "raise_on_ppermute_sort_diff"):
        return in_order
    if _config.raise_on_ppermute_sort_diff.value:
        raise RuntimeError(
            f"ppermute over {axes}: the axes must be in the order of the mesh, {in_order}. Otherwise the numbers of "
            "the ranks are easily mistaken. To allow it, set JAX's option jax_raise_on_ppermute_sort_diff to False."
        )
    return axes


def lax_rule(primitive: Primitive) -> Callable:
    """JAX's lowering of a primitive for all platforms, or one that raises."""
    return _lax_rules.get(primitive, no_lowering)


def lower_as_lax(primitive: Primitive, ctx: LoweringContext, operand: _ir.Value, **params: Any) -> Sequence:
    """Lowers one operand to XLA's collective, as JAX does."""
    return _lax_rules[primitive](ctx.replace(primitive=primitive), operand, **_params_of_lax(primitive, params))


# For each of JAX's primitives: jax_ring's parameter names, mapped to JAX's. JAX's primitive lacks the others.
_REDUCTION = {"axes": "axes", "axis_index_groups": "axis_index_groups"}
_BLOCKS = {"axes": "axis_name", "axis_index_groups": "axis_index_groups", "axis_size": "axis_size", "tiled": "tiled"}
_PARAMS_OF_LAX: dict = {
    psum_p: _REDUCTION,
    psum_invariant_p: {"axes": "axes"},
    pmax_p: _REDUCTION,
    pmin_p: _REDUCTION,
    reduce_scatter_p: {**_BLOCKS, "dimension": "scatter_dimension"},
    all_gather_p: {**_BLOCKS, "dimension": "all_gather_dimension"},
    all_gather_invariant_p: {
        "axes": "axis_name", "axis_size": "axis_size", "dimension": "all_gather_dimension", "tiled": "tiled"
    },
    all_to_all_p: {
        "axes": "axis_name", "axis_index_groups": "axis_index_groups", "dimension": "split_axis",
        "concat_dimension": "concat_axis", "tiled": "tiled",
    },
    ppermute_p: {"axes": "axis_name", "perm": "perm"},
    pbroadcast_p: {"axes": "axis_name", "root": "source"},
}  # fmt: skip


def _params_of_lax(primitive: Primitive, params: dict) -> dict:
    return {name: params[own] for own, name in _PARAMS_OF_LAX[primitive].items()}


def params_from_lax(primitive: Primitive, params: dict) -> dict:
    """The parameters of one of JAX's collectives (or of its start), by their names in jax_ring."""
    return {own: params[name] for own, name in _PARAMS_OF_LAX[STARTS.get(primitive, primitive)].items()}


def no_lowering(lowering_context: LoweringContext, *operands: Any, **params: Any) -> NoReturn:
    """Raises as JAX does for a platform without a lowering."""
    platform = (lowering_context.platforms or lowering_context.module_context.platforms)[0]
    raise NotImplementedError(
        f"MLIR translation rule for primitive '{lowering_context.primitive}' not found for platform {platform}"
    )


def replace_lowering(
    primitive: Primitive, platforms: tuple[str, ...], make_rule: Callable, *, cacheable: bool
) -> Callable[[], None]:
    """Replaces the lowering of one of JAX's primitives for some platforms; returns a function that undoes it.

    A rule for all platforms stays one rule: split by platform, a program for several would need a conditional, which
    JAX (up to 0.12) fails to build for primitives that are not cacheable. The new rule therefore sees such programs,
    and recognises them by `ctx`.

    make_rule: (JAX's rule) to the rule that replaces it. Where JAX has none, it gets one that raises JAX's error.
    cacheable: whether equal equations may be lowered once. A cached lowering does not know the call site.
    """
    registries = [_common_lowerings, *(_platform_lowerings[platform] for platform in platforms)]
    originals = [(registry, registry.get(primitive)) for registry in registries]
    for registry, entry in originals:
        if entry is not None:
            registry[primitive] = dataclasses.replace(entry, rule=make_rule(entry.rule))
    for platform in platforms:
        if primitive not in _common_lowerings and primitive not in _platform_lowerings[platform]:
            _mlir.register_lowering(primitive, make_rule(no_lowering), platform=platform)
    changes_caching = not cacheable and primitive not in _uncacheable_primitives
    if changes_caching:
        _uncacheable_primitives.add(primitive)

    def undo() -> None:
        for registry, entry in originals:
            if entry is None:
                registry.pop(primitive, None)
            else:
                registry[primitive] = entry
        if changes_caching:
            _uncacheable_primitives.discard(primitive)

    return undo


def function_name(primitive: Primitive) -> str:
    """The function that binds a collective's primitive, also for values that are unreduced, reduced or invariant."""
    name = primitive.name.removeprefix("unreduced_").replace("_reduced", "").replace("_invariant", "")
    return name.replace("reduce_scatter", "psum_scatter")


def once(lowering_context: LoweringContext, key: Hashable, compute: Callable[..., T], *args: Any) -> T:
    """compute(*args), called once per key and module. It is kept as long as the lowering of the module lasts."""
    kept = lowering_context.module_context.cached_primitive_lowerings  # JAX's own keys have other types
    if key not in kept:
        kept[key] = compute(*args)
    return kept[key]


def call_with_programs(function: Callable) -> None:
    """Calls a function with each program that JAX has lowered.

    function: of (module, jaxpr, platforms, donates, the meshes of arguments and results, is_exported).
    """
    lower = _mlir.lower_jaxpr_to_module

    @functools.wraps(lower)
    def lower_and_call(name, jaxpr, **options):
        lowered = lower(name, jaxpr, **options)
        with lowered.module.context, _ir.Location.unknown():
            shardings = [*(options.get("arg_shardings") or ()), *(options.get("result_shardings") or ())]
            platforms, donates = tuple(options["platforms"]), any(options["donated_args"])
            meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, jax.sharding.NamedSharding)]
            is_exported = options["lowering_parameters"].for_export
            function(lowered.module, jaxpr, platforms, donates, meshes, is_exported)
        return lowered

    _mlir.lower_jaxpr_to_module = lower_and_call  # type: ignore[assignment]


def call_around_builds(count: Callable[[int], None]) -> None:
    """Calls count(1) before a program is compiled, or loaded from JAX's cache, and count(-1) afterwards."""
    build = _compiler.compile_or_get_cached

    @functools.wraps(build)
    def count_and_build(*args, **options):
        count(1)
        try:
            return build(*args, **options)
        finally:
            count(-1)

    _compiler.compile_or_get_cached = count_and_build


def register_hlo_transformation(name: str, transform: Callable[[bytes], bytes | None], platform: str) -> bool:
    """Makes XLA hand over the programs that it compiles for a platform; returns whether it can.

    It cannot without the platform's plugin: programs are then lowered, and not compiled.
    """
    options: dict = {"name": name, "stage": _xla.PipelineStage.PRE_SCHEDULER, "platforms": platform}
    try:
        _xla.register_hlo_module_transformation(transform, **options)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def devices(platform: str) -> list:
    """JAX's devices of a platform, maybe none."""
    try:
        return jax.devices(platform)
    except (RuntimeError, AssertionError):  # the latter where there is no GPU
        return []


def is_donated(attributes: Mapping | _ir.DictAttr) -> bool:
    """Whether an argument with these attributes is donated, for a certain result or for any."""
    return "tf.aliasing_output" in attributes or "jax.buffer_donor" in attributes


def is_exported(lowering_context: LoweringContext) -> bool:
    return lowering_context.module_context.lowering_parameters.for_export


def called_function(lowering_context: LoweringContext, call: _ir.Operation) -> _ir.Operation:
    name = _ir.FlatSymbolRefAttr(call.attributes["callee"]).value
    return lowering_context.module_context.symbol_table[name].operation


def unconstrained(value: _ir.Value) -> _ir.Value:
    """A value before constraints on its sharding: JAX 0.12 adds one where the mesh has explicit axes."""
    while isinstance(value, _ir.OpResult) and value.owner.operation.name == "sdy.sharding_constraint":
        value = value.owner.operation.operands[0]
    return value


def new_function(lowering_context: LoweringContext, name: str, operand_types: list, result_types: list) -> Any:
    """A private function of the module without a body; renamed if the name is taken."""
    module = lowering_context.module_context
    function = _func.FuncOp(name, _ir.FunctionType.get(operand_types, result_types), ip=module.ip)
    function.attributes["sym_visibility"] = _ir.StringAttr.get("private")
    module.symbol_table.insert(function)
    return function


def platforms_of(lowering_context: LoweringContext) -> tuple[str, ...]:
    """The platforms that an equation is lowered for."""
    return tuple(lowering_context.platforms or lowering_context.module_context.platforms)


def stream_of(lowering_context: LoweringContext) -> str:
    """The GPU stream of `compute_on("gpu_stream:...")`; empty by default."""
    eqn_context = lowering_context.jaxpr_eqn_ctx
    kind, _, name = ((eqn_context and eqn_context.compute_type) or "").partition(":")
    return name.lower() if kind == "gpu_stream" else ""  # XLA ignores the case of names


def is_tracing() -> bool:
    return not _trace_state_clean()


def is_one_program(function: Callable) -> bool:
    """Whether a call of a function outside of others is one execution of one program."""
    return isinstance(function, _PjitFunction | jax.stages.Compiled)


def call_after_launches(function: Callable[[object], None]) -> None:
    """Calls a function with the results of each launch of a jitted function that no other one calls.

    After a first launch that has raised an exception it gets no results. From now on `is_launch` tells of every launch.
    """
    # Before a launch JAX looks up the program, by a key with the values of user contexts, and compares a value that is
    # another object: nothing else of Python is called before native code. These values are equal to any other. Their
    # comparison notes the frame, without Python's code, in which another thread could change the table.
    frames = itertools.starmap(sys._getframe, itertools.repeat((0,)))
    places = zip(map(id, frames), map(operator.attrgetter("f_lasti"), frames), strict=False)
    notes = zip(map(_looked_up.__setitem__, itertools.repeat(0), places), strict=False)

    class Value:
        __eq__ = staticmethod(functools.partial(next, notes))  # type: ignore[assignment]
        __hash__ = staticmethod(functools.partial(hash, None))  # type: ignore[assignment]  # that of the first value

    @functools.wraps(_launch)
    def launch_and_call(self, *args):
        results = ()
        try:
            results = _launch(self, *args)
            return results
        finally:
            _launch_value.set_global(Value())  # the key of this program has the last one
            function(results)

    def after_launch(jitted, args, kwargs, results) -> None:
        _looked_up[0] = None
        function(results)
        if _config.debug_nans.value or _config.debug_infs.value:  # what JAX has the hook for
            _check_for_nans(jitted, args, kwargs, results)

    _launch_value.set_global(Value())
    _pxla.ExecuteReplicated.__call__ = launch_and_call  # type: ignore[method-assign]
    _after_launches.set_global(after_launch)


# The frame from which a program was looked up last, and the place in its code. None once that was launched.
_looked_up: list[Any] = [None]
_launch_value: Any = jax.make_user_context()  # now: keys of other lengths are not equal


def is_launch(frame: int, code: types.CodeType, instruction: int) -> bool:
    """Whether a function that runs is in the launch of a program, or of one in whose callback it is.

    frame: its id. instruction: its index in the code.
    """
    return code is _LAUNCH_CODE or (frame, instruction) == _looked_up[0]


# The function of JAX in which Python is while a program is launched for the first time.
_LAUNCH_CODE = inspect.unwrap(_launch).__code__


def is_callback(frame: int, code: types.CodeType, instruction: int) -> bool:
    """Whether a function is one by which JAX's programs call Python."""
    return code.co_filename == _callback.__file__


def call_with_plugins(function: Callable[[], None]) -> None:
    """Calls a function once per plugin that JAX loads, such as CUDA's: before it starts the backends, or now.

    JAX holds a lock meanwhile, so the function must not start a backend.
    """
    _register_plugin_callbacks(lambda c_api: function())


def register_partitioner(target: str, partition: Callable) -> None:
    """Registers how XLA's partitioner replaces custom calls to a target, which has no other implementation.

    partition: (shapes of the operands, their shardings, shape of the result, its sharding, attributes of the call as
      text) to (bytecode of the program of one device, shardings of the operands, sharding of the result), where shapes
      and shardings are XLA's.
    """

    def refuse(*arguments):
        raise NotImplementedError(f"{target} needs the partitioner Shardy: set jax_use_shardy_partitioner to True")

    register = functools.partial(_xla_client.register_custom_call_partitioner, target, refuse, partition, refuse)
    register()
    _register_plugin_callbacks(lambda c_api: register(c_api=c_api))


def reshape_sharding(sharding: Any, removed: int, added: int) -> Any:
    """XLA's sharding for an array with `added` leading dimensions, not divided, in place of `removed`."""
    if not sharding.is_tiled():
        return sharding  # it divides nothing
    tiles = list(sharding.tile_assignment_dimensions())
    num_dimensions = len(tiles) - (sharding.replicate_on_last_tile_dim() or len(sharding.subgroup_types()))
    kept = list(range(removed, num_dimensions))
    others = [i for i in range(len(tiles)) if i not in kept]
    devices = np.reshape(sharding.tile_assignment_devices(), tiles).transpose(kept + others).ravel()
    proto = _xla_client.OpSharding()
    proto.type = _xla_client.OpSharding.Type.OTHER
    # Devices along the last dimension share a tile.
    proto.tile_assignment_dimensions = [1] * added + [tiles[i] for i in kept] + [math.prod(tiles[i] for i in others)]
    proto.tile_assignment_devices = [int(device) for device in devices]
    proto.replicate_on_last_tile_dim = True
    return _xla_client.HloSharding.from_proto(proto)


def tuple_sharding(shape: Any, shardings: Sequence) -> Any:
    """XLA's sharding of a tuple of XLA's shape."""
    return _xla_client.HloSharding.tuple_sharding(shape, list(shardings))


def visible_gpus() -> tuple[int, ...] | None:
    """CUDA ordinals of the GPUs that JAX may use in this process; None for all that CUDA shows."""
    return None if _visible_gpus.value == "all" else tuple(map(int, _visible_gpus.value.split(",")))


def devices_of_process(device: jax.Device) -> list[jax.Device]:
    """All devices of a device's process and backend, also those in no mesh, by id."""
    peers = [other for other in device.client.devices() if other.process_index == device.process_index]
    return sorted(peers, key=lambda other: other.id)


def axis_context_within(shard_map_params: dict) -> SPMDAxisContext:
    """The axis context of a shard_map's body, from its equation's parameters."""
    mesh = shard_map_params["mesh"]
    return SPMDAxisContext(mesh, frozenset(shard_map_params["newly_manual_axes"]) | set(mesh.manual_axes))


def mesh_devices(mesh: Mesh) -> list[jax.Device] | None:
    """A mesh's devices; None for an abstract one."""
    return list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None


def is_compile_only(mesh: Mesh) -> bool:
    """Whether a mesh is of `jax.experimental.topologies`, which programs are only compiled for."""
    devices = mesh_devices(mesh)
    return devices is not None and isinstance(devices[0].client, _CompileOnlyClient)


def module_name(lowering_context: LoweringContext) -> str:
    return _ir.StringAttr(lowering_context.module_context.module.operation.attributes["sym_name"]).value


def main_argument_types(lowering_context: LoweringContext) -> list[str]:
    main = lowering_context.module_context.symbol_table["main"].operation
    return [str(argument.type) for argument in main.regions[0].blocks[0].arguments]


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter is a jaxpr, closed or not."""
    return isinstance(value, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))


def place_of(equation: jax.extend.core.JaxprEqn) -> tuple:
    """Equal for equations of one line, one `jax.named_scope` and one setting of JAX's options."""
    return equation.ctx, equation.source_info.traceback, equation.source_info.name_stack


def has_backends() -> bool:
    """Whether JAX has started."""
    return bool(_xla_bridge._backends)


def is_distributed() -> bool:
    return _distributed.global_state.client is not None


def distributed_client():
    """The client of the distributed runtime. Raises RuntimeError while there is none."""
    client = _distributed.global_state.client
    if client is None:
        raise RuntimeError(
            f"jax_ring needs jax.distributed in a program of {jax.process_count()} processes, to find out "
            "which of them share a host. Call jax.distributed.initialize() first."
        )
    return client


def call_when_distributed(function: Callable[[], Any]) -> None:
    """Calls a function whenever `jax.distributed` is initialized, and now if it is."""
    state = type(_distributed.global_state)
    initialize = state.initialize

    @functools.wraps(initialize)
    def initialize_and_call(self, *arguments, **options):
        initialize(self, *arguments, **options)
        function()

    state.initialize = initialize_and_call  # type: ignore[method-assign]
    if is_distributed():
        function()


def distributed_process() -> int:
    """The index of this process, without creating a backend; 0 if it is alone."""
    return _distributed.global_state.process_id if is_distributed() else 0


def num_distributed_processes() -> int:
    """The number of processes, without creating a backend."""
    return _distributed.global_state.num_processes if is_distributed() else 1


def put_bytes(client: Any, key: str, value: bytes, replaces: bool = False) -> None:
    """Publishes a value in a runtime's store. Raises JAX's error if the key has one, unless it replaces that."""
    client.key_value_set_bytes(key, value, allow_overwrite=replaces)


def get_bytes(client: Any, key: str, seconds: float) -> bytes:
    """A key's value in a runtime's store. Raises JAX's error if there is none within the time, 0 for at once."""
    if seconds == 0:
        return client.key_value_try_get_bytes(key)
    return client.blocking_key_value_get_bytes(key, int(seconds * 1000))


def publish_once(client: Any, key: str, value: bytes) -> bytes:
    """Publishes a value unless the key has one; returns the key's value, without blocking."""
    try:
        put_bytes(client, key, value)
    except jax.errors.JaxRuntimeError:
        # Raises if the store is unreachable. Otherwise the key has a value.
        return get_bytes(client, key, 0)
    return value


def complete_errors(complete: Callable[[str], str]) -> None:
    """Passes the text of each error of XLA through `complete`."""
    error = jax.errors.JaxRuntimeError
    initialize = error.__init__

    def initialize_completed(self, *arguments):
        # A status may follow as second argument.
        if arguments and isinstance(arguments[0], str):
            arguments = (complete(arguments[0]), *arguments[1:])
        initialize(self, *arguments)

    error.__init__ = initialize_completed  # type: ignore[method-assign]


def evaluate_operands_apart(primitive: Primitive) -> None:
    """Lets JAX know or drop each result of a primitive, which has one for each operand, by itself.

    As if there were an equation for each. By default one unknown operand makes all results unknown, and one used result
    keeps all.
    """
    _rules_for_knowns[primitive] = functools.partial(_evaluate_knowns, primitive)
    _rules_for_remat[primitive] = _split_for_remat
    _dce_rules[primitive] = _drop_unused


def _part(eqn, wanted: Sequence[bool]):
    """The equation for some operands and their results; None for none."""
    kept = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    return eqn.replace(invars=[eqn.invars[i] for i in kept], outvars=[eqn.outvars[i] for i in kept]) if kept else None


def _drop_unused(used: list[bool], *rest) -> tuple:
    return used, _part(rest[-1], used)  # from JAX 0.12 on behind the liveness of the inputs


def _evaluate_knowns(primitive, trace, *tracers, **params):
    results: dict = {}
    for known in (True, False):
        places = [i for i, tracer in enumerate(tracers) if tracer.is_known() is known]
        if places:
            of_places = trace.default_process_primitive(primitive, [tracers[i] for i in places], params)
            results.update(zip(places, of_places, strict=True))
    return [results[i] for i in range(len(tracers))]


def _split_for_remat(saveable: Callable, unknown: Sequence[bool], instantiated: Sequence[bool], eqn) -> tuple:
    """An equation's part for the first pass and that for the second: what JAX does for equations without a rule."""
    first = _part(eqn, [not each for each in unknown])
    # A rule cannot return the two equations that move results elsewhere. They stay here, as if saved.
    recomputed = first is not None and isinstance(
        _remat_case(saveable(eqn.primitive, *[v.aval for v in first.invars], **eqn.params)), _partial_eval.RecomputeType
    )
    in_second = [each or recomputed for each in unknown]
    second = _part(eqn, in_second)
    residuals = [
        v
        for v, used, there in zip(eqn.invars, in_second, instantiated, strict=True)
        if used and not there and not isinstance(v, jax.extend.core.Literal)
    ]
    return first, second, list(unknown), in_second, residuals


def frames(eqn: jax.extend.core.JaxprEqn) -> list:
    """An equation's stack frames, innermost first, with function_name, file_name and line_num."""
    traceback = eqn.source_info.traceback
    return [] if traceback is None else list(traceback.frames)


def rank_dependent_axes(jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr) -> set:
    """The named axes of all collectives and `axis_index` in a jaxpr."""
    return {effect.name for effect in jaxpr.effects if isinstance(effect, _core.NamedAxisEffect)}


def may_have_rules(jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr) -> bool:
    """Whether JAX lets a function with this jaxpr's effects have rules for its derivatives."""
    return not _effects.custom_derivatives_allowed_effects.filter_not_in(jaxpr.effects)


def scan_counts(scan_params: dict) -> tuple[int, int]:
    """The numbers of constants and carries of a `scan`."""
    if "num_consts" in scan_params:
        return scan_params["num_consts"], scan_params["num_carry"]
    # JAX 0.12 has the tree structures of consts, carry and inputs instead.
    consts, carry, _ = scan_params["ft_in"].unpack()
    return len(consts), len(carry)


def platforms_of_branches(cond_params: Mapping) -> tuple | None:
    """The platforms of each branch of a `lax.platform_dependent`, None for the default; None for other `cond`s."""
    return cond_params.get("branches_platforms")


def bind_equation(eqn: jax.extend.core.JaxprEqn, operands: list) -> list:
    """An equation's results for these operands, as from `jax.core.eval_jaxpr`."""
    source = eqn.source_info
    name_stack = _source_info_util.current_name_stack() + source.name_stack
    with _source_info_util.user_context(source.traceback, name_stack=name_stack), eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def lowered_alone(eqn: jax.extend.core.JaxprEqn, axis_context: SPMDAxisContext, platform: str) -> Any:
    """The XlaComputation, not yet compiled, of one equation of a shard_map's body."""
    core = jax.extend.core
    operands: list = [core.Var(v.aval) for v in eqn.invars]
    results: list = [core.Var(getattr(v.aval, "inner_aval", v.aval)) for v in eqn.outvars]
    primitive = STARTS.get(eqn.primitive, eqn.primitive)  # results are arrays, so a program can return them
    alone = eqn.replace(primitive=primitive, invars=operands, outvars=results)
    unnamed = core.DebugInfo("lowered_alone", "", None, None)
    jaxpr = core.Jaxpr((), operands, results, [alone], debug_info=unnamed)
    sizes = axis_context.mesh.shape
    with _extend_axis_env([(axis, sizes[axis]) for axis in axis_context.manual_axes]), without_vma():
        module = _module_of(
            core.ClosedJaxpr(jaxpr, ()), name="alone", platforms=(platform,), backend=None, axis_context=axis_context
        )
    return _to_xla(_mlir.module_to_bytecode(module), use_tuple_args=False)
