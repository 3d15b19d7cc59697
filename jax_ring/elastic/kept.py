"""Commits in memory that belongs to the launcher, from which the processes of the next generation go on.

The launcher makes two anonymous files for each process of its host, which all processes there inherit. Each writes its
commits into its own two in turn, so that one whole commit is always there. The memory is gone when the launcher and the
processes are, however they end. In a job of several hosts each has what is not divided, and copies of parts of another.
"""

import ctypes
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_ring.elastic.generation import Generation
from jax_ring.elastic.snapshots import UNDIVIDED, Snapshot
from jax_ring.launcher import protocol

# A file: the mark, which the launcher reads as well; the length of the header; the header; the sections that it names.
# After a longer commit nothing follows, up to that one's length: the file cannot shrink.
_LENGTH = struct.Struct("<q")
_BEGIN = protocol.KEPT_MARK.size + _LENGTH.size
_FILES = "/proc/self/fd"
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, KEEP_SIZE in <linux/falloc.h>


class CommitId(NamedTuple):
    """The newest commit is the largest: one that some processes lacked is made anew in a later generation."""

    number: int
    generation: int


class KeptCommits:
    """The memory of the launcher, for the processes of one job; without a launcher it has none, and keeps nothing.

    files: the descriptors, two for each process. slot: which of them are this process's.

    Attributes:
      why_not: why it keeps nothing, if a launcher would.
      last: the commit that this process has made or gone on from. The next one must not overwrite it: others may not
        have made that.
      damaged: what is wrong with commits that cannot be read, once `commits` has looked.
    """

    def __init__(self, files: Sequence[int], slot: int, why_not: str = "") -> None:
        self.why_not = why_not
        self._files, self._own = tuple(files), tuple(files[2 * slot : 2 * slot + 2])
        self.last: CommitId | None = None
        self.damaged: dict[CommitId, str] = {}

    @classmethod
    def of_launcher(cls) -> "KeptCommits":
        """The memory of this process's launcher."""
        slot, *files = map(int, os.environ.get(protocol.KEPT_VARIABLE, "0").split(","))
        if files and not os.path.isdir(_FILES):
            return cls((), slot, "/proc is not mounted here")
        # A program started by a process of the launcher inherits the variable, but other files have these numbers.
        are_kept = all(os.path.realpath(_path(file)).startswith(f"/memfd:{protocol.KEPT_NAME}") for file in files)
        return cls(files if are_kept else (), slot)

    def write(self, number: int, snapshot: Snapshot, generation: Generation) -> None:
        """Keeps a commit: in the first process of a host what is not divided, and in each its parts and its copies.

        Raises OSError if there is no memory for it.
        """
        keeps = {generation.process, *generation.hosts.kept_by(generation.process)}
        if generation.is_first_of_host:
            keeps.add(UNDIVIDED)
        sections = [section for section in snapshot.arrays if section in keeps]
        if not sections or not self._files:
            return
        header = snapshot.header(sections)
        first, second = self._own
        file = second if self.last is not None and _commit_of(first) == self.last else first
        # A process that dies in between leaves a file that nobody reads.
        protocol.write_mark(file, False, generation.number, number)
        with open(_path(file), "r+b") as stream:
            stream.seek(protocol.KEPT_MARK.size)
            stream.write(_LENGTH.pack(len(header)) + header)
            for section in sections:
                for data in snapshot.data(section):
                    stream.write(data.data)
            stream.flush()
            _release(stream.fileno(), stream.tell())
        protocol.write_mark(file, True, generation.number, number)
        self.last = CommitId(number, generation.number)

    def commits(self) -> dict[CommitId, Snapshot]:
        """What this host has of each commit; nothing of a damaged file, beside which there may be a whole one.

        The arrays are the files' own memory: those of `last` stay as they are while the next commit is made, others
        may be overwritten by it.
        """
        found: dict[CommitId, Snapshot] = {}
        differ: set[CommitId] = set()
        for file in self._files:
            if (commit := _commit_of(file)) is None:
                continue
            name = f"commit {commit.number} of generation {commit.generation}, in the launcher's memory,"
            try:
                of_file = _read(file, name)
            except RuntimeError as error:
                self.damaged[commit] = str(error)
                continue
            of_host = found.setdefault(commit, of_file)
            if of_host.leaves != of_file.leaves:
                self.damaged[commit] = f"jax_ring.elastic: {name} has different leaves in different processes"
                differ.add(commit)
                continue
            if UNDIVIDED in of_file.arrays:
                of_host.leaves = of_file.leaves  # values that are no arrays are those of the first process
            of_host.arrays |= of_file.arrays
        # Others get to know that there was one: without any whole commit a job must not begin anew.
        nothing = {commit: Snapshot((), 1, {}) for commit in self.damaged}
        return nothing | {commit: snapshot for commit, snapshot in found.items() if commit not in differ}


def _read(file: int, name: str) -> Snapshot:
    """What a process has written of a commit. Raises RuntimeError if it is damaged."""
    room = os.fstat(file).st_size - _BEGIN
    length = int.from_bytes(os.pread(file, _LENGTH.size, protocol.KEPT_MARK.size), "little", signed=True)
    header = os.pread(file, length, _BEGIN) if 0 < length <= room else b""
    snapshot, sections = Snapshot.of_header(header, name)
    size = snapshot.num_bytes(*sections)
    if (lacking := length + size - room) > 0:
        raise RuntimeError(f"jax_ring.elastic: {name} is damaged: it lacks {lacking} bytes")
    # numpy maps no empty part.
    data = np.memmap(_path(file), np.uint8, "r", _BEGIN + length, size) if size else np.empty(0, np.uint8)
    snapshot.unpack(sections, data)
    return snapshot


def _commit_of(file: int) -> CommitId | None:
    """The commit in a file; None if none is whole."""
    mark = protocol.read_mark(file)
    return CommitId(number=mark[1], generation=mark[0]) if mark is not None else None


def _release(file: int, begin: int) -> None:
    """Gives back the memory of a file from there on. Without it the file takes more than it needs."""
    if (size := os.fstat(file).st_size - begin) > 0:
        ctypes.CDLL(None).fallocate(file, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(size))


def _path(file: int) -> str:
    """The path by which a file is opened with a position of its own: those who inherit a descriptor share one."""
    return f"{_FILES}/{file}"
