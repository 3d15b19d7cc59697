"""What a job's attempts share, know of other hosts, and come to."""

import asyncio
import itertools
from typing import Any, NamedTuple

from jax_ring.launcher import events
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.control_server import ControlServer
from jax_ring.launcher.events import Failure
from jax_ring.launcher.output import Output
from jax_ring.launcher.processes import LogFiles
from jax_ring.launcher.watching.others import Others

_LONGEST_BACKOFF_SECONDS = 60.0


class Shared:
    """What a job's attempts share."""

    output: Output
    server: ControlServer
    kept: tuple[int, ...]  # the files in which elastic jobs keep commits: two for each slot

    def __init__(self, options: Options) -> None:
        self.options = options
        self.queue: asyncio.Queue[events.Event] = asyncio.Queue()
        self.restarts = 0  # used up so far
        self.numbers = itertools.count()  # of processes
        self.logs = LogFiles(options.log_dir)
        self.copying: list[asyncio.Task] = []  # the output of processes that have ended

    def take_restart(self) -> bool:
        """Uses up a restart; returns whether there was one."""
        if self.restarts == self.options.max_restarts:
            return False
        self.restarts += 1
        return True

    def backoff(self) -> float:
        """The seconds before the last restart taken."""
        doubled = self.options.backoff * 2.0 ** min(self.restarts - 1, 60)  # larger powers overflow in the end
        return min(doubled, _LONGEST_BACKOFF_SECONDS)


class Remote:
    """The other hosts, of which there are none here; each side of a connection overrides what it has a part in."""

    leads = True  # whether this launcher decides for all hosts
    asks_where: asyncio.Event  # set if the launcher that leads asks where this host's processes are

    def __init__(self) -> None:
        self.others = Others(self._send)  # what a launcher that leads knows of their processes

    def _send(self, message: dict[str, Any], index: int | None) -> None:
        """Sends a message about the attempt to a host, or to all."""

    def succeeded(self) -> bool:
        """Whether all other hosts' processes have exited with status 0, as far as this launcher decides."""
        return True

    async def stopped(self) -> None:
        """Waits until other hosts' processes have ended, or their launchers are gone."""

    def tell_failure(self, failure: Failure) -> bool:
        """Tells host 0 of a failure; returns whether its launcher decides what to do."""
        return False

    def tell_stop(self, signum: int, grace: float, reason: str) -> None:
        """Tells other hosts that this one's processes are being ended."""

    def tell(self, what: str, value: Any) -> None:
        """Tells the launcher that leads of this host's processes.

        what: "succeeded" once all have exited with status 0; "left" if one has left its generation, with whether all
          have, and why; "enlisted" with the `Needs` of an elastic job; "progress" with what `others.encoded` gives.
        """


class Outcome(NamedTuple):
    """How an attempt ended."""

    status: int  # for the launcher to exit with if this is the last attempt
    failure: Failure | None = None  # whose fault, if it failed
    is_stopped: bool = False  # whether a signal has ended it
    is_ended: bool = False  # whether the job is over, whatever restarts are left

    def blamed_on(self, cause: Failure | None) -> "Outcome":
        """This outcome, or a failure for a cause outside of the attempt's processes."""
        if self.failure is None or self.is_stopped or cause is None:
            return self
        return self._replace(status=cause.status, failure=cause)

    def or_stopped(self, signum: int | None) -> "Outcome":
        """The outcome by a signal which came while others ended, unless one has ended the attempt before."""
        return self if signum is None or self.is_stopped else stopped_by(signum)


def stopped_by(signum: int) -> Outcome:
    return Outcome(128 + signum, is_stopped=True)
