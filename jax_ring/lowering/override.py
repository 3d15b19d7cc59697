"""`override_lax()`: JAX's collectives, and those of XLA's partitioner, by jax_ring."""

import contextlib
import threading
from typing import Self

from jax_ring import _compat
from jax_ring.lowering import lax_rules, tuning
from jax_ring.lowering.hlo import hook
from jax_ring.lowering.override_state import Settings, enabled
from jax_ring.options import ORDERS, Order, check_choice

_RULES = lax_rules.make_rules()


def is_overridden(primitive_name: str) -> bool:
    """Whether JAX's primitive of that name lowers to jax_ring in this thread."""
    return bool(enabled.value) and any(primitive.name == primitive_name for primitive in _RULES)


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
      order: of sums, as in `ring_psum`: "rank", "ring", "any" or "tree".

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
    """For `JAX_RING_OVERRIDE=1`: override_state.py has the value for threads without an override."""
    _count(1)


def _check_not_tracing() -> None:
    if _compat.is_tracing():
        raise RuntimeError(
            "override_lax() was opened or closed in a function that is being traced. It affects lowering, which "
            "happens after tracing: use it around the call of the outermost jitted function."
        )
