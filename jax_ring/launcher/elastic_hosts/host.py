"""The launcher of a host that comes and goes: it searches for one that leads and follows it, or leads itself."""

import asyncio
import errno
import secrets
import time

from jax_ring.launcher import environment, events
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.elastic_hosts import asking
from jax_ring.launcher.elastic_hosts.asking import Answer, Found
from jax_ring.launcher.elastic_hosts.follower import Follower
from jax_ring.launcher.elastic_hosts.groups import Evidence, Group, Host, Register, at_the_beginning
from jax_ring.launcher.elastic_hosts.leader import Leader
from jax_ring.launcher.environment import Plan
from jax_ring.launcher.job import Job
from jax_ring.launcher.multi_host.links import LINE_BYTES, Link
from jax_ring.launcher.shared import Outcome

_POLL_SECONDS = 0.2
# While it gathers hosts, a leader asks others this often whether one of them leads.
_ASK_SECONDS = 1.0


class ElasticHost(Job):
    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._order = [environment.joined(*address) for address in options.coordinators]
        self._silence = options.heartbeat_timeout
        self._regroup = self._silence / 4  # how long hosts of the last group may take to come again
        self._register = Register(at_the_beginning(self._order))
        self._evidence = Evidence(self._silence)
        self._own = Host(secrets.token_hex(8), "", options.processes)
        self._server: asyncio.Server | None = None
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._since = time.monotonic()  # when there were last enough hosts

    async def _attempts(self) -> Outcome:
        try:
            while True:
                leader = await self._unless_signalled(self._search(), self._left())
                outcome = await (self._lead() if leader is None else self._follow(leader))
                if outcome is not None:
                    return outcome
        except TimeoutError:
            self.output.log(f"failed: {self._why_not()}")
            return Outcome(1)
        finally:
            if self._server is not None:
                self._server.close()

    # ---- Others ------------------------------------------------------------------------------------------------------

    async def _listen(self) -> set[str]:
        """Listens at the first address in the order that is this host's, or else at any port.

        Returns this host's addresses at which others listen.
        """
        taken: set[str] = set()
        if self._server is not None and self._own.address in self._order:
            return taken
        server = None
        for address in self._order:
            host, port = asking.split(address)
            try:
                server = await asyncio.start_server(self._serve, host, port, limit=LINE_BYTES)
            except OSError as error:
                taken |= {address} if error.errno == errno.EADDRINUSE else set()
                continue
            if (why_not := environment.why_unreachable(server, host)) is not None:
                self.output.log(why_not)
            break
        if server is None:
            if self._server is not None:
                return taken
            server, address = await asyncio.start_server(self._serve, None, 0, limit=LINE_BYTES), ""
        if self._server is not None:
            self._server.close()
        self._server, self._own = server, self._own._replace(address=address)
        return taken

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, self._silence)
        message = await link.receive() or {}
        if "ask" in message:
            await asking.serve(link, self._answer())
        elif "host" in message and self._leader is not None:
            await self._leader.serve(link, message)
        else:
            link.abort()

    def _answer(self) -> Answer:
        state = asking.LEADS if self._leader else asking.FOLLOWS if self._follower else asking.SEARCHES
        runs = self._leader is not None and self._leader.group is not None
        return Answer(self._own.id, state, self._register.started.number, runs)

    async def _ask(self) -> Found:
        """Asks all that this launcher knows of, and notes who has ended."""
        hosts = {host for group in self._register.groups if group.number for host in group.hosts}
        addresses = {*self._order, *(host.address for host in hosts)} - {self._own.address}
        found = await asking.ask(addresses, self._silence)
        for host in hosts:
            if host.id == self._own.id:
                continue
            answer = found.get(host.address)
            is_gone = host.address in found and (answer is None or answer.id != host.id)
            if is_gone or host.address == self._own.address:
                self._evidence.ended(host.id)
        return found

    def _gone(self) -> list[str]:
        return [host for group in self._register.groups for host in self._evidence.gone(self._own.id, group)]

    async def _search(self) -> str | None:
        """The address of the launcher that leads; None if this one is to."""
        said: set[str] = set()
        while True:
            taken = await self._listen()
            found = await self._ask()
            if (leader := asking.best_leader(found, self._order)) is not None:
                return leader
            answers = {address: each for address, each in found.items() if each}
            for address in sorted(taken - {*answers} - said):
                self.output.log(f"cannot listen at --coordinator {address}: another program listens there")
                said.add(address)
            if self._own.address in self._order and all(each.state == asking.SEARCHES for each in answers.values()):
                earlier = self._order[: self._order.index(self._own.address)]
                if not set(earlier) & set(answers):
                    return None
            await asyncio.sleep(_POLL_SECONDS)

    # ---- Leading -----------------------------------------------------------------------------------------------------

    async def _lead(self) -> Outcome | None:
        """Leads until the job ends; returns None if another launcher is to lead."""
        self._leader = Leader(self._own, self, self._register, self._evidence)
        self.output.log(f"this launcher leads, at {self._own.address}")
        before: tuple[Host, ...] = ()
        failure = None
        try:
            while True:
                group = await self._unless_signalled(self._formed(self._leader))
                if group is None:
                    return None
                if group.hosts == before and not self._leader.has_changed:
                    if not self.take_restart():
                        reason = str(failure or "the processes have left; no restarts are left (--max-restarts)")
                        self.output.log(f"failed: {reason}")
                        await self._leader.end(1, reason)
                        return Outcome(failure.status if failure else 1, failure)
                    await self._back_off(failure)
                if not self._leader.is_complete(group):
                    continue
                outcome = await self._try_on_all(self._leader, group)
                if outcome.status == 0:
                    await self._leader.end(0, "")
                    return outcome
                if outcome.is_stopped:
                    return outcome
                before, failure = group.hosts, outcome.failure
        except TimeoutError:
            reason = self._why_not()
            self.output.log(f"failed: {reason}")
            await self._leader.end(1, reason)
            return Outcome(1)
        finally:
            self._leader.drop()
            self._leader = None

    async def _formed(self, leader: Leader) -> Group | None:
        """Waits for enough hosts, and agrees with them on a group; None if another launcher is to lead.

        Raises TimeoutError if they are too few for too long.
        """
        enough_since = asked = None
        while True:
            now = time.monotonic()
            if asked is None or now - asked > _ASK_SECONDS:
                found = await self._ask()
                asked = time.monotonic()
                all_found = {self._own.address: self._answer()} | found
                if asking.best_leader(all_found, self._order) != self._own.address:
                    return None
            hosts = leader.hosts()
            if hosts and leader.is_enough(self._gone()):
                self._since = time.monotonic()
                enough_since = enough_since or now
                waited = time.monotonic() - enough_since
                if self._is_time(leader, hosts, waited):
                    if group := await leader.agree(hosts):
                        return group
                    self._since = time.monotonic()  # there were enough until one was lost
            else:
                enough_since = None
                if not self._left():
                    raise TimeoutError
            await leader.next_change(_POLL_SECONDS)

    def _is_time(self, leader: Leader, hosts: tuple[Host, ...], waited: float) -> bool:
        """Whether to start with these hosts, after a wait for others."""
        last = self._register.started
        if last.number == 0:
            return len(hosts) == self.options.nnodes or waited >= self.options.join_timeout
        here = {self._own.id, *leader.guests}
        return waited >= self._regroup or all(
            host in here or self._evidence.is_accounted_for(host) for host in last.ids
        )

    async def _try_on_all(self, leader: Leader, group: Group) -> Outcome:
        def plan_of(coordinator: str) -> Plan:
            events.forget(self.queue, but=events.Signalled)
            leader.begin(group, coordinator)
            hosts = ", ".join(f"{index} ({host.address})" for index, host in enumerate(group.hosts))
            self.output.log(f"generation {group.number - 1}: hosts {hosts}")
            return group.plan_of(self._own.id, coordinator)

        try:
            outcome = await self._lead_attempt(leader, asking.split(self._own.address)[0], plan_of)
            if outcome.status != 0:
                leader.drop_running()
            return outcome
        finally:
            leader.ended()
            self._since = time.monotonic()

    # ---- Following ---------------------------------------------------------------------------------------------------

    async def _follow(self, address: str) -> Outcome | None:
        """Follows a launcher until the job ends; returns None if that is lost."""
        events.forget(self.queue, but=events.Signalled)
        try:
            link = await asking.connected(address, self._silence)
        except OSError:
            return None
        if self._own.address not in self._order:
            assert self._server is not None
            port = self._server.sockets[0].getsockname()[1]
            self._own = self._own._replace(address=environment.joined(link.own_address, port))
        options = self.options
        hello = {
            "host": self._own, "node_rank": options.node_rank, "gone": self._gone(), "restarts": self.restarts,
            "started": self._register.started, "accepted": self._register.accepted,
            "enlisted": self._register.enlisted,
            "options": [options.min_nodes, options.nnodes, self._silence],
        }  # fmt: skip
        link.send(hello)
        message = await link.receive()
        if message is None:
            link.abort()
            return None
        if "error" in message:
            link.abort()
            self.output.log(f"failed: {address} has refused this host: {message['error']}")
            return Outcome(2)
        leader_id = message["welcome"]
        self._evidence.found(leader_id)
        self._follower = Follower(link, address, self._own.id, leader_id, self._register, self._evidence, self.queue)
        self.output.log(f"follows the launcher at {address}")
        try:
            return await self._followed(self._follower)
        finally:
            follower, self._follower = self._follower, None
            await follower.close()

    async def _followed(self, follower: Follower) -> Outcome | None:
        while True:
            try:
                async with asyncio.timeout(_ASK_SECONDS):
                    event = await self.queue.get()
            except TimeoutError:
                # The leader may need to know who has ended.
                await self._unless_signalled(self._ask())
                follower.tell_gone(self._gone())
                continue
            if (end := self._end_of(event)) is not None:
                return end
            match event:
                case events.RemoteStop() if follower.is_lost:
                    self.output.log(event.reason)
                    self._since = time.monotonic()
                    return None
                case events.RemoteBegin(plan, restarts):
                    self.restarts = restarts
                    outcome = await self._watch(plan, follower)
                    self._since = time.monotonic()
                    if outcome.is_stopped or outcome.is_ended:
                        return outcome
                    if follower.is_lost:
                        return None
                    follower.tell("stopped", str(outcome.failure))

    # ---- Waits -------------------------------------------------------------------------------------------------------

    def _left(self) -> float:
        """How long this host may wait for others."""
        return max(0.0, self._since + self.options.node_timeout - time.monotonic())

    def _why_not(self) -> str:
        """Why this host does not go on."""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + self._since))
        guests = [guest.host for guest in self._leader.guests.values()] if self._leader else []
        here = [self._own, *guests]
        ids = {host.id for host in here} | {host.address for host in here}
        last, options = self._register.started, self.options
        missing = [f"{host.address} ({self._evidence.describe(host.id)})" for host in last.hosts if host.id not in ids]
        of_what = f"hosts of generation {last.number - 1}" if last.number else "hosts of --coordinator"
        least, _ = self._register.enlisted or (1, None)
        processes = f" with {least} processes (min_processes)" if least > 1 else ""
        return (
            f"too few hosts for {options.node_timeout:g} s (--node-timeout), since {since}: "
            f"{len(here)} here, and it takes {options.min_nodes} (--nnodes {options.min_nodes}:{options.nnodes})"
            f"{processes}, and of the {len(last.hosts)} {of_what} more than half, or half with the first. Missing: "
            f"{', '.join(missing) or 'none of these'}"
        )
