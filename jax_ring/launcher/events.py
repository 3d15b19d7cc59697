"""What a launcher waits for."""

import asyncio
from collections.abc import Callable
from types import UnionType
from typing import Any, NamedTuple

from jax_ring.launcher.environment import Plan
from jax_ring.launcher.failures import Failure

# Answers a process. The answer may come later.
Answer = Callable[[dict[str, Any]], None]


class Due(NamedTuple):
    """Something for the attempt to do, which returns why the job ends, or None."""

    do: Callable[[], str | None]


class Signalled(NamedTuple):
    signum: int


class Asked(NamedTuple):
    """A process has sent a message, to be answered by `answer`."""

    process: int
    message: dict[str, Any]
    answer: Answer


class Stuck(NamedTuple):
    """Processes no longer go on, and the job is to end."""

    blamed: dict[int, str]  # what is said of those for which the others wait, by process
    waiting: tuple[int, ...]  # the others that are behind


class RemoteFailed(NamedTuple):
    node: int
    failure: Failure


class RemoteChanged(NamedTuple): ...


class RemoteStop(NamedTuple):
    """The launcher that leads ends this host's processes, within a grace period in seconds."""

    signum: int
    grace: float
    reason: str


class RemoteBegin(NamedTuple):
    """The launcher that leads starts an attempt."""

    plan: Plan  # this host's part of it
    restarts: int  # used up by the job so far


class RemotePending(NamedTuple):
    """Whether other hosts are to take part: the processes leave at their next commit then."""

    is_pending: bool


class RemoteLeft(NamedTuple):
    """All processes have left, or should have: others are started in their place."""

    reason: str


class RemoteEnd(NamedTuple):
    status: int
    reason: str


Event = (
    Due
    | Signalled
    | Asked
    | Stuck
    | RemoteFailed
    | RemoteChanged
    | RemoteBegin
    | RemotePending
    | RemoteLeft
    | RemoteStop
    | RemoteEnd
)


def forget(queue: asyncio.Queue[Event], but: type | UnionType) -> None:
    """Drops the events that are queued, but those of some types."""
    for _ in range(queue.qsize()):
        if isinstance(event := queue.get_nowait(), but):
            queue.put_nowait(event)
