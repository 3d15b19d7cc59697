"""Which processes of a job no longer go on: the launcher that leads compares all, and reports them once."""

from collections import ChainMap
from collections.abc import Callable, Mapping

from jax_ring.launcher.watching.page import EXECUTIONS, STEPS, Notes
from jax_ring.launcher.watching.report import Place, Report

LOOK_SECONDS = 0.25  # between what a host tells


class Watcher:
    """Compares the processes of all hosts, in a clock that stands still while one compiles, or a host is silent.

    num_hosts: of how many hosts. ask: asks all processes where they are, for `places`. log: writes the lines of a
      message. fail: a process, by its rank and name, has failed, and why. watch, on_stuck: replace what the processes
      say, if given.

    Attributes:
      places: where the processes are that have answered, by rank.
    """

    def __init__(
        self, num_hosts: int, ask: Callable[[], None], log: Callable[..., None],
        fail: Callable[[int, str, str], None], watch: float | None = None, on_stuck: str | None = None,
    ) -> None:  # fmt: skip
        self._num_hosts, self._ask, self._log, self._fail = num_hosts, ask, log, fail
        self._watch, self._on_stuck = watch, on_stuck
        self.places: dict[int, Place] = {}
        self._told: dict[int, dict[int, Notes]] = {}  # by host and rank, since the last look
        self._clock = self._looked = 0.0
        self._since: dict[tuple[int, int, int], float] = {}  # since when ranks that are behind are where they are
        self._is_asking = False
        self._reported: set[int] = set()  # ranks that are still behind
        self._compiling: set[tuple[int, str]] = set()  # reported compilations

    def take(self, host: int, told: dict[int, Notes], now: float) -> None:
        """Takes what a host tells of its processes, by rank. Once all hosts have told, looks at them."""
        self._told[host] = told
        if len(self._told) == self._num_hosts:
            notes = dict(ChainMap(*self._told.values()))
            self._told.clear()
            limits = [each.limit for each in notes.values() if each.status is None and each.counts]
            if limits and (limit := self._watch or min(limits)):
                self._look(notes, now, limit)

    def _look(self, notes: Mapping[int, Notes], now: float, limit: float) -> None:
        """limit: seconds after which a process is stuck."""
        running = {rank: each for rank, each in notes.items() if each.status is None}
        compiling = {(rank, each.compiling) for rank, each in running.items() if each.compiling_for > limit}
        for rank, what in compiling - self._compiling:
            name, seconds = running[rank].name, running[rank].compiling_for
            self._log(f"{name} has been compiling {what or 'a program'} for {seconds:.0f} s")
        self._compiling = compiling
        # Time in which a launcher could not run does not count.
        elapsed, self._looked = min(now - self._looked, 2 * LOOK_SECONDS), now
        if not any(each.compiling_for for each in running.values()):
            self._clock += elapsed
        behind = self._behind(notes, running, limit)
        self._reported &= behind
        if not behind or self._reported:
            self._is_asking = False
        elif not self._is_asking:
            self._is_asking = True
            self.places.clear()
            self._ask()
        elif running.keys() <= self.places.keys():
            self._is_asking, self._reported = False, behind
            self._report(notes, running, behind, limit)

    def _behind(self, notes: Mapping[int, Notes], running: Mapping[int, Notes], limit: float) -> set[int]:
        """Those without progress; none unless one has made none for as long as `limit`."""
        # One that has exited well is still ahead.
        furthest = max((each.started for each in notes.values() if each.counts == STEPS and not each.status), default=0)
        lacking = [
            (rank, each.started, each.completed)
            for rank, each in running.items()
            if each.completed < (each.started if each.counts == EXECUTIONS else furthest)
        ]
        self._since = {place: self._since.get(place, self._clock) for place in lacking}
        ages = {rank: self._clock - since for (rank, *_), since in self._since.items()}
        is_late = any(age > limit and running[rank].counts for rank, age in ages.items())
        # The others need not have noticed at the same moment.
        return {rank for rank, age in ages.items() if age > limit / 2} if is_late else set()

    def _report(self, notes: Mapping[int, Notes], running: Mapping[int, Notes], behind: set[int], limit: float) -> None:
        if any(running[rank].counts == STEPS for rank in behind):
            report = Report(1 + min(running[rank].completed for rank in behind), sorted(behind), notes, self.places)
        else:  # executions have no numbers that compare: one that launches nothing may be what the others wait for
            report = Report(None, sorted(running), notes, self.places)
        self._log(*report.lines(limit, "--watch" if self._watch else "jax_ring.watch"))
        given = "end" if any(each.ends_job for each in running.values()) else "report"
        if (self._on_stuck or given) == "end":
            for rank, what in report.blamed().items():
                self._fail(rank, notes[rank].name, what)
