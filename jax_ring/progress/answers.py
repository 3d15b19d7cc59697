"""Says where this process is: to the launcher when it asks, or without one to standard error when a step hangs."""

import os
import sys
import threading
import time
import traceback
import types

from jax_ring import _compat, runtime
from jax_ring.launcher.protocol import Control
from jax_ring.launcher.watching import report
from jax_ring.launcher.watching.page import Notes
from jax_ring.progress import notes

_OWN = "jax_ring"  # begins the names of this package's threads
_MAX_FRAMES, _MAX_FRAMES_BESIDE = 20, 3  # of a thread; in a process that is not in Python
_MAX_THREADS = 30
_MAX_LENGTH = 20_000  # characters: the launcher reads a line of 64 KiB

_thread: threading.Thread | None = None
# The functions in which a call of a program is below Python.
_launches = {_compat.LAUNCH_CODE}


def start(*launches: types.CodeType) -> None:
    """Starts the thread. launches: functions whose innermost frame means that a program is being launched."""
    global _thread
    _launches.update(launches)
    if _thread is None:
        notes.page()
        target = _answer_launcher if notes.has_launcher() else _watch_alone
        _thread = threading.Thread(target=target, name=f"{_OWN}-watch", daemon=True)
        _thread.start()


def _answer_launcher() -> None:
    try:
        control = Control.connect()
        place = None
        while True:
            control.next_question(place)
            place = list(where(notes.page().read()))
    except RuntimeError:  # the launcher has ended, or ends the job
        return


def _watch_alone() -> None:
    """Reports the own steps: nothing is known of other processes."""
    comparison, before = report.Comparison(), time.monotonic()
    while True:
        limit = notes.page().read().limit
        wait = report.seconds_between_looks(limit)
        time.sleep(wait)
        note = notes.page().read()
        elapsed, before = min(time.monotonic() - before, 2 * wait), time.monotonic()
        verdict = comparison.look({0: note}, elapsed, limit)
        if verdict is None:
            continue
        process = _compat.distributed_process()
        own = types.SimpleNamespace(rank=process, name=f"process {process} (pid {os.getpid()})")
        found = report.Found(verdict, {0: note}, {0: where(note)}, {0: own}, limit, "jax_ring.watch")
        print(f"jax_ring: {report.text(found)}", file=sys.stderr, flush=True)
        if note.ends_job:
            os._exit(1)  # the thread that hangs cannot raise


def where(note: Notes) -> report.Place:
    """Where this process is."""
    main = threading.main_thread().ident
    stacks = {
        thread: list(traceback.walk_stack(frame))[::-1]  # outermost first
        for thread, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] != main)
    }
    kind = _kind(note, list(stacks.values()))
    call, table = _last_calls()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for thread, stack in list(stacks.items())[:_MAX_THREADS]:
        name = names.get(thread, f"thread {thread}")
        is_relevant = kind == "python" or thread == main or _is_in_callback(stack)
        if not is_relevant or name.startswith(_OWN):
            continue
        count = _MAX_FRAMES_BESIDE if kind == "device" else _MAX_FRAMES
        told = [each for each in stack if not _tells_nothing(each[0].f_code)]
        lines = traceback.StackSummary.extract(iter(told[-count:])).format()
        texts.append(f"{name}:\n{''.join(lines)}")
    return report.Place(kind, call, table, "".join(texts)[:_MAX_LENGTH])


def _kind(note: Notes, stacks: list[list]) -> str:
    if note.compiling_since:
        return "compilation"
    if note.completed == note.started:
        return "python"
    if any(map(_is_in_callback, stacks)):
        return "callback"
    if note.completed < note.returned or any(stack[-1][0].f_code in _launches for stack in stacks):
        return "device"
    return "python"


def _tells_nothing(code: types.CodeType) -> bool:
    return code.co_filename in report.IGNORED or _compat.is_callback(code)


def _is_in_callback(stack: list) -> bool:
    return any(_compat.is_callback(frame.f_code) for frame, _ in stack)


def _last_calls() -> tuple[str, str]:
    """The last call of this process, and the table of the last of all that it knows of; empty if none."""
    if waiting := runtime.calls_of_xla():
        text = f"{waiting[-1].text}, which XLA serves between hosts, waits, {waiting[-1].age:.1f} s"
    else:
        text = ""
    from jax_ring.inspect.recorded import flight_recorder  # only needed here

    record = flight_recorder()
    process = _compat.distributed_process()
    own = [call for call in record.calls if call.process == process]
    if not own:
        return text, ""
    last = next((call for call in reversed(own) if call.state in ("arriving", "ready")), own[-1])
    ago = last.entered_ago if last.ended_ago is None else last.ended_ago
    state = "waits" if last.ended_ago is None else last.state
    return text or f"{last.call}: {state}, {ago:.1f} s", record.table
