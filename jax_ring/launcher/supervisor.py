"""Carries out an elastic job's membership: services, replacements, overdue processes."""

import asyncio
import collections
import contextlib
import functools
import math
import signal
from collections.abc import Callable, Sequence

from jax_ring.launcher import events, protocol
from jax_ring.launcher.control_server import ControlServer
from jax_ring.launcher.coordinator.process import Service
from jax_ring.launcher.environment import reserved_address
from jax_ring.launcher.events import Failure
from jax_ring.launcher.members import Formation, Membership, Needs, Refusal
from jax_ring.launcher.processes import Process
from jax_ring.launcher.shared import Remote, Shared

_TICK_SECONDS = 0.1
# By then all members of a generation have connected to its service.
_CONNECT_SECONDS = 30.0
_LOOKS_AT_STOPPED = 10  # at a process until it counts as stopped


class Elastic:
    """The membership in one attempt.

    start: starts a process in a slot with a rank to be called by; raises OSError. later: has the attempt do something
    after some seconds, unless it has ended.
    """

    def __init__(
        self,
        shared: Shared,
        processes: Sequence[Process],
        needs: Needs,
        start: Callable[..., Process],
        later: Callable[[float, Callable[[], str | None]], None],
    ) -> None:
        self._shared, self._options, self._start, self._later = shared, shared.options, start, later
        self._log = shared.output.log
        self._processes = {process.number: process for process in processes}
        self._membership = Membership(list(self._processes), *needs)
        for process in processes:
            if process.status is not None:
                self._membership.ended(process.number)
        self._answers: dict[int, events.Answer] = {}  # to processes that wait for a generation
        self._replacing = 0  # processes to start after a back-off
        self._has_finished = False  # whether a process has exited with status 0
        self.late: Failure | None = None  # of a member, the first after that
        self._is_dismissed = False  # whether the remaining processes are being killed
        self._told = False  # whether the members know that a change is pending
        self._is_ticking = False
        self._forming: asyncio.Task | None = None
        self._awaited_since: dict[tuple[Process, str], float] = {}  # by member, and why
        self._freed: set[int] = set()  # members that a stuck one kept waiting, which was killed
        self._formed_at = -math.inf  # when the last generation was formed
        self._refused = ""
        self._addresses = contextlib.ExitStack()
        self._ready = Service(shared.output)  # for the next generation
        self._services: list[tuple[Service, tuple[int, ...]]] = []  # with the members

    def close(self) -> None:
        """Ends the services, once no process runs."""
        if self._forming is not None:
            self._forming.cancel()
        for service in [self._ready, *(service for service, _ in self._services)]:
            service.end()
        self._addresses.close()

    def enlisted(self, process: Process) -> None:
        """Tells a process at once, if it is to leave."""
        if self._told:
            self._tell(process.number)

    def left(self, process: Process, after: int, reason: str, answer: events.Answer) -> None:
        """A process has left a generation, and waits for the answer, which is the next.

        Raises ValueError if there will be none, or it cannot have been in that one.
        """
        if self._refused:
            raise ValueError(self._refused)
        self._membership.left(process.number, after, reason)
        if process.number in self._membership.members:
            self._log(f"{process.name} has left generation {after}: {reason}")
        self._answers[process.number] = answer

    def finished(self, process: Process) -> None:
        self._has_finished = True
        self._ended(process, is_failure=False)

    def died(self, process: Process, failure: Failure) -> str | None:
        """A process has failed; returns why the job ends, or None."""
        self._ended(process)
        if self._refused or self._is_dismissed:
            return None
        text = str(failure)
        if self._has_finished:
            self._log(f"{text}; others have finished, so that it is not replaced")
            if process.number in self._membership.members:
                self.late = self.late or failure
        elif self._shared.take_restart():
            wait = self._shared.backoff()
            self._log(f"{text}; the others go on, and another process starts in its place in {wait:g} s")
            self._replacing += 1
            self._later(wait, functools.partial(self._replace, process.slot, process.rank))
        elif any(other.status is None for other in self._processes.values()):
            self._log(f"{text}; the others go on, and no restarts are left (--max-restarts)")
        else:
            return text
        return None

    def _ended(self, process: Process, is_failure: bool = True) -> None:
        self._answers.pop(process.number, None)
        self._membership.ended(process.number, is_failure)
        if is_failure and self._formed_at + _CONNECT_SECONDS > asyncio.get_running_loop().time():
            for service, members in self._services[-1:]:  # none if all members have finished
                if process.number in members:
                    service.stand_in(members.index(process.number))
        # A dropped client aborts its process when its service ends, so keep a service for such clients.
        for entry in list(self._services):
            service, members = entry
            if all(self._processes[number].status is not None for number in members):
                service.end()
                self._services.remove(entry)

    def end_stuck(self, stuck: Sequence[Process], waiting: Sequence[int]) -> None:
        """Kills processes that do not go on. Those that wait for them in a call may be unable to leave it."""
        self._freed = set(waiting)
        for process in stuck:
            self._log(f"{process.name} is stuck; killing it")
            process.send(signal.SIGKILL)

    def _replace(self, slot: int, rank: int) -> None:
        self._replacing -= 1
        if self._has_finished or self._refused:
            return
        try:
            process = self._start(slot, rank, joins=True)
        except OSError as error:
            self._log(f"another process for rank {rank} could not be started: {error}")
            return
        self._processes[process.number] = process
        self._membership.started(process.number)

    def waits_for_replacements(self) -> bool:
        return self._replacing > 0 and not self._has_finished and not self._refused

    def has_finished(self) -> bool:
        return self._has_finished and not self._refused

    def advance(self) -> str | None:
        """Takes due decisions; returns why the job ends, or None."""
        membership = self._membership
        if self._refused:
            return None
        if self._has_finished and not any(number in membership.alive for number in membership.members):
            self._dismiss()
            return None
        if membership.is_change_pending() and not self._told:
            self._told = True
            for number in membership.members:
                self._tell(number)
        if self._forming is not None and self._forming.done():
            self._forming.result()
            self._forming = None
        if self._forming is None:
            decision = membership.decide(self._replacing)
            if isinstance(decision, Formation):
                self._forming = asyncio.create_task(self._form(decision))
                self._forming.add_done_callback(lambda task: self._shared.queue.put_nowait(events.Due(lambda: None)))
            elif isinstance(decision, Refusal):
                return self._refuse(decision.reason)
        self._end_overdue()
        return None

    def _tell(self, number: int) -> None:
        self._shared.server.tell(number, {"change_pending": True})

    def _dismiss(self) -> None:
        """Ends processes that wait when the members have finished."""
        if self._is_dismissed:
            return
        self._is_dismissed = True
        for process in self._processes.values():
            if process.status is None:
                self._log(f"{process.name} is no longer needed: the members have finished; killing it")
                process.send(signal.SIGKILL)

    def _refuse(self, reason: str) -> str:
        self._refused = reason
        for answer in self._answers.values():
            answer({"error": reason})
        self._answers.clear()
        return reason

    def _end_overdue(self) -> None:
        """Kills members for which others wait, if they are stopped or have not left in time."""
        now, membership = asyncio.get_running_loop().time(), self._membership
        left_over = [self._processes[number] for number in membership.members_left_over()]
        limits = {(process, why): limit for process in left_over for why, limit in self._why_awaited(process).items()}
        self._awaited_since = {each: self._awaited_since.get(each, now) for each in limits}
        for (process, why), since in self._awaited_since.items():
            if now - since > limits[process, why]:
                self._log(f"{process.name} {why}")
                process.send(signal.SIGKILL)
        if (limits or membership.is_change_pending()) and not self._is_ticking:
            self._is_ticking = True
            self._later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False

    def _why_awaited(self, process: Process) -> dict[str, float]:
        """Why others wait for a member, and for how many seconds they do before it is killed."""
        membership, limit = self._membership, self._options.leave_timeout
        number, found = membership.generation, dict[str, float]()
        if process.number in self._freed:
            # Nobody leaves where all wait in a call of XLA, whose members it does not miss.
            found[
                f"has not left generation {number} within {limit:g} s (--leave-timeout) of the end of the stuck ones; "
                "killing it"
            ] = limit
        if membership.is_leaving():
            late = f"has not left generation {number} within {limit:g} s (--leave-timeout) of the first; killing it"
            found[late] = limit
            if process.is_stopped():
                found = {"is stopped, and the others wait for it; killing it": -1.0}  # at once
        elif membership.is_change_pending() and process.is_stopped():
            # No member notices that another is stopped when it is the only one; joiners wait for it.
            found[f"has been stopped for {limit:g} s (--leave-timeout), and others wait for it; killing it"] = limit
        return found if process.status is None else {}

    async def _form(self, formation: Formation) -> None:
        """Starts a service and tells the members, unless a process has ended meanwhile."""
        membership = self._membership
        service, self._ready = self._ready, Service(self._shared.output)
        address = self._addresses.enter_context(reserved_address())
        service.begin(address, len(formation.members))
        is_started = await service.started()
        if not is_started or not membership.waiting.keys() >= {*formation.members, *formation.spares}:
            service.end()
            if not is_started:
                self._log("the coordination service of the next generation could not be started; trying again")
            return
        self._services.append((service, formation.members))
        self._formed_at = asyncio.get_running_loop().time()
        membership.form(formation)
        self._told = False
        self._freed = set()
        ranks = ", ".join(str(self._processes[number].rank) for number in formation.members)
        spares = ", ".join(str(self._processes[number].rank) for number in formation.spares)
        self._log(f"generation {membership.generation}: ranks {ranks}" + (f"; spares: {spares}" if spares else ""))
        for index, number in enumerate(formation.members):
            member = protocol.Member(membership.generation, address, len(formation.members), index)
            self._answers.pop(number)({"member": member})
        for number in formation.spares:
            member = protocol.Member(membership.generation, "", len(formation.members), -1)
            self._answers.pop(number)({"member": member})


class Leaving:
    """The processes of one attempt on this host, in a job whose hosts come and go: others start in their place."""

    def __init__(self, server: ControlServer, remote: Remote, log: Callable[[str], None]) -> None:
        self._server, self._remote, self._log = server, remote, log
        self._left: set[int] = set()
        self._is_change_pending = False

    def enlisted(self, process: Process) -> None:
        """Tells a process at once, if it is to leave."""
        if self._is_change_pending:
            self._tell(process)

    def change_pending(self, is_pending: bool, running: Sequence[Process]) -> None:
        """Has the processes leave at their next commit, or no longer."""
        self._is_change_pending = is_pending
        for process in running:
            self._tell(process)

    async def watch_stopped(self, running: Callable[[], Sequence[Process]], limit: float) -> None:
        """Counts processes as having left that a signal has stopped for `limit` seconds. Runs until it is cancelled.

        While processes start, nothing else tells those that wait for them before JAX's own limit of minutes.
        """
        looks: collections.Counter[int] = collections.Counter()
        while True:
            await asyncio.sleep(limit / _LOOKS_AT_STOPPED)
            for process in running():
                looks[process.number] = looks[process.number] + 1 if process.is_stopped() else 0
                if looks[process.number] == _LOOKS_AT_STOPPED:
                    self.left(process, f"has been stopped for {limit:g} s (--heartbeat-timeout)", running())

    def left(self, process: Process, how: str, running: Sequence[Process]) -> None:
        """A process has left, or does not go on. It has no answer, because it does not live to see it."""
        self._log(f"{process.name} {how}")
        self._left.add(process.number)
        is_all = all(other.number in self._left for other in running)
        self._remote.tell("left", [is_all, f"{process.name} {how}"])

    def _tell(self, process: Process) -> None:
        self._server.tell(process.number, {"change_pending": self._is_change_pending})
