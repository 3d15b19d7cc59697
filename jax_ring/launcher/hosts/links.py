"""A connection of two launchers of a job, by TCP: messages that nobody else can write, and signs of life.

A message is its length, a code and JSON. Whoever reads the network can read it.
"""

import asyncio
import contextlib
import hmac
import json
import math
import time
from collections.abc import Callable

from jax_ring.launcher.environment import joined
from jax_ring.launcher.hosts.messages import Message, MessageError, decode
from jax_ring.launcher.hosts.secret import prove

BUFFER_BYTES = 1 << 12  # what is read ahead, so that many connections of strangers take little memory
_MOST_BYTES = 1 << 20  # of a message: the stacks of a process
_LENGTH_BYTES, _CODE_BYTES = 4, 32
Log = Callable[[str], None]


class _Codes:
    """The codes of the messages in one direction, which nobody without the key can change, drop, repeat or add to."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def next(self, data: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + data, "sha256")


def peer(writer: asyncio.StreamWriter) -> str:
    """The address at the other end of a connection."""
    host, port, *_ = writer.get_extra_info("peername") or ("an unknown host", 0)
    return joined(host, port)


class Link:
    """A connection of two launchers.

    silence: after so many seconds without a sign of life, a side gives the other up. It sends one ten times as often.
    log: told of the other side if that is no launcher. keys: for what is sent and what is received.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float, log: Log,
        keys: tuple[bytes, bytes],
    ) -> None:  # fmt: skip
        self._reader, self._writer, self._silence, self._log = reader, writer, silence, log
        self._sent, self._received = map(_Codes, keys)
        self.heard = time.monotonic()  # when the other side was heard last
        self.acknowledged = -math.inf  # when this side sent the last sign of life that the other is known to have got
        self.is_silent = False
        self._others_time: float | None = None  # in its last sign of life
        self._beat = asyncio.create_task(self._beats())

    @classmethod
    async def opened(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float, log: Log,
        secret: bytes, *, listens: bool,
    ) -> "Link":  # fmt: skip
        """A link over a connection, once both sides have proved that they have the secret; raises as `prove` does."""
        return cls(reader, writer, silence, log, await prove(reader, writer, secret, listens=listens))

    @property
    def own_address(self) -> str:
        return self._writer.get_extra_info("sockname")[0]

    def send(self, message: Message) -> None:
        """Sends a message without blocking, or drops it if the other side has gone."""
        data = json.dumps(message).encode()
        if len(data) > _MOST_BYTES:  # the other side would close the connection
            self._log(f"{message.kind!r} of {len(data)} bytes is not sent to {peer(self._writer)}: too long")
            return
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + self._sent.next(data) + data)

    async def receive(self) -> Message | None:
        """The next message; None if the other side has gone, is silent or is no launcher."""
        while True:
            try:
                async with asyncio.timeout(self._silence):
                    message = decode(await self._data())
            except asyncio.IncompleteReadError:
                return None
            except OSError as error:
                self.is_silent = isinstance(error, TimeoutError)
                return None
            except MessageError as error:
                self.blame(error)
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

    async def _data(self) -> bytes:
        length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
        if length > _MOST_BYTES:
            raise MessageError(f"a message of {length} bytes; {_MOST_BYTES} are allowed")
        code, data = await self._reader.readexactly(_CODE_BYTES), await self._reader.readexactly(length)
        if not hmac.compare_digest(code, self._received.next(data)):
            raise MessageError("a message is not from the launcher that has proved who it is")
        return data

    def blame(self, error: MessageError) -> None:
        """Says why the connection is closed."""
        self._log(f"the connection with {peer(self._writer)} is closed: {error}")

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
