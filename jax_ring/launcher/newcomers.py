"""Connections to a launcher of which nothing is known yet: few at a time, and each for a short time."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator

_SECONDS = 5.0  # until a connection has to have said what it is for
_MOST, _PART_OF_FILES = 256, 4  # no more than this part of the files that the launcher may open


class Newcomers:
    """The newcomers of a server: one too many takes the place of the oldest.

    Attributes:
      at_once: a backlog for the server, which accepts so many at once. By TCP, who finds it full waits for a second.
    """

    def __init__(self) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _MOST if files == resource.RLIM_INFINITY else files // _PART_OF_FILES
        self._most = max(1, min(_MOST, limit))
        self.at_once = max(1, self._most // 4)
        self._writers: dict[asyncio.StreamWriter, None] = {}  # oldest first

    @contextlib.asynccontextmanager
    async def admitted(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        """A connection is a newcomer within this block. Raises TimeoutError if that takes too long."""
        self._writers[writer] = None
        if len(self._writers) > self._most:
            oldest = next(iter(self._writers))
            del self._writers[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_SECONDS):
                yield
        finally:
            self._writers.pop(writer, None)
