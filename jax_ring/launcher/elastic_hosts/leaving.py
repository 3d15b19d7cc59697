"""Processes of a job whose hosts come and go, which leave a generation: others are started in their place."""

import asyncio
import collections
from collections.abc import Callable, Sequence

from jax_ring.launcher.control_server import ControlServer
from jax_ring.launcher.processes import Process
from jax_ring.launcher.shared import Remote

_LOOKS = 10  # at a process until it counts as stopped


class Leaving:
    """The processes of one attempt on this host."""

    def __init__(self, server: ControlServer, remote: Remote, log: Callable[[str], None]) -> None:
        self._server, self._remote, self._log = server, remote, log
        self._left: set[int] = set()
        self._is_change_pending = False

    def enlisted(self, process: Process) -> None:
        """Tells a process at once, if it is to leave."""
        if self._is_change_pending:
            self._tell(process)

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
                    self.left(process, f"has been stopped for {limit:g} s (--heartbeat-timeout)", running())

    def left(self, process: Process, how: str, running: Sequence[Process]) -> None:
        """A process has left, or does not go on. It has no answer, because it does not live to see it."""
        self._log(f"{process.name} {how}")
        self._left.add(process.number)
        is_all = all(other.number in self._left for other in running)
        self._remote.tell("left", [is_all, f"{process.name} {how}"])

    def _tell(self, process: Process) -> None:
        self._server.tell(process.number, {"change_pending": self._is_change_pending})
