"""How a spare gives its parts of divided leaves to the members."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jax_ring.elastic.snapshots import Snapshot
from jax_ring.launcher.protocol import CONTROL_VARIABLE, is_own_user

# Spares and members learn of a new generation at the same time. There may be no spare, and the other members wait.
_APPEARS_WITHIN_SECONDS = 2.0
_TRANSFER_SECONDS = 10.0  # without progress
_REQUEST_BYTES = 1 << 10


class Place(NamedTuple):
    generation: int
    process: int

    @property
    def address(self) -> str:
        """A socket in Linux's abstract namespace, which leaves no file."""
        return f"\0jax_ring/elastic/{os.environ[CONTROL_VARIABLE]}/{self.generation}/{self.process}"


@contextlib.contextmanager
def served(place: Place | None, snapshots: Sequence[Snapshot]) -> Iterator[None]:
    """Within the block, a thread gives the parts in these commits to processes of this user.

    place: of this process; None without commits.
    """
    if place is None or all(snapshot.held is None for snapshot in snapshots):
        yield
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place.address)
        listener.listen()
        thread = threading.Thread(target=_serve, args=(listener, snapshots), daemon=True)
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends accept()
            thread.join()


def fetched(generation: int, snapshot: Snapshot, owners: Sequence[int]) -> Snapshot | None:
    """A commit with some processes' parts, from spares; None if one is missing.

    generation: in which the commit was made.
    """
    received = {}
    until = time.monotonic() + _APPEARS_WITHIN_SECONDS
    for owner in owners:
        # The owner has the part, and so does its neighbor.
        places = [Place(generation, process % snapshot.num_processes) for process in (owner, owner + 1)]
        data = None
        while data is None and time.monotonic() < until:
            data = next((found for place in places if (found := _asked(place, snapshot, owner)) is not None), None)
            if data is None:
                time.sleep(0.05)
        if data is None:
            return None
        received[owner] = data
    return snapshot.with_parts(received)


def _asked(place: Place, snapshot: Snapshot, owner: int) -> np.ndarray | None:
    size = snapshot.num_bytes(owner)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TRANSFER_SECONDS)
            connection.connect(place.address)
            if not is_own_user(connection):
                return None
            connection.sendall(json.dumps([snapshot.number, owner]).encode())
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as stream:
                data = stream.read(size + 1)
    except OSError:
        return None
    return np.frombuffer(data, np.uint8) if len(data) == size else None


def _serve(listener: socket.socket, snapshots: Sequence[Snapshot]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError, ValueError, TypeError):
            connection.settimeout(_TRANSFER_SECONDS)
            if not is_own_user(connection):
                continue
            number, owner = json.loads(connection.recv(_REQUEST_BYTES))
            for snapshot in snapshots:
                if snapshot.number == number and owner in (snapshot.held or ()):
                    connection.sendall(snapshot.packed(owner).tobytes())
