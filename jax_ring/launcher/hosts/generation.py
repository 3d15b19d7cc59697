"""The processes of all hosts in one generation, as the launcher that leads hears of them: it decides when they end."""

import asyncio
import enum
import functools
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_ring.launcher.events import NO_RANK, Failure, Failures
from jax_ring.launcher.hosts.groups import Group
from jax_ring.launcher.shared import Shared
from jax_ring.launcher.watching.report import Place
from jax_ring.launcher.watching.watcher import Watcher


class Phase(enum.Enum):
    """What a generation does. It goes from one phase to a later one.

    RUNNING: Processes run, or have exited with status 0. It ends when all have.
    DOUBTING: Failures blame a process, which has --failure-grace to fail by itself. If all are caught, it runs on.
    DOUBTING_LONGER: It still runs, and has the rest of --grace. Not in an elastic job, which goes on without it.
    ENDING: Processes were told to end: after a failure, or when all have left.
    """

    RUNNING = enum.auto()
    DOUBTING = enum.auto()
    DOUBTING_LONGER = enum.auto()
    ENDING = enum.auto()


class Outcome(NamedTuple):
    """How a generation ended."""

    status: int  # for the launchers to exit with if this is the last one
    failure: Failure | None = None  # whose fault, if it failed
    lost: frozenset[int] = frozenset()  # the ranks at fault, if they are known
    has_finished: bool = False  # whether a process has exited with status 0
    has_changed: bool = False  # whether it ended because hosts come, or one is lost that may be


class Generation:
    """send: sends a message to all hosts. own: the index of the host that leads, if it has processes.

    Attributes:
      phase: what it does.
      ended: the hosts, by index, of which no process is left.
    """

    def __init__(self, shared: Shared, group: Group, own: int | None, send: Callable[[dict[str, Any]], None]) -> None:
        self._shared, self._options, self._group, self._own, self._send = shared, shared.options, group, own, send
        self._num_processes = group.num_processes
        self.phase = Phase.RUNNING
        self.ended: set[int] = set()
        self._failures = Failures()
        self._exited: dict[int, str] = {}  # with status 0, the names of the processes
        self._initializing: set[int] = set()  # those that have come to jax.distributed.initialize()
        self._left: set[int] = set()
        self._is_change_pending = self._has_told_change = self._has_changed = False
        self._timers: list[asyncio.TimerHandle] = []
        self._watcher = Watcher(
            num_hosts=len(group.hosts),
            ask=lambda: self._send({"where": True}),
            log=lambda text: shared.output.log(text),
            fail=lambda rank, name, what: self._failed(Failure(name, rank, what), is_final=True),
            watch=self._options.watch,
            on_stuck=self._options.on_stuck,
        )

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def is_over(self) -> bool:
        """Whether all processes have exited with status 0, or have ended as they were told."""
        return len(self._exited) == self._num_processes or len(self.ended) == len(self._group.hosts)

    def take(self, index: int, what: str, value: Any) -> None:
        """Takes what a host says of its processes."""
        match what:
            case "failed":
                failure = Failure(**value[0])
                failure.name += self._of_host(index)
                self._failed(failure, is_final=value[1])
            case "exited" if self.phase is not Phase.ENDING:  # else it was told to, perhaps after its failure
                rank, name = value
                self._failures.pop(rank, None)  # an exception that was reported and then caught is no failure
                self._exited[rank] = name + self._of_host(index)
                if self.phase is Phase.DOUBTING_LONGER:
                    self._no_cause_in_time()
                self._later(self._options.failure_grace, self._check_absent)
            case "initializes":
                self._initializing.add(value)
                self._later(self._options.failure_grace, self._check_absent)
            case "left":
                self._leaves(*value)
            case "place":
                rank, place = value
                self._watcher.places[rank] = Place(*place)
            case "progress":
                self._watcher.take(index, self._of_host(index), value, time.monotonic())
            case "ended":
                self.ended.add(index)

    def lose(self, index: int, what: str, *, is_change: bool) -> None:
        """A host is lost. is_change: whether the job goes on without it."""
        self._has_changed |= is_change
        self.ended.add(index)
        address = self._group.hosts[index].address
        failure = Failure(f"host {index}" + (f" ({address})" if address else ""), NO_RANK, what)
        self._failures.setdefault(NO_RANK - 1 - index, failure)
        self.end(str(failure))

    def outcome(self, cause: Failure | None) -> Outcome:
        """How it has ended. cause: outside of its processes."""
        if not self._failures:
            return Outcome(0)
        failure = cause or self._failures.first()
        assert failure is not None
        lost = frozenset() if cause else self._failures.lost(self._num_processes)
        changed = self._has_changed or self._is_change_pending
        return Outcome(failure.status, failure, lost, bool(self._exited), changed)

    def end(self, reason: str, signum: int | None = None, grace: float | None = None) -> None:
        """Has all processes end, if they are not. Those of an elastic job at once: its state is in other memory."""
        if self.phase is Phase.ENDING:
            return
        self.phase = Phase.ENDING
        if signum is None:
            signum = signal.SIGTERM if self._shared.needs is None else signal.SIGKILL
        self._send({"end": [reason, signum, self._options.failure_grace if grace is None else grace]})

    # ---- Failures ----------------------------------------------------------------------------------------------------

    def _failed(self, failure: Failure, is_final: bool) -> None:
        """is_final: whether the process has ended, or does not go on."""
        known = self._failures.setdefault(failure.rank, failure)
        if is_final:
            known.status = failure.status
        if self.phase is Phase.ENDING:
            return
        if self._failures.has_own() and (is_final or not known.is_own):
            self.end(str(failure))
        elif known.is_own:
            self._later(self._options.failure_grace, self._check_exited, known)
        else:
            for rank in self._failures.awaited():
                self._send({"blamed": rank})
            if self.phase is Phase.RUNNING:  # the process that it blames may be about to fail too
                self.phase = Phase.DOUBTING
                self._later(self._options.failure_grace, self._no_cause_in_time)

    def _check_exited(self, failure: Failure) -> None:
        """The process should have exited after reporting its failure."""
        if self._failures.get(failure.rank) is failure:
            self.end(f"{failure}; it has not exited within {self._options.failure_grace:g} s")

    def _no_cause_in_time(self) -> None:
        """The process that others blame should have failed too."""
        if not self._failures:
            self.phase = Phase.RUNNING
            return
        first = self._failures.first()
        assert first is not None
        more = self._options.grace - self._options.failure_grace
        awaited = self._failures.awaited() - set(self._exited)
        if awaited and more > 0 and self._shared.needs is None:
            if self.phase is Phase.DOUBTING:
                self.phase = Phase.DOUBTING_LONGER
                ranks = ", ".join(map(str, sorted(awaited)))
                self._shared.output.log(
                    f"{first}; waiting up to {more:g} s for ranks {ranks} to exit, which may be the cause"
                )
                self._later(more, self._end_without_cause, first)
            return
        self._end_without_cause(first)

    def _end_without_cause(self, first: Failure) -> None:
        if self._failures.get(first.rank) is not first or self.phase is Phase.ENDING:
            return  # it was caught, or something else has ended the generation
        if self._exited:  # others may have waited for it
            first.what += f"; {', '.join(self._exited.values())} had exited with status 0"
        self.end(str(first))

    def _check_absent(self) -> None:
        """Processes that have exited should have come to jax.distributed.initialize(), if others wait there."""
        waiting = self._initializing - set(self._exited) - set(self._failures)
        for rank in sorted(set(self._exited) - self._initializing if waiting else ()):
            what = "has exited with status 0 without jax.distributed.initialize(), in which others wait for it"
            self._failed(Failure(self._exited[rank], rank, what), is_final=True)

    def _of_host(self, index: int) -> str:
        """What follows a process's name."""
        return f" of host {index}" if index != self._own else ""

    def _later(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(seconds, functools.partial(do, *arguments)))

    # ---- Hosts that come ---------------------------------------------------------------------------------------------

    def change(self, is_pending: bool) -> None:
        """Has the processes leave at a commit for other hosts; or stay, if these go before any has left."""
        if is_pending == self._is_change_pending or (self._left and not is_pending):
            return
        self._is_change_pending = is_pending
        self._has_told_change = True
        self._send({"pending": is_pending})

    def _leaves(self, rank: int, reason: str) -> None:
        is_first = not self._left
        self._left.add(rank)
        self._has_changed |= self._has_told_change  # the hosts may have gone again
        if len(self._left | set(self._exited)) == self._num_processes:
            self._end_left(reason)
        elif is_first:
            late = f"{reason}; others have not within {self._options.leave_timeout:g} s (--leave-timeout)"
            self._later(self._options.leave_timeout, self._end_left, late)

    def _end_left(self, reason: str) -> None:
        failure = Failure("generation", NO_RANK, f"{self._group.number - 1} has ended: {reason}")
        self._failures.setdefault(NO_RANK, failure)
        self.end(reason, signal.SIGKILL, 0.0)
