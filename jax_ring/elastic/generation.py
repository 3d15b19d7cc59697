"""A generation as its members see it: who they are, on which hosts, and how they exchange bytes."""

import itertools
import json
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import _compat, runtime
from jax_ring.collectives import ring_all_gather, ring_broadcast, ring_pmax
from jax_ring.launcher.protocol import HOSTS_VARIABLE, RESTART_VARIABLE, Control

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
        self._firsts, self._count = firsts, count

    @property
    def has_several_hosts(self) -> bool:
        return len(self._firsts) > 1

    def first_beside(self, process: int) -> int:
        """The first process on the host of a process."""
        return max(first for first in self._firsts if first <= process)

    def keeper(self, owner: int) -> int:
        """The process on the next host that keeps a copy of a process's parts; on one host the process itself."""
        host = max(h for h, first in enumerate(self._firsts) if first <= owner)
        begin = self._firsts[(host + 1) % len(self._firsts)]
        end = ([*self._firsts, self._count])[(host + 1) % len(self._firsts) + 1]
        return begin + (owner - self._firsts[host]) % (end - begin)

    def kept_by(self, process: int) -> list[int]:
        """The processes of whose parts it keeps copies."""
        return [owner for owner in range(self._count) if owner != process and self.keeper(owner) == process]


class Generation:
    """The members of a job between two changes. control: the connection to the launcher; None without one."""

    def __init__(self, control: Control | None) -> None:
        self.number = int(os.environ.get(RESTART_VARIABLE, "0"))
        self.process, self.num_processes = _compat.distributed_process(), _compat.num_distributed_processes()
        firsts = os.environ.get(HOSTS_VARIABLE) if control is not None else None
        self.hosts = HostsOfProcesses(tuple(map(int, firsts.split(","))) if firsts else (0,), self.num_processes)
        self._control = control
        self._exchange: Exchange | None = None
        self._posts = itertools.count()

    @property
    def is_first_of_host(self) -> bool:
        return self.hosts.first_beside(self.process) == self.process

    @property
    def exchange(self) -> "Exchange":
        """Exchanges bytes; its first use starts the backend, which waits for all processes."""
        if self._exchange is None:
            self._exchange = Exchange()
        return self._exchange

    def change_pending(self) -> bool:
        """Whether the launcher wants members to leave at their next commit."""
        return self._control is not None and self._control.change_pending()

    def leave(self, reason: str) -> NoReturn:
        """Waits for the end of this process, which the launcher brings about."""
        assert self._control is not None
        self._control.leave(reason)

    def post(self, own: Any) -> list[Any]:
        """Each process's post, by process: values for JSON. Waits for all, without a backend.

        Raises RuntimeError if a process does not post within the deadline, or something else than JSON.
        """
        if self.num_processes == 1:
            return [json.loads(json.dumps(own))]
        key = f"post/{next(self._posts)}"
        self.put(f"{key}/{self.process}", json.dumps(own).encode())
        posts = [self.get(f"{key}/{process}", process) for process in range(self.num_processes)]
        try:
            return [json.loads(each) for each in posts]
        except (ValueError, RecursionError) as error:
            raise RuntimeError(
                f"jax_ring.elastic: another process has sent something else than JSON: {error}"
            ) from None

    def put(self, key: str, value: bytes) -> None:
        """Publishes a value for the other members."""
        put, _ = _compat.key_value_store(runtime.timeout())
        put(f"jax_ring/elastic/{key}", value)

    def get(self, key: str, process: int) -> bytes:
        """Waits for the value of a process. Raises RuntimeError if it does not come within the deadline."""
        _, get = _compat.key_value_store(runtime.timeout())
        try:
            return get(f"jax_ring/elastic/{key}")
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
        self._programs: dict = {}

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each of these 32-bit numbers over the processes."""

        def elastic_most(x):
            return ring_pmax(x, _AXIS)

        return self._run(elastic_most, np.asarray([numbers], np.int32))[0].tolist()

    def gather(self, own: np.ndarray, sizes: Sequence[int], wanted: Sequence[int]) -> dict[int, np.ndarray]:
        """The bytes of some of the processes, which may differ between processes.

        own: the bytes of this process, uint8. sizes: how many each process has.
        """
        assert len(own) == sizes[self.process]

        def elastic_gather(x):
            return ring_all_gather(x, _AXIS, tiled=True)

        results = {process: np.empty(sizes[process], np.uint8) for process in wanted}
        chunk = _chunk_of(max(sizes))
        for start in range(0, max(sizes), chunk):
            gathered = self._run(elastic_gather, _padded(own[start : start + chunk], chunk))
            for process, result in results.items():
                part = result[start : start + chunk]
                part[:] = gathered[process, : len(part)]
        return results

    def broadcast(self, own: np.ndarray | None, size: int, root: int, *, is_wanted: bool) -> np.ndarray | None:
        """The bytes of process `root`, where they are wanted.

        own: these bytes, uint8, in that process.
        """

        def elastic_broadcast(x):
            return ring_broadcast(x, _AXIS, root=root)

        result = np.empty(size, np.uint8) if is_wanted else None
        chunk = _chunk_of(size)
        for start in range(0, size, chunk):
            sent = own[start : start + chunk] if own is not None else np.empty(0, np.uint8)
            received = self._run(elastic_broadcast, _padded(sent, chunk), root)[0]
            if result is not None:
                part = result[start : start + chunk]
                part[:] = received[: len(part)]
        return result

    def _run(self, function, own: np.ndarray, *key) -> np.ndarray:
        """This process's result of a function of one row per process."""
        key = (function.__name__, own.shape, *key)
        if key not in self._programs:
            # No vma check: the result of the gather is the same everywhere, but its type does not say so.
            mapped = jax.shard_map(function, mesh=self._mesh, in_specs=P(_AXIS), out_specs=P(), check_vma=False)
            self._programs[key] = jax.jit(mapped)
        shape = (self.num_processes, *own.shape[1:])
        own_array = jax.device_put(own, self._own)
        rows = jax.make_array_from_single_device_arrays(shape, NamedSharding(self._mesh, P(_AXIS)), [own_array])
        return np.asarray(self._programs[key](rows).addressable_data(0))


def _chunk_of(size: int) -> int:
    return min(_MAX_CHUNK, max(_MIN_CHUNK, 1 << max(0, size - 1).bit_length()))


def _padded(x: np.ndarray, size: int) -> np.ndarray:
    row = np.zeros((1, size), np.uint8)
    row[0, : len(x)] = x
    return row
