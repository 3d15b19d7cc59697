"""The leading launcher's side: the hosts that have come, what is proposed to them, and the attempt on them."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ring.launcher import events
from jax_ring.launcher.elastic_hosts.groups import Evidence, Group, Host, Register, chosen
from jax_ring.launcher.events import NO_RANK, Failure
from jax_ring.launcher.multi_host.links import Leads, Link
from jax_ring.launcher.shared import Shared


@dataclasses.dataclass
class Guest:
    """Another host. node_rank: which it asks for. gone: what it knows to be gone. accepted: the last number."""

    link: Link
    host: Host
    node_rank: int | None
    gone: list[str]
    accepted: int = 0


class Leader(Leads):
    def __init__(self, own: Host, shared: Shared, register: Register, evidence: Evidence) -> None:
        super().__init__(own.address, shared.queue)
        self._own, self._shared, self._options = own, shared, shared.options
        self._register, self._evidence = register, evidence
        self.guests: dict[str, Guest] = {}  # by id, in the order in which they have come
        self.group: Group | None = None  # that runs
        # Whether a host has been lost since the group was started, or its processes have left for a change.
        self.has_changed = False
        self._left: set[str] = set()
        self._leave_timer: asyncio.TimerHandle | None = None
        self._is_change_pending = self._has_told_change = self._is_stopping = False

    # ---- Hosts -------------------------------------------------------------------------------------------------------

    async def serve(self, link: Link, hello: dict[str, Any]) -> None:
        """Takes a host in, until its connection ends."""
        if refusal := self._refusal(hello):
            link.send({"error": refusal})
            await link.close()
            return
        host = Host(*hello["host"])
        if host.id in self.guests:  # it has noticed first that the connection has ended
            self._lose(self.guests[host.id])
        guest = self.guests[host.id] = Guest(link, host, hello["node_rank"], hello["gone"])
        self._evidence.found(host.id)
        self._register.learn(
            Group.of_message(hello["started"]), [Group.of_message(group) for group in hello["accepted"]]
        )
        self._shared.restarts = max(self._shared.restarts, hello["restarts"])
        self._register.enlisted = self._register.enlisted or hello["enlisted"]
        link.send({"welcome": self._own.id})
        self._compare()
        self._notify()
        while (message := await link.receive()) is not None:
            self._hear(guest, message)
        self._lose(guest)

    def _refusal(self, hello: dict[str, Any]) -> str:
        own = [self._options.min_nodes, self._options.nnodes, self._options.heartbeat_timeout]
        if hello["options"] != own:
            names = "--nnodes {}:{} and --heartbeat-timeout {:g}"
            return f"it was started with {names.format(*own)}, this host with {names.format(*hello['options'])}"
        rank = hello["node_rank"]
        others = [(guest.node_rank, guest.host) for guest in self.guests.values() if guest.host.id != hello["host"][0]]
        others.append((self._options.node_rank, self._own))
        for other, host in others:
            if rank is not None and rank == other:
                return f"there is a launcher with --node-rank {rank} already, at {host.address}"
        return ""

    def _hear(self, guest: Guest, message: dict[str, Any]) -> None:
        if "attempt" in message:
            self._take(guest.host.id, message)
            return
        if "accepted" in message:
            guest.accepted = message["accepted"]
        elif "gone" in message:
            guest.gone = message["gone"]
        self._notify()

    def _take(self, host: str, message: dict[str, Any]) -> None:
        super()._take(host, message)
        if message["attempt"] != self._attempt:
            return
        if "stopped" in message and not self._is_stopping:
            self._fail(host, f"has ended its processes: {message['stopped']}")
        for what, value in message.items():
            self._learn(host, what, value)

    def _learn(self, host: str, what: str, value: Any) -> None:
        """Takes what an elastic job's processes on a host do, this one or another."""
        if what == "left":
            self._leaves(host, *value)
        elif what == "enlisted":
            self._register.enlisted = value
            self._compare()

    def _lose(self, guest: Guest) -> None:
        guest.link.abort()
        host = guest.host.id
        if self.guests.get(host) is not guest:
            return  # it has connected again
        del self.guests[host]
        self._evidence.lost(host, guest.link.heard, guest.link.acknowledged)
        if self.group is None or host not in self.group.ids:
            self._compare()
        elif host not in self._stopped:
            silent = f"has been silent for {self._options.heartbeat_timeout:g} s (--heartbeat-timeout)"
            self.has_changed = True
            self._stopped.add(host)
            self._fail(
                host, silent if guest.link.is_silent else "is gone: its launcher has ended, or cannot be reached"
            )
        self._notify()

    def _fail(self, host: str, what: str) -> None:
        assert self.group is not None
        index = self.group.ids.index(host)
        failure = Failure(f"host {index} ({self.group.hosts[index].address})", NO_RANK, what)
        self._queue.put_nowait(events.RemoteFailed(index, failure))

    def drop(self) -> None:
        """Closes all connections."""
        for guest in list(self.guests.values()):
            guest.link.abort()
        if self._leave_timer is not None:
            self._leave_timer.cancel()

    # ---- Groups ------------------------------------------------------------------------------------------------------

    def is_enough(self, own_gone: Sequence[str]) -> bool:
        """Whether the hosts that are here may go on, by what has been agreed on."""
        present = {self._own.id, self._own.address, *self.guests, *(g.host.address for g in self.guests.values())}
        gone = {host: guest.gone for host, guest in self.guests.items()}
        return self._register.may_go_on(present, gone | {self._own.id: own_gone})

    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the next group; none if they are fewer than MIN."""
        every = [(self._options.node_rank, self._own), *((g.node_rank, g.host) for g in self.guests.values())]
        every.sort(key=lambda each: self._options.nnodes if each[0] is None else each[0])
        min_processes, multiple_of = self._register.enlisted or (1, None)
        hosts = chosen(self._register.started, [host for _, host in every], self._options.nnodes, multiple_of)
        is_enough = sum(host.processes for host in hosts) >= min_processes
        return hosts if is_enough and len(hosts) >= self._options.min_nodes else ()

    async def agree(self, hosts: tuple[Host, ...]) -> Group | None:
        """Proposes a group to all hosts that are here; None if one is lost before it has accepted."""
        group = Group(self._register.next_number(), hosts)
        self._register.learn(self._register.started, [group])
        asked, known = list(self.guests.values()), self._register.groups
        for guest in asked:
            guest.link.send({"propose": group})
        while missing := [guest for guest in asked if guest.accepted != group.number]:
            if any(self.guests.get(guest.host.id) is not guest for guest in missing):
                return None
            await self.next_change()
        if known != self._register.groups:
            return None  # a host has come that knows of another group
        self._register.learn(group, [])
        return group

    def is_complete(self, group: Group) -> bool:
        """Whether all its hosts are here."""
        return set(group.ids) <= {self._own.id, *self.guests}

    def begin(self, group: Group, coordinator: str) -> None:
        """Starts an attempt on other hosts."""
        self.group, self._left = group, set()
        self._begin(group.number, {host: index for index, host in enumerate(group.ids) if host != self._own.id})
        self._is_change_pending = self._has_told_change = self._is_stopping = self.has_changed = False
        for host in set(self.guests) & set(group.ids):
            start = {"group": group, "coordinator": coordinator, "restarts": self._shared.restarts}
            self.guests[host].link.send({"start": start})
        for spare in set(self.guests) - set(group.ids):
            self.guests[spare].link.send({"started": group})

    def drop_running(self) -> None:
        """Drops hosts whose processes have not ended in time."""
        for host in self._running():
            self._lose(self.guests[host])

    def ended(self) -> None:
        """The attempt has ended."""
        self.group = None
        self._begin(-1, {})
        if self._leave_timer is not None:
            self._leave_timer.cancel()
            self._leave_timer = None

    def _compare(self) -> None:
        """Has the processes leave at a commit if there would be other hosts, and stay if these go before any leaves."""
        if self.group is None:
            return
        is_pending = self.hosts() not in ((), self.group.hosts)
        have_left = self._left or self._leave_timer is not None
        if is_pending == self._is_change_pending or (have_left and not is_pending):
            return
        self._is_change_pending = is_pending
        self._has_told_change = True
        self._send({"pending": is_pending}, None)
        self._queue.put_nowait(events.RemotePending(is_pending))

    def _leaves(self, host: str, is_all: bool, reason: str) -> None:
        assert self.group is not None
        if is_all:
            self._left.add(host)
        if self._left >= set(self.group.ids):
            self.has_changed |= self._has_told_change  # the hosts may have gone again
            self._queue.put_nowait(events.RemoteLeft(reason))
        elif self._leave_timer is None:
            loop = asyncio.get_running_loop()
            late = f"{reason}; others have not within {self._options.leave_timeout:g} s (--leave-timeout)"
            self._leave_timer = loop.call_later(
                self._options.leave_timeout, self._queue.put_nowait, events.RemoteLeft(late)
            )

    # ---- Called by the attempt ---------------------------------------------------------------------------------------

    def tell_stop(self, signum: int, grace: float, reason: str) -> None:
        self._is_stopping = True
        super().tell_stop(signum, grace, reason)

    def tell(self, what: str, value: Any) -> None:
        self._learn(self._own.id, what, value)
