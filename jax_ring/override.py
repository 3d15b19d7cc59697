"""`override_lax()`: JAX's own collectives lower to this library, by other lowerings of its primitives."""

import contextlib
import operator
import threading
from collections.abc import Callable
from functools import partial
from typing import Self

import jax

from jax_ring import _compat, lowering
from jax_ring.options import Options

# Whether the override is on in this thread. It is a part of the key of all of JAX's caches, from traced functions to
# compiled programs, so that what was lowered with it is never taken for what was lowered without. Made when this
# module is imported, because JAX does not allow it while other threads trace.
_on = jax.make_user_context(False)


def _lower_psum(ctx, operand, *, axes, axis_index_groups=None):
    named = tuple(axis for axis in axes if not isinstance(axis, int))
    if len(named) != len(axes):
        positional = tuple(axis for axis in axes if isinstance(axis, int))
        (operand,) = _compat.lower_lax_psum(ctx, operand, axes=positional, axis_index_groups=None)
        ctx = ctx.replace(avals_in=ctx.avals_out)
    if not named:
        return [operand]
    # In one form, whatever containers and integers they came in, so that equal calls merge.
    groups = axis_index_groups and tuple(tuple(map(operator.index, group)) for group in axis_index_groups)
    return lowering.lower(ctx, operand, axes=named, axis_index_groups=groups, options=Options())


# JAX's primitives, and how they are lowered instead. (lax.pmean is a psum and a division.)
_LOWERINGS = {
    _compat.psum_p: _lower_psum,
    _compat.psum_invariant_p: _lower_psum,
}


def is_overridden(primitive_name: str) -> bool:
    """Whether JAX's primitive of that name lowers to this library now, in this thread."""
    return _on.value and any(primitive.name == primitive_name for primitive in _LOWERINGS)


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
    for primitive, ours in _LOWERINGS.items():
        _registered.callback(_compat.replace_lowering(primitive, lowering.PLATFORMS, partial(_switch, ours)))


def _switch(ours: Callable, jaxs: Callable) -> Callable:
    """A lowering for all threads, of which some have the override on and others off."""

    def lower(ctx, *operands, **params):
        return (ours if _on.value else jaxs)(ctx, *operands, **params)

    return lower
