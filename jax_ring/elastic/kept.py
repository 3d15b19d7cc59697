"""Commits in memory that belongs to the launcher: where a job goes on from when processes are lost.

The launcher makes two anonymous files for each process of its host, which all processes there inherit. Each writes its
commits into its own two in turn, so that one whole commit is always there. The memory is gone when the launcher and the
processes are, however they end. In a job of several hosts each has what is not divided, and copies of parts of another.
With keep='process' the files have the parts alone, of processes that have ended or are spares.
"""

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ring.elastic.generation import Generation
from jax_ring.elastic.snapshots import Have, Snapshot
from jax_ring.launcher.protocol import KEPT_NAME, KEPT_VARIABLE, RESTART_VARIABLE

_UNFINISHED, _ALL, _PARTS = b"\0", b"\1", b"\2"  # the first byte of a file


class CommitId(NamedTuple):
    """A commit that some processes lack is made anew in another generation, or after another restart."""

    number: int
    restart: int
    generation: int


class _Entry(NamedTuple):
    """What a process has written of a commit, in front of its arrays."""

    commit: CommitId  # which one
    num_processes: int  # that have made it
    # the snapshot without its arrays. None but in the first process of each host, which writes all that is not divided.
    header: bytes | None
    owners: tuple[int, ...] | None  # the processes whose parts of divided leaves follow; None if none is divided


class KeptCommits:
    """The memory of the launcher, for the processes of one job.

    files: the descriptors, two for each process. slot: which of them are this process's. parts_only: whether nothing is
    kept but the parts of divided leaves.
    """

    def __init__(self, files: Sequence[int], slot: int, parts_only: bool = False) -> None:
        self._files, self._own = tuple(files), tuple(files[2 * slot : 2 * slot + 2])
        self.parts_only, self._mark = parts_only, _PARTS if parts_only else _ALL

    @classmethod
    def of_launcher(cls, parts_only: bool = False) -> "KeptCommits | None":
        """The memory of this process's launcher; None without one."""
        if not (given := os.environ.get(KEPT_VARIABLE)):
            return None
        slot, *files = map(int, given.split(","))
        # A program started by a process of the launcher inherits the variable, but other files have these numbers.
        return cls(files, slot, parts_only) if all(map(_is_kept_file, files)) else None

    def write(self, snapshot: Snapshot, generation: Generation) -> None:
        """Keeps a commit: in the first process of a host what is not divided, and in each the parts that it has.

        Raises OSError if there is no memory for it.
        """
        if self.parts_only and generation.hosts.has_several_hosts:
            return  # each generation has new processes there, which have nothing to put the parts to
        is_first = generation.hosts.is_first(generation.process) and not self.parts_only
        if not is_first and snapshot.held is None:
            return
        header = snapshot.header() if is_first else None
        arrays = [*(snapshot.undivided() if is_first else ()), *map(snapshot.packed, snapshot.held or ())]
        entry = _Entry(_id(snapshot.number, generation.number), snapshot.num_processes, header, snapshot.held)
        with _opened(self._own[snapshot.number % 2], "r+b") as stream:
            # A process that dies in between leaves a file that nobody reads.
            stream.write(_UNFINISHED)
            stream.flush()
            pickle.dump(entry, stream)
            for array in arrays:
                stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            stream.truncate()
            stream.seek(0)
            stream.write(self._mark)

    def owners(self, number: int, made_in: int) -> set[int]:
        """The processes whose parts of a commit in a generation are here."""
        entries = self._entries().get(_id(number, made_in), [])
        return {owner for entry, *_ in entries for owner in entry.owners or ()}

    def with_parts(self, snapshot: Snapshot, made_in: int) -> Snapshot:
        """A commit of a generation with the parts that are here."""
        return _filled(snapshot, self._entries()[_id(snapshot.number, made_in)])

    def forget_parts(self) -> None:
        """Drops what this process has written, if that is parts alone."""
        for file in self._own if self.parts_only else ():
            os.ftruncate(file, 0)

    def commits(self) -> dict[CommitId, Have]:
        """What this host has of each commit, except of those without what is not divided."""
        found = {}
        for commit, entries in self._entries().items():
            if (first := entries[0][0]).header is None:
                continue
            owners = sorted({owner for entry, *_ in entries for owner in entry.owners or ()})
            found[commit] = Have(first.num_processes, None if first.owners is None else owners)
        return found

    def read(self, commit: CommitId, values: Mapping[str, Any]) -> Snapshot:
        """One of `commits`, with the parts that are here. values: the state whose structure it must have."""
        entries = self._entries()[commit]
        header = entries[0][0].header
        assert header is not None
        return _filled(Snapshot.of_header(header, values, 0, 0), entries)

    def _entries(self) -> dict[CommitId, list[tuple[_Entry, int, int]]]:
        """The entries of each commit with their files and where arrays begin there; any with a header first."""
        found: dict[CommitId, list[tuple[_Entry, int, int]]] = {}
        for file in self._files:
            with _opened(file, "rb") as stream:
                if stream.read(1) == self._mark:
                    entry: _Entry = pickle.load(stream)
                    found.setdefault(entry.commit, []).append((entry, file, stream.tell()))
        for entries in found.values():
            entries.sort(key=lambda each: each[0].header is None)
        return found


def _id(number: int, made_in: int) -> CommitId:
    return CommitId(number, int(os.environ.get(RESTART_VARIABLE, "0")), made_in)


def _filled(snapshot: Snapshot, entries: Sequence[tuple[_Entry, int, int]]) -> Snapshot:
    """A commit with what its entries have."""
    parts = {}
    for entry, file, begin in entries:
        with _opened(file, "rb") as stream:
            stream.seek(begin)
            if entry.header is not None:
                for array in snapshot.undivided():
                    _fill(array, stream)
            for owner in entry.owners or ():
                parts[owner] = np.empty(snapshot.num_bytes(owner), np.uint8)
                _fill(parts[owner], stream)
    return snapshot.with_parts(parts) if parts else snapshot


def _is_kept_file(file: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{KEPT_NAME}")
    except OSError:
        return False


def _opened(file: int, mode: str) -> Any:
    """A file with a position of its own: those who inherit a descriptor share one."""
    return open(f"/proc/self/fd/{file}", mode)


def _fill(array: np.ndarray, stream: Any) -> None:
    count = stream.readinto(array.reshape(-1).view(np.uint8))
    if count < array.nbytes:
        raise OSError(f"jax_ring.elastic: a kept commit ends {array.nbytes - count} bytes too early")
