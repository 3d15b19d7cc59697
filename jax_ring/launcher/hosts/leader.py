"""A launcher that leads: the hosts that are here, this one among them, and what is proposed and said to them."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

from jax_ring.launcher.arguments import Options
from jax_ring.launcher.hosts.follower import Follower
from jax_ring.launcher.hosts.generation import Generation, Phase
from jax_ring.launcher.hosts.groups import Evidence, Group, Host, Register, chosen
from jax_ring.launcher.hosts.links import Link
from jax_ring.launcher.shared import Needs, Shared

# For messages, and for descendants of processes to end.
_SLACK_SECONDS = 5.0


def described(options: Options) -> list[Any]:
    """The options that all launchers of a job have to share."""
    count = f"{options.min_nodes}:{options.nnodes}" if options.hosts_change else str(options.nnodes)
    return [count, options.heartbeat_timeout]


@dataclasses.dataclass
class Guest:
    """A host that is here. link: to it; None for that of this launcher."""

    link: Link | None
    send: Callable[[dict[str, Any]], None]
    host: Host
    node_rank: int | None  # which it asks for
    gone: list[str]  # what it knows to be gone
    accepted: int = 0  # the last number


class Leader:
    """A launcher that leads.

    Attributes:
      follower: the side of this host that is led.
      guests: the hosts that are here, by id: this one, then others in the order in which they have come.
      group, generation: what runs; None if nothing does.
    """

    def __init__(self, own: Host, shared: Shared, register: Register, evidence: Evidence) -> None:
        self._own_id, self._shared, self._options = own.id, shared, shared.options
        self._register, self._evidence = register, evidence
        self.group: Group | None = None
        self.generation: Generation | None = None
        self._changed = asyncio.Event()
        self.follower = Follower(own.id, register, shared.queue, lambda message: self._hear(self._own, message))
        self.follower.leads = True
        self.guests = {own.id: Guest(None, self.follower.take, own, self._options.node_rank, [])}

    @property
    def _own(self) -> Guest:
        return self.guests[self._own_id]

    @property
    def name(self) -> str:
        """This launcher, for other hosts."""
        return self._own.host.address if self._options.hosts_change else "host 0"

    # ---- Hosts -------------------------------------------------------------------------------------------------------

    async def serve(self, link: Link, hello: dict[str, Any]) -> None:
        """Takes a host in, until its connection ends."""
        if refusal := self._refusal(hello):
            link.send({"error": refusal})
            await link.close()
            return
        id_, address, slots = hello["host"]
        if id_ in self.guests:  # it has noticed first that the connection has ended
            self._lose(self.guests[id_])
        host = Host(id_, address, tuple(slots))
        guest = self.guests[id_] = Guest(link, link.send, host, hello["node_rank"], hello["gone"])
        self._evidence.found(id_)
        self._register.learn(
            Group.of_message(hello["started"]), [Group.of_message(group) for group in hello["accepted"]]
        )
        self._shared.restarts = max(self._shared.restarts, hello["restarts"])
        if hello["needs"] is not None:
            self._shared.needs = self._shared.needs or Needs(*hello["needs"])
        link.send({"welcome": self._own_id})
        self._compare()
        self._changed.set()
        while (message := await link.receive()) is not None:
            self._hear(guest, message)
        self._lose(guest)

    def _refusal(self, hello: dict[str, Any]) -> str:
        own = described(self._options)
        if hello["options"] != own:
            names = "--nnodes {} and --heartbeat-timeout {:g}"
            return f"it was started with {names.format(*own)}, this host with {names.format(*hello['options'])}"
        rank = hello["node_rank"]
        for host in [each.host for each in self.guests.values() if rank is not None and each.node_rank == rank]:
            if host.id != hello["host"][0]:
                at = f", at {host.address}" if host.address else ""
                return f"there is a launcher with --node-rank {rank} already{at}"
        return ""

    def _hear(self, guest: Guest, message: dict[str, Any]) -> None:
        if "accepted" in message:
            guest.accepted = message["accepted"]
        elif "gone" in message:
            guest.gone = message["gone"]
        elif self.group is not None and self.generation is not None and message.get("attempt") == self.group.number:
            if (index := self._index(guest)) is None:
                return
            for what, value in message.items():
                if what == "enlisted":
                    self._shared.needs = Needs(*value)
                    self._compare()
                elif what == "signalled" and guest is self._own and not self._options.hosts_change:
                    self.generation.end(*value)
                else:
                    self.generation.take(index, what, value)
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
        links = [guest.link for guest in self.guests.values() if guest.link is not None]
        for link in links:
            link.send({"over": [status, f"{self.name}: {reason}"]})
        await asyncio.gather(*(link.close() for link in links))
        self._own.send({"over": [status, reason]})

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
        for guest in self.guests.values():
            guest.host = guest.host.without([slot for host, slot in places if host == guest.host.id])

    async def agree(self, hosts: tuple[Host, ...], job: str) -> Group | None:
        """Proposes a group to all hosts that are here; None if one is lost before it has accepted."""
        group = Group(self._register.next_number(), hosts, job)
        asked, known = list(self.guests.values()), {*self._register.groups, group}
        for guest in asked:
            guest.send({"propose": group})
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
        self.group = group
        self.generation = Generation(self._shared, group, self._index(self._own), self._send)
        start = {"group": group, "coordinator": coordinator, "restarts": self._shared.restarts}
        for host, guest in self.guests.items():
            guest.send({"start": start} if host in group.ids or guest is self._own else {"started": group})
        return self.generation

    async def finish(self) -> None:
        """Waits until the generation is over. Hosts that have processes left long after they were told are dropped."""
        generation, until = self.generation, None
        while generation is not None and not generation.is_over():
            now = asyncio.get_running_loop().time()
            if until is None and generation.phase is Phase.ENDING:
                until = now + self._options.failure_grace + self._options.grace + _SLACK_SECONDS
            if until is not None and until <= now:
                until = math.inf
                for guest in list(self.guests.values()):
                    if guest.link is not None and self._index(guest) not in (None, *generation.ended):
                        self._lose(guest)
            await self.next_change(until - now if until is not None and until < math.inf else None)

    def ended(self) -> None:
        """Nothing runs."""
        if self.generation is not None:
            self.generation.close()
        self.group = self.generation = None

    def _index(self, guest: Guest) -> int | None:
        """Its index among the hosts of the generation, if it is one of them."""
        return self.group.ids.index(guest.host.id) if self.group and guest.host.id in self.group.ids else None

    def _compare(self) -> None:
        """Tells the processes whether there would be other hosts."""
        if self.group is not None and self.generation is not None:
            self.generation.change(self.hosts() not in ((), self.group.hosts))

    def _send(self, message: dict[str, Any], index: int | None = None) -> None:
        """Sends a message about the generation to a host, or to all."""
        assert self.group is not None
        for guest in list(self.guests.values()):
            place = self._index(guest)
            if (place is not None or guest is self._own) and index in (None, place):
                reason = {"end": [f"{self.name}: {end[0]}", *end[1:]]} if (end := message.get("end")) else {}
                guest.send({**message, **(reason if guest.link else {}), "attempt": self.group.number})
