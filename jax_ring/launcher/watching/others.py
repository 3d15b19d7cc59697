"""What launchers of several hosts tell each other of the progress of their processes."""

import time
from collections.abc import Callable
from typing import Any

from jax_ring.launcher.watching.page import Notes
from jax_ring.launcher.watching.report import Member, Place

_NEWS_SECONDS = 2.5  # without news of a host for so long, nothing is known of its processes


class Others:
    """The processes of other hosts in a generation, for the launcher that leads.

    send: sends a kind of message of this generation, with its value, to all hosts.
    """

    def __init__(self, send: Callable[[str, Any], None]) -> None:
        self._send = send
        self.told: dict[Any, Member] = {}  # by the host, and its launcher's number of the process
        self._heard: dict[int, float] = {}  # by host

    def forget(self) -> None:
        """A generation begins."""
        self.told.clear()
        self._heard.clear()

    def take(self, host: int, message: list[Any]) -> None:
        """message: the launcher's number of a process, and its `Member`."""
        number, (rank, name, status, notes, place) = message
        known = self.told.get((host, number))
        known_place = Place(*place) if place else known and known.place
        self.told[host, number] = Member(rank, f"{name} of host {host}", status, Notes(*notes), known_place)
        self._heard[host] = time.monotonic()

    def are_known(self) -> bool:
        """Whether there are news of all hosts."""
        return all(time.monotonic() - heard < _NEWS_SECONDS for heard in self._heard.values())

    def ask(self) -> bool:
        """Asks where the processes are, unless there are none."""
        self.told = {key: each._replace(place=None) for key, each in self.told.items()}
        self._send("where", True)
        return bool(self.told)
