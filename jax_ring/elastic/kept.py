"""Commits in memory that belongs to the launcher, from which the processes of the next generation go on.

The launcher makes two anonymous files for each process of its host, which all processes there inherit. Each writes its
commits into its own two in turn, so that one whole commit is always there. The memory is gone when the launcher and the
processes are, however they end. In a job of several hosts each has what is not divided, and copies of parts of another.
"""

import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ring.elastic.generation import Generation
from jax_ring.elastic.snapshots import UNDIVIDED, Snapshot
from jax_ring.launcher import protocol

# A file: the mark, which the launcher reads as well; the length of the header; the header; the sections that it names.
_LENGTH = struct.Struct("<q")
_BEGIN = protocol.KEPT_MARK.size + _LENGTH.size


class CommitId(NamedTuple):
    """The newest commit is the largest: one that some processes lacked is made anew in a later generation."""

    number: int
    generation: int


class _Entry(NamedTuple):
    """What a file has."""

    snapshot: Snapshot  # without its arrays
    sections: list[int]  # that follow
    file: int
    begin: int  # where they do


class KeptCommits:
    """The memory of the launcher, for the processes of one job.

    files: the descriptors, two for each process. slot: which of them are this process's.
    """

    def __init__(self, files: Sequence[int], slot: int) -> None:
        self._files, self._own = tuple(files), tuple(files[2 * slot : 2 * slot + 2])
        self._last: CommitId | None = None  # which the next one must not overwrite: others may not have made that

    @classmethod
    def of_launcher(cls) -> "KeptCommits | None":
        """The memory of this process's launcher; None without one."""
        if not (given := os.environ.get(protocol.KEPT_VARIABLE)):
            return None
        slot, *files = map(int, given.split(","))
        # A program started by a process of the launcher inherits the variable, but other files have these numbers.
        return cls(files, slot) if all(map(_is_kept_file, files)) else None

    def write(self, number: int, snapshot: Snapshot, generation: Generation) -> None:
        """Keeps a commit: in the first process of a host what is not divided, and in each the parts that it has.

        Raises OSError if there is no memory for it.
        """
        sections = [each for each in snapshot.arrays if each != UNDIVIDED or generation.is_first_of_host]
        if not sections:
            return
        commit, header = CommitId(number, generation.number), snapshot.header(sections)
        file = self._own[self._last is not None and _commit_of(self._own[0]) == self._last]
        # A process that dies in between leaves a file that nobody reads.
        protocol.write_mark(file, False, generation.number, number)
        with _opened(file, "r+b") as stream:
            stream.seek(protocol.KEPT_MARK.size)
            stream.write(_LENGTH.pack(len(header)) + header)
            for section in sections:
                for data in snapshot.data(section):
                    stream.write(data)
            stream.truncate()
        protocol.write_mark(file, True, generation.number, number)
        self._last = commit

    def commits(self) -> dict[CommitId, tuple[int, list[int]]]:
        """What this host has of each commit: over how many processes it is divided, and which sections."""
        found = {}
        for commit in {commit for file in self._files if (commit := _commit_of(file)) is not None}:
            entries = self._entries(commit)
            sections = sorted({section for entry in entries for section in entry.sections})
            found[commit] = entries[0].snapshot.num_parts, sections
        return found

    def read(self, commit: CommitId) -> Snapshot:
        """One of `commits`, with the sections that are here. It stays until another has been written after it."""
        self._last = commit
        entries = self._entries(commit)
        # Values that are no arrays are those of the first process.
        snapshot = min(entries, key=lambda entry: UNDIVIDED not in entry.sections).snapshot
        for entry in entries:
            with _opened(entry.file, "rb") as stream:
                stream.seek(entry.begin)
                for section in entry.sections:
                    data = np.empty(snapshot.num_bytes(section), np.uint8)
                    if stream.readinto(data) < len(data):
                        raise RuntimeError(f"jax_ring.elastic: {_name(commit)} has become shorter")
                    snapshot.unpack([section], data)
        return snapshot

    def _entries(self, commit: CommitId) -> list[_Entry]:
        """The files of a commit. Raises RuntimeError if one is damaged."""
        entries: list[_Entry] = []
        for file in self._files:
            if _commit_of(file) != commit:
                continue
            with _opened(file, "rb") as stream:
                size = os.fstat(file).st_size
                stream.seek(protocol.KEPT_MARK.size)
                length = int.from_bytes(stream.read(_LENGTH.size), "little", signed=True)
                if not 0 < length <= size - _BEGIN:
                    raise RuntimeError(
                        f"jax_ring.elastic: {_name(commit)} is damaged: {length} bytes of header, in a file of {size}"
                    )
                snapshot, sections = Snapshot.of_header(stream.read(length), _name(commit))
            lacking = _BEGIN + length + sum(map(snapshot.num_bytes, sections)) - size
            if lacking or (entries and not snapshot.is_alike(entries[0].snapshot)):
                why = f"it ends {lacking} bytes too early" if lacking else "the processes have written different leaves"
                raise RuntimeError(f"jax_ring.elastic: {_name(commit)} is damaged: {why}")
            entries.append(_Entry(snapshot, sections, file, _BEGIN + length))
        return entries


def _name(commit: CommitId) -> str:
    return f"commit {commit.number} of generation {commit.generation}, in the launcher's memory,"


def _commit_of(file: int) -> CommitId | None:
    """The commit in a file; None if none is whole."""
    mark = protocol.read_mark(file)
    return CommitId(number=mark[1], generation=mark[0]) if mark is not None else None


def _is_kept_file(file: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{protocol.KEPT_NAME}")
    except OSError:
        return False


def _opened(file: int, mode: str) -> Any:
    """A file with a position of its own: those who inherit a descriptor share one."""
    return open(f"/proc/self/fd/{file}", mode)
