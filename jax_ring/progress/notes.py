"""The page of this process, and what writes to it: one for the launcher, or one of its own."""

import os
import threading
from collections.abc import Callable

import jax

from jax_ring.launcher.watching.page import Page

_COMPILATION = "/jax/core/compile/"  # begins the names of JAX's events for tracing, lowering and compiling


class _Compilations:
    """Notes which programs are traced, lowered or compiled."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], int] = {}  # by event and thread
        # An event's scalar is recorded at its beginning, its duration at the end.
        jax.monitoring.register_scalar_listener(self._begin)
        jax.monitoring.register_event_duration_secs_listener(self._end)

    def _begin(self, event: str, value: float | int, **kwargs: str | int) -> None:
        if not event.startswith(_COMPILATION) or _is_child:
            return
        with self._lock:
            if not self._open:
                self._page.compile(str(kwargs.get("fun_name", "")))
            key = event, threading.get_ident()
            self._open[key] = self._open.get(key, 0) + 1

    def _end(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        key = event, threading.get_ident()
        if key not in self._open or _is_child:
            return
        with self._lock:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
            if not self._open:
                self._page.compile(None)


_lock = threading.Lock()
_page: Page | None = None
_is_launchers = False
_leaving: list[Callable[[], None]] = []  # called when the members of an elastic job change
_is_child = False  # a forked child shares the page of its parent, and writes nothing


def page() -> Page:
    """The page of this process, made by the first call."""
    global _page, _is_launchers
    with _lock:
        if _page is None:
            _page = Page.of_launcher()
            _is_launchers = _page is not None
            if _page is None:
                _page = Page.new(0)
            _Compilations(_page)
            os.register_at_fork(after_in_child=_note_child)
    return _page


def has_launcher() -> bool:
    return _page is not None and _is_launchers


def is_child() -> bool:
    return _is_child


def _note_child() -> None:
    global _is_child
    _is_child = True


def call_when_leaving(function: Callable[[], None]) -> None:
    """Calls a function that drops all arrays, when the members of an elastic job change."""
    _leaving.append(function)


def leave() -> None:
    """This process is no member of a generation."""
    if _page is not None:
        _page.enter(-1)
        for function in _leaving:
            function()


def enter(generation: int) -> None:
    if _page is not None:
        _page.enter(generation)
