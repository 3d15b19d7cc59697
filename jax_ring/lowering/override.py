"""`override_lax()`: JAX's own collectives lower to this library, by lowerings of ours for its primitives."""

import contextlib
import operator
import threading
from collections.abc import Callable
from functools import partial
from typing import Self

import jax

from jax_ring import _compat
from jax_ring.distributed import discovery
from jax_ring.lowering import tuning
from jax_ring.lowering.combiner import lower_joined
from jax_ring.lowering.rule import Collective
from jax_ring.lowering.rule import lower as lower_ours
from jax_ring.lowering.service import is_one_call
from jax_ring.options import Options

# Whether the override is on in this thread. It is a part of the key of all of JAX's caches, from traced functions to
# compiled programs, so that what was lowered with it is never taken for what was lowered without. Made when this
# module is imported, because JAX does not allow it while other threads trace.
_on = jax.make_user_context(False)


# JAX's primitives: the function to name in messages, the kind of collective, and how values become one.
_OURS = {
    _compat.psum_p: ("lax.psum", "all_reduce", "sum"),
    _compat.psum_invariant_p: ("lax.psum", "all_reduce", "sum"),
    _compat.pmax_p: ("lax.pmax", "all_reduce", "max"),
    _compat.pmin_p: ("lax.pmin", "all_reduce", "min"),
    _compat.reduce_scatter_p: ("lax.psum_scatter", "reduce_scatter", "sum"),
    _compat.all_gather_p: ("lax.all_gather", "all_gather", "sum"),
    _compat.all_gather_invariant_p: ("lax.all_gather", "all_gather", "sum"),
}

# Parameters that our primitives call by another name.
_RENAMED = {"axis_name": "axes", "scatter_dimension": "dimension", "all_gather_dimension": "dimension"}


def _make_rule(function: str, kind: str, op: str, jaxs: Callable) -> Callable:
    """A lowering that is ours where the override is on, in this thread, and JAX's own elsewhere."""

    def lower(ctx, operand, **params):
        # Random keys, which can be gathered, are no arrays to the engine.
        if not _on.value or jax.dtypes.issubdtype(ctx.avals_in[0].dtype, jax.dtypes.extended):
            return jaxs(ctx, operand, **params)
        ours = {_RENAMED.get(name, name): value for name, value in params.items()}
        axes, groups = ours.pop("axes"), ours.pop("axis_index_groups", None)
        named = tuple(axis for axis in axes if not isinstance(axis, int))
        if len(named) < len(axes):
            # Reduced on each device, which JAX's rule does on the way to its own collective.
            positional = tuple(axis for axis in axes if isinstance(axis, int))
            (operand,) = jaxs(ctx, operand, axes=positional, axis_index_groups=None)
            ctx, params = ctx.replace(avals_in=ctx.avals_out), {**params, "axes": named}
        if not named:
            return [operand]
        # In one form, whatever containers and integers they came in, so that equal calls merge.
        groups = groups and tuple(tuple(map(operator.index, group)) for group in groups)
        collective = Collective(function, kind, op, lambda ctx, operand, **_: jaxs(ctx, operand, **params))
        emit = partial(lower_ours, collective, axes=named, axis_index_groups=groups, options=Options(), **ours)
        if kind != "all_reduce" or not is_one_call(ctx, named, groups, kind):
            return emit(ctx, operand)
        return lower_joined(ctx, operand, (op, named, groups, ctx.avals_in[0].dtype), emit)

    return lower


def is_overridden(primitive_name: str) -> bool:
    """Whether JAX's primitive of that name lowers to this library now, in this thread."""
    return _on.value and any(primitive.name == primitive_name for primitive in _OURS)


class Override:
    """What `override_lax()` returns: it is on until `close()`, or until the end of the `with` block that it heads."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._closed = False
        _open()

    def close(self) -> None:
        """Switches this override off. Further calls do nothing.

        Raises:
          RuntimeError: in another thread than the one that switched it on, or in a function that is being traced.
        """
        if self._closed:
            return
        if threading.current_thread() is not self._thread:
            raise RuntimeError(
                f"override_lax() is on in thread {self._thread.name!r} alone and must be closed there, "
                f"not in {threading.current_thread().name!r}"
            )
        _close()
        self._closed = True

    def __enter__(self) -> Self:
        if self._closed:
            raise RuntimeError("this override of lax is closed: call override_lax() again")
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def override_lax() -> Override:
    """Makes `lax.psum` and its kin lower to this library, in this thread, from now on.

    As a call it stays on until the returned object's `close()`, or for good; as a context manager until the end of
    the block:

        override_lax()                  # at the top of a script

        with override_lax():            # or around what is to use it
            train_step(params, batch)

    Everything that is compiled in that time uses the engine of this library where `ring_psum` would: code that one
    did not write, and the sums that differentiation inserts under `shard_map(..., check_vma=True)`. What counts is
    when, and in which thread, a program is lowered, which for a jitted function is when it is called. Types, errors
    and rules of transformation stay JAX's own. Functions that were compiled before are compiled again, and found as
    they were afterwards; no cache is cleared. Overrides nest, and are closed in any order.

    Raises:
      RuntimeError: in a function that is being traced: it is lowered later, when the override may be off.
    """
    return Override()


_lock = threading.Lock()
_num_open = 0  # in all threads: while it is not zero, our lowerings are registered
_registered = contextlib.ExitStack()


class _Here(threading.local):
    """The overrides of one thread."""

    def __init__(self) -> None:
        self.num_open = 0
        self.context = contextlib.ExitStack()


_here = _Here()


def _open() -> None:
    global _num_open
    _refuse_if_tracing()
    discovery.publish()  # other processes may be waiting for this host
    with _lock:
        if not _num_open:
            _register()
        _num_open += 1
    if not _here.num_open:
        _here.context.enter_context(_on(True))
    _here.num_open += 1


def _close() -> None:
    global _num_open
    _refuse_if_tracing()
    _here.num_open -= 1
    if not _here.num_open:
        _here.context.close()
    with _lock:
        _num_open -= 1
        if not _num_open:
            _registered.close()


def _refuse_if_tracing() -> None:
    if _compat.is_tracing():
        raise RuntimeError(
            "override_lax() was switched in a function that is being traced. It is about how programs are lowered, "
            "which comes after tracing: switch it around the call of the outermost jitted function."
        )


def _register() -> None:
    for primitive, ours in _OURS.items():
        undo = _compat.replace_lowering(primitive, tuning.PLATFORMS, partial(_make_rule, *ours))
        _registered.callback(undo)
