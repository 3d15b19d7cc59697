"""`override_lax()`: makes JAX's own collectives lower to jax_ring, by replacing the lowerings of its primitives."""

import contextlib
import threading
from typing import Self

from jax_ring import _compat
from jax_ring.distributed import discovery
from jax_ring.lowering import lax_rules, tuning
from jax_ring.lowering.override_state import enabled

_RULES = lax_rules.make_rules(lambda: enabled.value)


def is_overridden(primitive_name: str) -> bool:
    """Whether JAX's primitive of that name currently lowers to jax_ring in this thread."""
    return enabled.value and any(primitive.name == primitive_name for primitive in _RULES)


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
        _thread_overrides.context.enter_context(enabled(True))
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
    for primitive, make_rule in _RULES.items():
        undo = _compat.replace_lowering(primitive, tuning.PLATFORMS, make_rule, cacheable=False)
        _registrations.callback(undo)
