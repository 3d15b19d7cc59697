"""Reads the pages of this host's processes, and tells the launcher that leads."""

import asyncio
import contextlib
from collections.abc import Mapping

from jax_ring.launcher.hosts.follower import Follower
from jax_ring.launcher.processes import Process
from jax_ring.launcher.schema import read
from jax_ring.launcher.watching.page import STACKS_SIGNAL
from jax_ring.launcher.watching.report import STOPPED, Place, readable
from jax_ring.launcher.watching.watcher import LOOK_SECONDS

# A process whose threads can run answers at once. Any writes its stacks on a signal, by Python's handler.
_POLLS, _POLL_SECONDS = 40, 0.05
_SIGNAL_SECONDS = 0.5


async def tell_progress(processes: Mapping[int, Process], follower: Follower) -> None:
    """Tells how far these processes are, and when asked where, until it is cancelled."""
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(follower.asks_where.wait(), LOOK_SECONDS)
            follower.asks_where.clear()
            running = [process for process in processes.values() if process.status is None]
            for process, place in zip(running, await asyncio.gather(*map(_place, running)), strict=True):
                follower.tell("place", [process.rank, place])  # stacks are long: each has a message of its own
        follower.tell("progress", [(each.rank, each.page.read(each.name, each.status)) for each in processes.values()])


async def _place(process: Process) -> Place:
    """Where a process is: by its own word, or else by Python's stacks."""
    page = process.page
    page.words.asked = True
    for _ in range(_POLLS):
        await asyncio.sleep(_POLL_SECONDS)
        if not page.words.asked:
            try:
                return read(page.behind(), Place)
            except ValueError as error:
                return Place(stacks=f"it has answered something else than where it is: {error}")
    page.words.asked = False
    page.clear()
    if process.is_stopped():
        return Place(STOPPED)
    if page.words.has_handler:  # without one, the signal would end it
        process.send(STACKS_SIGNAL, to_descendants=False)
        await asyncio.sleep(_SIGNAL_SECONDS)
    return Place(stacks=readable(page.behind()))
