"""What a launcher waits for."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax_ring.launcher.failures import Failure


class Exited(NamedTuple):
    """A process of this host has exited."""

    process: int


class Signalled(NamedTuple):
    """The launcher has received a signal."""

    signum: int


class Asked(NamedTuple):
    """A process has sent a message, to which `answer` replies."""

    process: int
    message: dict[str, Any]
    answer: Callable[[dict[str, Any]], None]


class Reminder(NamedTuple):
    """A time has come: that of `process` to exit after it has reported its failure, or of all, to name their cause."""

    process: int | None


class Tick(NamedTuple):
    """It is time to look again."""


class Replace(NamedTuple):
    """It is time to replace a process that died."""

    slot: int
    rank: int


class RemoteFailed(NamedTuple):
    """A process of another host has failed."""

    node: int
    failure: Failure


class RemoteChanged(NamedTuple):
    """What is known of other hosts has changed."""


class RemoteStart(NamedTuple):
    """The launcher of host 0 wants an attempt to start: the fields of its plan that do not depend on this host."""

    restart: int
    first: int
    num_processes: int
    coordinator: str


class RemoteStop(NamedTuple):
    """The launcher of host 0 wants this host's processes to end, within a grace period in seconds."""

    signum: int
    grace: float
    reason: str


class RemoteEnd(NamedTuple):
    """The job has ended."""

    status: int
    reason: str


Event = (
    Exited
    | Signalled
    | Asked
    | Reminder
    | Tick
    | Replace
    | RemoteFailed
    | RemoteChanged
    | RemoteStart
    | RemoteStop
    | RemoteEnd
)
