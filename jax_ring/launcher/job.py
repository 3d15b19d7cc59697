"""A job on one host, from its options to its exit status: it leads or follows, generation by generation."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from jax_ring.launcher import environment, events, signals
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.attempt import Attempt
from jax_ring.launcher.control_server import Answer, ControlServer
from jax_ring.launcher.coordinator.folder import SocketFolder
from jax_ring.launcher.coordinator.process import Service
from jax_ring.launcher.events import NO_RANK, Failure
from jax_ring.launcher.hosts.follower import Follower
from jax_ring.launcher.hosts.generation import Outcome
from jax_ring.launcher.hosts.groups import Group
from jax_ring.launcher.hosts.leader import Leader
from jax_ring.launcher.hosts.search import CannotGoOnError, Search, split
from jax_ring.launcher.output import Output
from jax_ring.launcher.processes import explained, may_be
from jax_ring.launcher.shared import Shared
from jax_ring.launcher.signals import SignalledError

_OUTPUT_LOST = 120  # Python's exit status where all else went well
_DRAIN_SECONDS = 1.0  # after a signal, for the end of the output
# While it follows, a launcher looks this often who has ended: the one that leads may need to know.
_LOOK_SECONDS = 1.0

T = TypeVar("T")


class Job:
    """The launcher's part in a job.

    It searches for a launcher that leads, and follows it, or leads itself; with one host it leads at once. A generation
    is an `Attempt` of new processes. One that fails is followed by another as long as restarts are left, then in an
    elastic job with those that remain; one that has been left for other hosts, at once.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._shared = options, Shared(options)
        self._search = Search(self._shared)
        self._attempt: Attempt | None = None
        self._service: Service | None = None  # of a generation that this launcher leads
        self._is_stopped = False  # whether a signal has ended the job on all hosts
        self._blamed: set[tuple[str, int]] = set()  # the hosts and slots whose processes failed last

    async def run(self) -> int:
        """Returns the launcher's exit status."""
        shared = self._shared
        shared.output = Output(sys.stdout, sys.stderr, lambda: self._signalled(signal.SIGPIPE))
        shared.kept = environment.kept_files(self._options.processes)
        shared.key_file = environment.key_file(shared.key)
        shared.sockets = SocketFolder()
        signum = None
        try:
            shared.server = ControlServer(shared.sockets.socket("control"), self._asked)
            signals.receive(self._signalled, self._pass_on, self._reap)
            await shared.server.start()
            if self._options.coordinators and not self._options.secret:
                shared.output.log("--insecure: whoever reaches the port of a launcher takes part in this job")
            status = await self._generations()
        except SignalledError as error:
            signum = error.signum
            status = 128 + signum
        finally:
            self._search.close()
            shared.server.close()
            shared.sockets.close()
            for file in (*shared.kept, shared.key_file):
                os.close(file)
        status = await self._drained(status, is_stopped=signum is not None)
        # Nothing follows the last line. A signal is noted in a pipe that asyncio closes first, of which Python would
        # complain, and Python 3.11 would report each connection that is still open.
        signal.set_wakeup_fd(-1)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        return status

    async def _generations(self) -> int:
        status = None
        while status is None:
            try:
                address = await self._unless_signalled(self._search.found())
                status = await (self._lead() if address is None else self._follow(address))
            except CannotGoOnError as error:
                status = self._failed(str(error), error.status)
        return status

    def _failed(self, reason: str, status: int = 1) -> int:
        self._shared.output.log(f"failed: {reason}")
        return status

    # ---- A launcher that leads: it follows itself --------------------------------------------------------------------

    async def _lead(self) -> int | None:
        """Leads until the job ends; returns None if another launcher is to lead."""
        events.forget(self._shared.queue)
        leader = self._search.lead()
        leading = asyncio.create_task(self._lead_generations(leader))
        leading.add_done_callback(lambda _: self._shared.queue.put_nowait(events.LeaderLost("")))
        try:
            status = await self._followed(leader.follower)
        except SignalledError as error:
            if not self._options.hosts_change:  # else others go on without this host
                self._is_stopped = True
                if leader.generation is not None:  # it may have begun, and this host's part of it not
                    leader.generation.end("it was told to end", signal.SIGTERM, self._options.grace)
                    leader.follower.tell("ended", self._shared.newest_commit())
                with contextlib.suppress(SignalledError):
                    await self._unless_signalled(leader.finish())
                await leader.end(128 + error.signum, "it was told to end")
            raise
        finally:
            leading.cancel()
            leader.drop()
            self._search.leader = None
            with contextlib.suppress(asyncio.CancelledError):
                await leading
        return status

    async def _lead_generations(self, leader: Leader) -> None:
        """Leads generation after generation, until the job ends, or another launcher is to lead."""
        try:
            while (group := await self._search.formed(leader)) is not None:
                outcome = await self._generation(leader, group)
                self._search.had_enough()
                if self._is_stopped:
                    return
                if outcome.status == 0 or not await self._goes_on(leader, group, outcome):
                    await leader.end(outcome.status, str(outcome.failure))
                    return
        except CannotGoOnError as error:
            await leader.end(error.status, str(error))

    async def _generation(self, leader: Leader, group: Group) -> Outcome:
        """A generation on all hosts, with a coordination service here."""
        own, path = self._search.own, self._shared.sockets.socket(f"coordinator-{group.number}")
        with environment.coordinator_address(split(own.address)[0] if own.address else "", path) as coordinator:
            try:
                self._service = service = Service(self._shared.output, coordinator, group.num_processes)
            except OSError as error:
                what = f"could not be started: {explained(error)}"
                return Outcome(1, Failure("the coordination service", NO_RANK, what))
            try:
                if self._options.hosts_change:
                    hosts = ", ".join(f"{index} ({host.address})" for index, host in enumerate(group.hosts))
                    self._shared.output.log(f"generation {group.number - 1}: hosts {hosts}")
                generation = leader.begin(group, coordinator)
                await leader.finish()
                return generation.outcome(service.failure())
            finally:
                self._service = None
                service.end()
                leader.ended()

    async def _goes_on(self, leader: Leader, group: Group, outcome: Outcome) -> bool:
        """Whether another generation follows this one, which has failed or was left; waits if it made no commit."""
        shared, options, log = self._shared, self._options, self._shared.output.log
        if outcome.has_changed:
            return True
        failure, lost, before = outcome.failure, outcome.lost, self._blamed
        self._blamed = {group.place_of(rank) for rank in lost}
        if shared.take_restart():
            wait = 0.0 if shared.has_commit_of(group.number - 1, hosts=len(group.hosts)) else shared.backoff()
            log(f"failed: {failure}; restart {shared.restarts} of {options.max_restarts} in {wait:g} s")
            left = group.num_processes - len(lost)
            if lost and self._blamed == before and options.processes > left >= options.min_processes:
                leader.leave_out(lost)
                log(f"{failure} in two attempts on end; going on with {left} processes without it")
            await asyncio.sleep(wait)
            return True
        if shared.needs is not None and lost and not outcome.has_finished:
            leader.leave_out(lost)
            if hosts := leader.hosts():
                count = sum(len(host.slots) for host in hosts)
                log(f"failed: {failure}; no restarts are left (--max-restarts), going on with {count} processes")
                return True
            log(leader.why_not())
        return False

    # ---- A launcher that is led --------------------------------------------------------------------------------------

    async def _follow(self, address: str) -> int | None:
        """Follows a launcher until the job ends; returns None if that is lost, and another may lead."""
        events.forget(self._shared.queue)  # before that one may say anything
        try:
            follower = await self._unless_signalled(self._search.follow(address))
            return await self._followed(follower) if follower is not None else None
        finally:
            await self._search.leave()

    async def _followed(self, follower: Follower) -> int | None:
        """Does what the launcher that leads says, and returns the exit status of the job; None if another may lead."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    event = await self._shared.queue.get()
            except TimeoutError:
                if self._options.hosts_change and not follower.leads:
                    await self._unless_signalled(self._search.ask())
                    follower.tell("gone", self._search.gone())
                continue
            match event:
                case events.Signalled(signum):
                    self._shared.output.log(f"received {signal.Signals(signum).name}")
                    raise SignalledError(signum)
                case events.JobEnded(status, reason):
                    return self._failed(reason, status) if status else 0
                case events.LeaderLost(reason):
                    if reason and not self._options.hosts_change:
                        return self._failed(reason)
                    if reason:
                        self._shared.output.log(reason)
                    self._search.had_enough()
                    return None
                case events.Begin(plan, restarts, newest_commit):
                    self._shared.restarts, self._shared.others_commit = restarts, newest_commit
                    self._attempt = Attempt(self._shared, plan, follower)
                    try:
                        received = await self._attempt.run()
                    finally:
                        self._attempt = None
                    self._search.had_enough()
                    if received is None or follower.leads:  # else the job has lost this host
                        follower.tell("ended", self._shared.newest_commit())
                    if received is not None:
                        raise SignalledError(received)

    # ---- Both --------------------------------------------------------------------------------------------------------

    async def _unless_signalled(self, waiting: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        return await signals.unless_signalled(self._shared.queue, waiting, seconds)

    def _signalled(self, signum: int) -> None:
        self._shared.queue.put_nowait(events.Signalled(signal.Signals(signum)))

    def _pass_on(self, signum: int) -> None:
        if self._attempt is not None:
            self._attempt.pass_on(signum)

    def _asked(self, pid: int, number: int, do: str, values: Any) -> Answer:
        if self._attempt is None or (process := self._attempt.processes.get(number)) is None:
            return {"error": "this process belongs to a generation that has ended"}
        if not may_be(pid, process.pid):
            return {"error": f"process {pid} asks for something as {process.name}, which has not started it"}
        return self._attempt.asked(process, do, values)

    def _reap(self) -> None:
        if self._attempt is not None:
            self._attempt.reap()
        # Processes that have not connected yet would wait for it for minutes.
        if self._service is not None and (failure := self._service.failure()) is not None:
            leader = self._search.leader
            if leader is not None and leader.generation is not None:
                leader.generation.fail(failure)

    async def _drained(self, status: int, *, is_stopped: bool) -> int:
        """Returns the exit status once output is written. A success waits for slow readers until a signal."""
        patience = None if status == 0 else _DRAIN_SECONDS if is_stopped else self._options.grace
        try:
            await self._unless_signalled(self._shared.output.written(), patience)
        except SignalledError as error:
            return status or 128 + error.signum
        except TimeoutError:
            pass
        return status or (_OUTPUT_LOST if self._shared.output.is_lost else 0)
