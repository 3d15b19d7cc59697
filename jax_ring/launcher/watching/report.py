"""What is said of processes that no longer go on."""

import linecache
import pathlib
import threading
from collections.abc import Collection, Mapping
from typing import NamedTuple

from jax_ring.launcher.watching.page import STEPS, Notes

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

    name: str
    status: int | None  # None while it runs
    notes: Notes
    place: Place = Place()

    def kind(self) -> str:
        """`Place.kind`; where a process does not answer, something holds Python's lock."""
        return self.place.kind or ("compilation" if self.notes.compiling_for else "python")

    def state(self) -> str:
        notes, kind = self.notes, self.kind()
        text = _IN[kind] + (f" of {notes.compiling or 'a program'}" if kind == "compilation" else "")
        if not notes.counts:
            text += "; has begun nothing"
        elif notes.counts == STEPS:
            text += f"; began {notes.started} steps, completed {notes.completed}"
        else:  # of executions only the newest is looked at
            text += "; waits for a program" if notes.completed < notes.started else "; has completed what it launched"
        if notes.completed:
            text += f", the last {notes.completed_ago:.1f} s ago"
        return text + ("" if self.place.kind else "; its threads do not answer, as if one held Python's lock")


class Report(NamedTuple):
    """Processes that do not go on."""

    step: int | None  # the first that they have not completed; None where executions are counted
    behind: Collection[int]  # their ranks; all, where executions are counted
    members: Mapping[int, Member]  # by rank; also those that have ended

    def text(self, limit: float, source: str) -> str:
        """A line with all names, then each process and the last calls. limit: in seconds. source: who has set it."""
        # First those for which the others wait.
        behind = [self.members[rank] for rank in sorted(self.behind, key=lambda rank: (self._is_waiting(rank), rank))]
        who = f"rank{'s' * (len(behind) > 1)} {_listed(self.behind)} {'have' if len(behind) > 1 else 'has'}"
        what = f"{who} not completed {self._step()}" if self.step else "a program has not completed"
        lines = [f"{what} within {limit:g} s ({source})"]
        for member in behind:
            lines.append(f"  {member.name}: {member.state()}")
            lines += [f"      last call of jax_ring: {member.place.call}"] if member.place.call else []
            lines += [f"      {line}" for line in member.place.stacks.splitlines()]
        if exited := [rank for rank, member in self.members.items() if member.status == 0]:
            lines.append(f"  ranks that have exited: {_listed(exited)}")
        if table := next((member.place.table for member in behind if member.place.table), ""):
            lines += ["", table.rstrip()]
        return "\n".join(lines)

    def blamed(self) -> dict[int, str]:
        """What to say of those for which the others wait: of all, if they are all in the device's program."""
        kinds = {rank: self.members[rank].kind() for rank in self.behind}
        ranks = [rank for rank, kind in kinds.items() if kind in ("python", "callback", "stopped")] or list(kinds)
        return {rank: f"is stuck in {self._step()}: {_IN[kinds[rank]]}" for rank in ranks}

    def _is_waiting(self, rank: int) -> bool:
        return self.members[rank].kind() == "device"

    def _step(self) -> str:
        if not self.step:
            return "an execution"
        # One that has begun the next may name another function.
        begun = sorted((each.notes.started, each.notes.function) for each in self.members.values())
        return f"step {self.step} ({next((name for number, name in begun if number >= self.step), '')})"


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def readable(stacks: str) -> str:
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
