"""Who leads, and with whom: one launcher searches for others, and decides when there are enough for a generation.

With `--nnodes MIN:MAX` each launcher listens, and answers who it is and whether it leads. With a fixed number of hosts
that of host 0 leads, and a job of one host listens nowhere.
"""

import asyncio
import errno
import math
import secrets
import time

from jax_ring.launcher import environment, events
from jax_ring.launcher.hosts.follower import Follower
from jax_ring.launcher.hosts.groups import Evidence, Group, Host, Register, at_the_beginning
from jax_ring.launcher.hosts.leader import Leader, described
from jax_ring.launcher.hosts.links import BUFFER_BYTES, Link, peer
from jax_ring.launcher.hosts.messages import Answer, Hello, Message, MessageError
from jax_ring.launcher.hosts.secret import OtherSecretError
from jax_ring.launcher.newcomers import Newcomers
from jax_ring.launcher.shared import Needs, Shared

_ANSWER_SECONDS = 1.0
_POLL_SECONDS = 0.2
# While it gathers hosts, a leader asks others this often whether one of them leads.
_ASK_SECONDS = 1.0
_QUIET_SECONDS = 5.0  # between lines that anybody can make this launcher say


class CannotGoOnError(Exception):
    """The job ends on this host, for the reason that is the text. status: for the launcher to exit with."""

    def __init__(self, reason: str, status: int = 1) -> None:
        super().__init__(reason)
        self.status = status


Found = dict[str, Answer]  # by address
_NOBODY = Answer("", "", False, False, 0, False)  # a machine is there, and nobody listens


def best_leader(found: Found, order: list[str]) -> str | None:
    """The address of the launcher to follow, of those that lead; earlier ones in `order` are preferred."""
    addresses = sorted(found, key=lambda address: order.index(address) if address in order else len(order))
    leaders = [address for address in addresses if found[address].leads]
    return max(leaders, key=lambda address: (found[address].number, found[address].runs), default=None)


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
        self._register = Register(at_the_beginning(self._order))
        self._evidence = Evidence(self._silence)
        self.own = Host(secrets.token_hex(8), "", tuple(range(self._options.processes)))
        self.leader: Leader | None = None
        self.follower: Follower | None = None
        self._server: asyncio.Server | None = None
        self._said: set[str] = set()
        self._newcomers = Newcomers()  # connections that are no host's yet
        self._said_rarely, self._unsaid = -math.inf, 0
        self._other_secrets: dict[str, str] = {}  # by address, who has another secret than this one, when last asked
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
            link, answer = await self._connected(address)
        except OSError:
            return None
        if self._server is not None and self.own.address not in self._order:
            port = self._server.sockets[0].getsockname()[1]
            self.own = self.own._replace(address=environment.joined(link.own_address, port))
        hello = Hello(
            self.own, self._options.node_rank, self.gone(), self._shared.restarts,
            self._shared.newest_commit(), self._shared.needs, self._register.started, self._register.accepted,
            described(self._options),
        )  # fmt: skip
        link.send(Message("hello", hello))
        leader = address if self._options.hosts_change else "host 0"  # its name
        match await link.receive():
            case Message("welcome", newest_commit):
                self._shared.others_commit = max(self._shared.others_commit, newest_commit)
                self._link = link
                self.follower = Follower(self.own, self._register, self._shared.queue, link.send)
                self._receiving = asyncio.create_task(self._receive(link, self.follower, leader, answer.id))
                if self._options.hosts_change:
                    self._shared.output.log(f"follows the launcher at {address}")
                return self.follower
            case Message("refused", reason):
                link.abort()
                raise CannotGoOnError(f"{leader} has refused this host: {reason}", status=2)
        link.abort()
        return None

    async def _receive(self, link: Link, follower: Follower, leader: str, leader_id: str) -> None:
        self._evidence.found(leader_id)
        try:
            while (message := await link.receive()) is not None:
                if message.kind in ("end", "over"):
                    reason = f"{leader}: {message.value.reason}"
                    message = message._replace(value=message.value._replace(reason=reason))
                follower.take(message)
        except MessageError as error:
            link.blame(error)
        link.abort()
        self._evidence.lost(leader_id, link.heard, link.acknowledged)
        who = f"that leads, at {leader}," if self._options.hosts_change else f"of {leader}"
        how = "is silent" if link.is_silent else "has ended, or cannot be reached"
        self._shared.queue.put_nowait(events.LeaderLost(f"the launcher {who} {how}"))

    async def leave(self) -> None:
        """Follows no longer."""
        if self.follower is not None:
            self.follower = None
            self._receiving.cancel()
            await self._link.close()

    # ---- Who is there ------------------------------------------------------------------------------------------------

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._shared.output.log(text)

    async def _listen(self) -> set[str]:
        """Listens at the first address in the order that is this host's, or else at any port.

        Returns this host's addresses at which others listen. Raises CannotGoOnError if host 0 of a fixed number cannot.
        """
        if self._server is not None and self.own.address in self._order:
            return set()
        taken = set()
        for address in self._order:
            host, port = split(address)
            try:
                server = await asyncio.start_server(self._serve, host, port, limit=BUFFER_BYTES)
            except OSError as error:
                is_taken = error.errno == errno.EADDRINUSE
                if not self._options.hosts_change:
                    why = "Another program listens there" if is_taken else "It has to be an address of this host"
                    raise CannotGoOnError(f"cannot listen at --coordinator {address}: {error}. {why}") from error
                if is_taken:
                    taken.add(address)
                continue
            if (why_not := environment.why_unreachable(server, host)) is not None:
                self._shared.output.log(why_not)
            break
        else:
            if self._server is not None:
                return taken
            server, address = await asyncio.start_server(self._serve, None, 0, limit=BUFFER_BYTES), ""
        self.close()
        self._server, self.own = server, self.own._replace(address=address)
        return taken

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Says to a newcomer who this launcher is, and takes it in if it asks for that."""
        link = message = None
        try:
            async with self._newcomers.admitted(writer):
                link = await Link.opened(
                    reader, writer, self._silence, self._say_rarely, self._options.secret, listens=True
                )
                link.send(Message("answer", self._answer()))
                message = await link.receive()
        except OtherSecretError as error:
            self._say_rarely(f"refused the launcher at {peer(writer)}: it {error}")
        except ValueError as error:
            self._say_rarely(f"the connection with {peer(writer)} is closed: {error}")
        except OSError:
            pass  # it is gone, or has said nothing for too long
        finally:
            if link is None:
                writer.close()  # behind what was sent
        if link is None:
            return
        match message:
            case Message("hello", hello) if self.leader is not None:
                await self.leader.serve(link, hello)
        link.abort()

    def _say_rarely(self, text: str) -> None:
        """For what anybody can make this launcher say."""
        now = time.monotonic()
        if now - self._said_rarely < _QUIET_SECONDS:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} such lines before it were left out)" if self._unsaid else ""
        self._said_rarely, self._unsaid = now, 0
        self._shared.output.log(text + more)

    def _answer(self) -> Answer:
        runs = self.leader is not None and self.leader.generation is not None
        number = self._register.started.number
        return Answer(self.own.id, self.own.address, self.leader is not None, self.follower is not None, number, runs)

    async def ask(self) -> Found:
        """Asks all that this launcher knows of, itself as well, and notes who has ended."""
        hosts = {host for group in self._register.groups if group.number for host in group.hosts if host.address}
        addresses = {*self._order, *(host.address for host in hosts)} - {self.own.address}
        found = {self.own.address: self._answer()}
        self._other_secrets.clear()
        await asyncio.gather(*(self._ask(address, found) for address in addresses))
        for host in hosts:
            if host.address in found and found[host.address].id != host.id:
                self._evidence.ended(host.id)
        return found

    async def _ask(self, address: str, found: Found) -> None:
        """Finds out what listens at an address, if that is not silent."""
        try:
            link, found[address] = await self._connected(address)
            link.abort()
        except ConnectionRefusedError:
            found[address] = _NOBODY
        except OtherSecretError as error:
            self._other_secrets[address] = f"the launcher at {address} {error}"
        except (OSError, ValueError, OverflowError):
            pass  # silent, or no address: another host has told it

    async def _connected(self, address: str) -> tuple[Link, Answer]:
        """A connection to a launcher, and what that says of itself. Raises OSError if there is none."""
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(*split(address), limit=BUFFER_BYTES)
            try:
                link = await Link.opened(
                    reader, writer, self._silence, self._say_rarely, self._options.secret, listens=False
                )
            except BaseException as error:
                writer.close()  # behind what was sent
                if isinstance(error, ValueError):
                    self._say_once(f"what listens at {address} is no launcher of this version of jax_ring")
                    raise ConnectionError from error
                raise
            try:
                match await link.receive():
                    case Message("answer", answer) if self._is_of(answer, address):
                        return link, answer
                raise ConnectionError
            except BaseException:
                link.abort()
                raise

    def _is_of(self, answer: Answer, address: str) -> bool:
        """Whether an answer is of a launcher at an address, and not of another one, to which somebody passes us on."""
        if answer.id == self.own.id:
            return False
        if not self._options.hosts_change or address not in self._order or answer.address == address:
            return True
        self._say_once(
            f"at {address} answers the launcher {f'of {answer.address}' if answer.address else 'of another address'}: "
            "give all launchers the same --coordinator"
        )
        return False

    def gone(self) -> tuple[str, ...]:
        """Hosts that can no longer start a group of their own."""
        return tuple(host for group in self._register.groups for host in self._evidence.gone(self.own.id, group))

    async def found(self) -> str | None:
        """The address of the launcher that leads; None if this one is to.

        Raises CannotGoOnError if there is none for too long.
        """
        if not self._order:
            return None  # a job of one host
        listens = self._options.hosts_change or self._options.node_rank == 0
        while True:
            taken = await self._listen() if listens else set()
            found = await self.ask()
            if (leader := best_leader(found, self._order)) is not None:
                return leader
            there = {address for address, answer in found.items() if answer is not _NOBODY}
            others = {*self._order} - {self.own.address}
            if others and others <= self._other_secrets.keys() and not self._register.started.number:
                raise CannotGoOnError(next(iter(self._other_secrets.values())), status=2)
            for text in self._other_secrets.values():  # the wrong one may be that
                self._say_once(text)
            for address in sorted(taken - there):
                self._say_once(f"cannot listen at --coordinator {address}: another program listens there")
            if self.own.address in self._order and not any(answer.follows for answer in found.values()):
                earlier = self._order[: self._order.index(self.own.address)]
                if there.isdisjoint(earlier):
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
            if now - asked > _ASK_SECONDS:
                found = await self.ask()
                asked = time.monotonic()
                if best_leader(found, self._order) != self.own.address:
                    return None
            leader.follower.tell("gone", self.gone())
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
        missing = set(last.ids) - set(leader.guests)  # which may come again
        return waited >= self._silence / 4 or all(map(self._evidence.is_accounted_for, missing))

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
            if missing := {*range(options.nnodes)} - {guest.node_rank for guest in leader.guests.values()}:
                return f"hosts {', '.join(map(str, sorted(missing)))} are not there after {waited}"
            return leader.why_not()
        here = leader.here() if leader else [self.own]
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + self._since))
        last, known = self._register.started, {name for host in here for name in (host.id, host.address)}
        lost = [f"{host.address} ({self._evidence.describe(host.id)})" for host in last.hosts if host.id not in known]
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
