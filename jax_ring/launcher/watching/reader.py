"""Reads the pages of this host's processes, and tells the launcher that leads."""

import asyncio
import contextlib
import json
from collections.abc import Mapping

from jax_ring.launcher.hosts.follower import Follower
from jax_ring.launcher.processes import Process
from jax_ring.launcher.watching import watcher
from jax_ring.launcher.watching.page import STACKS_SIGNAL
from jax_ring.launcher.watching.report import Place, readable

# A process whose threads can run answers at once. Any writes its stacks on a signal, by Python's handler.
_POLLS, _POLL_SECONDS = 40, 0.05
_SIGNAL_SECONDS = 0.5


async def tell_progress(processes: Mapping[int, Process], follower: Follower, watch: float | None) -> None:
    """Tells how far processes are, and when asked where, until it is cancelled.

    processes: more are added. watch: replaces the limit that they give.
    """
    limit = 0.0
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(follower.asks_where.wait(), watcher.seconds_between_looks(limit))
            follower.asks_where.clear()
            await asyncio.gather(*(_tell_place(each, follower) for each in processes.values() if each.status is None))
        told = [(each.rank, each.name, each.status, each.page.read()) for each in processes.values()]
        follower.tell("progress", told)
        limit = watcher.limit_of([notes for _, _, status, notes in told if status is None], watch)


async def _tell_place(process: Process, follower: Follower) -> None:
    follower.tell("place", [process.rank, await _place(process)])


async def _place(process: Process) -> Place:
    """Where a process is: by its own word, or else by Python's stacks."""
    page = process.page
    page.words.asked = True
    for _ in range(_POLLS):
        await asyncio.sleep(_POLL_SECONDS)
        if not page.words.asked:
            return Place(*json.loads(page.behind()))
    page.words.asked = False
    page.clear()
    if process.is_stopped():
        return Place("stopped")
    if page.words.has_handler:  # without one, the signal would end it
        process.send(STACKS_SIGNAL, to_descendants=False)
        await asyncio.sleep(_SIGNAL_SECONDS)
    return Place(stacks=readable(page.behind()))
