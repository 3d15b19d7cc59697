"""The libraries whose all-reduces run between processes: mpi4jax, torch.distributed, and JAX with jax_ring or XLA."""

import dataclasses
import os
import subprocess
from collections.abc import Callable

import numpy as np
from harness.implementations import AXIS, IMPLEMENTATIONS
from harness.measure import loop

from jax_ring import explain


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

        # Fewer calls suffice: there is no program launch to amortize.
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
        # Processes may use any core, like the threads of the others. By default mpirun rejects more ranks than cores.
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
        self.jax, self.process = jax, int(os.environ["JAX_PROCESS_ID"])
        if layout.hosts > 1:
            os.environ[HOST_VARIABLE] = f"host {self.process * layout.hosts // layout.processes}"
        jax.distributed.initialize()
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
