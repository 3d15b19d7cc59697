"""All-reduces of other libraries that run one process for each rank on this host: mpi4jax and torch.distributed.

The processes of a library are started once. While something else is measured they wait in a read, which costs nothing.
Run as a program, this file is such a process.
"""

import dataclasses
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection

import numpy as np
from measure import Spread, count_wrong, loop, rank_values

START_SECONDS = 120
HOW_TO_INSTALL = "pip install '.[peers]' (mpi4jax also needs an MPI: apt-get install openmpi-bin libopenmpi-dev)"


@dataclasses.dataclass
class Task:
    """What every rank measures; `times` is the number of calls in a jitted loop."""

    count: int
    dtype: str
    iterations: int
    warmup: int
    times: int


@dataclasses.dataclass
class Calls:
    """One message in a library: functions that return when the call, or the loop, has ended."""

    out_of_place: Callable[[], None]
    in_place: Callable[[], None]
    before_in_place: Callable[[], None]  # not timed
    loop: Callable[[], None]
    empty_loop: Callable[[], None]
    times: int  # calls in the loop
    result: np.ndarray


class Torch:
    """torch.distributed with Gloo. Its all_reduce is always in place; its loop is one in Python, without a start."""

    name, modules, programs = "torch/Gloo", ("torch",), ()

    @staticmethod
    def commands(command: list[str], ranks: int) -> list[list[str]]:
        return [[*command, str(rank)] for rank in range(ranks)]

    def __init__(self, folder: str, ranks: int, rank: str):
        import torch

        self.torch, self.rank = torch, int(rank)
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=self.rank, world_size=ranks
        )

    def calls(self, x: np.ndarray, times: int) -> Calls:
        dtype = getattr(self.torch, x.dtype.name)
        tensor = self.torch.from_numpy(x.view(f"int{8 * x.itemsize}").copy()).view(dtype)
        reduce = self.torch.distributed.all_reduce

        # The time of one call in a loop of few: there is no start of a program to make up for.
        few = min(times, 100)

        def loop():
            for _ in range(few):
                reduce(tensor)

        reduce(tensor)
        result = tensor.view(getattr(self.torch, f"int{8 * x.itemsize}")).numpy().copy().view(x.dtype)
        return Calls(lambda: reduce(tensor), lambda: reduce(tensor), lambda: None, loop, lambda: None, few, result)


class Mpi4jax:
    """mpi4jax over the MPI that is installed, jitted like the rest."""

    name, modules, programs = "mpi4jax", ("mpi4jax", "mpi4py"), ("mpirun",)

    @staticmethod
    def commands(command: list[str], ranks: int) -> list[list[str]]:
        options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        # Processes may use any core, as the threads of the others do. More ranks than cores would be refused.
        options += ["--bind-to", "none"] + (["--oversubscribe"] if ranks > (os.cpu_count() or 1) else [])
        return [["mpirun", *options, "-n", str(ranks), *command]]

    def __init__(self, folder: str, ranks: int):
        import jax
        from mpi4py import MPI

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", True)
        self.jax, self.mpi, self.rank = jax, MPI, MPI.COMM_WORLD.Get_rank()

    def calls(self, x: np.ndarray, times: int) -> Calls:
        import mpi4jax

        jax, comm = self.jax, self.mpi.COMM_WORLD

        def reduce(x):
            return mpi4jax.allreduce(x, op=self.mpi.SUM, comm=comm)

        plain, donating = jax.jit(reduce), jax.jit(reduce, donate_argnums=0)
        looping, empty = (jax.jit(lambda x, f=f: loop(f, times, x)) for f in (reduce, None))
        x = jax.device_put(x)
        donated = [x]

        def copy():
            donated[0] = jax.block_until_ready(x + 0)
            comm.Barrier()

        return Calls(
            lambda: plain(x).block_until_ready(),
            lambda: donating(donated[0]).block_until_ready(),
            copy,
            lambda: looping(x).block_until_ready(),
            lambda: empty(x).block_until_ready(),
            times,
            np.asarray(plain(x)),
        )


PEERS = {library.name: library for library in (Mpi4jax, Torch)}


def why_not(name: str) -> str | None:
    """Why the library cannot be measured here, if it cannot."""
    library = PEERS[name]
    missing = [module for module in library.modules if importlib.util.find_spec(module) is None]
    missing += [program for program in library.programs if shutil.which(program) is None]
    return f"{', '.join(missing)} not found; {HOW_TO_INSTALL}" if missing else None


class Peer:
    """The processes of one library, one for each rank."""

    def __init__(self, name: str, ranks: int):
        self.name = name
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "socket")
        command = [sys.executable, os.path.abspath(__file__), name, self.folder.name, str(ranks)]
        # One thread for each rank, as there is for each device of the others.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(ranks)
            server.settimeout(START_SECONDS)
            self.processes = [
                subprocess.Popen(one, env=environment, stdin=subprocess.DEVNULL)
                for one in PEERS[name].commands(command, ranks)
            ]
            self.connections = [Connection(server.accept()[0].detach()) for _ in range(ranks)]

    def run(self, task: Task) -> tuple[tuple[Spread, Spread, Spread], int]:
        """The spreads out of place, in place and in a loop, each of means over the ranks, and the wrong elements.

        Raises:
          RuntimeError: if a rank failed, for a dtype that the library does not reduce, say.
        """
        for connection in self.connections:
            connection.send(task)
        answers = [connection.recv() for connection in self.connections]
        for answer in answers:
            if isinstance(answer, Exception):
                raise RuntimeError(f"{self.name} failed at {task.count} elements of {task.dtype}: {answer!r}")
        figures = [np.mean([seconds[i] for seconds, _ in answers], axis=0) for i in range(3)]
        return tuple(Spread.of(seconds) for seconds in figures), sum(wrong for _, wrong in answers)

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.wait(START_SECONDS)
        self.folder.cleanup()


def _measure(library, ranks: int, task: Task) -> tuple[list[list[float]], int]:
    """Seconds of each call out of place, in place and within a loop, and how many elements were wrong."""
    values = rank_values(ranks, task.count, task.dtype)
    calls = library.calls(values[library.rank], task.times)

    def seconds(run) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    out_of_place, in_place, in_loop, empty = [], [], [], []
    for i in range(task.warmup + task.iterations):
        plain = seconds(calls.out_of_place)
        calls.before_in_place()
        donated = seconds(calls.in_place)
        if i >= task.warmup:
            out_of_place.append(plain)
            in_place.append(donated)
    for i in range(1 + max(3, task.iterations // 4)):
        looped, idle = seconds(calls.loop), seconds(calls.empty_loop)
        if i >= 1:
            in_loop.append(looped / calls.times)
            empty.append(idle / calls.times)
    in_loop = [second - float(np.median(empty)) for second in in_loop]
    return [out_of_place, in_place, in_loop], count_wrong(values, calls.result[None])


def _serve(name: str, folder: str, ranks: str, *rest: str) -> None:
    library = PEERS[name](folder, int(ranks), *rest)
    with Client(os.path.join(folder, "socket")) as connection:
        while (task := connection.recv()) is not None:
            try:
                connection.send(_measure(library, int(ranks), task))
            except Exception as error:
                connection.send(error)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
