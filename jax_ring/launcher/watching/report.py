"""What is said of processes that no longer go on."""

import contextlib
import linecache
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_ring.launcher.watching.page import STEPS, Notes

_MAX_FRAMES = 20  # of a thread
_MOST_LINE, _MOST_TEXT = 200, 1 << 16  # letters of a line of a file, and of all stacks
# Begin the names of files whose frames tell nothing.
_CALLERS = (str(pathlib.Path(__file__).parents[2]), threading.__file__, "<frozen runpy>")
# Where a process may be.
PYTHON, DEVICE, CALLBACK = "in Python", "in the device's program", "in a callback of the device's program"
COMPILATION, STOPPED = "in a compilation", "stopped"


class Place(NamedTuple):
    """Where a process is."""

    kind: str = ""  # one of these; empty if it does not answer
    call: str = ""  # the last call that jax_ring knows of there
    table: str = ""  # of the last calls of all processes that it knows of
    stacks: str = ""  # of its threads

    def validate(self) -> None:
        if self.kind not in ("", PYTHON, DEVICE, CALLBACK, COMPILATION, STOPPED):
            raise ValueError(f"{self.kind!r:.100} is no place of a process")


class Report(NamedTuple):
    """Processes that do not go on."""

    step: int | None  # the first that they have not completed; None where executions are counted
    behind: Sequence[int]  # their ranks; all, where executions are counted
    notes: Mapping[int, Notes]  # by rank, also of processes that have ended
    places: Mapping[int, Place]  # of those that run

    def lines(self, limit: float, source: str) -> list[str]:
        """A line with all names, then each process and the last calls. limit: in seconds. source: who has set it.

        What processes say of themselves is indented, so that nobody takes it for what the launcher says.
        """
        ranks = ", ".join(map(str, self.behind))
        who = f"ranks {ranks} have" if len(self.behind) > 1 else f"rank {ranks} has"
        what = f"{who} not completed {self._step()}" if self.step else "a program has not completed"
        lines = [f"{what} within {limit:g} s ({source})"]
        # First those for which the others wait.
        behind = sorted(self.behind, key=lambda rank: self._kind(rank) == DEVICE)
        for rank in behind:
            place = self.places[rank]
            lines.append(f"  {self.notes[rank].name}: {self._state(rank)}")
            lines += [f"      last call of jax_ring: {place.call}"] if place.call else []
            lines += [f"      {line}" for line in place.stacks.splitlines()]
        if exited := [str(rank) for rank, notes in sorted(self.notes.items()) if notes.status == 0]:
            lines.append(f"  ranks that have exited: {', '.join(exited)}")
        if table := next(filter(None, (self.places[rank].table for rank in behind)), ""):
            lines += ["", *(f"  {line}" for line in table.rstrip().splitlines())]
        return lines

    def blamed(self) -> dict[int, str]:
        """What to say of those for which the others wait: of all, if they are all in the device's program."""
        kinds = {rank: self._kind(rank) for rank in self.behind}
        ranks = [rank for rank, kind in kinds.items() if kind not in (DEVICE, COMPILATION)] or list(kinds)
        return {rank: f"is stuck in {self._step()}: {kinds[rank]}" for rank in ranks}

    def _step(self) -> str:
        if not self.step:
            return "an execution"
        # One that has begun the next may name another function.
        begun = sorted((notes.started, notes.function) for notes in self.notes.values())
        return f"step {self.step} ({next((name for number, name in begun if number >= self.step), '')})"

    def _kind(self, rank: int) -> str:
        """`Place.kind`; where a process does not answer, something holds Python's lock."""
        return self.places[rank].kind or (COMPILATION if self.notes[rank].compiling_for else PYTHON)

    def _state(self, rank: int) -> str:
        notes, kind = self.notes[rank], self._kind(rank)
        text = kind + (f" of {notes.compiling or 'a program'}" if kind == COMPILATION else "")
        if not notes.counts:
            text += "; has begun nothing"
        elif notes.counts == STEPS:
            text += f"; began {notes.started} steps, completed {notes.completed}"
        else:  # of executions only the newest is looked at
            text += "; waits for a program" if notes.completed < notes.started else "; has completed what it launched"
        if notes.completed:
            text += f", the last {notes.completed_ago:.1f} s ago"
        return text + ("" if self.places[rank].kind else "; its threads do not answer, as if one held Python's lock")


def readable(stacks: str, *, of_this_process: bool = False) -> str:
    """What Python has written of its threads, the main one first, without frames of jax_ring.

    of_this_process: whether to add the lines of the files. Another process could name a file that is never read to its
      end, as a pipe, or one of a file system that does not answer.
    """
    lines: list[str] = []
    for thread in reversed(stacks.split("\n\n")):
        frames = [line.partition('File "')[2].partition('", line ') for line in thread.splitlines()[1:]]
        told = [(file, *place.partition(" in ")) for file, _, place in frames if file and not file.startswith(_CALLERS)]
        if told:
            lines.append("another thread:" if lines else "MainThread:")
        for file, line, _, function in reversed(told[:_MAX_FRAMES]):
            lines.append(f'  File "{file}", line {line}, in {function}')
            if of_this_process:
                lines.append(f"    {_source(file, line)}")
    return "\n".join(lines)[:_MOST_TEXT]


def _source(file: str, line: str) -> str:
    with contextlib.suppress(ValueError):  # "???"
        return linecache.getline(file, int(line)).strip()[:_MOST_LINE]
    return ""
