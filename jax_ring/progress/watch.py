"""`watch`: notes when each call of a function is begun, and when its results are there; without it, each execution."""

import functools
import itertools
import math
import numbers
import queue
import threading
import types
from collections.abc import Callable
from typing import Any, Literal, get_args, overload

import jax

from jax_ring import _compat
from jax_ring.launcher.watching.page import EXECUTIONS, STEPS
from jax_ring.options import check_choice
from jax_ring.progress import answers, notes

OnStuck = Literal["report", "end"]
_LEAVE_SECONDS = 1.0  # for programs that still run when the members of an elastic job change

# Steps of all watched functions have one sequence, which processes compare.
_numbers = itertools.count(1)
_beginning = threading.RLock()  # the page has the number of the last one
_started: queue.SimpleQueue = queue.SimpleQueue()  # steps for the thread
_open: dict[int, bool] = {}  # steps that the thread has not been through, and whether their functions have returned


@overload
def watch(step: None = None, *, seconds: float = ..., on_stuck: OnStuck = ...) -> Callable[[Callable], "Watched"]: ...
@overload
def watch(step: Callable, *, seconds: float = ..., on_stuck: OnStuck = ...) -> "Watched": ...
def watch(step: Callable | None = None, *, seconds: float = 60.0, on_stuck: OnStuck = "report") -> Any:
    """A step of a training, whose calls are watched: reports which processes are stuck, and where.

        step = jax_ring.watch(jax.jit(train_step, donate_argnums=0), seconds=120)
        for batch in batches:
            state, loss = step(state, batch)

    Also as a decorator, `@jax_ring.watch` or `@jax_ring.watch(seconds=120)`. It neither blocks nor changes results: a
    thread waits for an output. A call while JAX traces is not watched.

    Once a process has begun a step, all have to complete it within `seconds`, in which neither compilations nor time
    between steps count, or one that is behind has to complete another one. A step is complete only once those that
    began before it are, such as one that calls it. Otherwise the launcher writes one report (docs/processes.md): who
    is behind and in which step; whether in Python, with the stacks of its threads, or in the device's program, with
    the last call of jax_ring; and how long the last hundred steps took where. All processes call watched functions
    equally often. Without the launcher a process reports its own steps to standard error.

    Args:
      step: a function of arrays, jitted or not. Of one that is not jitted all outputs are waited for.
      seconds: more than the longest step takes, and than one process alone spends between two. The least of all watched
        functions holds for each, also for one that calls others. `--watch` of the launcher replaces it.
      on_stuck: "report", or "end": the processes that are behind are ended as well, with a failure from which
        `--max-restarts` and elastic jobs go on. `--on-stuck` of the launcher replaces it.

    Returns:
      A function with the attributes of `step`, such as `lower`.

    Raises:
      TypeError: if `step` is no function.
      ValueError: if `seconds` is no positive number, or infinite, or `on_stuck` is no choice.
    """
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < math.inf):
        raise ValueError(f"watch: seconds must be a positive number, got {seconds!r}")
    check_choice("watch", "on_stuck", on_stuck, get_args(OnStuck))
    if step is None:
        return lambda step: watch(step, seconds=seconds, on_stuck=on_stuck)
    if not callable(step):
        raise TypeError(f"watch: step must be a function, got {type(step).__name__}")
    return Watched(step, seconds, on_stuck)


class Watched:
    """What `watch` returns."""

    def __init__(self, step: Callable, seconds: float, on_stuck: OnStuck) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        name = getattr(step, "__name__", type(step).__name__)
        self._page = notes.page()
        self._function = self._page.begin(STEPS, seconds, on_stuck == "end", name)
        self._is_one_program = _compat.is_one_program(step)
        self._by_size: list[int] = []  # places of the outputs, the smallest first
        self._num_kept = 1
        _start_thread()
        answers.start(Watched.__call__.__code__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compat.is_tracing() or notes.is_child():
            return self._step(*args, **kwargs)
        page, results = self._page, None
        with _beginning:
            number = next(_numbers)
            _open[number] = False
            page.start(number, self._function)
        try:
            results = self._step(*args, **kwargs)
            return results
        finally:  # also after an exception, which ends the step
            _open[number] = True
            if all(list(_open.values())):
                page.returned(number)
            leaves = jax.tree.leaves(results)
            _started.put((number, self._small(leaves) if self._is_one_program else leaves, self))

    def _small(self, leaves: list[Any]) -> list[Any]:
        """The smallest outputs. The thread may be many steps behind, and what it waits for stays in memory."""
        if len(self._by_size) != len(leaves):
            sizes = [getattr(leaf, "size", 0) for leaf in leaves]  # without jit not all are arrays
            self._by_size = sorted(range(len(sizes)), key=sizes.__getitem__)
        return [leaves[i] for i in self._by_size[: self._num_kept]]

    def _note_donated(self) -> None:
        """All of those were donated to the next step. Keeps more of them, until one is not."""
        self._num_kept = min(2 * self._num_kept, max(1, len(self._by_size)))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "_step":
            raise AttributeError(name)
        return getattr(self._step, name)

    def __repr__(self) -> str:
        return f"jax_ring.watch({self._step!r})"


@functools.cache
def _start_thread() -> None:
    notes.start_thread("steps", _complete, lambda: _started.put(None), _drop)


def _complete() -> None:
    page, last = notes.page(), 0
    while (entry := _started.get()) is not None:
        if isinstance(entry, threading.Event):
            entry.set()
            continue
        number, leaves, watched = entry
        # What has become of a step whose outputs were donated shows by the next.
        is_known = wait_for(leaves, of_one_program=watched._is_one_program)
        _open.pop(number, None)
        if is_known:
            last = max(last, number)
            # One that began before may not be over: the caller of this one, or another thread's.
            page.complete(number, min([last, *[each - 1 for each in list(_open)]]))
        else:
            watched._note_donated()
        del entry, leaves, watched  # they keep memory, and the backend


def _drop() -> None:
    """Forgets steps whose arrays are of a generation that this process leaves."""
    try:
        while True:
            _started.get_nowait()
    except queue.Empty:
        pass
    _open.clear()
    # It may still wait for an array, which keeps the backend. A program that hangs does not end.
    is_idle = threading.Event()
    _started.put(is_idle)
    is_idle.wait(_LEAVE_SECONDS)


def wait_for(leaves: list[Any], *, of_one_program: bool) -> bool:
    """Waits until the arrays among these are ready or have failed. Returns False if it could wait for none of them.

    Those that were donated before tell nothing.

    of_one_program: whether all are ready at the same time.
    """
    left = (leaf for leaf in leaves if isinstance(leaf, jax.Array) and not leaf.is_deleted())
    waited_for = list(itertools.islice(left, 1 if of_one_program else None))
    try:
        jax.block_until_ready(waited_for)  # at once: each wait of its own would need Python's lock again
    except Exception:  # donated meanwhile, or failed, which raises at the caller as well
        waited_for = [array for array in waited_for if not array.is_deleted()]
    return bool(waited_for) or not any(isinstance(leaf, jax.Array) for leaf in leaves)


# ---- Executions of a program that is not edited ----------------------------------------------------------------------

_LOOK_SECONDS = 0.1

_execution_numbers = itertools.count(1)
_newest: list[tuple[int, Any]] = []  # the last execution and its outputs, until the thread takes them
_end = threading.Event()


def watch_executions() -> None:
    """Begins to note the executions of this process: what `--watch` of the launcher sees of a program as it is.

    JAX calls a hook after each launch of a jitted function at the top level, and before the first launch of each
    program. A thread takes the newest outputs from time to time, and waits for them.
    """
    notes.page().begin(EXECUTIONS, 0.0, False, "an execution")
    _compat.call_with_launches(_launch, _launched)
    answers.start()
    notes.start_thread("executions", _complete_executions, _end.set, _newest.clear)


def _launch() -> int | None:
    page = notes.page()
    if not page.counts_executions or notes.is_child():
        return None
    number = next(_execution_numbers)
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


def _complete_executions() -> None:
    page = notes.page()
    while not _end.wait(_LOOK_SECONDS):
        try:
            number, leaves = _newest.pop()
        except IndexError:  # none since, or dropped at this moment
            continue
        # Earlier ones are ready as well. If all are donated, a later execution tells.
        if wait_for(leaves, of_one_program=True) and page.counts_executions:
            page.complete(number)
        del leaves
