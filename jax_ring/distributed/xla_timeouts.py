"""Errors and a deadline for XLA's collectives between CPU processes, which name neither call nor host.

XLA's collective is a call's step between hosts, or the whole call. It would wait for 30 minutes, and JAX end the
process before, when its coordinator is out of reach. Three things are done here:

- `XLA_FLAGS` sets XLA's limit to jax_ring's deadline, so that the collective raises an error.
- That error, "Gloo all-reduce failed", gets the waiting calls, their hosts and processes. Awaiting an array on one
  device raises it as a ValueError, which cannot be completed: standard error gets the text.
- Before the deadline a thread asks the key-value store of `jax.distributed` which others wait. It writes that to
  standard error if no error was completed by then, also where XLA's limit could not be set.
"""

import contextlib
import dataclasses
import functools
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax_ring import _compat, foreign_errors, runtime
from jax_ring.distributed import exit_notice
from jax_ring.launcher.schema import escaped

_FLAG = _compat.FLAG_OF_CPU_LIMIT
_CHECKS_PER_DEADLINE = 20
_ASK = 0.5  # the others, so many deadlines after a call began
_MAX_CALLS = 4  # in a message
_MAX_LENGTH = 600  # of what another process says that it waits in
_PATIENCE_SECONDS = 2.0  # for the store, while an error waits for its text
_SLACK_OF_XLA = 0.5  # seconds after XLA's limit: its error has certainly arrived


def begin() -> None:
    """Sets XLA's limit to the deadline, unless XLA has read its flags or `XLA_FLAGS` has one, and completes errors."""
    _complete_errors()
    if not _compat.HAS_FLAG_OF_CPU_LIMIT or _compat.has_backend():
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        flags = os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={math.ceil(runtime.timeout())}".strip()
    if match := re.search(rf"{_FLAG}=(\d+)", flags):
        _state.xla_limit = int(match[1])


@dataclasses.dataclass
class _State:
    """What this process knows of calls between hosts."""

    xla_limit: float | None = None  # seconds until XLA's collectives fail; None if it could not be set
    names: dict[int, str] = dataclasses.field(default_factory=dict)  # of the hosts of processes
    # By process the call in which it waits, or "": this one's once the store has taken it, then the others'. None if no
    # call waits for long.
    answers: dict[int, str] | None = None
    completed: tuple[str, str] = "", ""  # XLA's last text, and what was added


_state = _State()


@functools.cache
def _complete_errors() -> None:
    _compat.complete_errors(complete)
    previous = sys.excepthook

    def hook(error_type, error, traceback):
        previous(error_type, error, traceback)
        with contextlib.suppress(Exception):  # the user's exception matters more
            text = str(error)
            if isinstance(error, ValueError) and (added := complete(text).removeprefix(text).strip()):
                print(added, file=sys.stderr, flush=True)

    sys.excepthook = hook


def watch(names: Mapping[int, str]) -> None:
    """Starts the thread. names: of the hosts of processes that will wait for each other."""
    _state.names.update(names)
    _start_thread()


@functools.cache
def _start_thread() -> None:
    _in_background(_run)


# ---- The thread ------------------------------------------------------------------------------------------------------


def _run() -> None:
    written: set[str] = set()  # the calls of which there was a message
    while True:
        deadline = runtime.timeout()
        time.sleep(deadline / _CHECKS_PER_DEADLINE)
        calls = [call for call in runtime.calls_of_xla() if call.age >= _ASK * deadline]
        if not calls:
            if _state.answers is not None:
                _state.answers = None
                _in_background(_post, "")
            continue
        if _state.answers is None:
            _state.answers = {}
            _in_background(_ask, _state.answers, calls)
        limit = deadline if _state.xla_limit is None else max(deadline, _state.xla_limit + _SLACK_OF_XLA)
        for call in calls:
            if call.age >= limit and call.text not in written:
                written.add(call.text)
                advice = _ADVICE if _state.xla_limit is None else ""
                print(f"jax_ring: {_describe(call)}{advice}", file=sys.stderr, flush=True)


_ADVICE = (
    f" XLA's collective cannot be left: XLA had read its flags before jax_ring could set {_FLAG}. Import jax_ring "
    "before JAX is first used, or set the flag in XLA_FLAGS; then this is an error."
)


def _in_background(function: Callable, *arguments: Any) -> threading.Thread:
    """Calls a function that may hang, such as while the coordinator is out of reach."""
    thread = threading.Thread(target=function, args=arguments, name="jax_ring-between-hosts", daemon=True)
    thread.start()
    return thread


def _post(text: str) -> bool:
    """Publishes what this process waits in; returns whether the store answered."""
    try:
        exit_notice.store().put(_wait_key(_compat.distributed_process()), text.encode(), replaces=True)
    except Exception:  # the runtime may be gone or unreachable
        return False
    return True


def _ask(answers: dict[int, str], calls: list[runtime.CallOfXla]) -> None:
    """Says what this process waits in, and asks who else waits."""
    if not _post(calls[0].text):
        return
    own = _compat.distributed_process()
    answers[own] = calls[0].text
    time.sleep(runtime.timeout() * (1 - _ASK) / 2)
    for process in {process for call in calls for process in call.processes} - {own}:
        text = (exit_notice.store().peek(_wait_key(process)) or b"").decode(errors="replace")
        answers[process] = escaped(text[:_MAX_LENGTH])


# ---- The message -----------------------------------------------------------------------------------------------------


def complete(text: str) -> str:
    """An error of XLA's collectives with the calls of jax_ring that waited, or else who has left; others as is."""
    if not foreign_errors.OF_COLLECTIVE.search(text):
        return text
    calls = runtime.take_calls_of_xla()
    lines = [_describe(call) for call in calls[:_MAX_CALLS]]
    if len(calls) > _MAX_CALLS:
        lines.append(f"{len(calls) - _MAX_CALLS} more calls waited.")
    # Several arrays may carry the error of one execution.
    if not calls and text != _state.completed[0]:
        lines.append(_who_has_left(range(_compat.num_distributed_processes())))
    if any(lines):
        _state.completed = text, "".join(f"\njax_ring: {line}" for line in dict.fromkeys(lines))
    completed, added = _state.completed
    return text + added if text == completed else text


def _describe(call: runtime.CallOfXla) -> str:
    own = _compat.distributed_process()
    others = [process for process in sorted(set(call.processes)) if process != own]
    return (
        f"{_name(own)} has waited {call.age:.1f} s in {call.text}, which XLA serves between hosts, for "
        f"{', '.join(map(_name, others))}. {_what_is_known(others)}"
    )


def _what_is_known(others: list[int]) -> str:
    if left := _who_has_left(others):
        return left
    if (answers := _state.answers) is None:
        return "A process of these has failed, or the connection to it is broken."
    if not answers:
        return "JAX's coordinator does not answer either: it has ended, or this host is cut off from it."
    if not answers.keys() >= {*others}:
        return "Nothing is known of them yet."
    if silent := [process for process in others if not answers[process]]:
        which = ", ".join(map(_name, silent))
        return f"By JAX's coordinator, no call like it waits in {which}: stopped, busy with something else, or cut off."
    elsewhere = [f"{_name(process)} waits in {answers[process]}" for process in others]
    return f"All of them wait, so data is lost between them, or the calls differ: {'; '.join(elsewhere)}."


def _who_has_left(processes: Iterable[int]) -> str:
    left: list[str] = []

    def look() -> None:
        with contextlib.suppress(Exception):  # the runtime may be gone
            for process in processes:
                if process != _compat.distributed_process() and (how := exit_notice.departure_of(process)):
                    left.append(f"Process {process} {how.cause}.")

    _in_background(look).join(_PATIENCE_SECONDS)
    return " ".join([*left])


def _name(process: int) -> str:
    return f"process {process} on host {_state.names.get(process, 'unknown')}"


def _wait_key(process: int) -> str:
    return f"jax_ring/waits/{process}"
