"""Which processes are behind, and for how long nothing has come of it."""

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from jax_ring.launcher.watching.page import EXECUTIONS, STEPS, Notes

_LOOKS = 20  # in the time after which a process is stuck
_LONGEST_SECONDS = 1.0  # between two


def seconds_between_looks(limit: float) -> float:
    """limit: seconds after which a process is stuck; 0 if nothing is watched."""
    return min(limit / _LOOKS, _LONGEST_SECONDS) if limit else _LONGEST_SECONDS


class Verdict(NamedTuple):
    """Processes that do not go on."""

    # the first and the last that they have not completed; None where executions are counted
    steps: tuple[int, int] | None
    behind: tuple[Hashable, ...]  # the processes; all, where executions are counted


class Comparison:
    """Finds processes without progress, in a clock that stands still while one compiles."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._since: dict[Hashable, tuple[tuple, float]] = {}  # by process: what it lacks, and since when
        self._reported: dict[Hashable, tuple] = {}

    def forget(self) -> None:
        """Makes the next verdict possible at once."""
        self._reported.clear()

    def look(
        self, notes: Mapping[Hashable, Notes], elapsed: float, limit: float, ended: Iterable[Notes] = ()
    ) -> Verdict | None:
        """Looks at all running processes; returns a verdict once until one of those behind goes on.

        elapsed: seconds since the last look, of which no more count than the caller should have let pass.
        ended: notes of processes that have ended well, whose steps the others still lack.
        """
        if not any(each.compiling_since for each in notes.values()):
            self._clock += elapsed
        members = {number: each for number, each in notes.items() if each.generation >= 0}
        if not members:
            return None
        newest = max(each.generation for each in members.values())
        members = {number: each for number, each in members.items() if each.generation == newest}
        others = [each for each in ended if each.generation == newest]
        furthest = max((each.started for each in (*members.values(), *others) if each.counts == STEPS), default=0)
        lacking: dict[Hashable, tuple] = {}
        for number, each in members.items():
            if each.completed < (each.started if each.counts == EXECUTIONS else furthest):
                lacking[number] = each.generation, each.completed
        self._since = {
            number: known if (known := self._since.get(number)) and known[0] == what else (what, self._clock)
            for number, what in lacking.items()
        }
        self._reported = {number: what for number, what in self._reported.items() if lacking.get(number) == what}
        ages = {number: self._clock - since for number, (_, since) in self._since.items()}
        if self._reported or not any(age > limit and members[number].counts for number, age in ages.items()):
            return None
        # The others need not have noticed at the same moment.
        behind = [number for number in lacking if ages[number] > limit / 2]
        self._reported = {number: lacking[number] for number in behind}
        if not any(members[number].counts == STEPS for number in behind):
            # Executions have no numbers that compare: one that launches nothing may be what the others wait for.
            return Verdict(None, tuple(members))
        steps = [members[number].completed + 1 for number in behind]
        return Verdict((min(steps), max(steps)), tuple(behind))
