"""The lowerings that `override_lax()` puts in place of JAX's."""

import operator
import warnings
from collections.abc import Callable
from functools import partial

from jax_ring import _compat, runtime
from jax_ring.lowering import kinds, ragged, rules
from jax_ring.lowering.call_spec import CallSpec
from jax_ring.lowering.dispatch import lowering_key, platforms_of, replica_groups, service_of
from jax_ring.lowering.override_state import enabled
from jax_ring.lowering.xla.fallback import lower_broadcast_to_xla, lower_dynamic_broadcast_to_sum
from jax_ring.options import Options

_OVERRIDDEN = {
    _compat.psum_p: CallSpec("lax.psum", kinds.ALL_REDUCE),
    _compat.psum_invariant_p: CallSpec("lax.psum", kinds.ALL_REDUCE),
    _compat.pmax_p: CallSpec("lax.pmax", kinds.ALL_REDUCE, "max"),
    _compat.pmin_p: CallSpec("lax.pmin", kinds.ALL_REDUCE, "min"),
    _compat.reduce_scatter_p: CallSpec("lax.psum_scatter", kinds.REDUCE_SCATTER),
    _compat.all_gather_p: CallSpec("lax.all_gather", kinds.ALL_GATHER),
    _compat.all_gather_invariant_p: CallSpec("lax.all_gather", kinds.ALL_GATHER),
    _compat.all_to_all_p: CallSpec("lax.all_to_all", kinds.ALL_TO_ALL),
    _compat.ppermute_p: CallSpec("lax.ppermute", kinds.PERMUTE),
    _compat.pbroadcast_p: CallSpec("lax.pbroadcast", kinds.BROADCAST),
}


def make_rules() -> dict:
    """By primitive of JAX: from JAX's rule to its replacement.

    JAX's rule lowers where the override is off.
    """
    by_primitive: dict = {primitive: partial(_make_rule, call) for primitive, call in _OVERRIDDEN.items()}
    by_primitive[_compat.ragged_all_to_all_p] = _make_ragged_rule
    if _compat.pbroadcast_dynamic_p is not None:
        by_primitive[_compat.pbroadcast_dynamic_p] = _make_dynamic_broadcast_rule
    for start, primitive in _compat.STARTS.items():
        synchronous = _compat.lax_rule(primitive)  # stays for unreduced and reduced values
        if call := _OVERRIDDEN.get(primitive):
            call = call._replace(function=f"{call.function}_start", options=Options(apart=True))
            synchronous = _make_rule(call, synchronous)
        by_primitive[start] = partial(_make_start_rule, synchronous)
    for done in _compat.DONES:
        by_primitive[done] = _make_done_rule
    return by_primitive


def _make_rule(call: CallSpec, jax_rule: Callable):
    def lower(ctx, operand, **params):
        if not enabled.value:
            return jax_rule(ctx, operand, **params)
        key = ("override", call.function, call.options, *lowering_key(ctx, params))
        return _compat.once(ctx, key, _prepare, _in_order(call), jax_rule, ctx, params)(ctx, operand)

    return lower


def _in_order(call: CallSpec) -> CallSpec:
    """The call in the override's order of sums."""
    return call._replace(options=call.options.of_sum(enabled.value.order)) if call.is_sum else call


def _prepare(call: CallSpec, jax_rule: Callable, ctx, params: dict) -> Callable:
    """Emits calls like the current one: a function of (ctx, operand), without a reference to ctx."""

    def as_by_jax(ctx, operand, **_):
        return jax_rule(ctx, operand, **params)

    if _refuses(call, ctx):
        return as_by_jax
    axes = params.get("axes", params.get("axis_name"))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    if len(named) < len(axes):
        # Positional axes are reduced on each device, by JAX's rule.
        positional = tuple(axis for axis in axes if isinstance(axis, int))
        over_named = None
        if named:
            over_named = _prepare(call, jax_rule, ctx.replace(avals_in=ctx.avals_out), {**params, "axes": named})

        def emit(ctx, operand):
            (operand,) = jax_rule(ctx, operand, axes=positional, axis_index_groups=None)
            return over_named(ctx.replace(avals_in=ctx.avals_out), operand) if over_named else [operand]

        return emit
    _check_named_once(call.function, named)
    if not named:
        return lambda ctx, operand: [operand]
    call = _with_params(call._replace(to_xla=as_by_jax), ctx, named, params)
    if call.perm is not None and not _is_permutation(params["perm"], len(call.groups[0])):
        return as_by_jax  # raises an error
    service = service_of(ctx, call)
    if service.automatic_axes and service.levels is None and not _is_replaced_later(ctx):
        _warn_of_automatic_axes(ctx, call, service.automatic_axes)
    if jax_rule is _compat.no_lowering and call.kind is kinds.BROADCAST:  # JAX lowers it for GPUs only
        call = call._replace(to_xla=lower_broadcast_to_xla)
    emit_operands = rules.prepare(call, ctx, {})
    return lambda ctx, operand: emit_operands(ctx, [operand])


def _check_named_once(function: str, axes: tuple) -> None:
    """Raises as jax_ring does, before JAX names an argument that users do not know."""
    if len(set(axes)) != len(axes):
        raise ValueError(f"{function}: each axis may be named once, got {axes}")


def _refuses(call: CallSpec, ctx) -> bool:
    """Whether engines refuse the operand; JAX's rule then moves random keys, or raises."""
    return bool(call.kind.refusal(call.op, ctx.avals_in[0].dtype))


def _with_params(call: CallSpec, ctx, axes: tuple, params: dict) -> CallSpec:
    """The call, from the parameters of JAX's primitive."""
    if call.kind is kinds.PERMUTE and isinstance(ctx.module_context.axis_context, _compat.SPMDAxisContext):
        axes = _compat.axes_of_permutation(axes, ctx.module_context.axis_context.mesh)
    # Normalized: equal calls get equal keys and are combined.
    index_groups = params.get("axis_index_groups")
    index_groups = index_groups and tuple(tuple(map(operator.index, group)) for group in index_groups)
    groups = replica_groups(ctx.module_context.axis_context, axes, index_groups)
    size = len(groups[0])
    of_kind = _compat.params_from_lax(ctx.primitive, params)
    if call.kind is kinds.ALL_TO_ALL:
        # JAX expands and squeezes dimensions around the primitive, which is always tiled.
        of_kind |= {"axis_size": size, "tiled": True}
    if call.kind is kinds.PERMUTE:
        of_kind["perm"] = tuple((source % size, receiver % size) for source, receiver in params["perm"])
    if call.kind is kinds.BROADCAST and not 0 <= params["source"] < size:
        raise ValueError(
            f"{call.function} over {axes}: source must be a rank, that is 0 to {size - 1}, got {params['source']}"
        )
    of_kind = {name: of_kind[name] for name in call.kind.params}
    return call._replace(axes=axes, axis_index_groups=index_groups, groups=groups, **of_kind)


def _is_permutation(perm, size: int) -> bool:
    """Whether ranks are valid, and send and receive at most once."""
    ranks = [[rank % size for rank in side] for side in zip(*perm, strict=True)]
    is_unique = all(len(set(side)) == len(side) for side in ranks)
    return is_unique and all(-size <= rank < size for pair in perm for rank in pair)


def _make_ragged_rule(jax_rule: Callable):
    call = CallSpec("lax.ragged_all_to_all", kinds.RAGGED_ALL_TO_ALL, to_xla=jax_rule)

    def lower(ctx, *operands, axis_name, axis_index_groups):
        if not enabled.value or _refuses(call, ctx):
            return jax_rule(ctx, *operands, axis_name=axis_name, axis_index_groups=axis_index_groups)
        _check_named_once(call.function, tuple(axis_name))
        return ragged.lower(call, ctx, *operands, axes=tuple(axis_name), axis_index_groups=axis_index_groups)

    return lower


def _make_dynamic_broadcast_rule(jax_rule: Callable):
    """A broadcast from an operand's rank: a sum of bits with zeros of the others."""
    sent = CallSpec("lax.pbroadcast", kinds.BROADCAST)
    total = CallSpec("lax.pbroadcast", kinds.ALL_REDUCE, to_xla=partial(_compat.lower_as_lax, _compat.psum_p))

    def lower(ctx, operand, source, *, axis_name):
        if not enabled.value or _refuses(sent, ctx):
            return jax_rule(ctx, operand, source, axis_name=axis_name)
        axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
        _check_named_once(total.function, axes)
        return lower_dynamic_broadcast_to_sum(ctx, operand, source, axes, partial(rules.lower, total, axes=axes))

    return lower


# An asynchronous collective lowers to the synchronous call. The engines run it while the program does independent work,
# so the start returns the result, and the done operation has nothing to do.


def _make_start_rule(synchronous: Callable, jax_rule: Callable):
    def lower(ctx, operand, **params):
        if not enabled.value:
            return jax_rule(ctx, operand, **params)
        return synchronous(ctx.replace(avals_out=[ctx.avals_out[0].inner_aval]), operand, **params)

    return lower


def _make_done_rule(jax_rule: Callable):
    return lambda ctx, result: [result] if enabled.value else jax_rule(ctx, result)


def _is_replaced_later(ctx) -> bool:
    """Whether XLA's collective will be replaced at compilation."""
    return enabled.value.partitioner is not False and platforms_of(ctx) == ("cpu",)


_has_warned = False  # about automatic axes, in this process


def _warn_of_automatic_axes(ctx, call: CallSpec, automatic: tuple[str, ...]) -> None:
    """Warns of the first call that the override misses in a partial-manual shard_map."""
    global _has_warned
    if _has_warned or runtime.STRICT:  # JAX_RING_STRICT makes it an error
        return
    _has_warned = True
    file, line = _compat.call_location(ctx)
    manual = sorted(map(str, ctx.module_context.axis_context.manual_axes))
    warnings.warn_explicit(
        f"override_lax() does not reach {call.function} over {call.axes}: the enclosing shard_map is manual over "
        f"{manual} and leaves the axes {list(automatic)} to the compiler, so XLA serves the call. If nothing in it "
        "depends on these axes, make them manual too: leave out axis_names. This warning is given once per process; "
        f"jax_ring.explain() lists all such calls, and {runtime.STRICT_VARIABLE}=1 makes them an error.",
        UserWarning, file, line,
    )  # fmt: skip
