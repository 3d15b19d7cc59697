"""`override_lax()`: makes JAX's own collectives, and those that XLA's partitioner inserts, use jax_ring."""

import contextlib
import threading
from typing import Self

from jax_ring import _compat
from jax_ring.distributed import discovery
from jax_ring.lowering import lax_rules, tuning
from jax_ring.lowering.hlo import hook
from jax_ring.lowering.override_state import Settings, enabled
from jax_ring.options import ORDERS, Order, check_choice

_RULES = lax_rules.make_rules()


def is_overridden(primitive_name: str) -> bool:
    """Whether JAX's primitive of that name currently lowers to jax_ring in this thread."""
    return bool(enabled.value) and any(primitive.name == primitive_name for primitive in _RULES)


class Override:
    """An active override, until `close()` or the end of its `with` block. Returned by `override_lax()`."""

    def __init__(self, settings: Settings) -> None:
        self._thread = threading.current_thread()
        self._closed = False
        self.settings = settings
        _enable(self)

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
        _disable(self)
        self._closed = True

    def __enter__(self) -> Self:
        if self._closed:
            raise RuntimeError("this override is closed: call override_lax() again")
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def override_lax(*, partitioner: bool | None = None, order: Order = "rank") -> Override:
    """Makes the collectives of `jax.lax` lower to jax_ring in this thread, and those that XLA's partitioner inserts.

    A plain call is in effect until `close()` of the returned object, if ever; a context manager until the end of its
    block:

        override_lax()                  # at the top of a script

        with override_lax():            # or around the code that should use jax_ring
            train_step(params, batch)

    Programs lowered in this time use jax_ring's engine wherever `ring_psum` would. That includes third-party code, and
    the sums that differentiation inserts under `shard_map(..., check_vma=True)`. A jitted function is lowered when it
    is called, in the calling thread. Types, errors and transformation rules remain those of JAX. Functions that were
    compiled before are compiled again; their earlier programs stay cached for use after the override. Overrides nest,
    and can be closed in any order; the arguments of the last one count.

    A program of `jax.jit` whose arrays are divided by a `NamedSharding` has no collectives. XLA's partitioner inserts
    them, and they become jax_ring's as well, on GPUs from JAX 0.11 on:

        with override_lax():
            state, loss = train_step(state, batch)  # jax.jit, with sharded arguments

    Those that no engine serves stay XLA's, and the logger "jax_ring" says which and why, at level INFO.

    Args:
      partitioner: whether to replace what XLA's partitioner inserts. None: yes, but before JAX 0.11 not in programs
        that donate buffers. There a changed program forgets what it donates; True accepts that.
      order: in which sums are folded, as in `ring_psum`: "rank", "ring", "any" or "tree".

    A `UserWarning` at the first call in a partial-manual `shard_map` that stays XLA's says so, once per process.

    Raises:
      RuntimeError: in a function that is being traced. It is lowered later, when the override may be closed.
      TypeError: if `partitioner` is none of these.
      ValueError: if `order` is none of these.
    """
    if partitioner is not None and not isinstance(partitioner, bool):
        raise TypeError(f"override_lax: partitioner must be None, True or False, got {partitioner!r}")
    check_choice("override_lax", "order", order, ORDERS)
    return Override(Settings(partitioner, order))


_lock = threading.Lock()
_num_open = 0  # in all threads; the replaced lowerings are registered while it is positive
_registrations = contextlib.ExitStack()


class _ThreadOverrides(threading.local):
    """The overrides of one thread."""

    def __init__(self) -> None:
        self.open: list[Override] = []
        self.context = contextlib.ExitStack()

    def update(self) -> None:
        """Makes the settings of the last override count."""
        self.context.close()
        if self.open:
            self.context.enter_context(enabled(self.open[-1].settings))


_thread_overrides = _ThreadOverrides()


def _enable(override: Override) -> None:
    global _num_open
    _check_not_tracing()
    discovery.publish()  # other processes may be waiting for this host
    with _lock:
        if not _num_open:
            _register()
        _num_open += 1
    _thread_overrides.open.append(override)
    _thread_overrides.update()


def _disable(override: Override) -> None:
    global _num_open
    _check_not_tracing()
    _thread_overrides.open.remove(override)
    _thread_overrides.update()
    with _lock:
        _num_open -= 1
        if not _num_open:
            _registrations.close()


def enable_in_all_threads() -> None:
    """What `JAX_RING_OVERRIDE=1` asks for. override_state.py has the value for threads without an override."""
    global _num_open
    with _lock:
        _register()
        _num_open += 1


def _check_not_tracing() -> None:
    if _compat.is_tracing():
        raise RuntimeError(
            "override_lax() was opened or closed in a function that is being traced. It affects lowering, which "
            "happens after tracing: use it around the call of the outermost jitted function."
        )


def _register() -> None:
    _registrations.callback(hook.register())
    for primitive, make_rule in _RULES.items():
        undo = _compat.replace_lowering(primitive, tuning.PLATFORMS, make_rule, cacheable=False)
        _registrations.callback(undo)
