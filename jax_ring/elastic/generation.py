"""A generation as its members see it: meeting the others, what ends it, leaving it, entering the next."""

import gc
import itertools
import json
import logging
import os
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from jax_ring import _compat, foreign_errors, runtime
from jax_ring.distributed import discovery, exit_notice
from jax_ring.elastic.exchange import Exchange
from jax_ring.launcher.coordinator.server import with_own_handler
from jax_ring.launcher.protocol import HOSTS_VARIABLE, Control, Member
from jax_ring.progress import notes

logger = logging.getLogger("jax_ring")

_SLICE_SECONDS = 0.2
# All processes enter a generation at the same time. One that takes longer than this has died or is stopped.
_ENTRY_SECONDS = 20.0
# After waiting this long for the others, a process asks the launcher whether one has died. It does not ask at once: a
# new process may be waiting to join, and that is no reason to leave before the next commit.
_PATIENCE_SECONDS = 1.0


class Leave(BaseException):
    """Ends `train` after a commit, so that a new process can join. No Exception, which `train` might catch."""


class HostsOfProcesses:
    """On which host each process of a generation is, and who keeps copies of whose parts of divided leaves.

    firsts: the first process of each host, in order. count: the number of processes.
    """

    def __init__(self, firsts: tuple[int, ...], count: int) -> None:
        self._firsts, self._count = firsts, count

    @classmethod
    def of_launcher(cls, count: int) -> "HostsOfProcesses":
        """The hosts of this job, as its launcher says; without hosts that come and go, one."""
        given = os.environ.get(HOSTS_VARIABLE)
        return cls(tuple(map(int, given.split(","))) if given else (0,), count)

    @property
    def has_several_hosts(self) -> bool:
        return len(self._firsts) > 1

    def is_first(self, process: int) -> bool:
        """Whether it is the first process of its host."""
        return process in self._firsts

    def keeper(self, owner: int) -> int:
        """The process on the next host that keeps a copy of a process's parts; on one host the process itself."""
        host = max(h for h, first in enumerate(self._firsts) if first <= owner)
        begin = self._firsts[(host + 1) % len(self._firsts)]
        end = ([*self._firsts, self._count])[(host + 1) % len(self._firsts) + 1]
        return begin + (owner - self._firsts[host]) % (end - begin)

    def kept_by(self, process: int) -> list[int]:
        """The processes of whose parts it keeps copies."""
        return [owner for owner in range(self._count) if owner != process and self.keeper(owner) == process]


class Generation:
    """The members of a job between two changes."""

    def __init__(self, number: int, control: Control | None) -> None:
        """number: from 0. control: the connection to the launcher; None for a single process without one."""
        self.number, self.control = number, control
        self.process = _compat.distributed_process()
        self.num_processes = _compat.num_distributed_processes()
        self.hosts = HostsOfProcesses.of_launcher(self.num_processes)
        self._exchange: Exchange | None = None
        self._posts = itertools.count()

    @property
    def exchange(self) -> Exchange:
        """Exchanges bytes; its first use starts the backend, which waits for all processes."""
        if self._exchange is None:
            self._exchange = Exchange()
        return self._exchange

    def change_pending(self) -> bool:
        """Whether the launcher wants members to leave at their next commit."""
        return self.control is not None and self.control.change_pending()

    def post(self, own: Any) -> list[Any]:
        """Each process's post, by process: values for JSON. Waits for all.

        Raises Leave if the launcher wants members to leave because another has died, and JaxRuntimeError if one does
        not post within the deadline.
        """
        index = next(self._posts)
        if self.num_processes == 1:
            return [json.loads(json.dumps(own))]
        self.put(f"{index}/{self.process}", json.dumps(own).encode())
        return [json.loads(self.get(f"{index}/{process}")) for process in range(self.num_processes)]

    def put(self, key: str, value: bytes) -> None:
        put, _ = _compat.key_value_store(_SLICE_SECONDS)
        put(f"jax_ring/elastic/{key}", value)

    def get(self, key: str) -> bytes:
        """Waits for a key's value. Raises the errors of `post`."""
        _, get = _compat.key_value_store(_SLICE_SECONDS)
        began = time.monotonic()
        while True:
            try:
                return get(f"jax_ring/elastic/{key}")
            except jax.errors.JaxRuntimeError:
                waited = time.monotonic() - began
                if waited > min(runtime.timeout(), _ENTRY_SECONDS):
                    raise
                if waited > _PATIENCE_SECONDS and self.change_pending():
                    raise Leave("another process has ended before it had entered the generation") from None


# ---- What ends a generation ------------------------------------------------------------------------------------------


def why_left(error: BaseException) -> str | None:
    """Why an exception of `train` makes this process leave its generation; else None.

    So does one raised while such an error was handled, unless `from None` or an exit.
    """
    if isinstance(error, Leave):
        return str(error)
    if not isinstance(error, Exception):
        return None
    for each in _chain(error):
        # JAX chooses the type: awaiting a result raises ValueError.
        if isinstance(each, jax.errors.JaxRuntimeError | ValueError) and _is_of_a_member(each):
            return str(each)
    return None


def _is_of_a_member(error: Exception) -> bool:
    failure = runtime.failure_of(error)
    if failure is not None:
        return failure.code == "DEADLINE_EXCEEDED"
    return foreign_errors.MEMBER_GONE.search(str(error)) is not None


def explain_dead(error: BaseException, generation: int) -> None:
    """Adds advice where an object of an earlier generation was used."""
    if generation and any(foreign_errors.DEAD.search(str(each)) for each in _chain(error)):
        error.add_note(
            f"jax_ring.elastic: this is generation {generation} of the job. Arrays, devices, meshes and jitted "
            "functions over them that were made before it are dead. Make them inside the function that "
            "jax_ring.elastic.run decorates, from the arrays in its state."
        )


def clear_frames(error: BaseException) -> None:
    """Frees what an exception's frames hold, such as arrays."""
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ if error.__suppress_context__ else error.__context__


# ---- From one to the next --------------------------------------------------------------------------------------------


def leave(how: runtime.Departure) -> None:
    """Drops all that this process has of its generation.

    Other members need not be alive; those that wait for this one get an error with the reason.
    """
    backends = _compat.backends_alive()
    exit_notice.abort(how)
    runtime.detach_processes()
    notes.leave()
    discovery.forget()
    _compat.detach_runtime()
    gc.collect()
    if any(backend() is not None for backend in backends):
        logger.info(
            "arrays or devices of an earlier generation are still referenced, by a global variable for example: they "
            "hold memory, about 15 threads and 2 sockets"
        )


def enter(control: Control, after: int, reason: str) -> Generation:
    """Waits to be a member of a later generation, and connects to the others.

    Raises RuntimeError with the launcher's reason if there will be none.
    """
    member: Member = control.next_generation(after, reason)
    while member.process_id < 0:
        member = control.next_generation(member.generation, "it is a spare")
    with with_own_handler():
        _compat.connect_to_runtime(member.coordinator, member.num_processes, member.process_id, runtime.timeout())
    discovery.publish()
    notes.enter(member.generation)
    return Generation(member.generation, control)
