"""What launchers say to each other, as JSON. Each is checked as a whole before anything of it is used."""

from typing import Any, NamedTuple

from jax_ring.launcher.events import Blamed, ChangePending, End, Failure, JobEnded
from jax_ring.launcher.hosts.groups import Group, Host
from jax_ring.launcher.schema import checked, read
from jax_ring.launcher.shared import Needs
from jax_ring.launcher.watching.page import Notes
from jax_ring.launcher.watching.report import Place


class Answer(NamedTuple):
    """What a launcher says of itself to one that has connected."""

    id: str  # random
    address: str  # as in `Host`
    leads: bool
    follows: bool
    number: int  # of the last group that it knows to have started
    runs: bool  # whether it leads one that runs


class Hello(NamedTuple):
    """What a launcher says of its host to the one that is to lead it."""

    host: Host
    node_rank: int | None  # which it asks for
    gone: tuple[str, ...]  # hosts that can no longer start a group of their own
    restarts: int  # used up by the job
    newest_commit: int  # that it knows of
    needs: Needs | None
    started: Group  # the last that it knows to have
    accepted: tuple[Group, ...]  # later ones
    options: tuple[str, float]  # that all launchers of a job have to share


# The value of each kind of message.
_VALUES: dict[str, Any] = {
    "alive": tuple[float, float | None],  # a sign of life: when it was sent, and the last one of the other side
    # Between one that listens, which begins, and one that has connected.
    "answer": Answer,
    "hello": Hello,
    "welcome": int,  # the newest commit that it knows of
    "refused": str,  # why
    # By the launcher that leads.
    "propose": Group,
    "start": tuple[Group, str, int, int],  # host:port of the coordination service, restarts used up, the newest commit
    "started": Group,  # without the host that is told
    "over": JobEnded,
    # By the same, of the generation.
    "end": End,
    "pending": ChangePending,
    "blamed": Blamed,
    "where": bool,  # are the host's processes
    # By a launcher that is led.
    "accepted": int,  # the number of a group
    "gone": tuple[str, ...],  # hosts that can no longer start a group of their own
    # By the same, of its processes in the generation.
    "initializes": int,  # a rank, in jax.distributed.initialize()
    "enlisted": Needs,  # of an elastic job
    "failed": tuple[Failure, bool],  # and whether the process has ended or is to
    "exited": tuple[int, str],  # with status 0: a rank, and the name of the process
    "left": tuple[int, str],  # a rank, and why
    "progress": tuple[tuple[int, Notes], ...],  # each rank, and what is known of it
    "place": tuple[int, Place],  # a rank, and where it is: an answer to "where"
    "signalled": End,  # how this launcher ends its processes
    "ended": int,  # none runs any more: the newest commit that it knows of
}


class MessageError(ValueError):
    """What another launcher has said is no message, or not for it to say."""


class Message(NamedTuple):
    kind: str  # a key of `_VALUES`
    value: Any
    attempt: int = 0  # the number of the group whose generation it is about; 0 if it is about none


def decode(data: bytes) -> Message:
    """Raises MessageError if it is not a whole message."""
    try:
        kind, value, attempt = read(data, tuple[str, Any, int])
        return Message(kind, checked(value, _VALUES[kind]), attempt)
    except (ValueError, KeyError) as error:
        raise MessageError(f"{data[:100]!r} is no message of a launcher") from error
