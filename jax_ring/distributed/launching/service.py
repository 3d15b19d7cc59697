"""The launcher's side of the processes that host JAX's coordination service."""

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys

from jax_ring.distributed.launching.output import Output

_PROGRAM = pathlib.Path(__file__).parents[1] / "coordination.py"


class Service:
    """A process that hosts a coordination service, or is ready to."""

    def __init__(self, output: Output) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, process_group=0,  # Ctrl-C on a terminal must not reach it
        )  # fmt: skip
        assert self._process.stderr is not None
        self._copying = asyncio.create_task(output.copy(self._process.stderr, True, "[coordinator]", 0, None))

    def begin(self, address: str, num_processes: int) -> None:
        """Makes it listen soon. Clients that connect earlier try again."""
        assert self._process.stdin is not None
        command = {"address": address, "num_processes": num_processes}
        with contextlib.suppress(BrokenPipeError):  # `started` tells
            # A line is far smaller than a pipe's buffer, so that this does not block.
            os.write(self._process.stdin.fileno(), json.dumps(command).encode() + b"\n")

    async def started(self) -> bool:
        """Waits until it listens; returns whether it does."""
        assert self._process.stdout is not None
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        try:
            return bool(await reader.readline())
        finally:
            transport.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether its process has exited."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Ends it. Clients that are still connected abort their processes."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
