"""All-reduces between processes of this host: mpi4jax, torch.distributed, and JAX with jax_ring's or XLA's collectives.

The processes of a library are started once. While others are measured, they block in a read and use no CPU time. Run as
a program, this file is one of these processes.
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
INSTALL_HINT = (
    "pip install --editable '.[peers]' (mpi4jax also needs an MPI: apt-get install openmpi-bin libopenmpi-dev)"
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The number of processes, ranks per process, and hosts as set by `JAX_RING_HOST_ID`."""

    processes: int
    devices: int = 1
    hosts: int = 1

    @property
    def ranks(self) -> int:
        return self.processes * self.devices

    def __str__(self) -> str:
        hosts = f" on {self.hosts} hosts (by JAX_RING_HOST_ID)" if self.hosts > 1 else ""
        return f"{self.processes} processes x {self.devices} ranks{hosts}"


@dataclasses.dataclass
class Task:
    """One measurement. `times` is the number of calls in a jitted loop, or 0 to skip the loop."""

    count: int
    dtype: str
    iterations: int
    warmup: int
    times: int


@dataclasses.dataclass
class Calls:
    """One message size in a library, as functions that return when the call or the loop has completed."""

    out_of_place: Callable[[], None]
    in_place: Callable[[], None]
    before_in_place: Callable[[], None]  # not timed
    loop: Callable[[], None]
    empty_loop: Callable[[], None]
    times: int  # calls per loop
    results: np.ndarray  # (ranks of this process, elements)
    served_by: str = ""
    xla_bytes: int | None = None  # the operands of XLA's collectives in one call on one rank


@dataclasses.dataclass
class Measurement:
    """The measurements of one process: seconds of each call out of place, in place and within a loop, and more."""

    seconds: list[np.ndarray]
    wrong: int  # elements
    calls: int  # per rank
    served_by: str
    xla_bytes: int | None


class Torch:
    """torch.distributed with Gloo. Its all_reduce is always in place, and its loop is in Python."""

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

        # Fewer calls suffice, since there is no launch of a program to amortize.
        times = min(times, 100)

        def loop():
            for _ in range(times):
                reduce(tensor)

        reduce(tensor)
        result = tensor.view(getattr(self.torch, f"int{8 * x.itemsize}")).numpy().copy().view(x.dtype)
        return Calls(
            lambda: reduce(tensor), lambda: reduce(tensor), lambda: None, loop, lambda: None, times, result[None]
        )


class Mpi4jax:
    """mpi4jax over the installed MPI, jitted."""

    name, modules, programs = "mpi4jax", ("mpi4jax", "mpi4py"), ("mpirun",)

    several_devices = False

    @staticmethod
    def commands(command: list[str], layout: Layout, prefix: str | None = None) -> list[list[str]]:
        """prefix: of an environment that has an MPI of its own; by default the installed one."""
        if prefix is not None:
            command = [os.path.join(prefix, "bin", "python"), *command[1:]]
        program = "mpirun" if prefix is None else os.path.join(prefix, "bin", "mpirun")
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
        return [[program, *Mpi4jax.options("Open MPI" in version, layout.processes), *command]]

    @staticmethod
    def options(is_open_mpi: bool, ranks: int) -> list[str]:
        if not is_open_mpi:
            return ["-n", str(ranks)]
        options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        # Processes may use any core, as the threads of the others do. By default mpirun rejects more ranks than cores.
        options += ["--bind-to", "none"] + (["--oversubscribe"] if ranks > (os.cpu_count() or 1) else [])
        return [*options, "-n", str(ranks)]

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
        in_loop, empty = (jax.jit(lambda x, f=f: loop(f, times, x)) for f in (reduce, None))
        x = jax.device_put(own[0])
        donated = [x]

        def copy():
            donated[0] = jax.block_until_ready(x + 0)
            comm.Barrier()

        return Calls(
            lambda: plain(x).block_until_ready(),
            lambda: donating(donated[0]).block_until_ready(),
            copy,
            lambda: in_loop(x).block_until_ready(),
            lambda: empty(x).block_until_ready(),
            times,
            np.asarray(plain(x))[None],
        )


class JaxProcesses:
    """An all-reduce of `implementations.py` between processes of `jax.distributed`, jitted."""

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
        in_loop, empty = (compiled(lambda x, f=f: loop(f, times, x)) for f in (reduce, None))
        x, small = global_array(own), global_array(own[:, :1])
        donated = [x]

        def copy():
            donated[0] = jax.block_until_ready(x + 0)
            plain(small).block_until_ready()  # as a barrier

        shards = sorted(plain(x).addressable_shards, key=lambda shard: shard.index[0].start)
        explanation = explain(plain, x)
        (collective,) = explanation.collectives
        xla_instructions = [i for i in explanation.instructions if not i.name.startswith("jax_ring_")]
        return Calls(
            lambda: plain(x).block_until_ready(),
            lambda: donating(donated[0]).block_until_ready(),
            copy,
            lambda: in_loop(x).block_until_ready(),
            lambda: empty(x).block_until_ready(),
            times,
            np.stack([np.asarray(shard.data) for shard in shards]),
            f"{collective.served_by}{f': {collective.why}' if collective.why else ''}",
            sum(instruction.num_bytes for instruction in xla_instructions),
        )


class RingPsum(JaxProcesses):
    name = "ring_psum"


class LaxPsum(JaxProcesses):
    name = "lax.psum"


PEERS = {library.name: library for library in (Mpi4jax, Torch)}
BETWEEN_PROCESSES = {library.name: library for library in (RingPsum, LaxPsum)} | PEERS


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
        command = [sys.executable, os.path.abspath(__file__), library, self.folder.name, *numbers]
        # One thread per rank, like one per device in the other implementations.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        options = {}
        if prefix is not None:
            # Its own programs and libraries; what else is imported is that of this environment.
            environment |= {"PATH": f"{prefix}/bin:{os.environ['PATH']}", "I_MPI_ROOT": prefix, "I_MPI_PIN": "0"}
            options = {"prefix": prefix}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(layout.processes)
            server.settimeout(START_SECONDS)
            self.processes = [
                # Their output must not mix with the table.
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


def _measure(calls: Calls, task: Task) -> tuple[list[np.ndarray], int]:
    """Seconds of each call out of place, in place and within a loop, and the number of calls made."""

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
        looped, empty_looped = seconds(calls.loop), seconds(calls.empty_loop)
        if i >= 1:
            in_loop.append(looped / calls.times)
            empty.append(empty_looped / calls.times)
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
                # Interleaved libraries measure the same message repeatedly.
                if message != (task.count, task.dtype, task.times):
                    message = calls = None
                    values = rank_values(layout.ranks, task.count, task.dtype)
                    own = values[library.process * layout.devices :][: layout.devices]
                    calls = library.calls(own, task.times)
                    wrong = count_wrong(values, calls.results)
                    message = (task.count, task.dtype, task.times)
                    del values, own
                seconds, num_calls = _measure(calls, task)
                connection.send(Measurement(seconds, wrong, num_calls, calls.served_by, calls.xla_bytes))
            except Exception as error:
                connection.send(error)


if __name__ == "__main__":
    # Imported as a module, so that pickles name their classes peers.*, not __main__.*.
    import peers

    peers._serve(*sys.argv[1:])
