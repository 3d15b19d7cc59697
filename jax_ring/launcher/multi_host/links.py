"""The launchers of several hosts: host 0's decides, by TCP, a JSON object per line.

Whoever reaches the port can take part, as with JAX's coordination service: the network has to be trusted.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import signal
import time
from typing import Any, NamedTuple

from jax_ring.launcher import events
from jax_ring.launcher.environment import Plan
from jax_ring.launcher.events import Failure
from jax_ring.launcher.protocol import encode
from jax_ring.launcher.shared import Remote

# After so long without a sign of life, a side gives the other up. It sends one ten times as often.
SILENCE_SECONDS = 20.0
LINE_BYTES = 1 << 20  # the longest message: the stacks of a process
_RETRY_SECONDS = 0.2


class Link:
    """A connection of two launchers."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float = SILENCE_SECONDS
    ) -> None:
        self._reader, self._writer, self._silence = reader, writer, silence
        self.heard = time.monotonic()  # when the other side was heard last
        self.acknowledged = -math.inf  # when this side sent the last sign of life that the other is known to have got
        self.is_silent = False
        self._others_time: float | None = None  # in its last sign of life
        self._beat = asyncio.create_task(self._beats())

    @property
    def own_address(self) -> str:
        return self._writer.get_extra_info("sockname")[0]

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message without blocking, or drops it if the other side has gone."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(encode(message))

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None if the other side has gone, is silent or is no launcher."""
        while True:
            try:
                async with asyncio.timeout(self._silence):
                    line = await self._reader.readline()
                message = json.loads(line) if line else None
            except (TimeoutError, OSError, ValueError) as error:
                self.is_silent = isinstance(error, TimeoutError)
                return None
            if not isinstance(message, dict):
                return None
            self.heard = time.monotonic()
            if "alive" not in message:
                return message
            is_first = self._others_time is None
            self._others_time, echo = message["alive"]
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
        self.send({"alive": [time.monotonic(), self._others_time]})


class Led(Remote):
    """The side of a launcher for which another one decides: tells it what becomes of this host's processes."""

    leads = False
    _link: Link
    _receiving: asyncio.Task[None]

    def __init__(self, leader: str, queue: asyncio.Queue[events.Event]) -> None:
        """leader: its name, for messages."""
        super().__init__()
        self._leader, self._queue = leader, queue
        self._attempt = -1
        self.is_lost = False  # whether the other launcher is gone
        self.asks_where = asyncio.Event()

    async def close(self) -> None:
        self._receiving.cancel()
        await self._link.close()

    # Called by the attempt:

    def succeeded(self) -> bool:
        return False

    def tell_failure(self, failure: Failure) -> bool:
        self.tell("failed", dataclasses.asdict(failure))
        return not self.is_lost

    def tell(self, what: str, value: Any) -> None:
        self._link.send({what: value, "attempt": self._attempt})

    def _take(self, message: dict[str, Any]) -> bool:
        """Takes a message that any leader sends; returns whether it is the last one."""
        if "end" in message:
            self._queue.put_nowait(events.RemoteEnd(*message["end"]))
        elif "error" in message:
            reason = f"{self._leader} has refused this host: {message['error']}"
            self._queue.put_nowait(events.RemoteEnd(2, reason))
        elif message.get("attempt") == self._attempt:
            if "stop" in message:
                self._queue.put_nowait(events.RemoteStop(*message["stop"]))
            elif "pending" in message:
                self._queue.put_nowait(events.RemotePending(message["pending"]))
            elif "where" in message:
                self.asks_where.set()
            elif "stuck" in message:
                blamed, waiting = message["stuck"]
                self._queue.put_nowait(events.Stuck(dict(blamed), tuple(waiting)))
        return "end" in message or "error" in message


class _Host(NamedTuple):
    """Another host, and the number of its processes."""

    link: Link
    processes: int


class Leads(Remote):
    """The side of a launcher that decides for other hosts: hears what becomes of their processes."""

    guests: dict[Any, Any]  # the other hosts that are here, by number or id, each with a `link`

    def __init__(self, name: str, queue: asyncio.Queue[events.Event]) -> None:
        """name: of this host, for messages to the others."""
        super().__init__()
        self._name, self._queue = name, queue
        self._attempt = -1
        self._index: dict[Any, int] = {}  # of the other hosts that take part in the attempt
        self._succeeded: set[Any] = set()
        self._stopped: set[Any] = set()
        self._changed = asyncio.Event()

    def _begin(self, attempt: int, index: dict[Any, int]) -> None:
        self._attempt, self._index = attempt, index
        self._succeeded, self._stopped = set(), set()
        self.others.forget()

    def _running(self) -> set[Any]:
        return self._index.keys() & self.guests.keys() - self._stopped

    async def stopped(self) -> None:
        while self._running():
            await self.next_change()

    async def end(self, status: int, reason: str) -> None:
        """Ends the job on all hosts."""
        links = [guest.link for guest in self.guests.values()]
        for link in links:
            link.send({"end": [status, reason]})
        await asyncio.gather(*(link.close() for link in links))

    async def next_change(self, seconds: float | None = None) -> None:
        """Waits until something changes, or so long."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._queue.put_nowait(events.RemoteChanged())

    def _send(self, message: dict[str, Any], index: int | None) -> None:
        for host, place in self._index.items():
            if host in self.guests and index in (None, place):
                self.guests[host].link.send({**message, "attempt": self._attempt})

    def _take(self, host: Any, message: dict[str, Any]) -> None:
        """Takes a message about the attempt."""
        if message.get("attempt") != self._attempt or host not in self._index:
            return
        index = self._index[host]
        if "progress" in message:
            self.others.take(index, message["progress"])
            return
        if "failed" in message:
            failure = Failure(**message["failed"])
            failure.name += f" of host {index}"
            self._queue.put_nowait(events.RemoteFailed(index, failure))
        elif "succeeded" in message:
            self._succeeded.add(host)
        elif "stopped" in message:
            self._stopped.add(host)
        self._notify()

    # Called by the attempt:

    def succeeded(self) -> bool:
        return set(self._index) <= self._succeeded

    def tell_stop(self, signum: int, grace: float, reason: str) -> None:
        self._send({"stop": [signum, grace, f"{self._name}: {reason}"]}, None)


class Hub(Leads):
    """Host 0's side."""

    def __init__(self, nnodes: int, queue: asyncio.Queue[events.Event]) -> None:
        super().__init__("host 0", queue)
        self._nnodes = nnodes
        self.guests: dict[int, _Host] = {}

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Begins to listen. Raises OSError if it cannot."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=LINE_BYTES)
        return self._server

    async def gathered(self) -> None:
        while len(self.guests) < self._nnodes - 1:
            await self.next_change()

    def missing(self) -> list[int]:
        """The hosts without a launcher here."""
        return sorted(set(range(1, self._nnodes)) - set(self.guests))

    def begin(self, restart: int, own_processes: int, coordinator: str) -> int:
        """Starts an attempt on other hosts; returns the number of all processes."""
        nodes = sorted(self.guests)
        self._begin(restart, {node: node for node in nodes})
        *firsts, total = itertools.accumulate((self.guests[node].processes for node in nodes), initial=own_processes)
        for node, first in zip(nodes, firsts, strict=True):
            self.guests[node].link.send({"start": [restart, first, total, coordinator]})
        return total

    async def end(self, status: int, reason: str) -> None:
        self._server.close()
        await super().end(status, reason)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        hello = await link.receive()
        if refusal := self._refusal(hello):
            link.send({"error": refusal})
            await link.close()
            return
        assert hello is not None
        node = hello["node"]
        self.guests[node] = _Host(link, hello["processes"])
        self._notify()
        while (message := await link.receive()) is not None:
            self._take(node, message)
        del self.guests[node]
        if node in self._index and node not in self._stopped:
            failure = Failure(f"host {node}", -node, "is gone: its launcher has ended, or cannot be reached")
            self._queue.put_nowait(events.RemoteFailed(node, failure))
        self._notify()
        await link.close()

    def _refusal(self, hello: dict[str, Any] | None) -> str:
        try:
            assert hello is not None
            node, nnodes = hello["node"], hello["nnodes"]
            hello["processes"] + 0
        except (AssertionError, KeyError, TypeError):
            return "this is the launcher of a jax_ring job"
        if nnodes != self._nnodes:
            return f"host 0 was started with --nnodes {self._nnodes}, host {node} with --nnodes {nnodes}"
        if node in self.guests or not 0 < node < self._nnodes:
            return f"there is a launcher with --node-rank {node} already"
        return ""


class Spoke(Led):
    """Another host's side, which queues what host 0 wants."""

    def __init__(self, node: int, queue: asyncio.Queue[events.Event]) -> None:
        super().__init__("host 0", queue)
        self._node = node

    async def connect(self, host: str, port: int, nnodes: int, processes: int) -> None:
        """Connects to host 0, once it is there; set a time limit."""
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
                break
            except OSError:
                await asyncio.sleep(_RETRY_SECONDS)
        self._link = Link(reader, writer)
        self._slots = tuple(range(processes))
        self._link.send({"node": self._node, "nnodes": nnodes, "processes": processes})
        self._receiving = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while (message := await self._link.receive()) is not None:
            if "start" in message:
                restart, *others = message["start"]
                self._attempt = restart
                self._queue.put_nowait(events.RemoteBegin(Plan(restart, self._slots, *others), restart))
            elif self._take(message):
                return
        self.is_lost = True
        reason = "the launcher of host 0 has ended, or cannot be reached"
        self._queue.put_nowait(events.RemoteStop(signal.SIGTERM, 0.0, reason))
        self._queue.put_nowait(events.RemoteEnd(1, reason))
