"""Reads the pages of a job's processes, and reports once when some no longer go on."""

import asyncio
import contextlib
import os
import pathlib
from collections.abc import Hashable, Mapping
from typing import Any

from jax_ring.launcher import events
from jax_ring.launcher.processes import Process, format_ranks
from jax_ring.launcher.shared import Role, Shared
from jax_ring.launcher.watching import others, report
from jax_ring.launcher.watching.page import STACKS_SIGNAL, Notes
from jax_ring.launcher.watching.report import Comparison, Verdict, seconds_between_looks

# A process whose threads can run answers at once. Another one gets a signal, for which Python writes its stacks.
_ANSWER_SECONDS = 2.0
_SIGNAL_SECONDS = 0.5
_OTHER_HOSTS_SECONDS = 4.0  # for both, and the way there and back


class Watcher:
    """Watches the processes of an attempt: those of all hosts, or for a launcher that does.

    processes: of this host, by number; the attempt adds to it.
    """

    def __init__(self, shared: Shared, processes: Mapping[Any, Process], remote: Role) -> None:
        self._shared, self._options, self._processes = shared, shared.options, processes
        self._remote, self._others, self._log = remote, remote.others, shared.output.log
        self._comparison = Comparison()
        self._questions: dict[int, events.Answer] = {}  # to processes that wait to be asked where they are
        self._places: dict[Hashable, report.Place] = {}  # what they have answered
        self._answered = asyncio.Event()
        self._compiling: set[tuple[int, int]] = set()  # reported compilations: process, and when it began

    async def run(self) -> None:
        """Looks at the processes until it is cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            limit = self._limit(self._read())
            wait = seconds_between_looks(limit)
            if self._remote.leads:
                await asyncio.sleep(wait)
            else:
                await self._tell_leader(wait)
            notes = self._read()
            # Time in which the launcher could not run does not count.
            elapsed, before = min(loop.time() - before, 2 * wait), loop.time()
            if not limit:
                continue
            self._note_compilations(limit)
            if self._remote.leads and self._others.are_known():
                verdict = self._comparison.look(notes, elapsed, limit, self._read(0).values())
                if verdict is not None:
                    await self._report(verdict, notes, limit)

    async def _tell_leader(self, seconds: float) -> None:
        """Waits so long, or until the launcher that leads asks; tells it how far the processes are, and where if so."""
        places = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._remote.asks_where.wait()
            self._remote.asks_where.clear()
            places = await self._ask()
        for number, process in self._processes.items():
            self._remote.tell("progress", others.encoded(process, places.get(number)))

    def asked(self, process: Process, message: dict[str, Any], answer: events.Answer) -> None:
        """A process waits to be asked, and says where it is if it was."""
        if place := message.get("place"):
            self._places[process.number] = report.Place(*place)
            self._answered.set()
        self._questions[process.number] = answer

    def _read(self, status: int | None = None) -> dict[Hashable, Notes]:
        """The notes of running processes, or of those that have exited with a status."""
        own = {number: each.page.read() for number, each in self._processes.items() if each.status == status}
        return {**own, **{key: each.notes for key, each in self._others.told.items() if each.status == status}}

    def _limit(self, notes: Mapping[Hashable, Notes]) -> float:
        """Seconds; 0 if nothing is watched."""
        given = [each.limit for each in notes.values() if each.counts]
        return (self._options.watch or min(given)) if given else 0.0

    def _note_compilations(self, limit: float) -> None:
        for number, process in self._processes.items():
            note = process.page.read()
            began = number, note.compiling_since
            is_long = note.compiling_since and report.seconds_since(note.compiling_since) > limit
            if process.status is None and is_long and began not in self._compiling:
                self._compiling.add(began)
                self._log(report.of_compilation(process, note))

    async def _report(self, verdict: Verdict, notes: Mapping[Hashable, Notes], limit: float) -> None:
        own, told = await asyncio.gather(self._ask(), self._others.ask(_OTHER_HOSTS_SECONDS))
        places = own | told
        now = self._read()
        if any(number not in now or now[number].completed != notes[number].completed for number in verdict.behind):
            self._comparison.forget()  # they have gone on, or ended, meanwhile
            return
        every: dict[Hashable, Any] = {**self._processes, **self._others.told}
        source = "--watch" if self._options.watch else "jax_ring.watch"
        exited = format_ranks(each for each in every.values() if each.status == 0)
        latest = {number: now.get(number, note) for number, note in notes.items()}  # with what is told only if asked
        found = report.Found(verdict, latest, places, {n: every[n] for n in notes}, limit, source, exited)
        self._log(report.text(found))
        given = "end" if any(each.ends_job for each in notes.values()) else "report"
        if (self._options.on_stuck or given) == "end":
            blamed = report.blamed(found)
            waiting = [number for number in verdict.behind if number not in blamed]
            stuck = {number: blamed[number] for number in self._processes if number in blamed}
            self._shared.queue.put_nowait(events.Stuck(stuck, tuple(n for n in self._processes if n in waiting)))
            self._others.end_stuck(blamed, waiting)

    async def _ask(self) -> dict[Hashable, report.Place]:
        """Where the processes are, by their own word or by Python's stacks."""
        self._places = {}
        asked = dict(self._questions)
        self._questions = {}
        for answer in asked.values():
            answer({"where": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                while len(self._places) < len(asked):
                    self._answered.clear()
                    await self._answered.wait()
        silent = [each for number, each in self._processes.items() if number not in self._places and _can_write(each)]
        for process in silent:
            process.page.forget_stacks()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, STACKS_SIGNAL)
        if silent:
            await asyncio.sleep(_SIGNAL_SECONDS)
        for process in silent:
            self._places[process.number] = report.Place("unknown", "", "", report.of_signal(process.page.stacks()))
        for number, process in self._processes.items():
            if process.status is None and process.is_stopped():
                self._places[number] = self._places.get(number, report.NOWHERE)._replace(kind="stopped")
        return self._places


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
