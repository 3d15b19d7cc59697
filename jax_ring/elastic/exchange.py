"""Moves bytes between processes by jax_ring's collectives, one device per process."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring.collectives import ring_all_gather, ring_broadcast, ring_pmax

_AXIS = "processes"
# Bytes of a process in one call. For a moment each process holds this much of every other process too.
_MAX_CHUNK = 8 << 20
_MIN_CHUNK = 4 << 10


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

    def broadcast(self, own: np.ndarray | None, size: int, root: int) -> np.ndarray | None:
        """The bytes of process `root`, for processes that pass None; None for others.

        own: in the root the bytes, uint8; elsewhere anything but None if they are there.
        """

        def elastic_broadcast(x):
            return ring_broadcast(x, _AXIS, root=root)

        result = np.empty(size, np.uint8) if own is None else None
        chunk = _chunk_of(size)
        for start in range(0, size, chunk):
            sent = own[start : start + chunk] if own is not None and self.process == root else np.empty(0, np.uint8)
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
