"""Who leads, and with whom: one launcher searches for others, and decides when there are enough for a generation.

With `--nnodes MIN:MAX` each launcher listens, and answers who it is and whether it leads. With a fixed number of hosts
that of host 0 leads, and a job of one host listens nowhere.
"""

import asyncio
import contextlib
import errno
import math
import secrets
import time
from typing import NamedTuple

from jax_ring.launcher import environment, events
from jax_ring.launcher.hosts.follower import Follower
from jax_ring.launcher.hosts.groups import Evidence, Group, Host, Register, at_the_beginning
from jax_ring.launcher.hosts.leader import Leader, described
from jax_ring.launcher.hosts.links import LINE_BYTES, Link
from jax_ring.launcher.shared import Needs, Shared

LEADS, FOLLOWS, SEARCHES = "leads", "follows", "searches"
_ANSWER_SECONDS = 1.0
_POLL_SECONDS = 0.2
# While it gathers hosts, a leader asks others this often whether one of them leads.
_ASK_SECONDS = 1.0


class CannotGoOnError(Exception):
    """The job ends on this host, for the reason that is the text. status: for the launcher to exit with."""

    def __init__(self, reason: str, status: int = 1) -> None:
        super().__init__(reason)
        self.status = status


class Answer(NamedTuple):
    """What a launcher answers to another that asks who it is."""

    id: str  # random
    state: str  # LEADS, FOLLOWS or SEARCHES
    number: int  # of the last group that it knows to have started
    runs: bool  # whether it leads one that runs


Found = dict[str, Answer | None]  # by address; None where a machine is there, and nobody listens


def best_leader(found: Found, order: list[str]) -> str | None:
    """The address of the launcher to follow, of those that lead; earlier ones in `order` are preferred."""
    leaders = {address: each for address, each in found.items() if each and each.state == LEADS}

    def rank(address: str) -> tuple[int, bool, int]:
        place = order.index(address) if address in order else len(order)
        return leaders[address].number, leaders[address].runs, -place

    return max(leaders, key=rank, default=None)


class Search:
    """What one launcher knows of the others of its job.

    Attributes:
      own: this host.
      leader, follower: what this launcher is at the moment; None, and None while it searches.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared, self._options = shared, shared.options
        self._order = [environment.joined(*address) for address in self._options.coordinators]
        self._silence = self._options.heartbeat_timeout
        self._regroup = self._silence / 4  # how long hosts of the last group may take to come again
        self._register = Register(at_the_beginning(self._order))
        self._evidence = Evidence(self._silence)
        self.own = Host(secrets.token_hex(8), "", tuple(range(self._options.processes)))
        self.leader: Leader | None = None
        self.follower: Follower | None = None
        self._server: asyncio.Server | None = None
        self._since = time.monotonic()  # when there were last enough hosts

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def lead(self) -> Leader:
        """Begins to lead."""
        self.leader = Leader(self.own, self._shared, self._register, self._evidence)
        if self._options.hosts_change:
            self._shared.output.log(f"this launcher leads, at {self.own.address}")
        return self.leader

    async def follow(self, address: str) -> Follower | None:
        """Begins to follow the launcher at an address; None if it is gone.

        Raises CannotGoOnError if that refuses this host.
        """
        try:
            link = await _connected(address, self._silence)
        except OSError:
            return None
        if self._server is not None and self.own.address not in self._order:
            port = self._server.sockets[0].getsockname()[1]
            self.own = self.own._replace(address=environment.joined(link.own_address, port))
        link.send({
            "host": self.own, "node_rank": self._options.node_rank, "gone": self.gone(),
            "restarts": self._shared.restarts, "needs": self._shared.needs, "started": self._register.started,
            "accepted": self._register.accepted, "options": described(self._options),
        })  # fmt: skip
        message = await link.receive()
        if message is None or "error" in message:
            link.abort()
            if message is None:
                return None
            who = address if self._options.hosts_change else "host 0"
            raise CannotGoOnError(f"{who} has refused this host: {message['error']}", status=2)
        self._evidence.found(message["welcome"])
        name = f"that leads, at {address}," if self._options.hosts_change else "of host 0"
        self._link = link
        self.follower = Follower(self.own.id, self._register, self._shared.queue, link.send)
        self._receiving = asyncio.create_task(self._receive(link, self.follower, name, message["welcome"]))
        if self._options.hosts_change:
            self._shared.output.log(f"follows the launcher at {address}")
        return self.follower

    async def _receive(self, link: Link, follower: Follower, leader: str, leader_id: str) -> None:
        while (message := await link.receive()) is not None:
            follower.take(message)
        link.abort()
        self._evidence.lost(leader_id, link.heard, link.acknowledged)
        how = "is silent" if link.is_silent else "has ended, or cannot be reached"
        self._shared.queue.put_nowait(events.LeaderLost(f"the launcher {leader} {how}"))

    async def leave(self) -> None:
        """Follows no longer."""
        if self.follower is not None:
            self.follower = None
            self._receiving.cancel()
            await self._link.close()

    # ---- Who is there ------------------------------------------------------------------------------------------------

    async def _listen(self) -> set[str]:
        """Listens at the first address in the order that is this host's, or else at any port.

        Returns this host's addresses at which others listen. Raises CannotGoOnError if host 0 of a fixed number cannot.
        """
        taken: set[str] = set()
        if self._server is not None and self.own.address in self._order:
            return taken
        for address in self._order:
            host, port = split(address)
            try:
                server = await asyncio.start_server(self._serve, host, port, limit=LINE_BYTES)
            except OSError as error:
                is_taken = error.errno == errno.EADDRINUSE
                taken |= {address} if is_taken else set()
                if not self._options.hosts_change:
                    why = "Another program listens there" if is_taken else "It has to be an address of this host"
                    raise CannotGoOnError(f"cannot listen at --coordinator {address}: {error}. {why}") from error
                continue
            if (why_not := environment.why_unreachable(server, host)) is not None:
                self._shared.output.log(why_not)
            break
        else:
            if self._server is not None:
                return taken
            server, address = await asyncio.start_server(self._serve, None, 0, limit=LINE_BYTES), ""
        self.close()
        self._server, self.own = server, self.own._replace(address=address)
        return taken

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, self._silence)
        message = await link.receive() or {}
        if "ask" in message:
            link.send({"answer": self._answer()})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await link.receive()  # until the other side has it
            link.abort()
        elif "host" in message and self.leader is not None:
            await self.leader.serve(link, message)
        else:
            link.abort()

    def _answer(self) -> Answer:
        state = LEADS if self.leader else FOLLOWS if self.follower else SEARCHES
        runs = self.leader is not None and self.leader.group is not None
        return Answer(self.own.id, state, self._register.started.number, runs)

    async def ask(self) -> Found:
        """Asks all that this launcher knows of, and notes who has ended."""
        hosts = {host for group in self._register.groups if group.number for host in group.hosts if host.address}
        addresses = {*self._order, *(host.address for host in hosts)} - {self.own.address}
        found: Found = {}
        await asyncio.gather(*(_ask(address, self._silence, found) for address in addresses))
        for host in hosts:
            if host.id == self.own.id:
                continue
            answer = found.get(host.address)
            is_gone = host.address in found and (answer is None or answer.id != host.id)
            if is_gone or host.address == self.own.address:
                self._evidence.ended(host.id)
        return found

    def gone(self) -> list[str]:
        """Hosts that can no longer start a group of their own."""
        return [host for group in self._register.groups for host in self._evidence.gone(self.own.id, group)]

    async def found(self) -> str | None:
        """The address of the launcher that leads; None if this one is to.

        Raises CannotGoOnError if there is none for too long.
        """
        if not self._options.hosts_change and self._options.node_rank == 0:
            if self._order:
                await self._listen()
            return None
        said: set[str] = set()
        while True:
            taken = await self._listen() if self._options.hosts_change else set()
            found = await self.ask()
            if (leader := best_leader(found, self._order)) is not None:
                return leader
            answers = {address: each for address, each in found.items() if each}
            for address in sorted(taken - {*answers} - said):
                self._shared.output.log(f"cannot listen at --coordinator {address}: another program listens there")
                said.add(address)
            if self.own.address in self._order and all(each.state == SEARCHES for each in answers.values()):
                earlier = self._order[: self._order.index(self.own.address)]
                if not set(earlier) & set(answers):
                    return None
            if not self.seconds_left():
                raise CannotGoOnError(self._why_not(None))
            await asyncio.sleep(_POLL_SECONDS)

    # ---- Who takes part ----------------------------------------------------------------------------------------------

    async def formed(self, leader: Leader) -> Group | None:
        """Waits for enough hosts, and agrees with them on a group; None if another launcher is to lead.

        Raises CannotGoOnError if they are too few for too long.
        """
        enough_since, asked = None, -math.inf
        while True:
            now = time.monotonic()
            if self._options.hosts_change and now - asked > _ASK_SECONDS:
                found = await self.ask()
                asked = time.monotonic()
                found[self.own.address] = self._answer()
                if best_leader(found, self._order) != self.own.address:
                    return None
            leader.follower.tell_gone(self.gone())
            hosts = leader.hosts()
            if hosts and (not self._options.hosts_change or leader.is_enough()):
                self.had_enough()
                enough_since = enough_since or now
                if self._is_time(leader, hosts, time.monotonic() - enough_since):
                    job = self._register.started.job or secrets.token_hex(8)
                    if group := await leader.agree(hosts, job):
                        return group
                    self.had_enough()  # until one was lost
            else:
                enough_since = None
                are_all_here = not self._options.hosts_change and len(leader.guests) == self._options.nnodes
                if are_all_here or not self.seconds_left():
                    raise CannotGoOnError(self._why_not(leader))
            await leader.next_change(_POLL_SECONDS)

    def _is_time(self, leader: Leader, hosts: tuple[Host, ...], waited: float) -> bool:
        """Whether to start with these hosts, after a wait for others."""
        last = self._register.started
        if not self._options.hosts_change:
            return True
        if last.number == 0:
            return len(hosts) == self._options.nnodes or waited >= self._options.join_timeout
        missing = set(last.ids) - set(leader.guests)
        return waited >= self._regroup or all(map(self._evidence.is_accounted_for, missing))

    def had_enough(self) -> None:
        """Lets the time begin anew in which this host waits for others."""
        self._since = time.monotonic()

    def seconds_left(self) -> float:
        """How long this host may wait for others."""
        return max(0.0, self._since + self._options.node_timeout - time.monotonic())

    def _why_not(self, leader: Leader | None) -> str:
        """Why this host, or those that it leads, do not go on."""
        options, needs = self._options, self._shared.needs or Needs()
        waited = f"{options.node_timeout:g} s (--node-timeout)"
        if not options.hosts_change:
            if leader is None:
                return f"no launcher of host 0 at {self._order[0]} within {waited}"
            missing = {*range(options.nnodes)} - {guest.node_rank for guest in leader.guests.values()}
            return (
                f"hosts {', '.join(map(str, sorted(missing)))} are not there after {waited}"
                if missing
                else leader.why_not()
            )
        here = leader.here() if leader else [self.own]
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + self._since))
        ids = {host.id for host in here} | {host.address for host in here}
        last = self._register.started
        lost = [f"{host.address} ({self._evidence.describe(host.id)})" for host in last.hosts if host.id not in ids]
        of_what = f"hosts of generation {last.number - 1}" if last.number else "hosts of --coordinator"
        processes = f" with {needs.min_processes} processes (min_processes)" if needs.min_processes > 1 else ""
        return (
            f"too few hosts for {waited}, since {since}: "
            f"{len(here)} here, and it takes {options.min_nodes} (--nnodes {options.min_nodes}:{options.nnodes})"
            f"{processes}, and of the {len(last.hosts)} {of_what} more than half, or half with the first. Missing: "
            f"{', '.join(lost) or 'none of these'}"
        )


def split(address: str) -> tuple[str, int]:
    """The host and the port of an address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


async def _connected(address: str, silence: float) -> Link:
    """A connection to a launcher. Raises OSError if there is none."""
    async with asyncio.timeout(_ANSWER_SECONDS):
        return Link(*await asyncio.open_connection(*split(address), limit=LINE_BYTES), silence)


async def _ask(address: str, silence: float, found: Found) -> None:
    """Finds out what listens at an address, if that is not silent."""
    try:
        link = await _connected(address, silence)
    except ConnectionRefusedError:
        found[address] = None
        return
    except OSError:
        return
    try:
        link.send({"ask": True})
        async with asyncio.timeout(_ANSWER_SECONDS):
            if message := await link.receive():
                found[address] = Answer(*message["answer"])
    except (TimeoutError, KeyError, TypeError):
        pass  # as if it were silent
    finally:
        link.abort()
