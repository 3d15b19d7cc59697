"""The processes of all hosts in one generation, as the launcher that leads hears of them: it decides when they end."""

import asyncio
import enum
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_ring.launcher.events import NO_RANK, Blamed, ChangePending, End, Failure, Failures
from jax_ring.launcher.hosts.groups import Group
from jax_ring.launcher.hosts.messages import MessageError
from jax_ring.launcher.shared import Shared
from jax_ring.launcher.watching.watcher import Watcher


class Phase(enum.Enum):
    """What a generation does. It goes from one phase to a later one, or back to the first if all failures are caught.

    RUNNING: Processes run, or have exited with status 0. It is over when all have.
    DOUBTING: Failures blame a process, which has --failure-grace to fail by itself.
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


def _ranks_of(kind: str, value: Any) -> list[int]:
    """The ranks that a message of a host is about."""
    match kind, value:
        case "failed", (failure, _):
            return [failure.rank]
        case "exited" | "left" | "place", (rank, _):
            return [rank]
        case "initializes", rank:
            return [rank]
        case "progress", told:
            return [rank for rank, _ in told]
    return []


class Generation:
    """own: the index of the host that leads, if it has processes. send: sends a kind of message, with a value, to all.

    Attributes:
      group: its hosts.
      phase: what it does.
      ended: the hosts, by index, of which no process is left.
    """

    def __init__(self, shared: Shared, group: Group, own: int | None, send: Callable[[str, Any], None]) -> None:
        self._shared, self._options, self.group, self._own, self._send = shared, shared.options, group, own, send
        self.phase = Phase.RUNNING
        self.ended: set[int] = set()
        self._failures = Failures()
        self._exited: dict[int, str] = {}  # with status 0, the names of the processes
        self._initializing: set[int] = set()  # those that have come to jax.distributed.initialize()
        self._left: set[int] = set()
        self._is_change_pending = self._has_told_change = self._has_changed = False
        self._timers: list[asyncio.TimerHandle] = []
        self._doubt: asyncio.TimerHandle  # the last one that `_look_for_cause` has
        self._watcher = Watcher(
            num_hosts=len(group.hosts),
            ask=lambda: self._send("where", True),
            log=lambda *lines: shared.output.log(*lines),
            fail=lambda rank, name, what: self._failed(Failure(name, rank, what), is_final=True),
            watch=self._options.watch,
            on_stuck=self._options.on_stuck,
        )

    def close(self) -> None:
        """Decides nothing more."""
        for timer in self._timers:
            timer.cancel()

    def is_over(self) -> bool:
        """Whether all processes have exited with status 0, or have ended as they were told."""
        return len(self._exited) == self.group.num_processes or len(self.ended) == len(self.group.hosts)

    def take(self, index: int, kind: str, value: Any) -> None:
        """Takes what a host says of its processes. Raises MessageError if it speaks of those of others."""
        ranks = _ranks_of(kind, value)
        if not set(ranks) <= set(self.group.ranks_of(index)):
            raise MessageError(f"it speaks of the ranks {', '.join(map(str, ranks))}, which are not all its own")
        of_host = f" of host {index}" if index != self._own else ""
        match kind:
            case "failed":
                failure, is_final = value
                self._failed(failure._replace(name=failure.name + of_host), is_final)
            case "exited" if self.phase is not Phase.ENDING:  # else it was told to, perhaps after its failure
                rank, name = value
                self._failures.pop(rank, None)  # an exception that was reported and then caught is no failure
                self._exited[rank] = name + of_host
                if self.phase is Phase.DOUBTING_LONGER:
                    self._look_for_cause()
                self._later(self._options.failure_grace, self._check_absent)
            case "initializes":
                self._initializing.add(value)
                self._later(self._options.failure_grace, self._check_absent)
                self._later(self._options.heartbeat_timeout, self._blame_absent)
            case "left":
                self._leaves(*value)
            case "place":
                rank, place = value
                self._watcher.places[rank] = place
            case "progress":
                told = {rank: notes._replace(name=notes.name + of_host) for rank, notes in value}
                self._watcher.take(index, told, time.monotonic())
            case "ended":
                self._shared.others_commit = max(self._shared.others_commit, value)
                self.ended.add(index)

    def lose(self, index: int, what: str, *, is_change: bool) -> None:
        """A host is lost. is_change: whether the job goes on without it."""
        self._has_changed |= is_change
        self.ended.add(index)
        address = self.group.hosts[index].address
        failure = Failure(f"host {index}" + (f" ({address})" if address else ""), NO_RANK, what)
        self._failures.setdefault(NO_RANK - 1 - index, failure)
        self.end(str(failure))

    def fail(self, failure: Failure) -> None:
        """Something else than a process has failed."""
        self._failed(failure, is_final=True)

    def outcome(self, cause: Failure | None) -> Outcome:
        """How it has ended. cause: outside of its processes."""
        if not self._failures:
            return Outcome(0)
        failure = cause or self._failures.first()
        lost = frozenset() if cause else self._failures.lost(self.group.num_processes)
        has_changed = self._has_changed or self._is_change_pending
        return Outcome(failure.status, failure, lost, bool(self._exited), has_changed)

    def end(self, reason: str, signum: signal.Signals | None = None, grace: float | None = None) -> None:
        """Has all processes end, if they are not. Those of an elastic job at once: its state is in other memory."""
        if self.phase is Phase.ENDING:
            return
        self.phase = Phase.ENDING
        self.close()
        if signum is None:
            signum = signal.SIGTERM if self._shared.needs is None else signal.SIGKILL
        self._send("end", End(reason, signum, self._options.failure_grace if grace is None else grace))

    # ---- Failures ----------------------------------------------------------------------------------------------------

    def _failed(self, failure: Failure, is_final: bool) -> None:
        """is_final: whether the process has ended, or does not go on."""
        known = self._failures.setdefault(failure.rank, failure)
        if is_final:
            known = self._failures[failure.rank] = known._replace(status=failure.status)
        if self.phase is Phase.ENDING:
            return
        if self._failures.own() and (is_final or not known.is_own):
            self.end(str(failure))
        elif known.is_own:
            self._later(self._options.failure_grace, self._check_exited, known)
        else:
            for rank in self._failures.awaited():
                self._send("blamed", Blamed(rank))
            if self.phase is Phase.RUNNING:  # the process that it blames may be about to fail too
                self.phase = Phase.DOUBTING
                self._doubt = self._later(self._options.failure_grace, self._look_for_cause)

    def _check_exited(self, failure: Failure) -> None:
        """The process should have exited after reporting its failure."""
        if self._failures.get(failure.rank) is failure:
            self.end(f"{failure}; it has not exited within {self._options.failure_grace:g} s")

    def _look_for_cause(self, is_late: bool = False) -> None:
        """The process that others blame should have failed too. is_late: whether nobody waits longer for it."""
        if not self._failures:  # all are caught
            self._doubt.cancel()
            self.phase = Phase.RUNNING
            return
        first = self._failures.first()
        awaited = self._failures.awaited() - set(self._exited)
        more = self._options.grace - self._options.failure_grace
        if is_late or not awaited or more <= 0 or self._shared.needs is not None:
            if self._exited:  # others may have waited for them
                names = ", ".join(self._exited.values())
                what = f"{first.what}; {names} had exited with status 0"
                first = self._failures[first.rank] = first._replace(what=what)
            self.end(str(first))
        elif self.phase is Phase.DOUBTING:
            self.phase = Phase.DOUBTING_LONGER
            ranks = ", ".join(map(str, sorted(awaited)))
            self._shared.output.log(
                f"{first}; waiting up to {more:g} s for ranks {ranks} to exit, which may be the cause"
            )
            self._doubt = self._later(more, self._look_for_cause, True)

    def _check_absent(self) -> None:
        """Processes that have exited should have come to jax.distributed.initialize(), if others wait there."""
        waiting = self._initializing - set(self._exited) - set(self._failures)
        for rank in sorted(set(self._exited) - self._initializing if waiting else ()):
            what = "has exited with status 0 without jax.distributed.initialize(), in which others wait for it"
            self._failed(Failure(self._exited[rank], rank, what), is_final=True)

    def _blame_absent(self) -> None:
        """Processes that have not come to jax.distributed.initialize() for so long have failed if they are stopped.

        JAX would wait for minutes, and nobody knows yet whether the job is elastic.
        """
        for rank in set(range(self.group.num_processes)) - self._initializing - set(self._exited):
            self._send("blamed", Blamed(rank))

    def _later(self, seconds: float, do: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, do, *arguments))
        return self._timers[-1]

    # ---- Hosts that come ---------------------------------------------------------------------------------------------

    def change(self, is_pending: bool) -> None:
        """Has the processes leave at a commit for other hosts; or stay, if these go before any has left."""
        if is_pending == self._is_change_pending or (self._left and not is_pending):
            return
        self._is_change_pending = is_pending
        self._has_told_change = True
        self._send("pending", ChangePending(is_pending))

    def _leaves(self, rank: int, reason: str) -> None:
        is_first = not self._left
        self._left.add(rank)
        self._has_changed |= self._has_told_change  # the hosts may have gone again
        if len(self._left | set(self._exited)) == self.group.num_processes:
            self._end_left(reason)
        elif is_first:
            late = f"{reason}; others have not within {self._options.leave_timeout:g} s (--leave-timeout)"
            self._later(self._options.leave_timeout, self._end_left, late)

    def _end_left(self, reason: str) -> None:
        failure = Failure("generation", NO_RANK, f"{self.group.number - 1} has ended: {reason}")
        self._failures.setdefault(NO_RANK, failure)
        self.end(reason, signal.SIGKILL, 0.0)
