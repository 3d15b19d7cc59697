"""The lowerings that `override_lax()` puts in the place of JAX's own."""

import operator
import warnings
from collections.abc import Callable
from functools import partial

import jax

from jax_ring import _compat, runtime
from jax_ring.lowering import ragged, rules
from jax_ring.lowering.dispatch import groups_of, lowering_key, service_of
from jax_ring.lowering.state import cached_in_module
from jax_ring.lowering.xla.fallback import lower_broadcast_to_xla, lower_dynamic_broadcast_to_sum
from jax_ring.options import Options

# JAX's primitives: the function to name in messages, the kind of collective, and the reduction.
_OVERRIDDEN = {
    _compat.psum_p: ("lax.psum", "all_reduce", "sum"),
    _compat.psum_invariant_p: ("lax.psum", "all_reduce", "sum"),
    _compat.pmax_p: ("lax.pmax", "all_reduce", "max"),
    _compat.pmin_p: ("lax.pmin", "all_reduce", "min"),
    _compat.reduce_scatter_p: ("lax.psum_scatter", "reduce_scatter", "sum"),
    _compat.all_gather_p: ("lax.all_gather", "all_gather", "sum"),
    _compat.all_gather_invariant_p: ("lax.all_gather", "all_gather", "sum"),
    _compat.all_to_all_p: ("lax.all_to_all", "all_to_all", "sum"),
    _compat.ppermute_p: ("lax.ppermute", "permute", "sum"),
    _compat.pbroadcast_p: ("lax.pbroadcast", "broadcast", "sum"),
}

_JOINED = Options()

# Parameters that have other names in the primitives of jax_ring.
_RENAMED_PARAMS = {
    "axis_name": "axes",
    "scatter_dimension": "dimension",
    "all_gather_dimension": "dimension",
    "split_axis": "dimension",
    "concat_axis": "concat_dimension",
    "source": "root",
}


def make_rules(is_on: Callable[[], bool]) -> dict:
    """By primitive of JAX: a function from JAX's rule to one that is used instead.

    is_on: whether the override is on in this thread. If it is not, JAX's rule lowers.
    """
    by_primitive: dict = {}
    for primitive, description in _OVERRIDDEN.items():
        by_primitive[primitive] = partial(_make_rule, is_on, *description)
    by_primitive[_compat.ragged_all_to_all_p] = partial(_make_ragged_rule, is_on)
    if _compat.pbroadcast_dynamic_p is not None:
        by_primitive[_compat.pbroadcast_dynamic_p] = partial(_make_dynamic_broadcast_rule, is_on)
    for start, primitive in _compat.STARTS.items():
        function, kind, op = _OVERRIDDEN[primitive]
        by_primitive[start] = partial(
            _make_start_rule, is_on, f"{function}_start", kind, op, _compat.lax_rule(primitive)
        )
    for done in _compat.DONES:
        by_primitive[done] = partial(_make_done_rule, is_on)
    return by_primitive


def _make_rule(is_on: Callable, function: str, kind: str, op: str, jax_rule: Callable, options: Options = _JOINED):
    prepare = partial(_prepare, function, kind, op, jax_rule, options)

    def lower(ctx, operand, **params):
        if not is_on():
            return jax_rule(ctx, operand, **params)
        key = ("override", function, options, *lowering_key(ctx, params))
        return cached_in_module(ctx, key, lambda: prepare(ctx, params))(ctx, operand)

    return lower


def _prepare(function: str, kind: str, op: str, jax_rule: Callable, options: Options, ctx, params: dict) -> Callable:
    """How calls like the one under lowering are emitted: a function of (ctx, operand), without a reference to ctx."""

    def as_by_jax(ctx, operand):
        return jax_rule(ctx, operand, **params)

    # Random keys can be moved, but the engines do not support them.
    if jax.dtypes.issubdtype(ctx.avals_in[0].dtype, jax.dtypes.extended):
        return as_by_jax
    axes = params.get("axes", params.get("axis_name"))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    if len(named) < len(axes):
        # Positional axes are reduced on each device, by JAX's rule.
        positional = tuple(axis for axis in axes if isinstance(axis, int))
        over_named = None
        if named:
            ctx = ctx.replace(avals_in=ctx.avals_out)
            over_named = _prepare(function, kind, op, jax_rule, options, ctx, {**params, "axes": named})

        def emit(ctx, operand):
            (operand,) = jax_rule(ctx, operand, axes=positional, axis_index_groups=None)
            return over_named(ctx.replace(avals_in=ctx.avals_out), operand) if over_named else [operand]

        return emit
    if not named:
        return lambda ctx, operand: [operand]
    if kind == "permute" and isinstance(ctx.module_context.axis_context, _compat.SPMDAxisContext):
        named = _compat.axes_of_permutation(named, ctx.module_context.axis_context.mesh)
    # Normalized, so that equal calls have equal keys and are combined.
    groups = params.get("axis_index_groups")
    groups = groups and tuple(tuple(map(operator.index, group)) for group in groups)
    engine_params = {
        _RENAMED_PARAMS.get(name, name): value
        for name, value in params.items()
        if name not in ("axes", "axis_name", "axis_index_groups")
    }
    members = groups_of(ctx, named, groups)
    if kind == "all_to_all":
        # JAX expands and squeezes dimensions around the primitive, which is always tiled.
        engine_params |= {"axis_size": len(members[0]), "tiled": True}
    if kind == "permute":
        size = len(members[0])
        pairs = [(source % size, receiver % size) for source, receiver in params["perm"]]
        is_unique = all(len(set(ranks)) == len(ranks) for ranks in zip(*pairs, strict=True))
        if not is_unique or any(not -size <= rank < size for pair in params["perm"] for rank in pair):
            return as_by_jax  # which raises
        engine_params["perm"] = pairs
    if kind == "broadcast" and not 0 <= params["source"] < len(members[0]):
        raise ValueError(
            f"{function} over {named}: source must be a rank, that is 0 to {len(members[0]) - 1}, got "
            f"{params['source']}"
        )
    service = service_of(ctx, members, kind)
    if service.automatic_axes and service.levels is None:
        _warn_of_automatic_axes(ctx, function, named, service.automatic_axes)
    # JAX lowers a broadcast for GPUs only.
    without_rule = jax_rule is _compat.no_lowering and kind == "broadcast"
    to_xla = lower_broadcast_to_xla if without_rule else lambda ctx, operand, **_: as_by_jax(ctx, operand)
    emit_operands = rules.prepare(
        rules.Collective(function, kind, op, to_xla), ctx,
        axes=named, axis_index_groups=groups, options=options, **engine_params,
    )  # fmt: skip
    return lambda ctx, operand: emit_operands(ctx, [operand])


def _make_ragged_rule(is_on: Callable, jax_rule: Callable):
    def lower(ctx, *operands, axis_name, axis_index_groups):
        if not is_on():
            return jax_rule(ctx, *operands, axis_name=axis_name, axis_index_groups=axis_index_groups)
        return ragged.lower(
            "lax.ragged_all_to_all", jax_rule, ctx, *operands,
            axes=tuple(axis_name), axis_index_groups=axis_index_groups, options=Options(),
        )  # fmt: skip

    return lower


def _make_dynamic_broadcast_rule(is_on: Callable, jax_rule: Callable):
    """A broadcast whose source is an operand: a sum of bits, to which the other ranks contribute zeros."""
    to_xla = partial(_compat.lower_lax_reduction, _compat.psum_p)
    collective = rules.Collective("lax.pbroadcast", "all_reduce", "sum", to_xla)

    def lower(ctx, operand, source, *, axis_name):
        if not is_on() or jax.dtypes.issubdtype(ctx.avals_in[0].dtype, jax.dtypes.extended):
            return jax_rule(ctx, operand, source, axis_name=axis_name)
        axes = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
        return lower_dynamic_broadcast_to_sum(
            ctx, operand, source, tuple(axes),
            partial(rules.lower, collective, axes=tuple(axes), axis_index_groups=None, options=Options()),
        )  # fmt: skip

    return lower


# An asynchronous collective lowers to the synchronous call. The engines run it while the program goes on with what does
# not depend on it. So what it gives is the result, and there is nothing to do when the program asks for that.


def _make_start_rule(
    is_on: Callable, function: str, kind: str, op: str, synchronous_rule: Callable, jax_rule: Callable
):
    synchronous = _make_rule(is_on, function, kind, op, synchronous_rule, Options(apart=True))

    def lower(ctx, operand, **params):
        if not is_on():
            return jax_rule(ctx, operand, **params)
        return synchronous(ctx.replace(avals_out=[ctx.avals_out[0].inner_aval]), operand, **params)

    return lower


def _make_done_rule(is_on: Callable, jax_rule: Callable):
    return lambda ctx, result: [result] if is_on() else jax_rule(ctx, result)


_has_warned = False  # of automatic axes, in this process


def _warn_of_automatic_axes(ctx, function: str, axes: tuple, automatic: tuple[str, ...]) -> None:
    """Warns of the first call that the override does not reach because its shard_map is manual over some axes only."""
    global _has_warned
    if _has_warned or runtime.STRICT:  # JAX_RING_STRICT makes it an error
        return
    _has_warned = True
    file, line = _compat.call_location(ctx)
    manual = sorted(map(str, ctx.module_context.axis_context.manual_axes))
    warnings.warn_explicit(
        f"override_lax() does not reach {function} over {axes}: the enclosing shard_map is manual over {manual} and "
        f"leaves the axes {list(automatic)} to the compiler, so XLA serves the call. If nothing in it depends on these "
        "axes, make them manual too: leave out axis_names. This warning is given once per process; jax_ring.explain() "
        f"lists all such calls, and {runtime.STRICT_VARIABLE}=1 makes them an error.",
        UserWarning, file, line,
    )  # fmt: skip
