"""Where a launcher answers its processes: a Unix socket, for `protocol.ask`."""

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from jax_ring.launcher.newcomers import Newcomers
from jax_ring.launcher.schema import read

Answer = dict[str, Any]


class ControlServer:
    """Listens to the processes of this launcher.

    handler: called with the pid of who asks, 0 if the system does not tell, a process's number, what it asks for and
      the values; returns the answer.

    Attributes:
      path: of the socket, for `JAX_RING_CONTROL`.
    """

    def __init__(self, path: str, handler: Callable[[int, int, str, Any], Answer]) -> None:
        self.path, self._handler, self._newcomers = path, handler, Newcomers()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path, backlog=self._newcomers.at_once)
        os.chmod(self.path, 0o600)  # whatever the umask has taken

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                async with self._newcomers.admitted(writer):
                    pid, user = _peer(writer.get_extra_info("socket"))
                    if user != os.geteuid():
                        return
                    request = read(await reader.readline(), tuple[int, str, Any])
            except (OSError, ValueError):
                return  # not a process of this launcher, or it has ended
            writer.write(json.dumps(self._handler(pid, *request)).encode() + b"\n")


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The pid, and the user, of the process at the other end of a Unix socket; pid 0 in another namespace."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user
