"""`override_lax()`: JAX's collectives, and those of XLA's partitioner, by jax_ring.

While it is on in any thread, lowerings of jax_ring are in place of JAX's.
"""

import contextlib
import operator
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Self

from jax.extend.core import Primitive

from jax_ring import _compat, runtime
from jax_ring.lowering import plan, ragged, tuning
from jax_ring.lowering.call import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PERMUTE,
    RAGGED_ALL_TO_ALL,
    REDUCE_SCATTER,
    CallSpec,
)
from jax_ring.lowering.hlo import hook
from jax_ring.lowering.override_state import Settings, enabled
from jax_ring.lowering.xla.fallback import lower_broadcast_to_xla, lower_dynamic_broadcast_to_sum
from jax_ring.options import ORDERS, Options, Order, check_choice


class Override:
    """The result of `override_lax()`.

        override = jax_ring.override_lax()
        train_step(params, batch)
        override.close()

    The override is in effect until `close()`, or until the end of its `with` block.
    """

    def __init__(self, settings: Settings) -> None:
        _check_not_tracing()
        self._thread = threading.current_thread()
        self._closed = False
        self.settings = settings
        _count(1)
        _thread_overrides.open.append(self)
        _thread_overrides.update()

    def close(self) -> None:
        """Ends this override, once.

        Raises:
          RuntimeError: in another thread than opened it, or in a function that is being traced.
        """
        if self._closed:
            return
        if threading.current_thread() is not self._thread:
            raise RuntimeError(
                f"override_lax() was opened in thread {self._thread.name!r} and must be closed there, "
                f"not in {threading.current_thread().name!r}"
            )
        _check_not_tracing()
        _thread_overrides.open.remove(self)
        _thread_overrides.update()
        _count(-1)
        self._closed = True

    def __enter__(self) -> Self:
        if self._closed:
            raise RuntimeError("this override is closed: call override_lax() again")
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def override_lax(*, partitioner: bool | None = None, order: Order = "rank") -> Override:
    """Lowers `jax.lax`'s collectives to jax_ring in this thread, and those of XLA's partitioner.

    A call is in effect until `close()` of the returned object, a context manager until its end:

        override_lax()                  # at the top of a script

        with override_lax():            # or around the code that should use jax_ring
            train_step(params, batch)

    Programs lowered meanwhile use the engine wherever `ring_psum` would, third-party code and the sums of
    differentiation under `shard_map(..., check_vma=True)` included. Types, errors and
    transformation rules stay JAX's. Compiled functions are compiled again (docs/sharp_bits.md#override_lax). Overrides
    nest and close in any order; the last one's arguments count.

    XLA's partitioner inserts the collectives of `jax.jit` with arrays divided by a `NamedSharding`; they become
    jax_ring's, too, on GPUs from JAX 0.11 on:

        with override_lax():
            state, loss = train_step(state, batch)  # jax.jit, with sharded arguments

    The logger "jax_ring" names those that stay XLA's, and why, at level INFO.

    Args:
      partitioner: whether to replace the partitioner's. None: yes, but before JAX 0.11 not in programs that donate
        buffers, as a changed one forgets that; True accepts it.
      order: in which sums are added: "rank", "ring", "any" or "tree"; `ring_psum` has the definitions.

    A `UserWarning` reports the first call in a partial-manual `shard_map` that stays XLA's.

    Raises:
      RuntimeError: in a function that is being traced, and lowered later.
      TypeError: for another `partitioner`.
      ValueError: for another `order`.
    """
    if partitioner is not None and not isinstance(partitioner, bool):
        raise TypeError(f"override_lax: partitioner must be None, True or False, got {partitioner!r}")
    check_choice("override_lax", "order", order, ORDERS)
    return Override(Settings(partitioner, order))


_lock = threading.Lock()
_num_open = 0  # in all threads; the replaced lowerings are registered while it is positive
_registrations = contextlib.ExitStack()


class _ThreadOverrides(threading.local):
    def __init__(self) -> None:
        self.open: list[Override] = []
        self.context = contextlib.ExitStack()

    def update(self) -> None:
        self.context.close()
        if self.open:
            self.context.enter_context(enabled(self.open[-1].settings))


_thread_overrides = _ThreadOverrides()


def _count(change: int) -> None:
    """Notes an override that opens, 1, or closes, -1."""
    global _num_open
    with _lock:
        if not _num_open:
            hook.register()
            for primitive, make_rule in _RULES.items():
                undo = _compat.replace_lowering(primitive, tuning.PLATFORMS, make_rule, cacheable=False)
                _registrations.callback(undo)
        _num_open += change
        if not _num_open:
            _registrations.close()


def enable_in_all_threads() -> None:
    """Registers the lowerings for `JAX_RING_OVERRIDE=1`; override_state.py has the settings of threads without one."""
    _count(1)


def _check_not_tracing() -> None:
    if _compat.is_tracing():
        raise RuntimeError(
            "override_lax() was opened or closed in a function that is being traced. It affects lowering, which "
            "happens after tracing: use it around the call of the outermost jitted function."
        )


# ---- The lowerings in place of JAX's ---------------------------------------------------------------------------------

_OVERRIDDEN = {
    _compat.psum_p: CallSpec("lax.psum", ALL_REDUCE),
    _compat.psum_invariant_p: CallSpec("lax.psum", ALL_REDUCE),
    _compat.pmax_p: CallSpec("lax.pmax", ALL_REDUCE, "max"),
    _compat.pmin_p: CallSpec("lax.pmin", ALL_REDUCE, "min"),
    _compat.reduce_scatter_p: CallSpec("lax.psum_scatter", REDUCE_SCATTER),
    _compat.all_gather_p: CallSpec("lax.all_gather", ALL_GATHER),
    _compat.all_gather_invariant_p: CallSpec("lax.all_gather", ALL_GATHER),
    _compat.all_to_all_p: CallSpec("lax.all_to_all", ALL_TO_ALL),
    _compat.ppermute_p: CallSpec("lax.ppermute", PERMUTE),
    _compat.pbroadcast_p: CallSpec("lax.pbroadcast", BROADCAST),
}


def _make_rules() -> dict[Primitive, Callable]:
    """Functions from JAX's rule to its replacement, by JAX's primitive.

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


def _make_rule(call: CallSpec, jax_rule: Callable) -> Callable:
    def lower(ctx, operand, **params):
        if not enabled.value:
            return jax_rule(ctx, operand, **params)
        key = ("override", call.function, call.options, *plan.lowering_key(ctx, params))
        planned = _compat.once(ctx, key, _plan, call, jax_rule, ctx, params)
        if planned is not None:
            return planned.emit(ctx, [operand])
        named, positional = _axes_of(params)
        if positional and not _refuses(call, ctx):
            # Positional axes are reduced on each device, by JAX's rule.
            (operand,) = jax_rule(ctx, operand, axes=positional, axis_index_groups=None)
            ctx, params = ctx.replace(avals_in=ctx.avals_out), {**params, "axes": named}
            return lower(ctx, operand, **params) if named else [operand]
        return jax_rule(ctx, operand, **params) if named or _refuses(call, ctx) else [operand]

    return lower


def _axes_of(params: dict) -> tuple[tuple, tuple]:
    """Named and positional axes of one of JAX's primitives."""
    axes = params.get("axes", params.get("axis_name"))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    positional = tuple(axis for axis in axes if isinstance(axis, int))
    return tuple(axis for axis in axes if not isinstance(axis, int)), positional


def _plan(call: CallSpec, jax_rule: Callable, ctx, params: dict) -> plan.Plan | None:
    """The plan of a call; None without named axes, with positional ones, and where JAX's rule lowers it or raises."""
    named, positional = _axes_of(params)
    if positional or _refuses(call, ctx):
        return None
    _check_named_once(call.function, named)
    if not named:
        return None
    if call.is_sum:
        call = call._replace(options=call.options.of_sum(enabled.value.order))
    by_jax = call._replace(to_xla=lambda ctx, operand, **_: jax_rule(ctx, operand, **params))
    call = _with_params(by_jax, ctx, named, params)
    if call.perm is not None and not _is_permutation(params["perm"], len(call.groups[0])):
        return None  # JAX's rule raises an error
    service = plan.service_of(ctx, call)
    if service.automatic_axes and service.levels is None and not _is_replaced_later(ctx):
        _warn_of_automatic_axes(ctx, call, service.automatic_axes)
    if jax_rule is _compat.no_lowering and call.kind is BROADCAST:  # JAX lowers it for GPUs only
        call = call._replace(to_xla=lower_broadcast_to_xla)
    return plan.plan_call(call, ctx, {})


def _check_named_once(function: str, axes: tuple) -> None:
    """Raises as jax_ring does, before JAX names an argument that users do not know."""
    if len(set(axes)) != len(axes):
        raise ValueError(f"{function}: each axis may be named once, got {axes}")


def _refuses(call: CallSpec, ctx) -> bool:
    """Whether engines refuse the operand; JAX's rule then moves random keys, or raises."""
    return bool(call.kind.refusal(call.op, ctx.avals_in[0].dtype))


def _with_params(call: CallSpec, ctx, axes: tuple, params: dict) -> CallSpec:
    """The call, from the parameters of JAX's primitive."""
    if call.kind is PERMUTE and isinstance(ctx.module_context.axis_context, _compat.SPMDAxisContext):
        axes = _compat.axes_of_permutation(axes, ctx.module_context.axis_context.mesh)
    # Normalized: equal calls get equal keys and are combined.
    index_groups = params.get("axis_index_groups")
    index_groups = index_groups and tuple(tuple(map(operator.index, group)) for group in index_groups)
    groups = plan.replica_groups(ctx.module_context.axis_context, axes, index_groups)
    size = len(groups[0])
    of_kind = _compat.params_from_lax(ctx.primitive, params)
    if call.kind is ALL_TO_ALL:
        # JAX expands and squeezes dimensions around the primitive, which is always tiled.
        of_kind |= {"axis_size": size, "tiled": True}
    if call.kind is PERMUTE:
        of_kind["perm"] = tuple((source % size, receiver % size) for source, receiver in params["perm"])
    if call.kind is BROADCAST and not 0 <= params["source"] < size:
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
    call = CallSpec("lax.ragged_all_to_all", RAGGED_ALL_TO_ALL, to_xla=jax_rule)

    def lower(ctx, *operands, axis_name, axis_index_groups):
        if not enabled.value or _refuses(call, ctx):
            return jax_rule(ctx, *operands, axis_name=axis_name, axis_index_groups=axis_index_groups)
        _check_named_once(call.function, tuple(axis_name))
        return ragged.lower(call, ctx, *operands, axes=tuple(axis_name), axis_index_groups=axis_index_groups)

    return lower


def _make_dynamic_broadcast_rule(jax_rule: Callable):
    """A broadcast from an operand's rank: a sum of bits with zeros of the others."""
    sent = CallSpec("lax.pbroadcast", BROADCAST)
    total = CallSpec("lax.pbroadcast", ALL_REDUCE, to_xla=partial(_compat.lower_as_lax, _compat.psum_p))

    def lower(ctx, operand, source, *, axis_name):
        if not enabled.value or _refuses(sent, ctx):
            return jax_rule(ctx, operand, source, axis_name=axis_name)
        axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
        _check_named_once(total.function, axes)
        return lower_dynamic_broadcast_to_sum(ctx, operand, source, axes, partial(plan.lower, total, axes=axes))

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
    return enabled.value.partitioner is not False and _compat.platforms_of(ctx) == ("cpu",)


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


_RULES = _make_rules()
