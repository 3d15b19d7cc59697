"""`watch`: counts the calls of a function as steps; without it, each execution of a program counts."""

import functools
import math
import numbers
import threading
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

from jax_ring import _compat
from jax_ring.launcher.watching.page import EXECUTIONS, STEPS
from jax_ring.options import check_choice
from jax_ring.progress.process import progress

OnStuck = Literal["report", "end"]

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
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < math.inf):
        raise ValueError(f"watch: seconds must be a positive number, got {seconds!r}")
    check_choice("watch", "on_stuck", on_stuck, get_args(OnStuck))
    if step is None:
        return lambda step: watch(step, seconds=seconds, on_stuck=on_stuck)
    if not callable(step):
        raise TypeError(f"watch: step must be a function, got {type(step).__name__}")
    name = getattr(step, "__name__", type(step).__name__)
    own, is_one_program = progress(), _compat.is_one_program(step)
    own.count(STEPS, seconds, on_stuck == "end")
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
    progress().count(EXECUTIONS)
