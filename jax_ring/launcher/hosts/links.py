"""A connection of two launchers, by TCP: a message per line, and signs of life.

Whoever reaches the port can take part, as with JAX's coordination service: the network has to be trusted.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable

from jax_ring.launcher.environment import joined
from jax_ring.launcher.hosts.messages import Message, decode

LINE_BYTES = 1 << 20  # the longest message: the stacks of a process
Log = Callable[[str], None]


class Link:
    """A connection of two launchers.

    silence: after so many seconds without a sign of life, a side gives the other up. It sends one ten times as often.
    log: told of the other side if that is no launcher.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float, log: Log) -> None:
        self._reader, self._writer, self._silence, self._log = reader, writer, silence, log
        self.heard = time.monotonic()  # when the other side was heard last
        self.acknowledged = -math.inf  # when this side sent the last sign of life that the other is known to have got
        self.is_silent = False
        self._others_time: float | None = None  # in its last sign of life
        self._beat = asyncio.create_task(self._beats())

    @property
    def own_address(self) -> str:
        return self._writer.get_extra_info("sockname")[0]

    def send(self, message: Message) -> None:
        """Sends a message without blocking, or drops it if the other side has gone."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Message | None:
        """The next message; None if the other side has gone, is silent or is no launcher."""
        while True:
            try:
                async with asyncio.timeout(self._silence):
                    line = await self._reader.readline()
                if not line.endswith(b"\n"):
                    return None
                message = decode(line)
            except OSError as error:
                self.is_silent = isinstance(error, TimeoutError)
                return None
            except ValueError as error:
                host, port, *_ = self._writer.get_extra_info("peername") or ("an unknown host", 0)
                self._log(f"the connection with {joined(host, port)} is closed: {error}")
                return None
            self.heard = time.monotonic()
            if message.kind != "alive":
                return message
            is_first = self._others_time is None
            self._others_time, echo = message.value
            if echo is not None:
                self.acknowledged = echo
            if is_first:
                self._send_alive()

    async def close(self) -> None:
        """Closes the connection behind what was sent."""
        self._beat.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._beat.cancel()
        self._writer.transport.abort()

    async def _beats(self) -> None:
        while True:
            self._send_alive()
            await asyncio.sleep(self._silence / 10)

    def _send_alive(self) -> None:
        self.send(Message("alive", (time.monotonic(), self._others_time)))
