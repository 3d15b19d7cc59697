"""One attempt at a job: starts this host's processes, watches and ends them."""

import asyncio
import functools
import signal
from collections.abc import Callable, Sequence

from jax_ring.launcher import environment, events, protocol
from jax_ring.launcher.environment import Plan
from jax_ring.launcher.events import NO_RANK, Failure, Failures, failure_of_report, failure_of_status
from jax_ring.launcher.members import Needs
from jax_ring.launcher.processes import Process, format_ranks
from jax_ring.launcher.shared import Outcome, Remote, Shared
from jax_ring.launcher.supervisor import Elastic, Leaving
from jax_ring.launcher.watching.page import PAGE_VARIABLE, Page
from jax_ring.launcher.watching.watcher import Watcher

# After this long, a message says what the launcher waits for.
_PATIENCE_SECONDS = 1.0


class _ArgumentError(ValueError):
    """The script's own fault: it gets a ValueError with this message."""


class Attempt:
    def __init__(self, shared: Shared, plan: Plan, remote: Remote) -> None:
        self._shared, self._options, self._plan, self._remote = shared, shared.options, plan, remote
        self._log = shared.output.log
        self._processes: dict[int, Process] = {}  # by the launcher's number
        self._failures = Failures()
        self._needs: Needs | None = None  # of an elastic job
        self._elastic: Elastic | None = None
        self._watcher = Watcher(shared, self._processes, remote)
        is_whole = len(plan.slots) == plan.num_processes  # otherwise other launchers have to know the name
        self._memory = protocol.memory_prefix_for(shared.server.name if is_whole else plan.coordinator)
        self._leaving = Leaving(shared.server, remote, self._log) if plan.hosts else None
        self._exits = 0  # of processes, to be looked at
        self._raised: set[int] = set()  # those that an exception of their own ends
        self._signalled: set[int] = set()  # those that were told to end
        self._killed: set[int] = set()
        self._is_waiting_for_cause = False  # whether the wait for a report of the cause has begun
        self._waits_longer_for_cause = False  # whether it goes on, because the cause has not ended
        self._timers: list[asyncio.TimerHandle] = []

    async def run(self) -> Outcome:
        # What is left of the last attempt is of no use.
        events.forget(
            self._shared.queue, but=events.Signalled | events.RemoteStop | events.RemotePending | events.RemoteEnd
        )
        watching = [asyncio.create_task(self._watcher.run())]
        if self._leaving is not None:
            stopped = self._leaving.watch_stopped(self._running, self._options.heartbeat_timeout)
            watching.append(asyncio.create_task(stopped))
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
                    return await self._terminate(signal.SIGTERM, self._options.failure_grace, str(failure))
            return await self._supervise()
        finally:
            for task in watching:
                task.cancel()
            for timer in self._timers:
                timer.cancel()
            for process in self._processes.values():
                process.kill()
            if self._elastic is not None:
                self._elastic.close()
            await asyncio.gather(*(process.descendants_ended() for process in self._processes.values()))
            protocol.remove_memory(self._memory)
            self._shared.copying.extend(task for process in self._processes.values() for task in process.copying)

    def _unwatched(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log(f"the processes are no longer watched: {error!r}")

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

    def _start(self, slot: int, rank: int, joins: bool = False) -> Process:
        number, kept = next(self._shared.numbers), self._shared.kept
        page = Page.new(-1 if joins else 0)  # one that joins is no member yet
        own = {
            protocol.CONTROL_VARIABLE: self._shared.server.name,
            protocol.PROCESS_VARIABLE: str(number),
            protocol.MEMORY_VARIABLE: self._memory,
            protocol.KEPT_VARIABLE: ",".join(map(str, (slot, *kept))),
            PAGE_VARIABLE: str(page.file),
        }
        variables = environment.variables(self._options, self._plan, own, slot=slot, rank=rank, joins=joins)
        try:
            process = Process(self._options, number, slot, rank, page, variables, kept)
        except OSError:
            page.close()
            raise
        self._processes[number] = process
        label = f"[{rank}]".rjust(len(f"[{self._plan.num_processes - 1}]"))
        process.copy_output(self._shared.output, label, self._shared.logs.of(self._plan.restart, rank))
        return process

    def _running(self) -> list[Process]:
        return [process for process in self._processes.values() if process.status is None]

    async def _supervise(self) -> Outcome:
        while True:
            if (outcome := self._finished()) is not None:
                return outcome
            event = await self._shared.queue.get()
            reason: str | None = None
            match event:
                case events.Signalled(signum):
                    # Python ignores SIGPIPE, so forwarding it would have no effect.
                    forwarded = signal.SIGTERM if signum == signal.SIGPIPE else signum
                    reason = f"received {signal.Signals(signum).name}"
                    return await self._terminate(forwarded, self._options.grace, reason, signum)
                case events.RemoteStop(signum, grace, why):
                    return await self._terminate(signum, grace, why)
                case events.RemotePending(is_pending) if self._leaving is not None:
                    self._leaving.change_pending(is_pending, self._running())
                case events.RemoteLeft(why):
                    if not self._failures:
                        self._failures[-1] = Failure("generation", NO_RANK, f"{self._plan.restart} has ended: {why}")
                    return await self._terminate(signal.SIGKILL, self._options.failure_grace, why)
                case events.RemoteEnd(status):
                    return Outcome(status, is_ended=True)
                case events.Due(do):
                    reason = do()
                case events.Asked(number, message, answer):
                    self._asked(self._processes.get(number), message, answer)
                case events.Stuck(blamed, waiting):
                    reason = self._stuck(blamed, waiting)
                case events.RemoteFailed(node, failure):
                    reason = self._failed((node, failure.rank), failure)
            if reason is None and self._elastic is not None:
                reason = self._elastic.advance()
            if reason is not None:
                return await self._terminate(signal.SIGTERM, self._options.failure_grace, reason)

    def _finished(self) -> Outcome | None:
        """The outcome, once there is nothing to wait for."""
        if self._running() or self._exits:
            return None
        if self._elastic is not None and self._elastic.waits_for_replacements():
            return None
        if self._elastic is not None and self._elastic.has_finished():
            late = self._elastic.late
            return Outcome(late.status, late) if late else Outcome(0)
        if self._failures:
            return self._outcome()
        self._remote.tell("succeeded", True)
        return Outcome(0) if self._remote.succeeded() else None

    def _outcome(self) -> Outcome:
        for number in self._raised:
            failure, status = self._failures.get(number), self._processes[number].status
            if failure is not None and status is not None and status > 0:
                failure.status = status
        if self._elastic is None:
            # Ends that no event has told yet.
            for process in self._processes.values():
                if process.status and process.number not in self._signalled | self._killed:
                    self._failures.setdefault(
                        process.number, failure_of_status(process.name, process.rank, process.status)
                    )
        failure = self._failures.first()
        return Outcome(failure.status if failure else 1, failure)

    # Methods below that can end the job return the reason, or None.

    def _exited(self, process: Process) -> str | None:
        assert process.status is not None
        self._exits -= 1
        if process.status == 0:
            # An exception that was reported and then caught is no failure.
            self._failures.pop(process.number, None)
            if self._elastic is not None:
                self._elastic.finished(process)
            return None
        end = failure_of_status(process.name, process.rank, process.status)
        failure = self._failures.setdefault(process.number, end)  # unless it has reported another
        if process.number not in self._killed:
            failure.status = end.status
        if self._elastic is not None:
            # The job has survived the failures of processes that have ended.
            running = {process.number, *(other.number for other in self._running())}
            self._failures = Failures({key: each for key, each in self._failures.items() if key in running})
            return self._elastic.died(process, failure)
        return self._failed(process.number, failure, str(end))

    def _failed(self, key: int | tuple[int, int], failure: Failure, text: str = "") -> str | None:
        failure = self._failures.setdefault(key, failure)
        if isinstance(key, int) and self._remote.tell_failure(failure):
            return None  # the launcher of host 0 decides
        if self._failures.has_own():
            return text or str(failure)
        self._wait_for_cause()  # the process that it blames may be about to fail too
        return None

    def _wait_for_cause(self) -> None:
        if not self._is_waiting_for_cause:
            self._is_waiting_for_cause = True
            self._later(self._options.failure_grace, self._no_cause_in_time)

    def _has_not_exited(self, process: Process) -> str | None:
        """A process should have exited after reporting its failure."""
        if process.status is not None:
            return None
        failure = self._failures.get(process.number)
        waited = f"{failure}; it has not exited within {self._options.failure_grace:g} s"
        if self._elastic is not None:
            self._log(f"{waited}; killing it")
            self._killed.add(process.number)
            process.send(signal.SIGKILL)
            return None
        assert failure is not None
        return self._failed(process.number, failure, waited)

    def _no_cause_in_time(self) -> str | None:
        """The process that others blame should have failed too."""
        if self._elastic is not None:
            return None
        first = str(self._failures.first())
        ended = {process.rank for process in self._processes.values() if process.status is not None}
        more = self._options.grace - self._options.failure_grace
        if self._waits_longer_for_cause or more <= 0 or not (awaited := self._failures.awaited() - ended):
            return first
        self._waits_longer_for_cause = True
        ranks = ", ".join(map(str, sorted(awaited)))
        self._log(f"{first}; waiting up to {more:g} s for ranks {ranks} to exit, which may be the cause")
        self._later(more, self._no_cause_in_time)
        return None

    def _stuck(self, blamed: dict[int, str], waiting: Sequence[int]) -> str | None:
        processes = [process for number in blamed if (process := self._processes[number]).status is None]
        reasons = []
        for process in processes:
            failure = Failure(process.name, process.rank, blamed[process.number])
            if self._elastic is None:
                reasons.append(self._failed(process.number, failure))
            else:
                self._failures.setdefault(process.number, failure)
        if self._elastic is not None:
            self._elastic.end_stuck(processes, waiting)
        return next(filter(None, reasons), None)

    def _asked(self, process: Process | None, message: dict, answer: events.Answer) -> None:
        if process is None:
            answer({"error": "this process belongs to an attempt that has ended"})
            return
        try:
            match message.get("do"):
                case "next_question":
                    self._watcher.asked(process, message, answer)
                case "report":
                    failure = self._reported(process, message, answer)
                    if failure.is_own or self._elastic is not None:
                        self._later(self._options.failure_grace, functools.partial(self._has_not_exited, process))
                    else:
                        self._wait_for_cause()
                case "enlist":
                    members = self._enlist(message["min_processes"], message["multiple_of"])
                    answer({"done": True})
                    members.enlisted(process)
                case "next_generation" if self._leaving is not None:
                    self._leaving.left(process, f"has left: {message['reason']}", self._running())
                case "next_generation" if self._elastic is not None:
                    self._elastic.left(process, message["after"], message["reason"], answer)
                case "next_generation":
                    raise ValueError("this job is not elastic: call enlist() first")
                case other:
                    raise ValueError(f"unknown request {other!r}")
        except _ArgumentError as error:
            answer({"argument_error": str(error)})
        except (ValueError, KeyError, TypeError) as error:
            answer({"error": str(error)})

    def _enlist(self, min_processes: int, multiple_of: int | None) -> Elastic | Leaving:
        """Makes the job elastic. All processes ask for it."""
        options = self._options
        if options.min_processes < options.processes:  # -n MIN:MAX
            min_processes = max(min_processes, options.min_processes)
        if self._leaving is None:
            if options.nnodes > 1:
                raise ValueError(
                    f"elastic jobs on several hosts need --nnodes MIN:MAX; this one has --nnodes {options.nnodes}"
                )
            if min_processes > (count := options.processes):
                raise _ArgumentError(
                    f"elastic.run(min_processes={min_processes}): the job has {count} process{'es' * (count > 1)} "
                    f"(-n {count}): start at least {min_processes}, or lower min_processes"
                )
        needs = Needs(min_processes, multiple_of)
        needs.check(self._needs)
        if self._needs is None:
            self._needs = needs
            if self._leaving is None:
                processes = list(self._processes.values())
                self._elastic = Elastic(self._shared, processes, needs, self._start, self._later)
            else:
                self._remote.tell("enlisted", needs)
        members = self._leaving or self._elastic
        assert members is not None
        return members

    def _reported(self, process: Process, message: dict, answer: events.Answer) -> Failure:
        failure = self._failures.setdefault(process.number, failure_of_report(process.name, process.rank, message))
        if failure.is_own:
            self._raised.add(process.number)
        answer({"done": True})
        return failure

    def _later(self, seconds: float, do: Callable[[], str | None]) -> None:
        loop, queue = asyncio.get_running_loop(), self._shared.queue
        self._timers.append(loop.call_later(seconds, queue.put_nowait, events.Due(do)))

    async def _terminate(self, signum: int, grace: float, reason: str, received: int | None = None) -> Outcome:
        """Signals the running processes and waits for the grace period; `run` kills the rest.

        A process that an exception of its own ends is left to its handlers of atexit, for as long as --grace.

        received: the signal to the launcher, if one has ended the job. Otherwise one may still come.
        """
        self.reap()  # one that has ended by itself is not told to
        is_for_all = received is not None or signum == signal.SIGKILL
        running = [each for each in self._running() if is_for_all or each.number not in self._raised]
        if running:
            reason += f"; sending {signal.Signals(signum).name} to ranks {format_ranks(running)}"
        self._log(reason)
        self._remote.tell_stop(signum, grace, reason)
        for process in running:
            self._signalled.add(process.number)
            process.send(signum)
        loop = asyncio.get_running_loop()
        start = received_at = loop.time()
        last: events.RemoteEnd | None = None
        said = False
        while running := self._running():
            waited = loop.time() - start
            limits = {
                each: max(grace, self._options.grace) if each.number in self._raised else grace for each in running
            }
            self._kill([each for each, limit in limits.items() if limit <= waited])
            if (longest := max(limits.values())) <= waited:
                break
            if not said and waited >= _PATIENCE_SECONDS:
                said = True
                ranks = format_ranks(running)
                self._log(f"waiting up to {longest:g} s for ranks {ranks} to exit; a second signal kills them")
            until = [*limits.values()] if said else [*limits.values(), _PATIENCE_SECONDS]
            try:
                async with asyncio.timeout_at(start + min(each for each in until if each > waited)):
                    event = await self._shared.queue.get()
            except TimeoutError:
                continue
            if isinstance(event, events.Signalled):
                if received is None:
                    received, received_at = event.signum, loop.time()
                elif loop.time() - received_at >= _PATIENCE_SECONDS:  # else the same one, from a terminal and a wrapper
                    break
            if isinstance(event, events.RemoteEnd):
                last = event
            self._note(event)
        if last is not None:
            self._shared.queue.put_nowait(last)
        self._kill(self._running())
        return self._outcome().or_stopped(received)

    def _kill(self, processes: Sequence[Process]) -> None:
        if processes := [each for each in processes if each.number not in self._killed]:
            self._log(f"killing ranks {format_ranks(processes)}")
        for process in processes:
            self._killed.add(process.number)
            process.send(signal.SIGKILL)

    def _note(self, event: events.Event) -> None:
        """Learns the cause from an event, while processes are being ended."""
        match event:
            case events.Asked(number, message, answer):
                process = self._processes.get(number)
                if process is not None and message.get("do") == "report":
                    self._reported(process, message, answer)
                else:
                    answer({"error": "the job is being ended"})
            case events.RemoteFailed(node, failure):
                self._failures.setdefault((node, failure.rank), failure)
