"""The launcher's end of `protocol.Control`: a Unix socket whose messages it passes on."""

import asyncio
import json
import secrets
from collections.abc import Callable
from typing import Any

from jax_ring.launcher import protocol
from jax_ring.launcher.events import Answer


class ControlServer:
    """Listens to the processes of this launcher.

    handler: called with a process's number, its message and a function to answer it.

    Attributes:
      name: of the socket, for `JAX_RING_CONTROL`.
    """

    def __init__(self, handler: Callable[[int, dict[str, Any], Answer], None]) -> None:
        self._handler = handler
        # A killed launcher leaves no files behind in the abstract namespace.
        self.name = f"@jax_ring-{secrets.token_hex(16)}"
        self._server: asyncio.Server | None = None
        self._connections: dict[int, set[asyncio.StreamWriter]] = {}  # by process

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, protocol.socket_address(self.name))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connections in self._connections.values():
            for connection in connections:
                connection.transport.abort()

    def tell(self, process: int, message: dict[str, Any]) -> None:
        for connection in self._connections.get(process, ()):
            connection.write(protocol.encode(message))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process = None
        try:
            if not protocol.is_own_user(writer.get_extra_info("socket")):
                return
            while line := await reader.readline():
                message = json.loads(line)
                if not isinstance(message, dict):
                    break
                if process is None:
                    process = int(message["process"])
                    self._connections.setdefault(process, set()).add(writer)
                else:
                    self._handler(process, message, lambda answer: writer.write(protocol.encode(answer)))
        except (ConnectionError, ValueError, KeyError, TypeError):
            pass  # not a process of this launcher, or it has ended
        finally:
            if process is not None:
                self._connections[process].discard(writer)
            writer.close()
