"""Which processes of a job no longer go on: the launcher that leads compares all, and reports them once."""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax_ring.launcher.watching.page import EXECUTIONS, STEPS, Notes
from jax_ring.launcher.watching.report import Member, Place, Report

_LOOKS = 20  # in the time after which a process is stuck
_LONGEST_SECONDS = 1.0  # between two
_NEWS_SECONDS = 2.5  # without news of a host for so long, nothing is known of its processes


def limit_of(notes: Iterable[Notes], watch: float | None) -> float:
    """Seconds after which a process is stuck: `--watch`, or the least that one says; 0 if nothing is watched."""
    given = [each.limit for each in notes if each.counts]
    return (watch or min(given)) if given else 0.0


def seconds_between_looks(limit: float) -> float:
    return min(limit / _LOOKS, _LONGEST_SECONDS) if limit else _LONGEST_SECONDS


class Watcher:
    """Compares the processes of all hosts, in a clock that stands still while one compiles, or a host is silent.

    num_hosts: of how many hosts. ask: asks all processes where they are, for `places`. log: writes a message. fail: a
      process, by its rank and name, has failed, and why. watch, on_stuck: replace what the processes say, if given.

    Attributes:
      places: where the processes are that have answered, by rank.
    """

    def __init__(
        self, num_hosts: int, ask: Callable[[], None], log: Callable[[str], None],
        fail: Callable[[int, str, str], None], watch: float | None = None, on_stuck: str | None = None,
    ) -> None:  # fmt: skip
        self._num_hosts, self._ask, self._log, self._fail = num_hosts, ask, log, fail
        self._watch, self._on_stuck = watch, on_stuck
        self.places: dict[int, Place] = {}
        self._told: dict[int, dict[int, Member]] = {}  # by host and rank
        self._heard: dict[int, float] = {}  # when, by host
        self._clock = self._looked = self._next_look = 0.0
        self._since: dict[int, tuple[tuple, float]] = {}  # by rank: how far it is, and since when
        self._is_asking = False
        self._reported: set[int] = set()  # ranks that are still behind
        self._compiling: set[tuple[int, str]] = set()  # reported compilations

    def take(self, host: int, of_host: str, told: Iterable[Any], now: float) -> None:
        """Takes what a host tells of all its processes, and looks at those of all hosts, if it is time.

        of_host: follows their names. told: rank, name, status and notes of each. now: in seconds.
        """
        self._told[host] = {rank: Member(name + of_host, status, Notes(*notes)) for rank, name, status, notes in told}
        self._heard[host] = now
        if now < self._next_look:
            return
        members = dict(ChainMap(*self._told.values()))
        running = {rank: each.notes for rank, each in members.items() if each.status is None}
        limit = limit_of(running.values(), self._watch)
        is_known = len(self._told) == self._num_hosts and now - min(self._heard.values()) < _NEWS_SECONDS
        if not limit or not is_known:
            return
        self._report_compilations(members, running, limit)
        # One that has exited well is still ahead.
        steps = [each.notes.started for each in members.values() if not each.status and each.notes.counts == STEPS]
        behind = self._behind(running, max(steps, default=0), now, limit)
        self._reported &= behind
        if not behind or self._reported:
            self._is_asking = False
            self._next_look = now + seconds_between_looks(limit) / 2  # hosts do not tell at the same time
            return
        if not self._is_asking:
            self._is_asking = True
            self.places.clear()
            self._ask()
        if running.keys() <= self.places.keys():
            self._reported = behind
            self._report(members, running, behind, limit)

    def _behind(self, running: Mapping[int, Notes], furthest: int, now: float, limit: float) -> set[int]:
        """Those without progress; none unless one has made none for as long as `limit`."""
        # Time in which the launcher could not run does not count.
        elapsed, self._looked = min(now - self._looked, 2 * seconds_between_looks(limit)), now
        if not any(notes.compiling_for for notes in running.values()):
            self._clock += elapsed
        lacking = {
            rank: (notes.started, notes.completed)
            for rank, notes in running.items()
            if notes.completed < (notes.started if notes.counts == EXECUTIONS else furthest)
        }
        self._since = {
            rank: known if (known := self._since.get(rank)) and known[0] == what else (what, self._clock)
            for rank, what in lacking.items()
        }
        ages = {rank: self._clock - since for rank, (_, since) in self._since.items()}
        is_late = any(age > limit and running[rank].counts for rank, age in ages.items())
        # The others need not have noticed at the same moment.
        return {rank for rank, age in ages.items() if age > limit / 2} if is_late else set()

    def _report_compilations(self, members: Mapping[int, Member], running: Mapping[int, Notes], limit: float) -> None:
        found = {(rank, notes.compiling) for rank, notes in running.items() if notes.compiling_for > limit}
        for rank, what in found - self._compiling:
            since = f"for {running[rank].compiling_for:.0f} s"
            self._log(f"{members[rank].name} has been compiling {what or 'a program'} {since}")
        self._compiling = found

    def _report(
        self, members: Mapping[int, Member], running: Mapping[int, Notes], behind: set[int], limit: float
    ) -> None:
        step = None
        if any(running[rank].counts == STEPS for rank in behind):
            step = 1 + min(running[rank].completed for rank in behind)
        else:  # executions have no numbers that compare: one that launches nothing may be what the others wait for
            behind = set(running)
        places = {rank: each._replace(place=self.places.get(rank, Place())) for rank, each in members.items()}
        report = Report(step, sorted(behind), places)
        self._log(report.text(limit, "--watch" if self._watch else "jax_ring.watch"))
        given = "end" if any(notes.ends_job for notes in running.values()) else "report"
        if (self._on_stuck or given) == "end":
            for rank, what in report.blamed().items():
                self._fail(rank, members[rank].name, what)
