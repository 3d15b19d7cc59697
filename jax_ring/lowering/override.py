"""`override_lax()`: makes JAX's own collectives lower to jax_ring, by replacing the lowerings of its primitives."""

import contextlib
import operator
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Self

import jax

from jax_ring import _compat, runtime
from jax_ring.distributed import discovery
from jax_ring.lowering import tuning
from jax_ring.lowering.combiner import lower_combined
from jax_ring.lowering.rule import Collective
from jax_ring.lowering.rule import lower as lower_to_engine
from jax_ring.lowering.service import is_single_custom_call, replica_groups, service_of
from jax_ring.options import Options

# Whether the override is on in this thread. A user context is part of the key of all of JAX's caches, from traced
# functions to compiled programs, so that programs lowered with and without the override never mix. JAX does not allow
# creating one while other threads trace, so it is created at import.
_enabled = jax.make_user_context(False)


# JAX's primitives: the function to name in messages, the kind of collective, and the reduction.
_OVERRIDDEN = {
    _compat.psum_p: ("lax.psum", "all_reduce", "sum"),
    _compat.psum_invariant_p: ("lax.psum", "all_reduce", "sum"),
    _compat.pmax_p: ("lax.pmax", "all_reduce", "max"),
    _compat.pmin_p: ("lax.pmin", "all_reduce", "min"),
    _compat.reduce_scatter_p: ("lax.psum_scatter", "reduce_scatter", "sum"),
    _compat.all_gather_p: ("lax.all_gather", "all_gather", "sum"),
    _compat.all_gather_invariant_p: ("lax.all_gather", "all_gather", "sum"),
}

# Parameters that have other names in the primitives of jax_ring.
_RENAMED_PARAMS = {"axis_name": "axes", "scatter_dimension": "dimension", "all_gather_dimension": "dimension"}


def _make_rule(function: str, kind: str, op: str, jax_rule: Callable) -> Callable:
    """A rule that lowers to jax_ring if the override is on in this thread, and by JAX's own rule if not."""

    def lower(ctx, operand, **params):
        # Random keys can be gathered, but the engines do not support them.
        if not _enabled.value or jax.dtypes.issubdtype(ctx.avals_in[0].dtype, jax.dtypes.extended):
            return jax_rule(ctx, operand, **params)
        engine_params = {_RENAMED_PARAMS.get(name, name): value for name, value in params.items()}
        axes, groups = engine_params.pop("axes"), engine_params.pop("axis_index_groups", None)
        named = tuple(axis for axis in axes if not isinstance(axis, int))
        if len(named) < len(axes):
            # Positional axes are reduced on each device, by JAX's rule.
            positional = tuple(axis for axis in axes if isinstance(axis, int))
            (operand,) = jax_rule(ctx, operand, axes=positional, axis_index_groups=None)
            ctx, params = ctx.replace(avals_in=ctx.avals_out), {**params, "axes": named}
        if not named:
            return [operand]
        # Normalized, so that equal calls have equal keys and are combined.
        groups = groups and tuple(tuple(map(operator.index, group)) for group in groups)
        collective = Collective(function, kind, op, lambda ctx, operand, **_: jax_rule(ctx, operand, **params))
        emit = partial(
            lower_to_engine, collective, axes=named, axis_index_groups=groups, options=Options(), **engine_params
        )
        members = replica_groups(ctx.module_context.axis_context, named, groups)
        service = service_of(ctx, members, kind)
        if service.automatic_axes:
            _warn_of_automatic_axes(ctx, function, named, service.automatic_axes)
        if kind != "all_reduce" or not is_single_custom_call(service, members):
            return emit(ctx, operand)
        return lower_combined(ctx, operand, (op, named, groups, ctx.avals_in[0].dtype), emit)

    return lower


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


def is_overridden(primitive_name: str) -> bool:
    """Whether JAX's primitive of that name currently lowers to jax_ring in this thread."""
    return _enabled.value and any(primitive.name == primitive_name for primitive in _OVERRIDDEN)


class Override:
    """An active override, until `close()` or the end of its `with` block. Returned by `override_lax()`."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._closed = False
        _enable()

    def close(self) -> None:
        """Ends this override. Further calls do nothing.

        Raises:
          RuntimeError: in a thread other than the one that opened it, or in a function that is being traced.
        """
        if self._closed:
            return
        if threading.current_thread() is not self._thread:
            raise RuntimeError(
                f"override_lax() was opened in thread {self._thread.name!r} and must be closed there, "
                f"not in {threading.current_thread().name!r}"
            )
        _disable()
        self._closed = True

    def __enter__(self) -> Self:
        if self._closed:
            raise RuntimeError("this override is closed: call override_lax() again")
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def override_lax() -> Override:
    """Makes the collectives of `jax.lax` lower to jax_ring in this thread.

    A plain call is in effect until `close()` of the returned object, if ever; a context manager until the end of its
    block:

        override_lax()                  # at the top of a script

        with override_lax():            # or around the code that should use jax_ring
            train_step(params, batch)

    Programs lowered in this time use jax_ring's engine wherever `ring_psum` would. That includes third-party code, and
    the sums that differentiation inserts under `shard_map(..., check_vma=True)`. A jitted function is lowered when it
    is called, in the calling thread. Types, errors and transformation rules remain those of JAX. Functions that were
    compiled before are compiled again; their earlier programs stay cached for use after the override. Overrides nest,
    and can be closed in any order.

    A `UserWarning` at the first call in a partial-manual `shard_map`, once per process, says that XLA serves it.

    Raises:
      RuntimeError: in a function that is being traced. It is lowered later, when the override may be closed.
    """
    return Override()


_lock = threading.Lock()
_num_open = 0  # in all threads; the replaced lowerings are registered while it is positive
_registrations = contextlib.ExitStack()


class _ThreadOverrides(threading.local):
    """The overrides of one thread."""

    def __init__(self) -> None:
        self.num_open = 0
        self.context = contextlib.ExitStack()


_thread_overrides = _ThreadOverrides()


def _enable() -> None:
    global _num_open
    _check_not_tracing()
    discovery.publish()  # other processes may be waiting for this host
    with _lock:
        if not _num_open:
            _register()
        _num_open += 1
    if not _thread_overrides.num_open:
        _thread_overrides.context.enter_context(_enabled(True))
    _thread_overrides.num_open += 1


def _disable() -> None:
    global _num_open
    _check_not_tracing()
    _thread_overrides.num_open -= 1
    if not _thread_overrides.num_open:
        _thread_overrides.context.close()
    with _lock:
        _num_open -= 1
        if not _num_open:
            _registrations.close()


def _check_not_tracing() -> None:
    if _compat.is_tracing():
        raise RuntimeError(
            "override_lax() was opened or closed in a function that is being traced. It affects lowering, which "
            "happens after tracing: use it around the call of the outermost jitted function."
        )


def _register() -> None:
    for primitive, description in _OVERRIDDEN.items():
        undo = _compat.replace_lowering(primitive, tuning.PLATFORMS, partial(_make_rule, *description), cacheable=False)
        _registrations.callback(undo)
