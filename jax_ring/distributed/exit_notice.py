"""Tells other processes when this one leaves, so that none waits until its deadline.

A process leaves by an uncaught exception, or at its program's end. Its groups hear of it through shared memory.
Processes without shared memory look in the key-value store of `jax.distributed`, where the pid shows whether it was
killed.
"""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import sys
import threading
from typing import Any, NamedTuple

import jax

from jax_ring import _compat, _ffi_cpu, runtime
from jax_ring.distributed.store import ForeignValueError, Store
from jax_ring.launcher.coordinator.client import Programs
from jax_ring.launcher.schema import escaped, read
from jax_ring.runtime import Departure

_MAX_LENGTH = 600  # of the notice, so that it fits into a group's shared memory
_SECONDS_BETWEEN_LOOKS = 0.2
_NOT_WRITTEN = jax.errors.JaxRuntimeError, ForeignValueError  # by which others hear less, and only later


class _Process(NamedTuple):
    """A process as its host sees it; pids of other hosts or namespaces do not compare."""

    host: str
    pid: int
    start_time: int


_store: Any = None  # of the runtime that this process has joined
_process = 0  # its index there
_pid: int | None = None  # of the process that has joined others: a child that it forks has not
_has_left = False
_is_ending = threading.Event()


def join(of_runtime: Store) -> None:
    """Publishes how others see whether this process has ended, and watches over its end.

    Once for each runtime that the program initializes.
    """
    global _store, _process, _pid, _has_left
    _store, _process = of_runtime, _compat.distributed_process()
    with contextlib.suppress(OSError, *_NOT_WRITTEN):
        own = _read_process(_own_host(), os.getpid())
        _store.put(_process_key(_process), json.dumps(own).encode())
    _pid, _has_left = os.getpid(), False
    _watch()


@functools.cache
def _watch() -> None:
    _chain_excepthook()
    watcher = threading.Thread(target=_answer_questions, name="jax_ring departures", daemon=True)
    with contextlib.suppress(RuntimeError):  # at a limit of threads: errors then come at the deadline
        watcher.start()
    # Runs before the exit handler of jax.distributed, which may wait for the others.
    atexit.register(_at_exit, Programs(), watcher)


def store() -> Store:
    """The store of the runtime that this process has joined. The next one may not be asked before it has connected."""
    return _store


def abort(how: Departure) -> None:
    """Aborts all groups of this process, now and in future: their calls fail everywhere."""
    global _has_left
    if _has_left or _pid != os.getpid():
        return
    _has_left = True
    # Half of a surrogate pair, as in some file names, has no UTF-8 form.
    cause = " ".join(how.cause.split()).encode(errors="backslashreplace").decode()
    how = how._replace(cause=cause if len(cause) <= _MAX_LENGTH else cause[: _MAX_LENGTH - 1] + "…")
    _ffi_cpu.abort_groups(*how)
    with contextlib.suppress(*_NOT_WRITTEN):
        _store.put(_left_key(_process), json.dumps(how).encode())


def departure_of(process: int) -> Departure | None:
    """How another process of the runtime has left; None if unknown."""
    if how := _store.peek(_left_key(process)):
        left = read(how, Departure)
        return left._replace(cause=escaped(left.cause[:_MAX_LENGTH]))
    own = _store.peek(_process_key(process))
    return Departure("has ended", "ended") if own and _has_ended(read(own, _Process)) else None


def departure_by(error: BaseException) -> Departure:
    """How a process leaves that raises this exception."""
    failure = runtime.failure_of(error)
    if failure is not None and failure.cause:
        return Departure(failure.cause, failure.kind, failure.process, failure.rank)
    name, text = type(error).__qualname__, f"{failure.code}: {failure.text}" if failure else str(error)
    return Departure(f"raised {name}: {text}" if text else f"raised {name}")


# ---- The end of this process ----------------------------------------------------------------------------------------


def _chain_excepthook() -> None:
    previous = sys.excepthook

    def hook(error_type, error, traceback):
        if error is not None and not _is_interactive():
            with contextlib.suppress(Exception):  # the user's exception matters more
                abort(departure_by(error))
        previous(error_type, error, traceback)

    sys.excepthook = hook


def _is_interactive() -> bool:
    """Whether this is an interactive session, which goes on after an error."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _at_exit(programs: Programs, watcher: threading.Thread) -> None:
    if _pid != os.getpid():
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    has_failed = _has_left or (error is not None and not _is_interactive())
    has_ended = not has_failed and programs.wait(runtime.timeout())
    _is_ending.set()
    # A thread that returns from a wait while Python ends is killed, and that kills the process. So none may.
    programs.end()
    _ffi_cpu.end_questions()
    if watcher.ident is not None:
        watcher.join(timeout=10)
    if has_failed and error is not None:  # the program's own hook may not have called that of this module
        abort(departure_by(error))
    elif has_ended:
        abort(Departure("has exited"))


# ---- The end of others ----------------------------------------------------------------------------------------------


def _answer_questions() -> None:
    """Looks for the processes that native calls wait for, until this one ends."""
    while not _is_ending.wait(_SECONDS_BETWEEN_LOOKS):
        for process in _ffi_cpu.await_questions(seconds=60.0):
            with contextlib.suppress(Exception):  # the runtime may be shutting down
                if how := departure_of(process):
                    _ffi_cpu.note_departure(process, *how)


def _own_host() -> str:
    """Kernel and pid namespace, whose first number is the same on all hosts."""
    boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"


def _read_process(host: str, pid: int) -> _Process:
    """A running process of this host. Raises OSError if there is none or the system does not tell."""
    # A pid that another process has published must be a number.
    # The name before the last parenthesis may contain anything.
    fields = pathlib.Path(f"/proc/{pid:d}/stat").read_text(errors="replace").rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise FileNotFoundError(f"process {pid} has ended")
    return _Process(host, pid, int(fields[19]))


def _has_ended(process: _Process) -> bool:
    try:
        return process.host == _own_host() and _read_process(process.host, process.pid) != process
    except (FileNotFoundError, ProcessLookupError):
        return True  # missing: the system has such files, or the process would not have published its own


def _process_key(process: int) -> str:
    return f"jax_ring/process/{process}"


def _left_key(process: int) -> str:
    return f"jax_ring/left/{process}"
