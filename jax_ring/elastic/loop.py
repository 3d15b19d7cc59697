"""`run`: calls a training function anew when the processes have changed."""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import jax

from jax_ring import _compat
from jax_ring.distributed import exit_notice
from jax_ring.elastic.generation import Generation, Leave, clear_frames, enter, explain_dead, leave, why_left
from jax_ring.elastic.state import State
from jax_ring.launcher.protocol import (
    CONTROL_VARIABLE,
    GENERATION_VARIABLE,
    HOSTS_VARIABLE,
    JOIN_VARIABLE,
    Control,
)
from jax_ring.options import check_function, integer
from jax_ring.runtime import Departure

logger = logging.getLogger("jax_ring")

# Generations in a row without a commit and without a change of members. After so many, the program fails, not a
# process.
_MAX_FRUITLESS = 3

_is_called = False  # an elastic function, in a job


def run(*, min_processes: int = 1, num_shards: int | None = None) -> Callable[[Callable], Callable]:
    """A decorator for a training function that goes on when processes of the job are lost or added.

        @jax_ring.elastic.run(min_processes=2)
        def train(state):
            mesh = jax.make_mesh((jax.device_count(),), ("data",))
            while state.step < 1000:
                ...
                state.commit()

        train(state)

    The function's first argument is a `State`. When a process is killed, is stopped, hangs or fails, the others form
    a new group, take the newest commit that all have, as arrays of numpy, and call the function again. Anything else of
    JAX made before is dead, so make it inside (docs/elastic.md).

    Any other exception is a failure of this process: it is raised, and the others go on. Start the program with `python
    -m jax_ring.launch`; a single process without it just calls the function, without `jax.distributed.initialize()`.

    Args:
      min_processes: with fewer the job ends with an error.
      num_shards: that of `value_and_grad(..., num_shards=V)`, a multiple of the number of ranks. As many processes as
        fit take part; the others wait. None allows any number.

    Raises:
      TypeError: if one of these is no integer, or `train` no function.
      ValueError: if `min_processes` or `num_shards` is not positive; by the call, if the job has fewer than
        `min_processes` processes.
    """
    if (min_processes := integer("elastic.run", "min_processes", min_processes)) < 1:
        raise ValueError(f"elastic.run: min_processes must be at least 1, got {min_processes}")
    if num_shards is not None and (num_shards := integer("elastic.run", "num_shards", num_shards)) < 1:
        raise ValueError(f"elastic.run: num_shards must be at least 1, got {num_shards}")

    def decorate(train: Callable) -> Callable:
        check_function("elastic.run", "train", train)

        @functools.wraps(train)
        def elastic_train(state: State, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(state, State):
                raise TypeError(
                    f"elastic.run: {train.__name__} takes a jax_ring.elastic.State as its first argument, got "
                    f"{type(state).__name__}"
                )
            if os.environ.get(HOSTS_VARIABLE) and not state.outlives_processes:
                raise ValueError(
                    "elastic.run: in a job of --nnodes MIN:MAX other processes are started when hosts come or go, and "
                    "this state is only in the memory of processes. Make it as State(keep='host', ...), or with "
                    "directory= and every=."
                )
            control = _enlisted(min_processes, num_shards)
            return _loop(functools.partial(train, state, *args, **kwargs), state, control, min_processes, num_shards)

        return elastic_train

    return decorate


def _enlisted(min_processes: int, num_shards: int | None) -> Control | None:
    """The connection to the launcher, in a job that is elastic from now on; None for a single process.

    Raises:
      RuntimeError: without a launcher, before `jax.distributed.initialize()`, or for a second call.
      ValueError: if a process's ranks do not divide `num_shards`, or this or `-n` is too small for `min_processes`.
    """
    if not os.environ.get(CONTROL_VARIABLE):
        if (count := _compat.num_distributed_processes()) == 1:
            return None
        raise RuntimeError(
            f"elastic.run: this program has {count} processes, and no launcher that would say which of them are left. "
            f"Start it with: python -m jax_ring.launch -n {count} script.py"
        )
    if not _compat.is_distributed() and not os.environ.get(JOIN_VARIABLE):
        raise RuntimeError("elastic.run: call jax.distributed.initialize() first, before any other use of JAX")
    multiple_of = None
    if num_shards is not None:
        each = jax.local_device_count()
        if num_shards % each:
            raise ValueError(
                f"elastic.run: num_shards must be a multiple of the devices of a process, got num_shards={num_shards} "
                f"and {each} devices. Pass another --devices to the launcher."
            )
        multiple_of = num_shards // each
        if multiple_of < min_processes:
            raise ValueError(
                f"elastic.run: num_shards={num_shards} is less than the number of devices of min_processes="
                f"{min_processes} processes, each with {each}. Pass more shards, or a smaller min_processes."
            )
    global _is_called
    if _is_called:
        raise RuntimeError(
            "elastic.run: this program has called an elastic function before, and a job has one call: a process "
            "that joins runs the script from its beginning. Do all of the training in one function, with one State."
        )
    control = Control.connect()
    control.enlist(min_processes=min_processes, multiple_of=multiple_of)
    _is_called = True
    return control


def _first_generation(state: State, control: Control | None) -> Generation:
    """The generation of `jax.distributed.initialize()`, or for a new process the next.

    A new process has run the script so far alone: nobody waits for its imports and data.
    """
    if control is not None and os.environ.pop(JOIN_VARIABLE, ""):
        return _next_generation(state, control, -1, "it is new", Departure("has joined others"))
    return Generation(int(os.environ.get(GENERATION_VARIABLE, "0")), control)


def _next_generation(state: State, control: Control, after: int, reason: str, how: Departure) -> Generation:
    state._leave()
    leave(how)
    return enter(control, after, reason)


def _loop(
    train: Callable[[], Any], state: State, control: Control | None, min_processes: int, num_shards: int | None
) -> Any:
    """Calls `train` once per generation until it returns or raises its own error."""
    fruitless = 0
    generation = _first_generation(state, control)
    while True:
        number, count, at_entry = generation.number, generation.num_processes, state.commits
        try:
            newcomers = state._enter(generation)
            at_entry = state.commits
            if newcomers:
                fruitless = 0
            # The launcher forms the first generation before the processes tell what they need.
            if control is not None and (count < min_processes or (num_shards or 0) % jax.device_count()):
                raise Leave(
                    f"{count} processes with {jax.device_count()} devices do not suit min_processes={min_processes}, "
                    f"num_shards={num_shards}"
                )
            result = train()
            state.__dict__["_generation"] = None  # others may have ended: a commit would wait for them
            return result
        except BaseException as error:
            reason = why_left(error)
            if control is None or reason is None or fruitless == _MAX_FRUITLESS:
                explain_dead(error, number)
                raise
            is_failure = isinstance(error, Exception)
            how = exit_notice.departure_by(error) if is_failure else Departure("has left for new members")
            clear_frames(error)
        # Not in the handler: it refers to the exception, and so to arrays.
        logger.info("leaving generation %d: %s", number, reason)
        made_commits = state.commits > at_entry
        del generation
        generation = _next_generation(state, control, number, reason, how)
        fruitless = 0 if made_commits or generation.num_processes != count else fruitless + 1
