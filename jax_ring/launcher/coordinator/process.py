"""The launcher's side of the processes that host JAX's coordination service."""

import contextlib
import os
import pathlib
import subprocess
import sys

from jax_ring.launcher.events import NO_RANK, Failure, failure_of_status
from jax_ring.launcher.output import Output
from jax_ring.launcher.processes import state_of

_PROGRAM = pathlib.Path(__file__).parent / "server.py"
_DYING_SECONDS = 1.0  # for threads to end that have been killed


class Service:
    """A process that hosts a coordination service; clients that connect before it listens try again."""

    def __init__(self, output: Output, address: str, num_processes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), address, str(num_processes)],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE,  # it ends with its input
            start_new_session=True,  # keeps Ctrl-C on a terminal away from it
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},  # errors only
        )  # fmt: skip
        output.copy(self._process.stderr, True, "[coordinator]", 0)

    def failure(self) -> Failure | None:
        """How it ended by itself, if so, with clients that are not to blame."""
        if state_of(self._process.pid) == "Z":  # its main thread has ended, the others may take a moment
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_DYING_SECONDS)
        status = self._process.poll()
        name = f"the coordination service (pid {self._process.pid})"
        return None if status is None else failure_of_status(name, NO_RANK, status)

    def end(self) -> None:
        """Ends it; clients still connected abort."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
