"""The failures that a launcher hears of, and the events that it waits for."""

import asyncio
import signal
from typing import NamedTuple

from jax_ring.launcher.environment import Plan
from jax_ring.launcher.processes import describe_status

NO_RANK = -1
_MESSAGE_LENGTH = 500  # of an exception, in the launcher's last line


# ---- Failures --------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """The failure of a process."""

    name: str  # of the process, for messages
    rank: int  # its first index; NO_RANK for a process of the launcher
    what: str  # what happened, after the name
    status: int = 1  # for the launcher to exit with
    caused_by: int | None = None  # the process it blames; -1 if unknown, None for itself

    @property
    def is_own(self) -> bool:
        return self.caused_by is None

    def __str__(self) -> str:
        return f"{self.name} {self.what}"

    def validate(self) -> None:
        """No failure ends a launcher with success."""
        _check_status(self.status, 1)


def _check_status(status: int, least: int) -> None:
    """Of a launcher, which the system would cut to a byte."""
    if not least <= status < 256:
        raise ValueError(f"{status} is no exit status from {least} to 255")


def failure_of_status(name: str, rank: int, status: int) -> Failure:
    """A status other than 0, without a report."""
    return Failure(name, rank, describe_status(status), status if status > 0 else 128 - status)


class Report(NamedTuple):
    """What a process tells of the exception that ends it."""

    type: str
    message: str
    caused_by: int | None  # as in `Failure`


def failure_of_report(name: str, rank: int, report: Report) -> Failure:
    text = next(iter(report.message.strip().splitlines()), "")
    if len(text) > _MESSAGE_LENGTH:
        text = text[:_MESSAGE_LENGTH] + " ..."
    return Failure(name, rank, f"raised {report.type}" + (f": {text}" if text else ""), caused_by=report.caused_by)


class Failures(dict[int, Failure]):
    """A generation's failures, in the order in which they became known: by rank, or a negative number for a host."""

    def own(self) -> list[Failure]:
        """Those by a process's own fault."""
        return [failure for failure in self.values() if failure.is_own]

    def first(self) -> Failure:
        """The first by a process's own fault; without any, the first. There has to be one."""
        return (self.own() or [*self.values()])[0]

    def awaited(self) -> set[int]:
        """The ranks that failures blame, and whose own is not known."""
        return {rank for failure in self.values() if (rank := failure.caused_by) is not None and rank >= 0} - set(self)

    def lost(self, count: int) -> frozenset[int]:
        """The ranks at fault, of so many: by themselves, or else those that are blamed, or else all that failed."""
        own = {failure.rank for failure in self.own()}
        return frozenset(own or self.awaited() or {failure.rank for failure in self.values()}) & frozenset(range(count))


# ---- Events ----------------------------------------------------------------------------------------------------------


class Begin(NamedTuple):
    """The launcher that leads starts a generation."""

    plan: Plan  # this host's part of it
    restarts: int  # used up by the job so far
    newest_commit: int  # that the launcher that leads knows of


class ChangePending(NamedTuple):
    """Whether other hosts are to take part: the processes leave at their next commit then."""

    is_pending: bool


class Blamed(NamedTuple):
    """Other processes wait for a rank of this host."""

    rank: int


class End(NamedTuple):
    """The processes of this host are to end: why, by which signal, and after how many seconds they are killed."""

    reason: str
    signum: signal.Signals
    grace: float


class Signalled(NamedTuple):
    """A signal to the launcher ends the job."""

    signum: signal.Signals


class LeaderLost(NamedTuple):
    """The launcher that leads is out of reach, or another one is to lead."""

    reason: str


class JobEnded(NamedTuple):
    status: int
    reason: str

    def validate(self) -> None:
        _check_status(self.status, 0)


Event = Begin | ChangePending | Blamed | End | Signalled | LeaderLost | JobEnded


def forget(queue: asyncio.Queue[Event]) -> None:
    """Drops the events that are queued, but signals."""
    for _ in range(queue.qsize()):
        if isinstance(event := queue.get_nowait(), Signalled):
            queue.put_nowait(event)
