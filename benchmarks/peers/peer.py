"""The processes of a library: how they are started, asked for measurements, and ended.

They are started once. While others are measured, they block in a read and use no CPU time.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection

import numpy as np
from harness.measure import Spread

from peers.libraries import BETWEEN_PROCESSES, Layout

WORKER = pathlib.Path(__file__).with_name("worker.py")
START_SECONDS = 120
INSTALL_HINT = (
    "pip install --editable '.[peers]' (mpi4jax also needs an MPI: apt-get install openmpi-bin libopenmpi-dev)"
)


@dataclasses.dataclass
class Task:
    """One measurement. `times` is the number of calls in a jitted loop, or 0 to skip the loop."""

    count: int
    dtype: str
    iterations: int
    warmup: int
    times: int


@dataclasses.dataclass
class Measurement:
    """The measurements of one process: seconds of each call out of place, in place and within a loop, and more."""

    seconds: list[np.ndarray]
    wrong: int  # elements
    calls: int  # per rank
    served_by: str
    xla_bytes: int | None


def mpi_of(name: str) -> tuple[str, str | None]:
    """An implementation and the environment of its MPI: "mpi4jax:PREFIX" is mpi4jax in another environment."""
    library, _, prefix = name.partition(":")
    return library, prefix or None


def why_not(name: str, layout: Layout) -> str | None:
    """Why the library cannot be measured here; None if it can."""
    name, prefix = mpi_of(name)
    library = BETWEEN_PROCESSES[name]
    if prefix is not None:
        program = os.path.join(prefix, "bin", "mpirun")
        return None if os.path.exists(program) else f"there is no {program}"
    missing = [module for module in library.modules if importlib.util.find_spec(module) is None]
    missing += [program for program in library.programs if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found; {INSTALL_HINT}"
    if not library.several_devices and layout.devices > 1:
        return "it supports one rank per process only"
    return None


class Peer:
    """The processes of one library."""

    def __init__(self, name: str, layout: Layout):
        self.name = name
        library, prefix = mpi_of(name)
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "socket")
        numbers = map(str, dataclasses.astuple(layout))
        command = [sys.executable, str(WORKER), library, self.folder.name, *numbers]
        # One thread per rank, like one per device in the other implementations.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        options = {}
        if prefix is not None:
            # Its own programs and libraries. All other imports come from this environment.
            environment |= {"PATH": f"{prefix}/bin:{os.environ['PATH']}", "I_MPI_ROOT": prefix, "I_MPI_PIN": "0"}
            options = {"prefix": prefix}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(layout.processes)
            server.settimeout(START_SECONDS)
            self.processes = [
                # Keep their output out of the table.
                subprocess.Popen(one, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr)
                for one in BETWEEN_PROCESSES[library].commands(command, layout, **options)
            ]
            self.connections = [Connection(server.accept()[0].detach()) for _ in range(layout.processes)]

    def measure(self, task: Task) -> Measurement:
        """The time of each call as the mean over processes, and the wrong elements of all of them.

        Raises:
          RuntimeError: if a process failed, for example on a dtype that the library does not support.
        """
        try:
            for connection in self.connections:
                connection.send(task)
            measurements = [connection.recv() for connection in self.connections]
        except (EOFError, OSError) as error:
            measurements = [error]
        for measurement in measurements:
            if isinstance(measurement, Exception):
                raise RuntimeError(f"{self.name} failed at {task.count} elements of {task.dtype}: {measurement!r}")
        return dataclasses.replace(
            measurements[0],
            seconds=[np.mean(figures, axis=0) for figures in zip(*(a.seconds for a in measurements), strict=True)],
            wrong=sum(measurement.wrong for measurement in measurements),
        )

    def run(self, task: Task) -> tuple[tuple[Spread, Spread, Spread], int]:
        """The spreads out of place, in place and in a loop, and the number of wrong elements. Raises as `measure`."""
        measurement = self.measure(task)
        return tuple(Spread.of(seconds) for seconds in measurement.seconds), measurement.wrong

    def close(self) -> None:
        for connection in self.connections:
            # The processes of a library that failed have exited.
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.wait(START_SECONDS)
        self.folder.cleanup()
