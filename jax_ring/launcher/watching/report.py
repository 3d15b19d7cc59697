"""Which processes no longer go on, and what the launcher says of them."""

import itertools
import pathlib
import statistics
import threading
import time
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from jax_ring.launcher.processes import Process, format_ranks
from jax_ring.launcher.watching.page import EXECUTIONS, STEPS, Notes

_LOOKS = 20  # in the time after which a process is stuck
_LONGEST_SECONDS = 1.0  # between two
_STEPS = 100  # in the table
_PACKAGE = pathlib.Path(__file__).parents[2]
# Files whose frames tell nothing.
_CALLERS = ("launcher/worker.py", "progress/watch.py", "elastic/loop.py")
IGNORED = ("<frozen runpy>", *(str(_PACKAGE / name) for name in _CALLERS))


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


# ---- The report ------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a process is."""

    kind: str  # "python", "device", "callback", "compilation", "stopped"; "unknown" if it does not answer
    call: str  # the last call that jax_ring knows of there; empty for none
    table: str  # of the last calls of all processes that it knows of; empty for none
    stacks: str  # of its threads


NOWHERE = Place("unknown", "", "", "")


class Found(NamedTuple):
    """All that is known; mappings are by process."""

    verdict: Verdict
    notes: Mapping[Hashable, Notes]
    places: Mapping[Hashable, Place]
    processes: Mapping[Hashable, Any]  # what has a `rank` and a `name`, as `Process`
    limit: float  # in seconds
    source: str  # who has set it
    exited: str = ""  # ranks that have ended well

    def kind(self, number: Hashable) -> str:
        """`Place.kind`; where a process does not answer, something holds Python's lock."""
        kind = self.places.get(number, NOWHERE).kind
        if kind == "unknown":
            kind = "compilation" if self.notes[number].compiling_since else "python"
        return kind


def seconds_since(nanoseconds: int) -> float:
    return (time.monotonic_ns() - nanoseconds) / 1e9


def of_compilation(process: Process, note: Notes) -> str:
    what = note.compiling or "a program"
    return f"{process.name} has been compiling {what} for {seconds_since(note.compiling_since):.0f} s"


def blamed(found: Found) -> dict[Hashable, str]:
    """What to say of the processes for which the others wait: of all, if they are all in the device's program."""
    kinds = {number: found.kind(number) for number in found.verdict.behind}
    numbers = [number for number, kind in kinds.items() if kind in ("python", "callback", "stopped")]
    if found.verdict.steps is None:  # "python" may be a launch
        numbers = [number for number in numbers if kinds[number] != "python"] or numbers
    numbers = numbers or list(kinds)
    return {number: f"is stuck in {_step(found)}: {_IN[kinds[number]]}" for number in numbers}


_IN = {
    "python": "in Python",
    "device": "in the device's program",
    "callback": "in a callback of the device's program",
    "compilation": "in a compilation",
    "stopped": "stopped",
}


def text(found: Found) -> str:
    """The report: a line with all names, then each process, the last calls and the times of steps."""
    behind = sorted((found.processes[number] for number in found.verdict.behind), key=lambda each: each.rank)
    if found.verdict.steps is None:
        title = f"a program has not completed within {found.limit:g} s ({found.source})"
    else:
        names = f"rank {behind[0].rank} has" if len(behind) == 1 else f"ranks {format_ranks(behind)} have"
        title = f"{names} not completed {_step(found)} within {found.limit:g} s ({found.source})"
    # First those for which the others wait.
    order = sorted(
        found.verdict.behind, key=lambda number: (found.kind(number) == "device", found.processes[number].rank)
    )
    lines = [title, *itertools.chain.from_iterable(_process(found, number) for number in order)]
    if found.exited:
        lines.append(f"  ranks that have exited: {found.exited}")
    if table := next((place.table for place in found.places.values() if place.table), ""):
        lines += ["", *table.splitlines()]
    return "\n".join([*lines, *_times(found)])


def _step(found: Found) -> str:
    if found.verdict.steps is None:
        return "an execution"
    step, last = found.verdict.steps
    if step != last:
        return f"steps {step} to {last}"
    for note in found.notes.values():
        if step in note.recent and note.recent[step].function < len(note.names):
            return f"step {step} ({note.names[note.recent[step].function]})"
    return f"step {step}"


def _process(found: Found, number: Hashable) -> Iterable[str]:
    note, place, process = found.notes[number], found.places.get(number, NOWHERE), found.processes[number]
    kind = found.kind(number)
    what = _IN[kind]
    if kind == "python" and note.counts != STEPS:
        what += " or in the launch of a program"
    if kind == "compilation":
        what += f" of {note.compiling or 'a program'}"
    ago = f"{seconds_since(note.completed_at):.1f} s ago"
    if not note.counts:
        what += "; has not come to a step" if found.verdict.steps else "; has launched no program"
    elif note.counts == STEPS:
        what += f"; began {note.started} steps, completed {note.completed}" + (f", {ago}" if note.completed else "")
    else:
        what += "; has completed what it launched" if note.completed == note.started else "; waits for a program"
        what += f", the last {ago}" if note.completed else ""
    if place.kind == "unknown":
        what += "; its threads do not answer, as if one held Python's lock"
    yield f"  {process.name}: {what}"
    if place.call:
        yield f"      last call of jax_ring: {place.call}"
    yield from (f"      {line}" for line in place.stacks.splitlines())


def of_signal(stacks: str) -> str:
    """What Python has written of its threads, without those of jax_ring."""
    lines: list[str] = []
    for thread in stacks.strip().split("\n\n"):
        name, *frames = thread.splitlines()
        if any(f'"{_PACKAGE}' not in frame and f'"{threading.__file__}' not in frame for frame in frames):
            lines += [name, *(frame for frame in frames if not any(file in frame for file in IGNORED))]
    return "\n".join(lines)


def _times(found: Found) -> Iterable[str]:
    """The table of stragglers."""
    recent = {
        found.processes[number].rank: dict(sorted(note.recent.items())[-_STEPS:])
        for number, note in found.notes.items()
        if note.counts == STEPS and note.generation >= 0 and note.completed > 1
    }
    if not recent:
        return
    last = dict.fromkeys(recent, 0)
    behind: dict[int, list[float]] = {rank: [] for rank in recent}
    for step in set.intersection(*map(set, recent.values())) if len(recent) > 1 else ():
        *_, before, (at, rank) = sorted((steps[step].started, rank) for rank, steps in recent.items())
        last[rank] += 1
        behind[rank].append((at - before[0]) / 1e6)
    yield f"  the last {max(map(len, recent.values()))} steps, medians in ms:"
    yield f"  {'rank':>6} {'in step':>9} {'between':>9} {'began last':>11} {'later by':>9}"
    for rank, steps in sorted(recent.items()):
        inside, between = [], []
        for step, times in steps.items():
            previous = steps[step - 1].completed if step - 1 in steps else 0
            if times.completed and (previous or step == 1):
                inside.append((times.completed - max(times.started, previous)) / 1e6)
            if previous:
                between.append(max(times.started - previous, 0) / 1e6)
        yield f"  {rank:>6} {_median(inside):>9} {_median(between):>9} {last[rank]:>11} {_median(behind[rank]):>9}"


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"
