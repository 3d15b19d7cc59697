"""Reads the pages of a job's processes, and reports once when some no longer go on."""

import asyncio
import json
import time
from collections.abc import Hashable, Mapping
from typing import Any

from jax_ring.launcher import events
from jax_ring.launcher.hosts.follower import Follower
from jax_ring.launcher.processes import Process
from jax_ring.launcher.shared import Shared
from jax_ring.launcher.watching import report
from jax_ring.launcher.watching.page import ANSWERED, ASKED, STACKS_SIGNAL
from jax_ring.launcher.watching.report import Member, Place

# A process whose threads can run answers at once. Any writes its stacks on a signal, by Python's handler.
_POLLS, _POLL_SECONDS = 40, 0.05
_SIGNAL_SECONDS = 0.5
_OTHER_HOSTS_SECONDS = 4.0  # for both, after the second in which they look


class Watcher:
    """Watches the processes of a generation: those of all hosts, or for a launcher that does.

    processes: of this host, by number; more are added.
    """

    def __init__(self, shared: Shared, processes: Mapping[Any, Process], follower: Follower) -> None:
        self._shared, self._options, self._processes, self._follower = shared, shared.options, processes, follower
        self._comparison = report.Comparison()
        self._compiling: set[tuple[Hashable, str]] = set()  # reported compilations

    async def run(self) -> None:
        """Looks at the processes until it is cancelled."""
        limit = 0.0
        while True:
            await asyncio.sleep(report.seconds_between_looks(limit))
            if not self._follower.leads:
                places = await self._ask() if self._follower.asks_where.is_set() else {}
                self._follower.asks_where.clear()
                for number, member in self._members(places).items():
                    self._follower.tell("progress", [number, member])
            members = self._members({})
            running = {number: each.notes for number, each in members.items() if each.status is None}
            given = [notes.limit for notes in running.values() if notes.counts]
            limit = (self._options.watch or min(given)) if given else 0.0
            if limit and self._follower.leads and self._follower.others.are_known():
                self._report_compilations(members, running, limit)
                ended = [each.notes for each in members.values() if each.status == 0]
                if verdict := self._comparison.look(running, time.monotonic(), limit, ended):
                    await self._report(verdict, running, limit)

    def _members(self, places: Mapping[Hashable, Place]) -> dict[Hashable, Member]:
        """What is known of all processes, with the places of this host's."""
        own = {
            number: Member(each.rank, each.name, each.status, each.page.read(), places.get(number))
            for number, each in self._processes.items()
        }
        return {**own, **self._follower.others.told}

    def _report_compilations(self, members: Mapping, running: Mapping[Hashable, Any], limit: float) -> None:
        found = {(number, each.compiling) for number, each in running.items() if each.compiling_for > limit}
        for number, what in found - self._compiling:
            since = f"for {running[number].compiling_for:.0f} s"
            self._shared.output.log(f"{members[number].name} has been compiling {what or 'a program'} {since}")
        self._compiling = found

    async def _report(self, verdict: report.Verdict, before: Mapping[Hashable, Any], limit: float) -> None:
        has_others = self._follower.others.ask()
        places, _ = await asyncio.gather(self._ask(), asyncio.sleep(_OTHER_HOSTS_SECONDS if has_others else 0))
        members = self._members(places)
        for number in verdict.behind:
            now = members.get(number)
            if now is None or now.status is not None or now.notes.completed != before[number].completed:
                self._comparison = report.Comparison()  # they have gone on, or ended, meanwhile
                return
        source = "--watch" if self._options.watch else "jax_ring.watch"
        self._shared.output.log(report.text(verdict, members, limit, source))
        given = "end" if any(notes.ends_job for notes in before.values()) else "report"
        if (self._options.on_stuck or given) == "end":
            for number, what in report.blamed(verdict, members).items():
                failure = events.Failure(members[number].name, members[number].rank, what)
                self._follower.tell("failed", [failure, True])

    async def _ask(self) -> dict[Hashable, Place]:
        """Where the processes are: by their own word or by Python's stacks."""
        asked = {number: each for number, each in self._processes.items() if each.status is None}
        places = {}
        for process in asked.values():
            process.page.ask(ASKED)
        for _ in range(_POLLS):
            await asyncio.sleep(_POLL_SECONDS)
            if all(process.page.words.question == ANSWERED for process in asked.values()):
                break
        for number, process in asked.items():
            page, unknown = process.page, Place("stopped" if process.is_stopped() else "")
            places[number] = Place(*json.loads(page.behind())) if page.words.question == ANSWERED else unknown
            page.ask(0)
            if page.words.has_handler and not unknown.kind:  # without one, the signal would end it
                process.send(STACKS_SIGNAL, to_descendants=False)
        await asyncio.sleep(_SIGNAL_SECONDS)
        return {n: each._replace(stacks=report.of_signal(asked[n].page.behind())) for n, each in places.items()}
