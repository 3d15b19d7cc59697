"""A generation as its members see it: leaving it, entering the next, meeting the others."""

import gc
import itertools
import json
import logging
import time
from typing import Any

import jax

from jax_ring import _compat, runtime
from jax_ring.distributed import discovery, exit_notice
from jax_ring.elastic.exchange import Exchange
from jax_ring.elastic.failures import Leave
from jax_ring.elastic.layout import Layout
from jax_ring.launcher.coordinator.server import with_own_handler
from jax_ring.launcher.protocol import Control, Member
from jax_ring.progress import notes

logger = logging.getLogger("jax_ring")

_SLICE_SECONDS = 0.2
# All processes enter a generation at the same time. One that takes longer than this has died or is stopped.
_ENTRY_SECONDS = 20.0
# After waiting this long for the others, a process asks the launcher whether one has died. It does not ask at once: a
# new process may be waiting to join, and that is no reason to leave before the next commit.
_PATIENCE_SECONDS = 1.0


class Generation:
    """The members of a job between two changes."""

    def __init__(self, number: int, control: Control | None) -> None:
        """number: from 0. control: the connection to the launcher; None for a single process without one."""
        self.number, self.control = number, control
        self.process = _compat.distributed_process()
        self.num_processes = _compat.num_distributed_processes()
        self.layout = Layout.of_launcher(self.num_processes)
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
