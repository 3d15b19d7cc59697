"""`watch`: what this process has begun and completed, and where it is, in a page for the launcher, or in its own.

Calls of watched functions count as steps. Without any, each execution of a program counts.
"""

import atexit
import functools
import itertools
import json
import math
import numbers
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax

from jax_ring import _compat, _ffi_cpu, runtime
from jax_ring.launcher.schema import escaped
from jax_ring.launcher.watching import page, report
from jax_ring.launcher.watching.watcher import Watcher
from jax_ring.options import check_choice

OnStuck = Literal["report", "end"]

_COMPILATION = "/jax/core/compile/"  # begins the names of JAX's events for tracing, lowering and compiling
_LOOK_SECONDS = 0.1
_EXIT_SECONDS = 10.0
_of_thread = threading.local()  # has attributes within a watched call


def watch(step: Callable | None = None, *, seconds: float = 60.0, on_stuck: OnStuck = "report") -> Any:
    """A step of a training, whose calls are watched: reports which processes are stuck, and where.

        step = jax_ring.watch(jax.jit(train_step, donate_argnums=0), seconds=120)
        for batch in batches:
            state, loss = step(state, batch)

    Also as a decorator, `@jax_ring.watch` or `@jax_ring.watch(seconds=120)`. It neither blocks nor changes results.
    Calls while JAX traces, and within another watched call, are not watched.

    Once a process has begun a step, all have to complete it within `seconds`, in which neither compilations nor time
    between steps count, or one that is behind has to complete another one. Otherwise the launcher writes one report
    (docs/processes.md). All processes call watched functions equally often. Without the launcher a process reports its
    own steps to standard error.

    Args:
      step: a function of arrays, jitted or not. Of one that is not jitted all outputs are waited for.
      seconds: more than the longest step takes, and than one process alone spends between two. The least of all watched
        functions holds for each. `--watch` of the launcher replaces it.
      on_stuck: "report", or "end": the processes that are behind fail, so that `--max-restarts` applies. `--on-stuck`
        of the launcher replaces it.

    Returns:
      A function with the attributes of `step`, such as `lower`.

    Raises:
      TypeError: if `step` is no function.
      ValueError: if `seconds` is no positive number, or infinite, or `on_stuck` is no choice.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not 0 < seconds < math.inf:
        raise ValueError(f"watch: seconds must be a positive number, got {seconds!r}")
    check_choice("watch", "on_stuck", on_stuck, get_args(OnStuck))
    if step is None:
        return lambda step: watch(step, seconds=seconds, on_stuck=on_stuck)
    if not callable(step):
        raise TypeError(f"watch: step must be a function, got {type(step).__name__}")
    name = getattr(step, "__name__", type(step).__name__)
    own, is_one_program = progress(), _compat.is_one_program(step)
    own.count(page.STEPS, seconds, on_stuck == "end")
    # Place of the smallest output, and the number of outputs. What is waited for stays in memory.
    smallest = [0, 0]

    @functools.wraps(step)
    def watched(*args, **kwargs):
        if _compat.is_tracing() or vars(_of_thread):
            return step(*args, **kwargs)
        results = None
        own.begin(name)
        _of_thread.is_in_call = True
        try:
            results = step(*args, **kwargs)
            return results
        finally:  # also after an exception, which ends the step
            del _of_thread.is_in_call
            outputs = jax.tree.leaves(results)
            if is_one_program and outputs:
                if smallest[1] != len(outputs):
                    smallest[:] = min(range(len(outputs)), key=lambda i: outputs[i].size), len(outputs)
                outputs = [outputs[smallest[0]]]
            own.end(outputs)

    for attribute in set(dir(step)) - set(dir(watched)):
        setattr(watched, attribute, getattr(step, attribute))
    return watched


def watch_executions() -> None:
    """Begins to count the executions of this process: what `--watch` of the launcher sees of a program as it is."""
    progress().count(page.EXECUTIONS)


class Progress:
    """Counts what this process begins and completes: steps or executions. A thread looks at the newest outputs."""

    def __init__(self) -> None:
        given = page.Page.of_launcher()
        self.page, self._is_alone = given or page.Page.new(), given is None
        self._ended = 0  # executions, or steps
        self._returned: list[tuple[int, Sequence[Any]]] = []  # number and outputs of calls that may not be complete
        self._compiling: list[tuple[str, int]] = []  # events and their threads
        self._lock = threading.RLock()
        # A forked child writes nothing to the page of its parent.
        os.register_at_fork(after_in_child=lambda: vars(self).update(page=page.Page.new(), _lock=threading.RLock()))
        _compat.call_after_launches(self._launched)
        # An event's scalar is recorded at its beginning, its duration at the end.
        jax.monitoring.register_scalar_listener(self._compile)
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jax_ring-watch", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def count(self, counts: int, limit: float = 0.0, ends_job: bool = False) -> None:
        """Says what is counted. Once it is steps, executions no longer count. The shortest limit holds."""
        words = self.page.words
        with self._lock:
            if counts != words.counts:
                self._ended, self._returned = 0, []
                words.started, words.completed, words.completed_at = 0, 0, time.monotonic()
            words.limit = min(limit, words.limit or limit)
            words.ends_job |= ends_job
            words.counts = counts

    def begin(self, name: str) -> None:
        with self._lock:
            self.page.words.function = page.cut(name)
            self.page.words.started += 1

    def end(self, outputs: Sequence[Any]) -> None:
        """Notes that a step or an execution has returned.

        outputs: some that tell when it is complete, and those before. If all are donated, the next one tells.
        """
        with self._lock:
            self._ended += 1
            if not outputs and self._returned:  # as after an exception: those before may not be there yet
                outputs = self._returned[-1][1]
            if self.page.words.counts == page.EXECUTIONS:
                self.page.words.started = self._ended
                self._returned.clear()  # it is enough to know that the newest is complete
            self._returned.append((self._ended, outputs))

    def _launched(self, results: Any) -> None:
        if self.page.words.counts == page.EXECUTIONS:
            self.end(jax.tree.leaves(results))  # the caller may change what holds the arrays

    def _run(self) -> None:
        # Without a launcher this process watches itself.
        process = _compat.distributed_process
        watcher = Watcher(
            num_hosts=1,
            ask=lambda: watcher.places.update({process(): self._where()}),
            log=lambda *lines: print("jax_ring:", "\n".join(map(escaped, lines)), file=sys.stderr, flush=True),
            fail=lambda *_: os._exit(1),  # the thread that hangs cannot raise
        )
        while not self._end.wait(_LOOK_SECONDS):
            self._look()
            if self.page.words.asked:
                self.page.answer(json.dumps(self._where()))
            if self._is_alone:
                notes = self.page.read(f"process {process()} (pid {os.getpid()})")
                watcher.take(0, {process(): notes}, time.monotonic())

    def _stop(self) -> None:
        """Ends the thread: Python would end it within C++, and that the process."""
        self._end.set()
        self._thread.join(timeout=_EXIT_SECONDS)

    def _look(self) -> None:
        """Notes the executions that are complete, and whether one is being launched."""
        is_launching = _runs(_compat.is_launch)
        with self._lock:
            if self.page.words.counts == page.EXECUTIONS:
                self.page.words.started = self._ended + is_launching
            left: list[tuple[int, Sequence[Any]]] = []
            for number, outputs in reversed(self._returned):
                is_complete = are_ready(outputs)
                if is_complete is None and not (left or is_launching) and self.page.words.counts == page.EXECUTIONS:
                    is_complete = True  # not donated: the program has deleted them
                if is_complete:
                    self.page.words.completed = number
                    self.page.words.completed_at = time.monotonic()
                    break
                if is_complete is False or not left:
                    left.append((number, outputs))
            self._returned = left[::-1]

    def _compile(self, event: str, value: float | int, **kwargs: str | int) -> None:
        if event.startswith(_COMPILATION):
            with self._lock:
                if not self._compiling:
                    self.page.words.compiling = page.cut(str(kwargs.get("fun_name", "")))
                    self.page.words.compiling_since = time.monotonic()
                self._compiling.append((event, threading.get_ident()))

    def _compiled(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        with self._lock:
            if (what := (event, threading.get_ident())) in self._compiling:
                self._compiling.remove(what)
                if not self._compiling:
                    self.page.words.compiling_since = 0

    def _where(self) -> report.Place:
        """Where this process is."""
        notes = self.page.read()
        if notes.compiling_for:
            kind = report.COMPILATION
        elif notes.completed == notes.started:
            kind = report.PYTHON
        elif _runs(_compat.is_callback):
            kind = report.CALLBACK
        elif self._ended > notes.completed or _runs(_compat.is_launch):
            kind = report.DEVICE
        else:
            kind = report.PYTHON
        return report.Place(kind, *_last_calls(), report.readable(self.page.stacks(), of_this_process=True))


progress = functools.cache(Progress)  # that of this process


def are_ready(outputs: Sequence[Any]) -> bool | None:
    """Whether the arrays among these are ready or have failed; None if all were donated, and tell nothing."""
    arrays = [each for each in outputs if hasattr(each, "is_ready")]
    left = [array for array in arrays if not array.is_deleted()]
    try:
        return all(array.is_ready() for array in left) if left or not arrays else None
    except RuntimeError:  # donated meanwhile
        return None


def _runs(test: Callable[[int, types.CodeType, int], bool]) -> bool:
    """Whether this is true of a function that runs."""
    return any(itertools.starmap(test, _ffi_cpu.running_frames()))


def _last_calls() -> tuple[str, str]:
    """The last call of this process, and the table of the last of all that it knows of; empty if none."""
    from jax_ring.inspect.recorded import flight_recorder  # only needed here

    record, process = flight_recorder(), _compat.distributed_process()
    own = [call for call in record.calls if call.process == process]
    table = record.table if own else ""
    if waiting := runtime.calls_of_xla():
        return f"{waiting[-1].text}, which XLA serves between hosts, waits, {waiting[-1].age:.1f} s", table
    if not own:
        return "", ""
    last = next((call for call in reversed(own) if call.state in ("arriving", "ready")), own[-1])
    ago = last.entered_ago if last.ended_ago is None else last.ended_ago
    return f"{last.call}: {'waits' if last.ended_ago is None else last.state}, {ago:.1f} s", table
