"""Commits in memory that belongs to the launcher: where a job goes on from when all its processes are lost.

The launcher makes two anonymous files for each process of the job, which all processes inherit. Each writes its commits
into its own two in turn, so that one whole commit is always there. The memory is gone when the launcher and the
processes are, however they end.
"""

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ring.elastic.headers import header_of, without_arrays
from jax_ring.elastic.snapshots import Snapshot, array_of
from jax_ring.launcher.protocol import KEPT_NAME, KEPT_VARIABLE, RESTART_VARIABLE

_SIZE_BYTES = 8  # the size of an entry, at the start of its file; 0 while the file is written


class _Entry(NamedTuple):
    """What a process has written of a commit, in front of its arrays.

    Attributes:
      number: of the commit.
      epoch: the restart of the job and the generation in it. A commit that some processes lack is made anew in another.
      process, num_processes: in that generation.
      header: the snapshot without its arrays. None but in process 0, which writes all that is not divided.
      is_divided: whether the other processes have parts.
    """

    number: int
    epoch: tuple[int, int]
    process: int
    num_processes: int
    header: bytes | None
    is_divided: bool


class KeptCommits:
    """The memory of the launcher, for the processes of one job.

    files: the descriptors, two for each process. slot: which of them are this process's.
    """

    def __init__(self, files: Sequence[int], slot: int) -> None:
        self._files, self._slot = tuple(files), slot

    @classmethod
    def of_launcher(cls) -> "KeptCommits | None":
        """That of the launcher of this process; None without one."""
        if not (given := os.environ.get(KEPT_VARIABLE)):
            return None
        slot, *files = map(int, given.split(","))
        # A program started by a process of the launcher inherits the variable, but other files have these numbers.
        return cls(files, slot) if all(map(_is_kept_file, files)) else None

    def write(self, snapshot: Snapshot, process: int, generation: int) -> None:
        """Keeps a commit: what process 0 has, and of each other process its parts of divided leaves.

        Raises:
          OSError: if there is no memory for it.
        """
        is_divided = snapshot.held is not None
        if process and not is_divided:
            return
        epoch = int(os.environ.get(RESTART_VARIABLE, "0")), generation
        header = None if process else header_of(snapshot)
        entry = pickle.dumps(_Entry(snapshot.number, epoch, process, snapshot.num_processes, header, is_divided))
        arrays = [] if process else _undivided(snapshot)
        if is_divided:
            arrays = [*arrays, snapshot.packed(process)]
        file = self._files[2 * self._slot + snapshot.number % 2]
        # A process that dies in between leaves a file that nobody reads.
        _write(file, bytes(_SIZE_BYTES), 0)
        end = _write(file, entry, _SIZE_BYTES)
        for array in arrays:
            end = _write(file, np.ascontiguousarray(array).reshape(-1).view(np.uint8), end)
        os.ftruncate(file, end)
        _write(file, len(entry).to_bytes(_SIZE_BYTES, "little"), 0)

    def newest(self, values: Mapping[str, Any]) -> Snapshot | None:
        """The newest commit that is here as a whole; None if there is none.

        values: the state whose structure it must have.

        Raises:
          RuntimeError: if it has another one.
        """
        commits: dict[tuple, dict[int, tuple[_Entry, int, int]]] = {}
        for file in self._files:
            if (size := int.from_bytes(os.pread(file, _SIZE_BYTES, 0), "little")) == 0:
                continue
            entry: _Entry = pickle.loads(os.pread(file, size, _SIZE_BYTES))
            commits.setdefault((entry.number, entry.epoch), {})[entry.process] = entry, file, _SIZE_BYTES + size
        for _, of_processes in sorted(commits.items(), reverse=True):
            if 0 not in of_processes:
                continue
            first, file, begin = of_processes[0]
            if not first.is_divided or len(of_processes) == first.num_processes:
                return self._read(first, of_processes, file, begin, values)
        return None

    def _read(self, first: _Entry, of_processes: Mapping, file: int, begin: int, values: Mapping) -> Snapshot:
        assert first.header is not None
        snapshot = without_arrays(first.header, values, 0, 0)
        for array in _undivided(snapshot):
            begin = _read_into(array.reshape(-1).view(np.uint8), file, begin)
        parts = {}
        if first.is_divided:
            starts = {process: (file, begin) for process, (_, file, begin) in of_processes.items()} | {0: (file, begin)}
            for process, (file, begin) in starts.items():
                parts[process] = np.empty(snapshot.num_bytes(process), np.uint8)
                _read_into(parts[process], file, begin)
        return snapshot.with_parts(parts).whole()


def _is_kept_file(file: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{KEPT_NAME}")
    except OSError:
        return False


def _undivided(snapshot: Snapshot) -> list[np.ndarray]:
    return [array for leaf in snapshot.leaves if isinstance(array := array_of(leaf), np.ndarray)]


def _write(file: int, data: Any, offset: int) -> int:
    """Writes bytes at an offset, and returns where they end."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
    return offset


def _read_into(array: np.ndarray, file: int, offset: int) -> int:
    """Fills an array of bytes from an offset on, and returns where they end."""
    view = array.data
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise OSError(f"jax_ring.elastic: a kept commit ends {len(view)} bytes too early")
        view, offset = view[count:], offset + count
    return offset
