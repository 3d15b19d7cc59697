"""A launcher that leads: the hosts that are here, this one among them, and what is proposed and said to them."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from jax_ring.launcher.arguments import Options
from jax_ring.launcher.events import JobEnded
from jax_ring.launcher.hosts.follower import Follower
from jax_ring.launcher.hosts.generation import Generation, Phase
from jax_ring.launcher.hosts.groups import Evidence, Group, Host, Register, chosen
from jax_ring.launcher.hosts.links import Link
from jax_ring.launcher.hosts.messages import Hello, Message, MessageError
from jax_ring.launcher.shared import Needs, Shared

# For messages, and for descendants of processes to end.
_SLACK_SECONDS = 5.0


def described(options: Options) -> tuple[str, float]:
    """The options that all launchers of a job have to share."""
    count = f"{options.min_nodes}:{options.nnodes}" if options.hosts_change else str(options.nnodes)
    return count, options.heartbeat_timeout


@dataclasses.dataclass
class Guest:
    """A host that is here. link: to it; None for that of this launcher."""

    link: Link | None
    send: Callable[[Message], None]
    host: Host
    node_rank: int | None  # which it asks for
    gone: tuple[str, ...] = ()  # hosts that it knows to be gone
    accepted: int = 0  # the last number


class Leader:
    """A launcher that leads.

    Attributes:
      follower: the side of this host that is led.
      guests: the hosts that are here, by id: this one, then others in the order in which they have come.
      generation: what runs; None if nothing does.
    """

    def __init__(self, own: Host, shared: Shared, register: Register, evidence: Evidence) -> None:
        self._shared, self._options = shared, shared.options
        self._register, self._evidence = register, evidence
        self.generation: Generation | None = None
        self._changed = asyncio.Event()
        self.follower = Follower(own, register, shared.queue, lambda message: self._hear(self._own, message))
        self.follower.leads = True
        self._own = Guest(None, self.follower.take, own, self._options.node_rank)
        self.guests = {own.id: self._own}

    # ---- Hosts -------------------------------------------------------------------------------------------------------

    async def serve(self, link: Link, hello: Hello) -> None:
        """Takes a host in, until its connection ends."""
        if refusal := self._refusal(hello):
            link.send(Message("refused", refusal))
            await link.close()
            return
        host = hello.host
        if host.id in self.guests:  # it has noticed first that the connection has ended
            self._lose(self.guests[host.id])
        guest = self.guests[host.id] = Guest(link, link.send, host, hello.node_rank, hello.gone)
        try:
            self._evidence.found(host.id)
            self._register.learn(hello.started, hello.accepted)
            self._shared.restarts = max(self._shared.restarts, hello.restarts)
            self._shared.others_commit = max(self._shared.others_commit, hello.newest_commit)
            self._shared.needs = self._shared.needs or hello.needs
            link.send(Message("welcome", self._shared.newest_commit()))
            self._compare()
            self._changed.set()
            while (message := await link.receive()) is not None:
                self._hear(guest, message)
        except MessageError as error:
            link.blame(error)
        finally:
            self._lose(guest)

    def _refusal(self, hello: Hello) -> str:
        own = described(self._options)
        if hello.options != own:
            names = "--nnodes {} and --heartbeat-timeout {:g}"
            return f"it was started with {names.format(*own)}, this host with {names.format(*hello.options)}"
        if hello.host.id == self._own.host.id:
            return "it is this launcher"
        for guest in self.guests.values():
            is_other = guest.host.id != hello.host.id
            if is_other and guest.node_rank is not None and guest.node_rank == hello.node_rank:
                at = f", at {guest.host.address}" if guest.host.address else ""
                return f"there is a launcher with --node-rank {hello.node_rank} already{at}"
        return ""

    def _hear(self, guest: Guest, message: Message) -> None:
        kind, value, attempt = message
        index = self._index(guest)
        if kind == "accepted":
            guest.accepted = value
        elif kind == "gone":
            guest.gone = value
        elif self.generation is not None and index is not None and attempt == self.generation.group.number:
            if kind == "enlisted":
                self._shared.needs = value
                self._compare()
            elif kind == "signalled":
                if guest is self._own and not self._options.hosts_change:
                    self.generation.end(*value)
            else:
                self.generation.take(index, kind, value)
        self._changed.set()

    def _lose(self, guest: Guest) -> None:
        assert guest.link is not None
        guest.link.abort()
        host = guest.host.id
        if self.guests.get(host) is not guest:
            return  # it has connected again
        del self.guests[host]
        self._evidence.lost(host, guest.link.heard, guest.link.acknowledged)
        index = self._index(guest)
        if self.generation is None or index is None:
            self._compare()
        elif index not in self.generation.ended:
            silent = f"has been silent for {self._options.heartbeat_timeout:g} s (--heartbeat-timeout)"
            what = silent if guest.link.is_silent else "is gone: its launcher has ended, or cannot be reached"
            self.generation.lose(index, what, is_change=self._options.hosts_change)
        self._changed.set()

    def drop(self) -> None:
        """Closes all connections."""
        for guest in self.guests.values():
            if guest.link is not None:
                guest.link.abort()

    async def end(self, status: int, reason: str) -> None:
        """Ends the job on all hosts."""
        over = Message("over", JobEnded(status, reason))
        links = [guest.link for guest in self.guests.values() if guest.link is not None]
        for link in links:
            link.send(over)
        await asyncio.gather(*(link.close() for link in links))
        self._own.send(over)

    async def next_change(self, seconds: float | None = None) -> None:
        """Waits until something changes, or so long."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # ---- Groups ------------------------------------------------------------------------------------------------------

    def is_enough(self) -> bool:
        """Whether the hosts that are here may go on, by what has been agreed on."""
        present = {*self.guests, *(guest.host.address for guest in self.guests.values())}
        return self._register.may_go_on(present, {host: guest.gone for host, guest in self.guests.items()})

    def here(self) -> list[Host]:
        """All hosts that are here, by --node-rank, and then in the order in which they have come."""
        last = self._options.nnodes
        guests = sorted(self.guests.values(), key=lambda each: last if each.node_rank is None else each.node_rank)
        return [guest.host for guest in guests]

    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the next group; none if they are not enough."""
        options, here = self._options, self.here()
        # Ranks follow --node-rank where the number of hosts is fixed.
        before = self._register.started if options.hosts_change else Group(0, ())
        hosts = chosen(before, here, options.nnodes, self._shared.needs or Needs())
        return hosts if len(hosts if options.hosts_change else here) >= options.min_nodes else ()

    def why_not(self) -> str:
        """Why the processes of the hosts that are here are too few."""
        hosts = [host for host in self.here() if host.slots]
        count, needs = sum(len(host.slots) for host in hosts), self._shared.needs or Needs()
        if needs.most(count) or len(hosts) < self._options.min_nodes:
            return f"{len(hosts)} hosts are left with a process, and it takes {self._options.min_nodes} (--nnodes)"
        return needs.why_not(count)

    def leave_out(self, ranks: Collection[int]) -> None:
        """Has the next groups go on without the slots of these ranks of the last one."""
        places = [self._register.started.place_of(rank) for rank in ranks]
        for host, guest in self.guests.items():
            slots = tuple(slot for slot in guest.host.slots if (host, slot) not in places)
            guest.host = guest.host._replace(slots=slots)

    async def agree(self, hosts: tuple[Host, ...], job: str) -> Group | None:
        """Proposes a group to all hosts that are here; None if one is lost before it has accepted."""
        group = Group(self._register.next_number(), hosts, job)
        asked, known = list(self.guests.values()), {*self._register.groups, group}
        for guest in asked:
            guest.send(Message("propose", group))
        while missing := [guest for guest in asked if guest.accepted != group.number]:
            if any(self.guests.get(guest.host.id) is not guest for guest in missing):
                return None
            await self.next_change()
        if known != {*self._register.groups}:
            return None  # a host has come that knows of another group
        self._register.learn(group, [])
        return group if set(group.ids) <= set(self.guests) else None

    def begin(self, group: Group, coordinator: str) -> Generation:
        """Starts a generation on all hosts."""
        self.generation = Generation(self._shared, group, group.index_of(self._own.host.id), self._send)
        start = Message("start", (group, coordinator, self._shared.restarts, self._shared.newest_commit()))
        for host, guest in self.guests.items():
            guest.send(start if host in group.ids or guest is self._own else Message("started", group))
        return self.generation

    async def finish(self) -> None:
        """Waits until the generation is over. Hosts that have processes left long after they were told are dropped."""
        if (generation := self.generation) is None:
            return
        await self._until(lambda: generation.is_over() or generation.phase is Phase.ENDING)
        try:
            async with asyncio.timeout(self._options.failure_grace + self._options.grace + _SLACK_SECONDS):
                await self._until(generation.is_over)
        except TimeoutError:
            for guest in self.guests.values():
                if guest.link is not None and self._index(guest) not in (None, *generation.ended):
                    guest.link.abort()
            await self._until(generation.is_over)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.next_change()

    def ended(self) -> None:
        """Nothing runs."""
        if self.generation is not None:
            self.generation.close()
        self.generation = None

    def _index(self, guest: Guest) -> int | None:
        """Its index among the hosts of the generation, if it is one of them."""
        return self.generation.group.index_of(guest.host.id) if self.generation is not None else None

    def _compare(self) -> None:
        """Tells the processes whether there would be other hosts."""
        if self.generation is not None:
            self.generation.change(self.hosts() not in ((), self.generation.group.hosts))

    def _send(self, kind: str, value: Any) -> None:
        """Sends a message about the generation to all of its hosts, and to the side of this one that is led."""
        assert self.generation is not None
        for guest in list(self.guests.values()):
            if self._index(guest) is not None or guest is self._own:
                guest.send(Message(kind, value, self.generation.group.number))
