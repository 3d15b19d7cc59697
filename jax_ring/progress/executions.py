"""Executions of a program that is not edited: what `--watch` of the launcher sees of it.

JAX calls a hook after each launch of a jitted function at the top level, and before the first launch of each program.
A thread takes the newest outputs from time to time, and waits for them.
"""

import itertools
import threading
from typing import Any

import jax

from jax_ring import _compat
from jax_ring.launcher.watching.page import EXECUTIONS
from jax_ring.progress import answers, notes, outputs

_LOOK_SECONDS = 0.1

_numbers = itertools.count(1)
_newest: list[tuple[int, Any]] = []  # the last execution and its outputs, until the thread takes them
_end = threading.Event()


def start() -> None:
    """Begins to note the executions of this process."""
    notes.page().begin(EXECUTIONS, 0.0, False, "an execution")
    _compat.call_with_launches(_launch, _launched)
    answers.start()
    notes.start_thread("executions", _complete, _end.set, _newest.clear)


def _launch() -> int | None:
    page = notes.page()
    if not page.counts_executions or notes.is_child():
        return None
    number = next(_numbers)
    page.start(number, 0)
    return number


def _launched(number: int | None, results: Any) -> None:
    if number is None:
        number = _launch()
    page = notes.page()
    if number is not None and page.counts_executions:
        page.returned(number)
        # The caller may change what holds the arrays.
        _newest[:] = [(number, jax.tree.leaves(results))]


def _complete() -> None:
    page = notes.page()
    while not _end.wait(_LOOK_SECONDS):
        try:
            number, leaves = _newest.pop()
        except IndexError:  # none since, or dropped at this moment
            continue
        # Earlier ones are ready as well. If all are donated, a later execution tells.
        if outputs.wait(leaves, of_one_program=True) and page.counts_executions:
            page.complete(number)
        del leaves
