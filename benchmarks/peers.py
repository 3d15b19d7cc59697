"""All-reduces between processes of this host: mpi4jax, torch.distributed, and JAX's processes with ours and XLA's.

The processes of a library are started once. While something else is measured they wait in a read, which costs nothing.
Run as a program, this file is such a process.
"""

import contextlib
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
from implementations import AXIS, IMPLEMENTATIONS
from measure import Spread, count_wrong, loop, rank_values

from jax_ring import explain

START_SECONDS = 120
HOW_TO_INSTALL = "pip install '.[peers]' (mpi4jax also needs an MPI: apt-get install openmpi-bin libopenmpi-dev)"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many processes there are, with how many ranks each, and on how many hosts they are told to be."""

    processes: int
    devices: int = 1
    hosts: int = 1

    @property
    def ranks(self) -> int:
        return self.processes * self.devices

    def __str__(self) -> str:
        hosts = f" on {self.hosts} hosts (so they are told)" if self.hosts > 1 else ""
        return f"{self.processes} processes x {self.devices} ranks{hosts}"


@dataclasses.dataclass
class Task:
    """What every rank measures; `times` is the number of calls in a jitted loop, 0 to leave the loop out."""

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
    results: np.ndarray  # (ranks of this process, elements)
    served_by: str = ""
    xla_bytes: int | None = None  # the operands of XLA's collectives in one call on one rank


@dataclasses.dataclass
class Answer:
    """Seconds of each call out of place, in place and within a loop, and what else was found about them."""

    seconds: list[np.ndarray]
    wrong: int
    calls: int  # that were made of one rank
    served_by: str
    xla_bytes: int | None


class Torch:
    """torch.distributed with Gloo. Its all_reduce is always in place; its loop is one in Python, without a start."""

    name, modules, programs = "torch/Gloo", ("torch",), ()

    several_devices = False

    @staticmethod
    def commands(command: list[str], layout: Layout) -> list[list[str]]:
        return [[*command, str(rank)] for rank in range(layout.processes)]

    def __init__(self, folder: str, layout: Layout, rank: str):
        import torch

        self.torch, self.process = torch, int(rank)
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=self.process, world_size=layout.processes
        )

    def calls(self, own: np.ndarray, times: int) -> Calls:
        (x,) = own
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
        return Calls(
            lambda: reduce(tensor), lambda: reduce(tensor), lambda: None, loop, lambda: None, few, result[None]
        )


class Mpi4jax:
    """mpi4jax over the MPI that is installed, jitted like the rest."""

    name, modules, programs = "mpi4jax", ("mpi4jax", "mpi4py"), ("mpirun",)

    several_devices = False

    @staticmethod
    def commands(command: list[str], layout: Layout) -> list[list[str]]:
        ranks = layout.processes
        options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        # Processes may use any core, as the threads of the others do. More ranks than cores would be refused.
        options += ["--bind-to", "none"] + (["--oversubscribe"] if ranks > (os.cpu_count() or 1) else [])
        return [["mpirun", *options, "-n", str(ranks), *command]]

    def __init__(self, folder: str, layout: Layout):
        import jax
        from mpi4py import MPI

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", True)
        self.jax, self.mpi, self.process = jax, MPI, MPI.COMM_WORLD.Get_rank()

    def calls(self, own: np.ndarray, times: int) -> Calls:
        import mpi4jax

        jax, comm = self.jax, self.mpi.COMM_WORLD

        def reduce(x):
            return mpi4jax.allreduce(x, op=self.mpi.SUM, comm=comm)

        plain, donating = jax.jit(reduce), jax.jit(reduce, donate_argnums=0)
        looping, empty = (jax.jit(lambda x, f=f: loop(f, times, x)) for f in (reduce, None))
        x = jax.device_put(own[0])
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
            np.asarray(plain(x))[None],
        )


class JaxProcesses:
    """An all-reduce of `implementations.py`, in processes of a `jax.distributed` of its own, jitted like the rest."""

    name: str
    modules, programs = ("jax",), ()
    several_devices = True

    @staticmethod
    def commands(command: list[str], layout: Layout) -> list[list[str]]:
        python, *script = command
        options = ["-n", str(layout.processes), "--devices", str(layout.devices)]
        return [[python, "-P", "-m", "jax_ring.launch", *options, *script]]

    def __init__(self, folder: str, layout: Layout):
        import jax

        from jax_ring.distributed.discovery import HOST_VARIABLE

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", True)
        jax.distributed.initialize()
        self.jax, self.process = jax, jax.process_index()
        if layout.hosts > 1:
            os.environ[HOST_VARIABLE] = f"host {self.process * layout.hosts // layout.processes}"
        self.mesh = jax.sharding.Mesh(jax.devices(), (AXIS,))

    def calls(self, own: np.ndarray, times: int) -> Calls:
        jax, reduce = self.jax, IMPLEMENTATIONS[self.name]
        spec = jax.sharding.PartitionSpec(AXIS)

        def global_array(values):
            return jax.make_array_from_process_local_data(jax.NamedSharding(self.mesh, spec), values.reshape(-1))

        def compiled(fun, **options):
            return jax.jit(
                jax.shard_map(fun, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False), **options
            )

        plain, donating = compiled(reduce), compiled(reduce, donate_argnums=0)
        looping, empty = (compiled(lambda x, f=f: loop(f, times, x)) for f in (reduce, None))
        x, small = global_array(own), global_array(own[:, :1])
        donated = [x]

        def copy():
            donated[0] = jax.block_until_ready(x + 0)
            plain(small).block_until_ready()  # in the place of a barrier

        shards = sorted(plain(x).addressable_shards, key=lambda shard: shard.index[0].start)
        explanation = explain(plain, x)
        (collective,) = explanation.collectives
        xlas = [i for i in explanation.instructions if not i.name.startswith("jax_ring_")]
        return Calls(
            lambda: plain(x).block_until_ready(),
            lambda: donating(donated[0]).block_until_ready(),
            copy,
            lambda: looping(x).block_until_ready(),
            lambda: empty(x).block_until_ready(),
            times,
            np.stack([np.asarray(shard.data) for shard in shards]),
            f"{collective.served_by}{f': {collective.why}' if collective.why else ''}",
            sum(instruction.num_bytes for instruction in xlas),
        )


class RingPsum(JaxProcesses):
    name = "ring_psum"


class LaxPsum(JaxProcesses):
    name = "lax.psum"


PEERS = {library.name: library for library in (Mpi4jax, Torch)}
BETWEEN_PROCESSES = {library.name: library for library in (RingPsum, LaxPsum)} | PEERS


def why_not(name: str, layout: Layout) -> str | None:
    """Why the library cannot be measured here, if it cannot."""
    library = BETWEEN_PROCESSES[name]
    missing = [module for module in library.modules if importlib.util.find_spec(module) is None]
    missing += [program for program in library.programs if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found; {HOW_TO_INSTALL}"
    if not library.several_devices and layout.devices > 1:
        return "it has one rank in each process"
    return None


class Peer:
    """The processes of one library."""

    def __init__(self, name: str, layout: Layout):
        self.name = name
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "socket")
        numbers = map(str, dataclasses.astuple(layout))
        command = [sys.executable, os.path.abspath(__file__), name, self.folder.name, *numbers]
        # One thread for each rank, as there is for each device of the others.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(layout.processes)
            server.settimeout(START_SECONDS)
            self.processes = [
                # What they say is not a part of the table.
                subprocess.Popen(one, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr)
                for one in BETWEEN_PROCESSES[name].commands(command, layout)
            ]
            self.connections = [Connection(server.accept()[0].detach()) for _ in range(layout.processes)]

    def measure(self, task: Task) -> Answer:
        """The times of each call, each a mean over the processes, and the wrong elements of them all.

        Raises:
          RuntimeError: if a process failed, for a dtype that the library does not reduce, say.
        """
        try:
            for connection in self.connections:
                connection.send(task)
            answers = [connection.recv() for connection in self.connections]
        except (EOFError, OSError) as error:
            answers = [error]
        for answer in answers:
            if isinstance(answer, Exception):
                raise RuntimeError(f"{self.name} failed at {task.count} elements of {task.dtype}: {answer!r}")
        return dataclasses.replace(
            answers[0],
            seconds=[np.mean(figures, axis=0) for figures in zip(*(a.seconds for a in answers), strict=True)],
            wrong=sum(answer.wrong for answer in answers),
        )

    def run(self, task: Task) -> tuple[tuple[Spread, Spread, Spread], int]:
        """The spreads out of place, in place and in a loop, and the wrong elements. Raises as `measure`."""
        answer = self.measure(task)
        return tuple(Spread.of(seconds) for seconds in answer.seconds), answer.wrong

    def close(self) -> None:
        for connection in self.connections:
            # Those of a library that failed are gone.
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.wait(START_SECONDS)
        self.folder.cleanup()


def _measure(calls: Calls, task: Task) -> tuple[list[np.ndarray], int]:
    """Seconds of each call out of place, in place and within a loop, and how many calls were made."""

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
    loops = 1 + max(3, task.iterations // 4) if task.times else 0
    for i in range(loops):
        looped, idle = seconds(calls.loop), seconds(calls.empty_loop)
        if i >= 1:
            in_loop.append(looped / calls.times)
            empty.append(idle / calls.times)
    in_loop = np.array(in_loop) - np.median(empty or 0)
    return [np.array(out_of_place), np.array(in_place), in_loop], 2 * (
        task.warmup + task.iterations
    ) + loops * calls.times


def _serve(name: str, folder: str, processes: str, devices: str, hosts: str, *rest: str) -> None:
    layout = Layout(int(processes), int(devices), int(hosts))
    library = BETWEEN_PROCESSES[name](folder, layout, *rest)
    message = None
    with Client(os.path.join(folder, "socket")) as connection:
        while (task := connection.recv()) is not None:
            try:
                # The same message comes again where libraries take turns.
                if message != (task.count, task.dtype, task.times):
                    message = calls = None
                    values = rank_values(layout.ranks, task.count, task.dtype)
                    own = values[library.process * layout.devices :][: layout.devices]
                    calls = library.calls(own, task.times)
                    wrong = count_wrong(values, calls.results)
                    message = (task.count, task.dtype, task.times)
                    del values, own
                seconds, made = _measure(calls, task)
                connection.send(Answer(seconds, wrong, made, calls.served_by, calls.xla_bytes))
            except Exception as error:
                connection.send(error)


if __name__ == "__main__":
    # As a module: by its name the other side finds the classes of what it is sent.
    import peers

    peers._serve(*sys.argv[1:])
