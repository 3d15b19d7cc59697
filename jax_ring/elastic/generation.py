"""A generation as its members see it: who they are, on which hosts, and how they exchange bytes."""

import functools
import itertools
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import _compat, runtime
from jax_ring.collectives import ring_all_gather, ring_pmax
from jax_ring.distributed import store
from jax_ring.launcher.protocol import COMMIT_VARIABLE, GENERATION_VARIABLE, HOSTS_VARIABLE
from jax_ring.launcher.watching.page import Page

_AXIS = "processes"
# Bytes of a process in one call. For a moment each process holds this much of every other process too.
_MAX_CHUNK = 8 << 20
_MIN_CHUNK = 4 << 10


class Leave(BaseException):
    """Ends `train` after a commit, because the members change. No Exception, which `train` might catch."""


class HostsOfProcesses:
    """On which host each process of a generation is, and who keeps copies of whose parts of divided leaves.

    firsts: the first process of each host, in order. count: the number of processes.
    """

    def __init__(self, firsts: tuple[int, ...], count: int) -> None:
        self._hosts, self._count = [range(*ends) for ends in itertools.pairwise((*firsts, count))], count

    @property
    def has_several_hosts(self) -> bool:
        return len(self._hosts) > 1

    def first_beside(self, process: int) -> int:
        """The first process on the host of a process."""
        return next(host.start for host in self._hosts if process in host)

    def keeper(self, owner: int) -> int:
        """The process on the next host that keeps a copy of a process's parts; on one host the process itself."""
        index, own = next((index, host) for index, host in enumerate(self._hosts) if owner in host)
        following = self._hosts[(index + 1) % len(self._hosts)]
        return following[own.index(owner) % len(following)]

    def kept_by(self, process: int) -> list[int]:
        """The processes of whose parts it keeps copies."""
        return [owner for owner in range(self._count) if owner != process and self.keeper(owner) == process]


class Generation:
    """The members of a job between two changes."""

    def __init__(self) -> None:
        self.number = int(os.environ.get(GENERATION_VARIABLE, "0"))
        self.process, self.num_processes = _compat.distributed_process(), _compat.num_distributed_processes()
        self._page = Page.of_launcher()
        # A program that a process of a job starts has the variables too, and is no part of the job.
        environment = os.environ if self._page is not None else {}
        self.newest_commit = int(environment.get(COMMIT_VARIABLE, "0"))
        firsts = environment.get(HOSTS_VARIABLE, "0")
        self.hosts = HostsOfProcesses(tuple(map(int, firsts.split(","))), self.num_processes)

    @property
    def is_first_of_host(self) -> bool:
        return self.hosts.first_beside(self.process) == self.process

    @functools.cached_property
    def exchange(self) -> "Exchange":
        """Exchanges bytes; its first use starts the backend, which waits for all processes."""
        return Exchange()

    def change_pending(self) -> bool:
        """Whether the launcher wants members to leave at their next commit."""
        return self._page is not None and bool(self._page.words.change_pending)

    def post(self, own: bytes) -> list[bytes]:
        """Each process's post, by process. Waits for all, without a backend; a generation has one.

        Raises RuntimeError if a process does not post within the deadline.
        """
        if self.num_processes == 1:
            return [own]
        self.put("post", own)
        return [self.get("post", process) for process in range(self.num_processes)]

    def put(self, name: str, value: bytes) -> None:
        """Publishes a value for the other members; a generation has one of a name."""
        store.current().put(f"jax_ring/elastic/{name}/{self.process}", value)

    def get(self, name: str, process: int) -> bytes:
        """Waits for the value of a process. Raises RuntimeError if it does not come in time, or is not its own."""
        try:
            return store.current().get(f"jax_ring/elastic/{name}/{process}")
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"elastic.run: process {process} has not begun its function within {runtime.timeout():g} s; process "
                f"{self.process} has. {runtime.TIMEOUT_VARIABLE} sets the time limit."
            ) from error


class Exchange:
    """A mesh with one device of each process of a generation.

    All processes make the same calls in the same order. A call raises the collectives' errors if a process has died.
    """

    def __init__(self) -> None:
        self.process, self.num_processes = jax.process_index(), jax.process_count()
        first: dict[int, jax.Device] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            first.setdefault(device.process_index, device)
        self._own = first[self.process]
        self._mesh = Mesh([first[process] for process in range(self.num_processes)], (_AXIS,))
        # No vma check: the result of the gather is the same everywhere, but its type does not say so.
        self._programs: dict[Callable, Callable] = {
            each: jax.jit(jax.shard_map(each, mesh=self._mesh, in_specs=P(_AXIS), out_specs=P(), check_vma=False))
            for each in (_most, _gather)
        }

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each of these 32-bit numbers over the processes."""
        return self._run(_most, np.asarray([numbers], np.int32))[0].tolist()

    def broadcast(self, own: np.ndarray | None, size: int, *, is_wanted: bool) -> np.ndarray | None:
        """The bytes of the one process that has them, where they are wanted.

        own: these bytes, uint8, in that process; None elsewhere. size: how many they are.
        """
        result = np.empty(size, np.uint8) if is_wanted else None
        chunk = _chunk_of(size)
        for start in range(0, size, chunk):
            received = self._run(_most, _padded(own, start, chunk))[0]  # others have zeros
            if result is not None:
                result[start : start + chunk] = received[: size - start]
        return result

    def gather(self, own: np.ndarray, sizes: Sequence[int], wanted: Sequence[int]) -> dict[int, np.ndarray]:
        """The bytes of some of the processes, which may differ between processes.

        own: the bytes of this process, uint8. sizes: how many each process has.
        """
        assert len(own) == sizes[self.process]
        results = {process: np.empty(sizes[process], np.uint8) for process in wanted}
        chunk = _chunk_of(max(sizes))
        for start in range(0, max(sizes), chunk):
            gathered = self._run(_gather, _padded(own, start, chunk))
            for process, result in results.items():
                part = result[start : start + chunk]
                part[:] = gathered[process, : len(part)]
        return results

    def _run(self, function: Callable[[jax.Array], jax.Array], own: np.ndarray) -> np.ndarray:
        """This process's result of a function of one row per process."""
        rows = jax.make_array_from_single_device_arrays(
            (self.num_processes, own.shape[1]), NamedSharding(self._mesh, P(_AXIS)), [jax.device_put(own, self._own)]
        )
        return np.asarray(self._programs[function](rows).addressable_data(0))


def _most(x: jax.Array) -> jax.Array:
    return ring_pmax(x, _AXIS)


def _gather(x: jax.Array) -> jax.Array:
    return ring_all_gather(x, _AXIS, tiled=True)


def _chunk_of(size: int) -> int:
    return min(_MAX_CHUNK, max(_MIN_CHUNK, 1 << max(0, size - 1).bit_length()))


def _padded(x: np.ndarray | None, start: int, size: int) -> np.ndarray:
    """One row of so many bytes from the start on, and zeros."""
    row = np.zeros((1, size), np.uint8)
    if x is not None:
        part = x[start : start + size]
        row[0, : len(part)] = part
    return row
