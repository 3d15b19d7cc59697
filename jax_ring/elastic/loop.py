"""`run`: calls a training function with the newest commit, in each generation of a job."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

from jax_ring import _compat
from jax_ring.elastic.generation import Generation, Leave
from jax_ring.elastic.state import State
from jax_ring.launcher import protocol
from jax_ring.options import check_function, integer

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

    The function's first argument is a `State`. When a process is killed, is stopped, hangs or fails, the launcher ends
    the others and starts new ones, which run the script from its beginning, and call the function with the newest
    commit, as arrays of numpy. So they do when a host joins.

    Start the program with `python -m jax_ring.launch`; a single process without it just calls the function, without
    `jax.distributed.initialize()`.

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
            _enlist(min_processes, num_shards)
            try:
                state._enter(Generation())
                return train(state, *args, **kwargs)
            except Leave as error:
                reason = str(error)
            finally:
                state.__dict__["_generation"] = None  # others may have ended: a commit would wait for them
            protocol.leave(reason)

        return elastic_train

    return decorate


def _enlist(min_processes: int, num_shards: int | None) -> None:
    """Makes the job elastic; nothing for a single process without a launcher.

    Raises:
      RuntimeError: without a launcher, before `jax.distributed.initialize()`, or for a second call.
      ValueError: if a process's ranks do not divide `num_shards`, or this or `-n` is too small for `min_processes`.
    """
    if not os.environ.get(protocol.CONTROL_VARIABLE):
        if (count := _compat.num_distributed_processes()) == 1:
            return
        raise RuntimeError(
            f"elastic.run: this program has {count} processes, and no launcher that would say which of them are left. "
            f"Start it with: python -m jax_ring.launch -n {count} script.py"
        )
    if not _compat.is_distributed():
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
            "elastic.run: this program has called an elastic function before, and a job has one call: new processes "
            "run the script from its beginning. Do all of the training in one function, with one State."
        )
    protocol.ask("enlist", min_processes, multiple_of)
    _is_called = True
    count = _compat.num_distributed_processes()
    # The launcher forms the first generation before the processes tell what they need.
    if count < min_processes or (multiple_of is not None and multiple_of % count):
        protocol.leave(
            f"{count} processes with {count * jax.local_device_count()} devices do not suit "
            f"min_processes={min_processes}, num_shards={num_shards}"
        )
