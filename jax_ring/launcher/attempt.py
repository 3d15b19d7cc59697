"""The processes of this host in one generation: started, watched, ended. What becomes of them the leader is told."""

import asyncio
import collections
import signal
import time
from collections.abc import Sequence
from typing import Any

from jax_ring.launcher import environment, events, protocol, signals
from jax_ring.launcher.control_server import Answer
from jax_ring.launcher.environment import Plan
from jax_ring.launcher.events import End, Failure, Report, failure_of_report, failure_of_status
from jax_ring.launcher.hosts.follower import Follower
from jax_ring.launcher.processes import Process, State, explained, format_ranks
from jax_ring.launcher.schema import checked
from jax_ring.launcher.shared import Needs, Shared
from jax_ring.launcher.signals import SignalledError
from jax_ring.launcher.watching.page import PAGE_VARIABLE, Page
from jax_ring.launcher.watching.reader import tell_progress

# After this long, a message says what the launcher waits for.
_PATIENCE_SECONDS = 1.0
_KILLED_SECONDS = 5.0  # for all processes to end that were killed
_LOOKS_AT_STOPPED = 10  # at a process until it counts as stopped

# What a process asks for, with the type of the values.
REQUESTS: dict[str, Any] = {
    "initialize": tuple[()],  # it waits for the others in jax.distributed.initialize()
    "report": Report,  # an exception ends it
    "enlist": Needs,  # to make the job elastic
    "leave": tuple[str],  # its generation, and why: it waits to be killed
}


class _ArgumentError(ValueError):
    """The script's own fault: it gets a ValueError with this message."""


class Attempt:
    """
    Attributes:
      processes: by the launcher's number.
    """

    def __init__(self, shared: Shared, plan: Plan, follower: Follower) -> None:
        self._shared, self._options, self._plan, self._follower = shared, shared.options, plan, follower
        self._log = shared.output.log
        self.processes: dict[int, Process] = {}
        self._has_exited = asyncio.Event()  # a process, since it was cleared
        self._memory = protocol.memory_prefix_for(shared.key, f"{plan.job}/{plan.number}")

    async def run(self) -> int | None:
        """Returns the signal that has ended the job on this host, if one has."""
        telling = tell_progress(self.processes, self._follower)
        watching = [asyncio.create_task(each) for each in (telling, self._watch_stopped())]
        for task in watching:
            task.add_done_callback(self._unwatched)
        try:
            for index, slot in enumerate(self._plan.slots):
                rank = self._plan.first + index
                try:
                    self._start(slot, rank)
                except OSError as error:
                    self._failed(Failure(f"rank {rank}", rank, f"could not be started: {explained(error)}"))
                    break
            return await self._supervise()
        finally:
            for task in watching:
                task.cancel()
            for process in self._running():
                process.send(signal.SIGKILL)
            until = time.monotonic() + _KILLED_SECONDS
            # Later no code of the program runs in it any more.
            if left := [each for each in self.processes.values() if not each.kill(until)]:
                ranks = format_ranks(left)
                self._log(f"ranks {ranks} are killed, and end once the system lets them go, as from a file that hangs")
            await asyncio.gather(*(process.descendants_ended() for process in self.processes.values()))
            for why_not in protocol.remove_memory(self._memory):
                self._log(f"shared memory could not be removed: {why_not}")

    def _unwatched(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log(f"the processes are no longer watched: {error!r}")

    def _start(self, slot: int, rank: int) -> None:
        shared, number = self._shared, next(self._shared.numbers)
        page = Page.new()
        own = {
            protocol.CONTROL_VARIABLE: shared.server.path,
            protocol.PROCESS_VARIABLE: str(number),
            protocol.MEMORY_VARIABLE: self._memory,
            protocol.KEY_VARIABLE: str(shared.key_file),
            protocol.COMMIT_VARIABLE: str(shared.newest_commit()),
            protocol.KEPT_VARIABLE: ",".join(map(str, (slot, *shared.kept))),
            PAGE_VARIABLE: str(page.file),
        }
        variables = environment.variables(self._options, self._plan, own, slot=slot, rank=rank)
        try:
            process = Process(self._options, number, rank, page, variables, (*shared.kept, shared.key_file))
        except OSError:
            page.close()
            raise
        self.processes[number] = process
        label = f"[{rank}]".rjust(len(f"[{self._plan.num_processes - 1}]"))
        process.copy_output(shared.output, label, shared.logs.of(self._plan.job, self._plan.number, rank))

    async def _supervise(self) -> int | None:
        queue = self._shared.queue
        while True:
            match event := await queue.get():
                case events.Signalled(signum):
                    # Python ignores SIGPIPE, so forwarding it would have no effect.
                    forwarded = signal.SIGTERM if signum == signal.SIGPIPE else signum
                    end = End(f"received {signal.Signals(signum).name}", forwarded, self._options.grace)
                    self._follower.tell("signalled", end)
                    return await self._end(end, signum)
                case End():
                    return await self._end(event)
                case events.LeaderLost(reason):
                    queue.put_nowait(event)  # for the job
                    return await self._end(End(reason, signal.SIGTERM, 0.0))
                case events.JobEnded():
                    queue.put_nowait(event)
                    return None
                case events.ChangePending(is_pending):
                    for process in self._running():
                        process.page.words.change_pending = is_pending
                case events.Blamed(rank):
                    for process in self._running():
                        if process.rank == rank and process.is_stopped():
                            self._failed(Failure(process.name, rank, "is stopped"))

    def _running(self) -> list[Process]:
        return [process for process in self.processes.values() if process.status is None]

    def _failed(self, failure: Failure, *, is_final: bool = True) -> None:
        self._follower.tell("failed", [failure, is_final])

    def reap(self) -> None:
        """Finds exited processes, after SIGCHLD."""
        for process in self.processes.values():
            if not process.reap():
                continue
            assert process.status is not None
            self._has_exited.set()
            if process.status == 0:
                self._follower.tell("exited", [process.rank, process.name])
            elif process.state not in (State.TOLD, State.KILLED):
                self._failed(failure_of_status(process.name, process.rank, process.status))

    def pass_on(self, signum: int) -> None:
        """Signals the processes alone: their descendants might end by it."""
        for process in self._running():
            process.send(signum, to_descendants=False)

    async def _watch_stopped(self) -> None:
        """Counts processes as failed that a signal has stopped for so long, in jobs that go on without them.

        While processes start, nothing else tells those that wait for them before JAX's own limit of minutes.
        """
        looks: collections.Counter[int] = collections.Counter()
        limit = self._options.heartbeat_timeout
        while True:
            await asyncio.sleep(limit / _LOOKS_AT_STOPPED)
            goes_on = self._shared.needs is not None or self._options.hosts_change
            for process in self._running():
                looks[process.number] = looks[process.number] + 1 if goes_on and process.is_stopped() else 0
                if looks[process.number] == _LOOKS_AT_STOPPED:
                    what = f"has been stopped for {limit:g} s (--heartbeat-timeout)"
                    self._failed(Failure(process.name, process.rank, what))

    # ---- What processes ask ------------------------------------------------------------------------------------------

    def asked(self, process: Process, do: str, values: Any) -> Answer:
        """The answer to a process. Nothing of its values is used before they are checked."""
        try:
            match do, checked(values, REQUESTS[do]):
                case "initialize", _:
                    self._follower.tell("initializes", process.rank)
                case "report", report:
                    failure = failure_of_report(process.name, process.rank, report)
                    if failure.is_own:
                        process.advance(State.RAISED)
                    self._failed(failure, is_final=False)
                case "enlist", needs:
                    self._enlist(needs)
                case "leave", (why,):
                    reason = f"{process.name} has left: {why}"
                    self._log(reason)
                    self._follower.tell("left", [process.rank, reason])
        except KeyError:
            return {"error": f"unknown request {do!r}"}
        except ValueError as error:
            return {"error": str(error), "is_argument": isinstance(error, _ArgumentError)}
        return {}

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
        shared.needs = needs
        self._follower.tell("enlisted", needs)

    # ---- The end -----------------------------------------------------------------------------------------------------

    async def _end(self, end: End, received: int | None = None) -> int | None:
        """Signals the running processes and waits for the grace period; `run` kills the rest.

        A process that an exception of its own ends is left to its handlers of atexit, for as long as --grace, or where
        the others are killed at once for the same time as they would have.
        """
        self.reap()  # one that has ended by itself is not told to
        is_for_all = received is not None or end.grace == 0.0
        reason, running = end.reason, self._running()
        if told := [each for each in running if is_for_all or each.state is not State.RAISED]:
            verb = "killing" if end.signum == signal.SIGKILL else f"sending {signal.Signals(end.signum).name} to"
            reason += f"; {verb} ranks {format_ranks(told)}"
        self._log(reason)
        for process in told:
            process.advance(State.KILLED if end.signum == signal.SIGKILL else State.TOLD)
            process.send(end.signum)
        for_raised = end.grace if end.signum == signal.SIGKILL else max(end.grace, self._options.grace)
        loop = asyncio.get_running_loop()
        start = received_at = loop.time()
        said = False
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
            self._has_exited.clear()
            try:
                seconds = min(each for each in until if each > waited) - waited
                await signals.unless_signalled(self._shared.queue, self._has_exited.wait(), seconds)
            except TimeoutError:
                pass
            except SignalledError as error:
                if received is None:
                    received, received_at = error.signum, loop.time()
                elif loop.time() - received_at >= _PATIENCE_SECONDS:  # else the same one, from a terminal and a wrapper
                    break
        self._kill(self._running())
        return received

    def _kill(self, processes: Sequence[Process]) -> None:
        if processes := [each for each in processes if each.state is not State.KILLED]:
            self._log(f"killing ranks {format_ranks(processes)}")
        for process in processes:
            process.advance(State.KILLED)
            process.send(signal.SIGKILL)
