"""One generation on this host: starts its processes, watches and ends them."""

import asyncio
import collections
import contextlib
import dataclasses
import enum
import functools
import signal
from collections.abc import Callable, Sequence
from typing import Any

from jax_ring.launcher import environment, events, protocol
from jax_ring.launcher.environment import Plan
from jax_ring.launcher.events import NO_RANK, End, Failure, Failures, failure_of_report, failure_of_status
from jax_ring.launcher.processes import Process, State, format_ranks
from jax_ring.launcher.shared import Needs, Outcome, Role, Shared
from jax_ring.launcher.watching.page import PAGE_VARIABLE, Page
from jax_ring.launcher.watching.watcher import Watcher

# After this long, a message says what the launcher waits for.
_PATIENCE_SECONDS = 1.0
_LOOKS_AT_STOPPED = 10  # at a process until it counts as stopped


class _ArgumentError(ValueError):
    """The script's own fault: it gets a ValueError with this message."""


class Phase(enum.Enum):
    """What a generation does on this host. It goes to a later phase only.

    RUNNING: Processes run, or have exited with status 0. It ends when all have, for the launcher that leads: when those
      of all hosts have.
    DOUBTING: Failures blame a process, which has --failure-grace to fail by itself.
    DOUBTING_LONGER: It still runs, and has the rest of --grace. Not in an elastic job, which goes on without it.
    ENDING: Processes were told to end, and are killed when their time is up: after a failure, when all have left, by a
      signal, or because the launcher that leads says so.
    """

    RUNNING = enum.auto()
    DOUBTING = enum.auto()
    DOUBTING_LONGER = enum.auto()
    ENDING = enum.auto()


class Attempt:
    def __init__(self, shared: Shared, plan: Plan, role: Role) -> None:
        self._shared, self._options, self._plan, self._role = shared, shared.options, plan, role
        self._log = shared.output.log
        self._phase = Phase.RUNNING
        self._processes: dict[int, Process] = {}  # by the launcher's number
        self._failures = Failures()
        self._absent: list[Failure] = []  # of processes that have exited without jax.distributed.initialize()
        self._others_initialize = False  # whether processes of other hosts wait in that
        self._is_change_pending = False
        self._watcher = Watcher(shared, self._processes, role)
        self._memory = protocol.memory_prefix_for(f"{plan.job}/{plan.number}")
        self._exits = 0  # of processes, to be looked at
        self._timers: list[asyncio.TimerHandle] = []

    async def run(self) -> Outcome:
        # What is left of the last generation is of no use.
        queue = self._shared.queue
        events.forget(queue, but=events.Signalled | End | events.ChangePending | events.JobEnded | events.LeaderLost)
        watching = [asyncio.create_task(each) for each in (self._watcher.run(), self._watch_stopped())]
        for task in watching:
            task.add_done_callback(self._unwatched)
        try:
            for index, slot in enumerate(self._plan.slots):
                rank = self._plan.first + index
                try:
                    self._start(slot, rank)
                except OSError as error:
                    failure = Failure(f"rank {rank}", rank, f"could not be started: {error}")
                    self._failures.setdefault(-1, failure)
                    return await self._end(self._because(str(failure)))
            return await self._supervise()
        finally:
            for task in watching:
                task.cancel()
            for timer in self._timers:
                timer.cancel()
            for process in self._processes.values():
                process.kill()
            await asyncio.gather(*(process.descendants_ended() for process in self._processes.values()))
            protocol.remove_memory(self._memory)
            self._shared.copying.extend(task for process in self._processes.values() for task in process.copying)

    def _unwatched(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log(f"the processes are no longer watched: {error!r}")

    def _start(self, slot: int, rank: int) -> None:
        shared, number, page = self._shared, next(self._shared.numbers), Page.new(0)
        own = {
            protocol.CONTROL_VARIABLE: shared.server.name,
            protocol.PROCESS_VARIABLE: str(number),
            protocol.MEMORY_VARIABLE: self._memory,
            protocol.KEPT_VARIABLE: ",".join(map(str, (slot, *shared.kept))),
            PAGE_VARIABLE: str(page.file),
        }
        variables = environment.variables(self._options, self._plan, own, slot=slot, rank=rank)
        try:
            process = Process(self._options, number, rank, page, variables, shared.kept)
        except OSError:
            page.close()
            raise
        self._processes[number] = process
        label = f"[{rank}]".rjust(len(f"[{self._plan.num_processes - 1}]"))
        process.copy_output(shared.output, label, shared.logs.of(self._plan.number, rank))

    def reap(self) -> None:
        """Finds exited processes, after SIGCHLD."""
        for process in self._processes.values():
            if process.reap():
                self._exits += 1
                self._shared.queue.put_nowait(events.Due(functools.partial(self._exited, process)))

    def pass_on(self, signum: int) -> None:
        """Signals the processes alone: their descendants might end by it."""
        for process in self._running():
            process.send(signum, to_descendants=False)

    def _running(self) -> list[Process]:
        return [process for process in self._processes.values() if process.status is None]

    @property
    def _is_elastic(self) -> bool:
        return self._shared.needs is not None

    # ---- While processes run -----------------------------------------------------------------------------------------
    # A method that returns an `End` has the processes end.

    async def _supervise(self) -> Outcome:
        while (outcome := self._finished()) is None:
            event = await self._shared.queue.get()
            if isinstance(event, events.JobEnded):
                self._shared.queue.put_nowait(event)  # for the job
                return Outcome(event.status)
            if (end := self._take(event)) is not None:
                return await self._end(end)
        return outcome

    def _take(self, event: events.Event) -> End | None:
        match event:
            case events.Signalled(signum):
                # Python ignores SIGPIPE, so forwarding it would have no effect.
                forwarded = signal.SIGTERM if signum == signal.SIGPIPE else signum
                return End(f"received {signal.Signals(signum).name}", forwarded, self._options.grace, signum)
            case End():
                return event
            case events.LeaderLost(reason):
                self._shared.queue.put_nowait(event)  # for the job
                return End(reason, signal.SIGTERM, 0.0)
            case events.AllLeft(reason):
                what = f"{self._plan.number} has ended: {reason}"
                self._failures.setdefault(-1, Failure("generation", NO_RANK, what))
                return End(reason, signal.SIGKILL, 0.0)
            case events.ChangePending(is_pending):
                self._is_change_pending = is_pending
                for process in self._running():
                    self._shared.server.tell(process.number, {"change_pending": is_pending})
            case events.Due(do):
                return do()
            case events.Asked(number, message, answer):
                self._asked(self._processes.get(number), message, answer)
            case events.Stuck(blamed, _):
                ends = [self._stuck(number, what) for number, what in blamed.items()]
                return next(filter(None, ends), None)
            case events.HostFailed(index, failure):
                return self._failed((index, failure.rank), failure)
            case events.HostInitializes(absent):
                self._others_initialize |= absent is None
                self._note_absent(absent)
        return None

    def _finished(self) -> Outcome | None:
        """The outcome, once there is nothing to wait for."""
        if self._running() or self._exits:
            return None
        if self._failures:
            return self._outcome()
        self._role.tell("succeeded", True)
        return Outcome(0) if self._role.succeeded() else None

    def _because(self, reason: str) -> End:
        """The end after a failure. An elastic job goes on at once: its state is in the launcher's memory."""
        return End(reason, signal.SIGKILL if self._is_elastic else signal.SIGTERM, self._options.failure_grace)

    def _exited(self, process: Process) -> End | None:
        assert process.status is not None
        self._exits -= 1
        if process.status == 0:
            # An exception that was reported and then caught is no failure.
            self._failures.pop(process.number, None)
            if not process.initializes and self._plan.num_processes > 1:
                what = "has exited with status 0 without jax.distributed.initialize(), in which others wait for it"
                self._note_absent(Failure(process.name, process.rank, what))
            return None
        end = failure_of_status(process.name, process.rank, process.status)
        failure = self._failures.setdefault(process.number, end)  # unless it has reported another
        if process.state is not State.KILLED:
            failure.status = end.status
        return self._failed(process.number, failure, str(end))

    def _failed(self, key: int | tuple[int, int], failure: Failure, text: str = "") -> End | None:
        failure = self._failures.setdefault(key, failure)
        if isinstance(key, int) and self._role.tell_failure(failure):
            self._log(text or str(failure))
            return None  # the launcher that leads decides
        if self._failures.has_own():
            return self._because(text or str(failure))
        return self._doubt()  # the process that it blames may be about to fail too

    def _doubt(self) -> End | None:
        for process in self._running():
            if process.rank in self._failures.awaited() and process.is_stopped():
                return self._failed(process.number, Failure(process.name, process.rank, "is stopped"))
        if self._phase is Phase.RUNNING:
            self._phase = Phase.DOUBTING
            self._later(self._options.failure_grace, self._no_cause_in_time)
        return None

    def _no_cause_in_time(self) -> End | None:
        """The process that others blame should have failed too."""
        first = str(self._failures.first())
        ended = {process.rank for process in self._processes.values() if process.status is not None}
        more = self._options.grace - self._options.failure_grace
        awaited = self._failures.awaited() - ended
        if self._phase is Phase.DOUBTING_LONGER or self._is_elastic or more <= 0 or not awaited:
            return self._because(first)
        self._phase = Phase.DOUBTING_LONGER
        ranks = ", ".join(map(str, sorted(awaited)))
        self._log(f"{first}; waiting up to {more:g} s for ranks {ranks} to exit, which may be the cause")
        self._later(more, self._no_cause_in_time)
        return None

    def _has_not_exited(self, process: Process) -> End | None:
        """A process should have exited after reporting its failure."""
        if process.status is not None:
            return None
        failure = self._failures[process.number]
        return self._failed(
            process.number, failure, f"{failure}; it has not exited within {self._options.failure_grace:g} s"
        )

    def _stuck(self, number: int, what: str) -> End | None:
        process = self._processes[number]
        if process.status is not None:
            return None
        return self._failed(number, Failure(process.name, process.rank, what))

    async def _watch_stopped(self) -> None:
        """Counts processes as failed that a signal has stopped for so long, in jobs that go on without them.

        While processes start, nothing else tells those that wait for them before JAX's own limit of minutes.
        """
        looks: collections.Counter[int] = collections.Counter()
        limit = self._options.heartbeat_timeout
        while True:
            await asyncio.sleep(limit / _LOOKS_AT_STOPPED)
            for process in self._running():
                is_stopped = (self._is_elastic or self._options.hosts_change) and process.is_stopped()
                looks[process.number] = looks[process.number] + 1 if is_stopped else 0
                if looks[process.number] == _LOOKS_AT_STOPPED:
                    what = f"has been stopped for {limit:g} s (--heartbeat-timeout)"
                    self._shared.queue.put_nowait(events.Due(functools.partial(self._stuck, process.number, what)))

    def _note_absent(self, absent: Failure | None) -> None:
        """Notes that a process has exited without jax.distributed.initialize(), or that one is in it if None."""
        if not self._role.leads:
            what, value = ("absent", dataclasses.asdict(absent)) if absent else ("initializes", True)
            self._role.tell(what, value)
            return
        if absent is not None:
            self._absent.append(absent)
        self._later(self._options.failure_grace, self._check_absent)

    def _check_absent(self) -> End | None:
        is_awaited = self._others_initialize or any(process.initializes for process in self._running())
        if not (self._absent and is_awaited):
            return None
        failure = self._absent[0]
        self._failures.setdefault((-1, failure.rank), failure)
        return self._because(str(failure))

    def _later(self, seconds: float, do: Callable[[], End | None]) -> None:
        loop, queue = asyncio.get_running_loop(), self._shared.queue
        self._timers.append(loop.call_later(seconds, queue.put_nowait, events.Due(do)))

    # ---- What processes ask ------------------------------------------------------------------------------------------

    def _asked(self, process: Process | None, message: dict[str, Any], answer: events.Answer) -> None:
        if process is None:
            answer({"error": "this process belongs to a generation that has ended"})
            return
        try:
            match message.get("do"):
                case "next_question":
                    self._watcher.asked(process, message, answer)
                case "initialize":
                    process.initializes = True
                    self._note_absent(None)
                    answer({"done": True})
                case "report":
                    failure = self._reported(process, message, answer)
                    if failure.is_own:
                        self._later(self._options.failure_grace, functools.partial(self._has_not_exited, process))
                    else:
                        self._later(0.0, functools.partial(self._failed, process.number, failure))
                case "enlist":
                    self._enlist(Needs(message["min_processes"], message["multiple_of"]))
                    answer({"done": True})
                    if self._is_change_pending:
                        self._shared.server.tell(process.number, {"change_pending": True})
                case "leave":
                    self._left(process, str(message["reason"]))
                case other:
                    raise ValueError(f"unknown request {other!r}")
        except _ArgumentError as error:
            answer({"argument_error": str(error)})
        except (ValueError, KeyError, TypeError) as error:
            answer({"error": str(error)})

    def _enlist(self, needs: Needs) -> None:
        """Makes the job elastic. All processes ask for it."""
        options, shared, count = self._options, self._shared, self._plan.num_processes
        if options.min_processes < options.processes:  # -n MIN:MAX
            needs = needs._replace(min_processes=max(needs.min_processes, options.min_processes))
        if shared.needs is None and not options.hosts_change and needs.min_processes > count:
            raise _ArgumentError(
                f"elastic.run(min_processes={needs.min_processes}): the job has {count} process{'es' * (count > 1)} "
                f"(-n {options.processes}): start at least {needs.min_processes}, or lower min_processes"
            )
        needs.check(shared.needs)
        if shared.needs is None:
            shared.needs = needs
            self._role.tell("enlisted", needs)

    def _reported(self, process: Process, message: dict[str, Any], answer: events.Answer) -> Failure:
        failure = self._failures.setdefault(process.number, failure_of_report(process.name, process.rank, message))
        if failure.is_own:
            process.advance(State.RAISED)
        answer({"done": True})
        return failure

    def _left(self, process: Process, reason: str) -> None:
        """A process has left. It gets no answer: it waits to be killed."""
        process.advance(State.LEFT)
        self._log(f"{process.name} has left: {reason}")
        is_all = all(other.state is State.LEFT for other in self._running())
        self._role.tell("left", [is_all, f"{process.name} has left: {reason}"])

    # ---- The end -----------------------------------------------------------------------------------------------------

    async def _end(self, end: End) -> Outcome:
        """Signals the running processes and waits for the grace period; `run` kills the rest.

        A process that an exception of its own ends is left to its handlers of atexit, for as long as --grace, or in an
        elastic job --failure-grace.
        """
        self._phase = Phase.ENDING
        self.reap()  # one that has ended by itself is not told to
        received, is_for_all = end.received, end.received is not None or end.grace == 0.0
        reason, running = end.reason, self._running()
        told = [each for each in running if is_for_all or each.state is not State.RAISED]
        if told:
            verb = "killing" if end.signum == signal.SIGKILL else f"sending {signal.Signals(end.signum).name} to"
            reason += f"; {verb} ranks {format_ranks(told)}"
        self._log(reason)
        self._role.tell_stop(end.signum, end.grace, end.reason)
        for process in told:
            process.advance(State.KILLED if end.signum == signal.SIGKILL else State.TOLD)
            process.send(end.signum)
        for_raised = end.grace if self._is_elastic else max(end.grace, self._options.grace)
        loop = asyncio.get_running_loop()
        start = received_at = loop.time()
        said = False
        later: list[events.Event] = []
        while running := self._running():
            waited = loop.time() - start
            limits = {each: for_raised if each.state is State.RAISED else end.grace for each in running}
            self._kill([each for each, limit in limits.items() if limit <= waited])
            if (longest := max(limits.values())) <= waited:
                break
            if not said and waited >= _PATIENCE_SECONDS:
                said = True
                ranks = format_ranks(running)
                self._log(f"waiting up to {longest:g} s for ranks {ranks} to exit; a second signal kills them")
            until = [*limits.values()] if said else [*limits.values(), _PATIENCE_SECONDS]
            event = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(start + min(each for each in until if each > waited)):
                    event = await self._shared.queue.get()
            if isinstance(event, events.Signalled):
                if received is None:
                    received, received_at = event.signum, loop.time()
                elif loop.time() - received_at >= _PATIENCE_SECONDS:  # else the same one, from a terminal and a wrapper
                    break
            elif isinstance(event, events.JobEnded | events.LeaderLost):
                later.append(event)
            elif event is not None:
                self._learn(event)
        for event in later:
            self._shared.queue.put_nowait(event)
        self._kill(self._running())
        outcome = self._outcome()
        return outcome if received is None else outcome.or_stopped(received)

    def _kill(self, processes: Sequence[Process]) -> None:
        if processes := [each for each in processes if each.state is not State.KILLED]:
            self._log(f"killing ranks {format_ranks(processes)}")
        for process in processes:
            process.advance(State.KILLED)
            process.send(signal.SIGKILL)

    def _learn(self, event: events.Event) -> None:
        """Learns the cause from an event, while processes are being ended."""
        match event:
            case events.Asked(number, message, answer):
                process = self._processes.get(number)
                if process is not None and message.get("do") == "report":
                    self._reported(process, message, answer)
                else:
                    answer({"error": "the job is being ended"})
            case events.HostFailed(index, failure):
                self._failures.setdefault((index, failure.rank), failure)

    def _outcome(self) -> Outcome:
        for process in self._processes.values():
            failure, status = self._failures.get(process.number), process.status
            if failure is not None and process.state is State.RAISED and status is not None and status > 0:
                failure.status = status
            # Ends that no event has told yet.
            if status and process.state not in (State.TOLD, State.KILLED):
                self._failures.setdefault(process.number, failure_of_status(process.name, process.rank, status))
        failure = self._failures.first()
        finished = any(process.status == 0 for process in self._processes.values())
        lost = self._failures.lost(self._plan.num_processes)
        return Outcome(failure.status if failure else 1, failure, lost, has_finished=finished)
