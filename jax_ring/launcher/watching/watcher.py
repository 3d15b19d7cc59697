"""Reads the pages of a job's processes, and reports once when some no longer go on."""

import asyncio
import contextlib
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jax_ring.launcher import events
from jax_ring.launcher.processes import Process, format_ranks
from jax_ring.launcher.shared import Shared
from jax_ring.launcher.watching import report
from jax_ring.launcher.watching.comparison import Comparison, Verdict, seconds_between_looks
from jax_ring.launcher.watching.page import STACKS_SIGNAL, Notes

# A process whose threads can run answers at once. Another one gets a signal, for which Python writes its stacks.
_ANSWER_SECONDS = 2.0
_SIGNAL_SECONDS = 0.5

Answer = Callable[[dict[str, Any]], None]


class Watcher:
    """Watches the processes of an attempt.

    processes: by number; the attempt adds to it.
    """

    def __init__(self, shared: Shared, processes: Mapping[int, Process]) -> None:
        self._shared, self._options, self._processes = shared, shared.options, processes
        self._comparison = Comparison()
        self._questions: dict[int, Answer] = {}  # to processes that wait to be asked where they are
        self._places: dict[int, report.Place] = {}  # what they have answered
        self._answered = asyncio.Event()
        self._compiling: set[tuple[int, int]] = set()  # reported compilations: process, and when it began

    async def run(self) -> None:
        """Looks at the processes until it is cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            notes = self._read()
            limit = self._limit(notes)
            wait = seconds_between_looks(limit)
            await asyncio.sleep(wait)
            if not limit:
                before = loop.time()
                continue
            notes = self._read()
            # Time in which the launcher could not run does not count.
            elapsed, before = min(loop.time() - before, 2 * wait), loop.time()
            self._note_compilations(notes, limit)
            if (verdict := self._comparison.look(notes, elapsed, limit, self._read(0).values())) is not None:
                await self._report(verdict, notes, limit)

    def asked(self, process: Process, message: dict[str, Any], answer: Answer) -> None:
        """A process waits to be asked, and says where it is if it was."""
        if place := message.get("place"):
            self._places[process.number] = report.Place(*place)
            self._answered.set()
        self._questions[process.number] = answer

    def _read(self, status: int | None = None) -> dict[int, Notes]:
        """The notes of running processes, or of those that have exited with a status."""
        return {number: each.page.read() for number, each in self._processes.items() if each.status == status}

    def _limit(self, notes: Mapping[int, Notes]) -> float:
        """Seconds; 0 if nothing is watched."""
        given = [each.limit for each in notes.values() if each.counts]
        return (self._options.watch or min(given)) if given else 0.0

    def _note_compilations(self, notes: Mapping[int, Notes], limit: float) -> None:
        for number, each in notes.items():
            began = number, each.compiling_since
            is_long = each.compiling_since and report.seconds_since(each.compiling_since) > limit
            if is_long and began not in self._compiling:
                self._compiling.add(began)
                self._log(report.of_compilation(self._processes[number], each))

    async def _report(self, verdict: Verdict, notes: Mapping[int, Notes], limit: float) -> None:
        places = await self._ask()
        now = self._read()
        if any(number not in now or now[number].completed != notes[number].completed for number in verdict.behind):
            self._comparison.forget()  # they have gone on, or ended, meanwhile
            return
        for number in list(notes):
            if self._processes[number].is_stopped():
                places[number] = report.Place("stopped", "", "", places.get(number, report.NOWHERE).stacks)
        processes = {number: self._processes[number] for number in notes}
        source = "--watch" if self._options.watch else "jax_ring.watch"
        exited = format_ranks(each for each in self._processes.values() if each.status == 0)
        found = report.Found(verdict, notes, places, processes, limit, source, exited)
        self._log(report.text(found))
        given = "end" if any(each.ends_job for each in notes.values()) else "report"
        if (self._options.on_stuck or given) == "end":
            blamed = report.blamed(found)
            waiting = tuple(number for number in verdict.behind if number not in blamed)
            self._shared.queue.put_nowait(events.Stuck(blamed, waiting))

    async def _ask(self) -> dict[int, report.Place]:
        """Where the processes are, by their own word or by Python's stacks."""
        self._places = {}
        asked = dict(self._questions)
        self._questions = {}
        for answer in asked.values():
            answer({"where": True})
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                while len(self._places) < len(asked):
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            pass
        silent = [each for number, each in self._processes.items() if number not in self._places and _can_write(each)]
        for process in silent:
            process.page.forget_stacks()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, STACKS_SIGNAL)
        if silent:
            await asyncio.sleep(_SIGNAL_SECONDS)
        for process in silent:
            self._places[process.number] = report.Place("unknown", "", "", report.of_signal(process.page.stacks()))
        return self._places

    def _log(self, text: str) -> None:
        self._shared.output.log(text)


def _can_write(process: Process) -> bool:
    """Whether a process runs, and has a handler for the signal, which would end it otherwise."""
    if process.status is not None or process.is_stopped():
        return False
    try:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (int(STACKS_SIGNAL) - 1) & 1)
