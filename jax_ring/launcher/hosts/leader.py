"""A launcher that leads: the other hosts that are here, what is proposed to them, and the generation on all."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jax_ring.launcher import events
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.events import NO_RANK, Failure
from jax_ring.launcher.hosts.groups import Evidence, Group, Host, Register, chosen
from jax_ring.launcher.hosts.links import Link
from jax_ring.launcher.shared import Needs, Role, Shared


def described(options: Options) -> list[Any]:
    """The options that all launchers of a job have to share."""
    count = f"{options.min_nodes}:{options.nnodes}" if options.hosts_change else str(options.nnodes)
    return [count, options.heartbeat_timeout]


@dataclasses.dataclass
class Guest:
    """Another host. node_rank: which it asks for. gone: what it knows to be gone. accepted: the last number."""

    link: Link
    host: Host
    node_rank: int | None
    gone: list[str]
    accepted: int = 0


class Leader(Role):
    leads = True

    def __init__(self, own: Host, shared: Shared, register: Register, evidence: Evidence) -> None:
        super().__init__()
        self._own, self._shared, self._options, self._queue = own, shared, shared.options, shared.queue
        self._register, self._evidence = register, evidence
        self.guests: dict[str, Guest] = {}  # by id, in the order in which they have come
        self.group: Group | None = None  # that runs
        # Whether the generation ends because hosts come, or one is lost that may be.
        self.has_changed = False
        self._succeeded: set[str] = set()  # hosts whose processes have all exited with status 0
        self._stopped: set[str] = set()  # hosts without a process
        self._left: set[str] = set()
        self._leave_timer: asyncio.TimerHandle | None = None
        self._is_change_pending = self._has_told_change = self._is_stopping = False
        self._changed = asyncio.Event()

    @property
    def name(self) -> str:
        """This launcher's name, for other hosts."""
        return self._own.address if self._options.hosts_change else "host 0"

    # ---- Hosts -------------------------------------------------------------------------------------------------------

    async def serve(self, link: Link, hello: dict[str, Any]) -> None:
        """Takes a host in, until its connection ends."""
        if refusal := self._refusal(hello):
            link.send({"error": refusal})
            await link.close()
            return
        id_, address, slots = hello["host"]
        host = Host(id_, address, tuple(slots))
        if host.id in self.guests:  # it has noticed first that the connection has ended
            self._lose(self.guests[host.id])
        guest = self.guests[host.id] = Guest(link, host, hello["node_rank"], hello["gone"])
        self._evidence.found(host.id)
        self._register.learn(
            Group.of_message(hello["started"]), [Group.of_message(group) for group in hello["accepted"]]
        )
        self._shared.restarts = max(self._shared.restarts, hello["restarts"])
        if hello["needs"] is not None:
            self._shared.needs = self._shared.needs or Needs(*hello["needs"])
        link.send({"welcome": self._own.id})
        self._compare()
        self._notify()
        while (message := await link.receive()) is not None:
            self._hear(guest, message)
        self._lose(guest)

    def _refusal(self, hello: dict[str, Any]) -> str:
        own = described(self._options)
        if hello["options"] != own:
            names = "--nnodes {} and --heartbeat-timeout {:g}"
            return f"it was started with {names.format(*own)}, this host with {names.format(*hello['options'])}"
        rank = hello["node_rank"]
        others = [(guest.node_rank, guest.host) for guest in self.guests.values() if guest.host.id != hello["host"][0]]
        others.append((self._options.node_rank, self._own))
        for other, host in others:
            if rank is not None and rank == other:
                at = f", at {host.address}" if host.address else ""
                return f"there is a launcher with --node-rank {rank} already{at}"
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
        """Takes what a host says of its processes in this generation."""
        if self.group is None or message["attempt"] != self.group.number or host not in self.group.ids:
            return
        index = self.group.ids.index(host)
        if "progress" in message:
            self.others.take(index, message["progress"])
            return
        if "failed" in message:
            self._queue.put_nowait(events.HostFailed(index, self._failure_of(index, message["failed"])))
        elif "initializes" in message:
            self._queue.put_nowait(events.HostInitializes(None))
        elif "absent" in message:
            self._queue.put_nowait(events.HostInitializes(self._failure_of(index, message["absent"])))
        elif "succeeded" in message:
            self._succeeded.add(host)
        elif "stopped" in message:
            self._stopped.add(host)
            if not self._is_stopping:
                self._fail(host, f"has ended its processes: {message['stopped']}")
        for what, value in message.items():
            self._learn(host, what, value)
        self._notify()

    def _failure_of(self, index: int, message: dict[str, Any]) -> Failure:
        failure = Failure(**message)
        failure.name += f" of host {index}"
        return failure

    def _learn(self, host: str, what: str, value: Any) -> None:
        """Takes what an elastic job's processes on a host do, this one or another."""
        if what == "left":
            self._leaves(host, *value)
        elif what == "enlisted":
            self._shared.needs = Needs(*value)
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
            self.has_changed |= self._options.hosts_change
            self._stopped.add(host)
            self._fail(
                host, silent if guest.link.is_silent else "is gone: its launcher has ended, or cannot be reached"
            )
        self._notify()

    def _fail(self, host: str, what: str) -> None:
        assert self.group is not None
        index = self.group.ids.index(host)
        address = self.group.hosts[index].address
        failure = Failure(f"host {index}" + (f" ({address})" if address else ""), NO_RANK, what)
        self._queue.put_nowait(events.HostFailed(index, failure))

    def drop(self) -> None:
        """Closes all connections."""
        for guest in list(self.guests.values()):
            guest.link.abort()
        self._forget_timer()

    async def end(self, status: int, reason: str) -> None:
        """Ends the job on all hosts."""
        links = [guest.link for guest in self.guests.values()]
        for link in links:
            link.send({"end": [status, reason]})
        await asyncio.gather(*(link.close() for link in links))

    async def next_change(self, seconds: float | None = None) -> None:
        """Waits until something changes, or so long."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._queue.put_nowait(events.HostsChanged())

    # ---- Groups ------------------------------------------------------------------------------------------------------

    def is_enough(self, own_gone: Sequence[str]) -> bool:
        """Whether the hosts that are here may go on, by what has been agreed on."""
        present = {self._own.id, self._own.address, *self.guests, *(g.host.address for g in self.guests.values())}
        gone = {host: guest.gone for host, guest in self.guests.items()}
        return self._register.may_go_on(present, gone | {self._own.id: own_gone})

    def here(self) -> list[Host]:
        """All hosts that are here, by --node-rank, and then in the order in which they have come."""
        every = [(self._options.node_rank, self._own), *((g.node_rank, g.host) for g in self.guests.values())]
        every.sort(key=lambda each: self._options.nnodes if each[0] is None else each[0])
        return [host for _, host in every]

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
        lost: dict[str, set[int]] = {}
        for rank in ranks:
            host, slot = self._register.started.place_of(rank)
            lost.setdefault(host, set()).add(slot)
        self._own = self._own.without(lost.get(self._own.id, ()))
        for guest in self.guests.values():
            guest.host = guest.host.without(lost.get(guest.host.id, ()))

    async def agree(self, hosts: tuple[Host, ...], job: str) -> Group | None:
        """Proposes a group to all hosts that are here; None if one is lost before it has accepted."""
        group = Group(self._register.next_number(), hosts, job)
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
        """Starts a generation on other hosts."""
        self.group = group
        self._succeeded, self._stopped, self._left = set(), set(), set()
        self._is_change_pending = self._has_told_change = self._is_stopping = self.has_changed = False
        self.others.forget()
        for host in set(self.guests) & set(group.ids):
            start = {"group": group, "coordinator": coordinator, "restarts": self._shared.restarts}
            self.guests[host].link.send({"start": start})
        for spare in set(self.guests) - set(group.ids):
            self.guests[spare].link.send({"started": group})

    def ended(self) -> None:
        """The generation has ended."""
        self.has_changed |= self._is_change_pending
        self.group = None
        self._forget_timer()

    async def stopped(self) -> None:
        """Waits until other hosts' processes have ended, or their launchers are gone."""
        while self._running():
            await self.next_change()

    def drop_running(self) -> None:
        """Drops hosts whose processes have not ended in time."""
        for host in self._running():
            self._lose(self.guests[host])

    def _running(self) -> set[str]:
        ids = set(self.group.ids) if self.group else set()
        return ids & self.guests.keys() - self._stopped

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
        self._queue.put_nowait(events.ChangePending(is_pending))

    def _leaves(self, host: str, is_all: bool, reason: str) -> None:
        assert self.group is not None
        self.has_changed |= self._has_told_change  # the hosts may have gone again
        if is_all:
            self._left.add(host)
        if self._left >= set(self.group.ids):
            self._queue.put_nowait(events.AllLeft(reason))
        elif self._leave_timer is None:
            loop = asyncio.get_running_loop()
            late = f"{reason}; others have not within {self._options.leave_timeout:g} s (--leave-timeout)"
            self._leave_timer = loop.call_later(
                self._options.leave_timeout, self._queue.put_nowait, events.AllLeft(late)
            )

    def _forget_timer(self) -> None:
        if self._leave_timer is not None:
            self._leave_timer.cancel()
            self._leave_timer = None

    # ---- Called by the generation ------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any], index: int | None) -> None:
        assert self.group is not None
        for place, host in enumerate(self.group.ids):
            if host in self.guests and index in (None, place):
                self.guests[host].link.send({**message, "attempt": self.group.number})

    def succeeded(self) -> bool:
        assert self.group is not None
        return set(self.group.ids) - {self._own.id} <= self._succeeded

    def tell_failure(self, failure: Failure) -> bool:
        return False

    def tell_stop(self, signum: int, grace: float, reason: str) -> None:
        self._is_stopping = True
        self._send({"stop": [f"{self.name}: {reason}", signum, grace]}, None)

    def tell(self, what: str, value: Any) -> None:
        self._learn(self._own.id, what, value)
