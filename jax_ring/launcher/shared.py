"""What a job's attempts share, and know of other hosts."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator

from jax_ring.launcher import events
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.control_server import ControlServer
from jax_ring.launcher.failures import Failure
from jax_ring.launcher.output import Output
from jax_ring.launcher.processes import LogFiles, Process
from jax_ring.launcher.watching.others import Others
from jax_ring.launcher.watching.report import Place


@dataclasses.dataclass
class Shared:
    """What a job's attempts share.

    Attributes:
      numbers: of processes.
      copying: the tasks that copy the output of processes that have ended.
      take_restart: uses up one of the restarts; False if there are none left.
      backoff: the wait before the restart that was taken last, in seconds.
      kept: the files in which elastic jobs keep commits: two for each slot.
    """

    options: Options
    output: Output
    queue: asyncio.Queue[events.Event]
    server: ControlServer
    numbers: Iterator[int]
    logs: LogFiles
    copying: list[asyncio.Task]
    take_restart: Callable[[], bool]
    backoff: Callable[[], float]
    kept: tuple[int, ...]


class Remote:
    """The other hosts; one side overrides what it has a part in.

    Attributes:
      others: their processes, for the launcher that leads.
      asks_where: set if that launcher asks where this host's processes are.
    """

    others: Others | None = None  # the sides that lead replace it
    asks_where: asyncio.Event

    def succeeded(self) -> bool:
        """Whether all hosts' processes have exited with status 0, as far as host 0 knows."""
        return False

    def tell_failure(self, failure: Failure) -> bool:
        """Tells host 0 of a failure; returns whether its launcher decides what to do."""
        return False

    def tell_stop(self, signum: int, grace: float, reason: str) -> None:
        """Tells other hosts that this one's processes are being ended."""

    def tell_success(self) -> None:
        """Tells host 0 that this host's processes have exited with status 0."""

    def tell_left(self, is_all: bool, reason: str) -> None:
        """Tells the launcher that leads that a process has left its generation, or all of this host have."""

    def tell_enlisted(self, min_processes: int, multiple_of: int | None) -> None:
        """Tells it what the processes have asked for."""

    def tell_progress(self, process: Process, place: Place | None) -> None:
        """Tells it how far a process is, and where."""
