"""Processes of a job whose hosts come and go, which leave a generation: others are started in their place."""

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import Any

from jax_ring.launcher.control_server import ControlServer
from jax_ring.launcher.processes import Process
from jax_ring.launcher.shared import Remote

_LOOKS = 10  # at a process until it counts as stopped


class Leaving:
    """The processes of one attempt on this host."""

    def __init__(self, server: ControlServer, remote: Remote, log: Callable[[str], None]) -> None:
        self._server, self._remote, self._log = server, remote, log
        self._enlisted: tuple[int, int | None] | None = None
        self._left: set[int] = set()
        self._is_change_pending = False

    def asked(
        self,
        process: Process,
        message: dict[str, Any],
        answer: Callable[[dict[str, Any]], None],
        running: Sequence[Process],
    ) -> None:
        """Answers `enlist`; `next_generation` has no answer, because no process lives to see it."""
        try:
            if message["do"] == "enlist":
                self._enlist(message["min_processes"], message["multiple_of"])
                answer({"done": True})
                if self._is_change_pending:
                    self._tell(process)
            elif message["do"] == "next_generation":
                self._leaves(process, f"has left: {message['reason']}", running)
            else:
                raise ValueError(f"unknown request {message['do']!r}")
        except (ValueError, KeyError, TypeError) as error:
            answer({"error": str(error)})

    def change_pending(self, is_pending: bool, running: Sequence[Process]) -> None:
        """Has the processes leave at their next commit, or no longer."""
        self._is_change_pending = is_pending
        for process in running:
            self._tell(process)

    async def watch_stopped(self, running: Callable[[], Sequence[Process]], limit: float) -> None:
        """Counts processes as having left that a signal has stopped for `limit` seconds. Runs until it is cancelled.

        While processes start, nothing else tells those that wait for them before JAX's own limit of minutes.
        """
        looks: collections.Counter[int] = collections.Counter()
        while True:
            await asyncio.sleep(limit / _LOOKS)
            for process in running():
                looks[process.number] = looks[process.number] + 1 if process.is_stopped() else 0
                if looks[process.number] == _LOOKS:
                    self._leaves(process, f"has been stopped for {limit:g} s (--heartbeat-timeout)", running())

    def _leaves(self, process: Process, how: str, running: Sequence[Process]) -> None:
        self._log(f"{process.name} {how}")
        self._left.add(process.number)
        is_all = all(other.number in self._left for other in running)
        self._remote.tell_left(is_all, f"{process.name} {how}")

    def _enlist(self, min_processes: int, multiple_of: int | None) -> None:
        if min_processes < 1:
            raise ValueError(f"enlist(min_processes={min_processes}): must be at least 1")
        if multiple_of is not None and multiple_of < min_processes:
            raise ValueError(
                f"enlist(multiple_of={multiple_of}): {min_processes} processes or more cannot divide {multiple_of}"
            )
        if self._enlisted is None:
            self._enlisted = min_processes, multiple_of
            self._remote.tell_enlisted(min_processes, multiple_of)
        elif self._enlisted != (min_processes, multiple_of):
            raise ValueError(
                f"enlist(): another process gave min_processes={self._enlisted[0]}, multiple_of={self._enlisted[1]}; "
                f"this one {min_processes}, {multiple_of}"
            )

    def _tell(self, process: Process) -> None:
        self._server.tell(process.number, {"change_pending": self._is_change_pending})
