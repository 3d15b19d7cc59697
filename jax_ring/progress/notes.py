"""The page of this process, and what writes to it: one for the launcher, or one of its own."""

import atexit
import os
import threading
from collections import Counter
from collections.abc import Callable

import jax

from jax_ring.launcher.watching.page import Page

_COMPILATION = "/jax/core/compile/"  # begins the names of JAX's events for tracing, lowering and compiling
# For programs that still run when Python ends.
_EXIT_SECONDS = 10.0

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
            _note_compilations(_page)
            os.register_at_fork(after_in_child=_note_child)
    return _page


def _note_compilations(page: Page) -> None:
    """Notes which programs are traced, lowered or compiled."""
    lock = threading.Lock()
    running: Counter[tuple[str, int]] = Counter()  # by event and thread

    def begin(event: str, value: float | int, **kwargs: str | int) -> None:
        if not event.startswith(_COMPILATION) or _is_child:
            return
        with lock:
            if not running.total():
                page.compile(str(kwargs.get("fun_name", "")))
            running[event, threading.get_ident()] += 1

    def end(event: str, duration_secs: float, **kwargs: str | int) -> None:
        key = event, threading.get_ident()
        if not running[key] or _is_child:
            return
        with lock:
            running[key] -= 1
            if not running.total():
                page.compile(None)

    # An event's scalar is recorded at its beginning, its duration at the end.
    jax.monitoring.register_scalar_listener(begin)
    jax.monitoring.register_event_duration_secs_listener(end)


def has_launcher() -> bool:
    return _is_launchers


def is_child() -> bool:
    return _is_child


def _note_child() -> None:
    global _is_child
    _is_child = True


def start_thread(name: str, complete: Callable[[], None], end: Callable[[], None], drop: Callable[[], None]) -> None:
    """Starts a thread that waits for results.

    end: makes it return: if a wait were over while Python ends, that would end the process. drop: makes it forget all
    arrays, when the members of an elastic job change.
    """
    thread = threading.Thread(target=complete, name=f"jax_ring-{name}", daemon=True)
    thread.start()

    def end_thread() -> None:
        end()
        thread.join(timeout=_EXIT_SECONDS)

    atexit.register(end_thread)
    _leaving.append(drop)


def leave() -> None:
    """This process is no member of a generation."""
    if _page is not None:
        _page.enter(-1)
        for function in _leaving:
            function()


def enter(generation: int) -> None:
    if _page is not None:
        _page.enter(generation)
