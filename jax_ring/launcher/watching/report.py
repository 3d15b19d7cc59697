"""Which processes no longer go on, and what is said of them."""

import linecache
import pathlib
import threading
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from jax_ring.launcher.watching.page import EXECUTIONS, STEPS, Notes

_LOOKS = 20  # in the time after which a process is stuck
_LONGEST_SECONDS = 1.0  # between two
_MAX_FRAMES = 20  # of a thread
# Begin the names of files whose frames tell nothing.
_CALLERS = (str(pathlib.Path(__file__).parents[2]), threading.__file__, "<frozen runpy>")
_IN = {
    "python": "in Python",
    "device": "in the device's program",
    "callback": "in a callback of the device's program",
    "compilation": "in a compilation",
    "stopped": "stopped",
}


class Place(NamedTuple):
    """Where a process is."""

    kind: str = ""  # a key of `_IN`; empty if it does not answer
    call: str = ""  # the last call that jax_ring knows of there
    table: str = ""  # of the last calls of all processes that it knows of
    stacks: str = ""  # of its threads


class Member(NamedTuple):
    """A process, and what is known of it."""

    rank: int
    name: str
    status: int | None  # None while it runs
    notes: Notes
    place: Place | None = None

    def kind(self) -> str:
        """`Place.kind`; where a process does not answer, something holds Python's lock."""
        known = self.place.kind if self.place else ""
        return known or ("compilation" if self.notes.compiling_for else "python")


class Verdict(NamedTuple):
    """Processes that do not go on."""

    step: int | None  # the first that they have not completed; None where executions are counted
    behind: tuple[Hashable, ...]  # the processes; all, where executions are counted


def seconds_between_looks(limit: float) -> float:
    """limit: seconds after which a process is stuck; 0 if nothing is watched."""
    return min(limit / _LOOKS, _LONGEST_SECONDS) if limit else _LONGEST_SECONDS


class Comparison:
    """Finds processes without progress, in a clock that stands still while one compiles."""

    def __init__(self) -> None:
        self._clock = self._before = 0.0
        self._since: dict[Hashable, tuple[tuple, float]] = {}  # by process: how far it is, and since when
        self._reported: dict[Hashable, tuple] = {}

    def look(
        self, notes: Mapping[Hashable, Notes], now: float, limit: float, ended: Iterable[Notes] = ()
    ) -> Verdict | None:
        """Looks at all running processes; returns a verdict once until one of those behind goes on.

        now: in seconds. Time in which the caller could not run does not count.
        ended: notes of processes that have ended well, whose steps the others still lack.
        """
        elapsed, self._before = min(now - self._before, 2 * seconds_between_looks(limit)), now
        if not any(each.compiling_for for each in notes.values()):
            self._clock += elapsed
        furthest = max((each.started for each in (*notes.values(), *ended) if each.counts == STEPS), default=0)
        lacking = {
            number: (each.started, each.completed)
            for number, each in notes.items()
            if each.completed < (each.started if each.counts == EXECUTIONS else furthest)
        }
        self._since = {
            number: known if (known := self._since.get(number)) and known[0] == what else (what, self._clock)
            for number, what in lacking.items()
        }
        self._reported = {number: what for number, what in self._reported.items() if lacking.get(number) == what}
        ages = {number: self._clock - since for number, (_, since) in self._since.items()}
        if self._reported or not any(age > limit and notes[number].counts for number, age in ages.items()):
            return None
        # The others need not have noticed at the same moment.
        behind = [number for number in lacking if ages[number] > limit / 2]
        self._reported = {number: lacking[number] for number in behind}
        if not any(notes[number].counts == STEPS for number in behind):
            # Executions have no numbers that compare: one that launches nothing may be what the others wait for.
            return Verdict(None, tuple(notes))
        return Verdict(1 + min(notes[number].completed for number in behind), tuple(behind))


def blamed(verdict: Verdict, members: Mapping[Hashable, Member]) -> dict[Hashable, str]:
    """What to say of the processes for which the others wait: of all, if they are all in the device's program."""
    kinds = {number: members[number].kind() for number in verdict.behind}
    numbers = [number for number, kind in kinds.items() if kind in ("python", "callback", "stopped")] or list(kinds)
    return {number: f"is stuck in {_step(verdict, members)}: {_IN[kinds[number]]}" for number in numbers}


def text(verdict: Verdict, members: Mapping[Any, Member], limit: float, source: str) -> str:
    """The report: a line with all names, then each process and the last calls.

    members: also those that have ended well. limit: in seconds. source: who has set it.
    """
    # First those for which the others wait.
    behind = [members[number] for number in verdict.behind]
    behind.sort(key=lambda each: (each.kind() == "device", each.rank))
    who = f"rank {behind[0].rank} has" if len(behind) == 1 else f"ranks {_ranks(behind)} have"
    what = f"{who} not completed {_step(verdict, members)}" if verdict.step else "a program has not completed"
    lines = [f"{what} within {limit:g} s ({source})"]
    for member in behind:
        place = member.place or Place()
        lines.append(f"  {member.name}: {_state(member)}")
        lines += [f"      last call of jax_ring: {place.call}"] if place.call else []
        lines += [f"      {line}" for line in place.stacks.splitlines()]
    if exited := _ranks(each for each in members.values() if each.status == 0):
        lines.append(f"  ranks that have exited: {exited}")
    if table := next((each.place.table for each in behind if each.place and each.place.table), ""):
        lines += ["", table.rstrip()]
    return "\n".join(lines)


def _ranks(members: Iterable[Member]) -> str:
    return ", ".join(map(str, sorted(each.rank for each in members)))


def _step(verdict: Verdict, members: Mapping[Hashable, Member]) -> str:
    if not verdict.step:
        return "an execution"
    # One that has begun the next may name another function.
    begun = sorted((each.notes.started, each.notes.function) for each in members.values())
    return f"step {verdict.step} ({next((name for number, name in begun if number >= verdict.step), '')})"


def _state(member: Member) -> str:
    notes, kind = member.notes, member.kind()
    text = _IN[kind] + (f" of {notes.compiling or 'a program'}" if kind == "compilation" else "")
    if not notes.counts:
        text += "; has begun nothing"
    elif notes.counts == STEPS:
        text += f"; began {notes.started} steps, completed {notes.completed}"
    else:  # of executions only the newest is looked at
        text += "; waits for a program" if notes.completed < notes.started else "; has completed what it launched"
    if notes.completed:
        text += f", the last {notes.completed_ago:.1f} s ago"
    if not (member.place and member.place.kind):
        text += "; its threads do not answer, as if one held Python's lock"
    return text


def of_signal(stacks: str) -> str:
    """What Python has written of its threads, the main one first, without frames of jax_ring."""
    lines: list[str] = []
    for thread in reversed(stacks.split("\n\n")):
        frames = [line.partition('File "')[2].partition('", line ') for line in thread.splitlines()[1:]]
        told = [(file, *place.partition(" in ")) for file, _, place in frames if file and not file.startswith(_CALLERS)]
        if told:
            lines.append("another thread:" if lines else "MainThread:")
        for file, line, _, function in reversed(told[:_MAX_FRAMES]):
            lines.append(f'  File "{file}", line {line}, in {function}')
            lines.append(f"    {linecache.getline(file, int(line)).strip()}")
    return "\n".join(lines)
