"""What launchers of several hosts tell each other of the progress of their processes."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, NamedTuple

from jax_ring.launcher.processes import Process
from jax_ring.launcher.watching.page import Notes, Times
from jax_ring.launcher.watching.report import Place

# Without news of a host for so long, nothing is known of its processes.
_NEWS_SECONDS = 2.5


class Told(NamedTuple):
    """A process of another host, as its launcher has told."""

    rank: int
    name: str
    status: int | None
    notes: Notes  # with times of this host's clock, as exact as messages are fast
    place: Place | None  # if it was asked for


class Others:
    """The processes of other hosts in an attempt, for the launcher that leads."""

    def __init__(self, send: Callable[[dict[str, Any], int | None], None]) -> None:
        """send: sends a message of this attempt to a host, or to all."""
        self._send = send
        self.told: dict[Any, Told] = {}  # by the host, and its launcher's number of the process
        self._heard: dict[int, float] = {}  # by host
        self._has_changed = asyncio.Event()

    def forget(self) -> None:
        """An attempt begins."""
        self.told.clear()
        self._heard.clear()

    def take(self, host: int, message: list[Any]) -> None:
        number, told = _decoded(host, message)
        if told.place is None and (known := self.told.get((host, number))) is not None:
            told = told._replace(place=known.place, notes=told.notes._replace(recent=known.notes.recent))
        self.told[host, number] = told
        self._heard[host] = time.monotonic()
        self._has_changed.set()

    def are_known(self) -> bool:
        """Whether there are news of all hosts."""
        return all(time.monotonic() - heard < _NEWS_SECONDS for heard in self._heard.values())

    async def ask(self, seconds: float) -> dict[Hashable, Place]:
        """Where the processes are that have told it within this time."""
        self.told = {key: each._replace(place=None) for key, each in self.told.items()}
        self._send({"where": True}, None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(each.place is None and each.status is None for each in self.told.values()):
                    self._has_changed.clear()
                    await self._has_changed.wait()
        return {key: each.place for key, each in self.told.items() if each.place is not None}

    def end_stuck(self, blamed: Mapping[Hashable, str], waiting: Collection[Hashable]) -> None:
        """Has the other hosts end those of their processes that are among these."""
        for host in self._heard:
            own = [(key, key[1]) for key in self.told if key[0] == host]
            stuck = [[number, blamed[key]] for key, number in own if key in blamed]
            late = [number for key, number in own if key in waiting]
            if stuck or late:
                self._send({"stuck": [stuck, late]}, host)


def encoded(process: Process, place: Place | None) -> list[Any]:
    """How far a process of this host is, and where, for `Others.take`."""
    notes = process.page.read()
    if place is None:
        notes = notes._replace(recent={})  # many bytes that only a report needs
    return [process.number, time.monotonic_ns(), process.rank, process.name, process.status, notes, place]


def _decoded(host: int, message: list[Any]) -> tuple[int, Told]:
    number, now, rank, name, status, fields, place = message
    notes, shift = Notes(*fields), time.monotonic_ns() - now

    def here(at: int) -> int:
        return at and at + shift

    recent = {
        int(step): Times(here(started), here(completed), function)
        for step, (started, completed, function) in notes.recent.items()
    }
    notes = notes._replace(
        completed_at=here(notes.completed_at), compiling_since=here(notes.compiling_since), recent=recent
    )
    return number, Told(rank, f"{name} of host {host}", status, notes, None if place is None else Place(*place))
