"""Which hosts take part: what launchers have agreed on, who is left of it, and what is known of the others.

A leader proposes a group with the next number to all its hosts, and starts it when all have accepted. Two groups that
cannot reach each other never both start: both would need some of the hosts of the last group.
"""

import bisect
import dataclasses
import itertools
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jax_ring.launcher.environment import Plan
from jax_ring.launcher.shared import Needs

# A launcher goes on without the other of two only if that one cannot have given it up before it ended. This is the part
# of the time after which it would have, so that clocks may differ a little.
_MARGIN = 0.8
_MOST_SLOTS = 1 << 16  # of a host
_MOST_NUMBERS = 1 << 40


class Host(NamedTuple):
    """A launcher in a group."""

    id: str  # random, of one launcher: one that is started again has another
    address: str  # host:port where it listens; empty if it does not
    slots: tuple[int, ...]  # the places of the processes that it starts

    def validate(self) -> None:
        if list(self.slots) != sorted({slot for slot in self.slots if 0 <= slot < _MOST_SLOTS}):
            raise ValueError(f"{self.slots!r:.100} are no places of processes")


class Group(NamedTuple):
    """The hosts of a generation, those that were there before first. Number 0 is for the beginning."""

    number: int
    hosts: tuple[Host, ...]
    job: str = ""  # random, of all groups of a job

    def validate(self) -> None:
        if not 0 <= self.number < _MOST_NUMBERS or len(set(self.ids)) < len(self.hosts):
            raise ValueError(f"a group with the number {self.number}, or a host twice")
        if self.job and not self.job.isalnum():  # it names what is of the job
            raise ValueError(f"{self.job!r:.100} names no job")

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(host.id for host in self.hosts)

    @property
    def num_processes(self) -> int:
        return sum(len(host.slots) for host in self.hosts)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The index of each host's first process."""
        return tuple(itertools.accumulate((len(host.slots) for host in self.hosts[:-1]), initial=0))

    def ranks_of(self, index: int) -> range:
        """The ranks of a host, by its index."""
        return range(self.firsts[index], self.firsts[index] + len(self.hosts[index].slots))

    def index_of(self, host: str) -> int | None:
        """The index of the host with an id, if it is of the group."""
        return self.ids.index(host) if host in self.ids else None

    def plan_of(self, host: str, coordinator: str) -> Plan:
        """The part of a host with an id. One that is not of the group, such as a leader, has no processes."""
        index = self.index_of(host)
        slots, first = ((), 0) if index is None else (self.hosts[index].slots, self.firsts[index])
        return Plan(self.job, self.number - 1, slots, first, self.num_processes, coordinator, self.firsts)

    def place_of(self, rank: int) -> tuple[str, int]:
        """The host's id and the slot of a rank."""
        index = bisect.bisect(self.firsts, rank) - 1
        return self.hosts[index].id, self.hosts[index].slots[rank - self.firsts[index]]

    def may_go_on(self, present: Collection[str], gone: Mapping[str, Collection[str]]) -> bool:
        """Whether hosts with these ids are enough of the group for a next one.

        More than half of them, or half with the first. One of two needs to know of the other that it has ended, or for
        the first that it has been silent for so long that it cannot think so itself.

        gone: by id, what this host knows to be gone.
        """
        here = [host for host in self.ids if host in present]
        if len(self.hosts) == 2 and len(here) == 1 and self.number:
            return not set(self.ids) - {here[0]} - set(gone.get(here[0], ()))
        return 2 * len(here) > len(self.hosts) or (2 * len(here) == len(self.hosts) > 0 and self.ids[0] in here)


def at_the_beginning(addresses: Sequence[str]) -> Group:
    """The group before the first, of the launchers that may lead; their addresses stand for ids."""
    return Group(0, tuple(Host(address, address, ()) for address in addresses))


class Register:
    """What one launcher has agreed to."""

    def __init__(self, beginning: Group) -> None:
        self.started = beginning  # the last group that it knows to have started
        self.accepted: tuple[Group, ...] = ()  # later ones, of which it does not know whether they have started

    def learn(self, started: Group, accepted: Collection[Group]) -> None:
        """Adds what another launcher has agreed to."""
        if started.number > self.started.number:
            self.started = started
        later = {group for group in (*self.accepted, *accepted) if group.number > self.started.number}
        self.accepted = tuple(sorted(later))

    @property
    def groups(self) -> tuple[Group, ...]:
        """Candidates for the group that started last."""
        return self.started, *self.accepted

    def next_number(self) -> int:
        return max(group.number for group in self.groups) + 1

    def may_go_on(self, present: Collection[str], gone: Mapping[str, Collection[str]]) -> bool:
        """Whether these hosts are enough, whichever of the groups has started last."""
        return all(group.may_go_on(present, gone) for group in self.groups)


def chosen(before: Group, waiting: Sequence[Host], most_hosts: int, needs: Needs) -> tuple[Host, ...]:
    """The hosts of the next group: those of the last one first, then others in the order in which they have come.

    Those that the number of processes leaves over have fewer, or are left out; none if they are too few.
    """
    by_id = {host.id: host for host in waiting}
    old = [by_id[host] for host in before.ids if host in by_id]
    hosts = [*old, *(host for host in waiting if host not in old)][:most_hosts]
    left = needs.most(sum(len(host.slots) for host in hosts))
    result = []
    for host in hosts:
        slots = host.slots[:left]
        left -= len(slots)
        if slots:
            result.append(host._replace(slots=slots))
    return tuple(result)


# ---- Hosts that are lost ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Loss:
    """A launcher whose connection has ended.

    heard: when it was heard last. acknowledged: when this side sent the last sign of life that it is known to have got.
    ended: by when it is known to have ended; infinity if it is not. at: the time of day.
    """

    heard: float
    acknowledged: float = -math.inf
    ended: float = math.inf
    at: str = dataclasses.field(default_factory=lambda: time.strftime("%H:%M:%S"))


class Evidence:
    """What a launcher knows of others that it has lost: whether they have ended, and since when they are silent.

    silence: after so many seconds without a sign of life launchers give each other up.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._losses: dict[str, _Loss] = {}

    def found(self, host: str) -> None:
        self._losses.pop(host, None)

    def lost(self, host: str, heard: float, acknowledged: float) -> None:
        """A connection to it has ended. The numbers are those of `Link`."""
        self._losses[host] = _Loss(heard, acknowledged)

    def ended(self, host: str) -> None:
        """Nobody listens at its address, or somebody else."""
        loss = self._losses.setdefault(host, _Loss(time.monotonic()))
        loss.ended = min(loss.ended, time.monotonic())

    def is_accounted_for(self, host: str) -> bool:
        """Whether there is no hope that it comes soon."""
        loss = self._losses.get(host)
        return loss is not None and (loss.ended < math.inf or time.monotonic() - loss.heard > self._silence)

    def describe(self, host: str) -> str:
        loss = self._losses.get(host)
        if loss is None:
            return "not heard of yet"
        return f"{'ended' if loss.ended < math.inf else 'silent, or cannot be reached,'} since {loss.at}"

    def gone(self, own: str, group: Group) -> list[str]:
        """Who can no longer start a group of its own, of the two hosts of a group; see `Group.may_go_on`.

        The first of the two starts one without the other only if that one has ended, or was silent for so long. So the
        other may go on without the first if it has ended earlier than that.
        """
        if len(group.hosts) != 2 or own not in group.ids:
            return []
        (other,) = set(group.ids) - {own}
        if own == group.ids[0]:
            return [other] if self.is_accounted_for(other) else []
        loss = self._losses.get(other)
        is_known = loss is not None and loss.ended < loss.acknowledged + _MARGIN * self._silence
        return [other] if is_known else []
