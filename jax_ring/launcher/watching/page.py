"""A page of memory that a process and its launcher share. The launcher reads it whatever the process does.

It is an anonymous file, which the launcher makes for each process. Its size is sealed, so that nobody can take memory
away that the other has mapped. Behind the page the process says where it is, if asked.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import math
import mmap
import os
import signal
import time
from typing import NamedTuple

NAME = "jax_ring_steps"  # names the file
PAGE_VARIABLE = "JAX_RING_STEPS"  # the file's descriptor in the process, and the process that has taken it
STACKS_SIGNAL = signal.SIGRTMAX - 7  # one that programs have no use for
STEPS, EXECUTIONS = 1, 2  # what a process counts; 0 for nothing
_TEXT_BYTES = 1024


class Words(ctypes.Structure):
    """What is in the page. Whoever reads a number gets it as it was written: it is aligned, and one word.

    Times are seconds of the host's monotonic clock. A text ends at its first NUL, or with its field.
    """

    _fields_ = [
        ("counts", ctypes.c_int64),  # `STEPS`, `EXECUTIONS` or 0
        ("limit", ctypes.c_double),  # seconds after which the process is stuck; 0 if it has none
        ("ends_job", ctypes.c_int64),  # whether the job ends then
        ("started", ctypes.c_int64),
        ("completed", ctypes.c_int64),
        ("completed_at", ctypes.c_double),  # when the last one was completed, or counting began
        ("compiling_since", ctypes.c_double),  # 0 if the process does not trace or compile
        ("has_handler", ctypes.c_int64),  # whether the process writes its stacks on the signal
        ("asked", ctypes.c_int64),  # whether the launcher asks where the process is, which has not answered
        ("change_pending", ctypes.c_int64),  # by the launcher: whether to leave an elastic job at the next commit
        ("function", ctypes.c_char * _TEXT_BYTES),  # the watched one that has begun last
        ("compiling", ctypes.c_char * _TEXT_BYTES),  # what is compiled
    ]


_SIZE = ctypes.sizeof(Words)
# The end of what is behind the page. A message of launchers has room for it, of which JSON may make six times as much.
# Unused memory is not there.
_END = _SIZE + (1 << 17)


def cut(text: str) -> bytes:
    """A text that fits into its field."""
    return text.encode(errors="replace")[:_TEXT_BYTES]


def _ago(then: float, now: float) -> float:
    """The seconds since a time; 0 for what is none, as a NaN."""
    return now - then if 0 < then <= now else 0.0


class Notes(NamedTuple):
    """What is known of a process: `Words` at one time, and what its launcher adds."""

    counts: int = 0
    limit: float = 0.0
    ends_job: bool = False
    started: int = 0
    completed: int = 0
    completed_ago: float = 0.0  # seconds
    compiling_for: float = 0.0  # seconds; 0 if it does not
    function: str = ""
    compiling: str = ""
    name: str = ""
    status: int | None = None  # None while it runs


class Page:
    """The page of one process."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.words = Words.from_buffer(mmap.mmap(file, _SIZE))

    @classmethod
    def new(cls) -> "Page":
        file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, _END)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(file)

    @classmethod
    def of_launcher(cls) -> "Page | None":
        """The page of this process; None without a launcher."""
        given, _, owner = os.environ.get(PAGE_VARIABLE, "").partition(":")
        with contextlib.suppress(OSError):
            # A forked process has the variable of its parent; a program that one starts has it, but not the file.
            if owner in ("", str(os.getpid())) and os.readlink(f"/proc/self/fd/{given}").startswith(f"/memfd:{NAME}"):
                os.environ[PAGE_VARIABLE] = f"{given}:{os.getpid()}"
                return cls(int(given))
        return None

    def close(self) -> None:
        del self.words  # and with it the memory, which nothing else holds
        os.close(self.file)

    def read(self, name: str = "", status: int | None = None) -> Notes:
        """What the process has noted. Whatever it has written there, these are numbers that one can reckon with."""
        words = self.words
        counts, limit, completed_at, compiling_since = (
            words.counts,
            words.limit,
            words.completed_at,
            words.compiling_since,
        )
        now = time.monotonic()  # after both
        return Notes(
            counts if counts in (STEPS, EXECUTIONS) else 0, limit if 0 < limit < math.inf else 0.0,
            bool(words.ends_job), words.started, words.completed, _ago(completed_at, now), _ago(compiling_since, now),
            words.function.decode(errors="ignore"), words.compiling.decode(errors="ignore"),  # may be cut in a letter
            name, status,
        )  # fmt: skip

    # ---- Behind the page ---------------------------------------------------------------------------------------------

    # What is there ends where Python writes next: the file's offset is one for both processes.

    def clear(self) -> None:
        os.lseek(self.file, _SIZE, os.SEEK_SET)

    def behind(self) -> str:
        end = min(os.lseek(self.file, 0, os.SEEK_CUR), _END)
        return os.pread(self.file, max(0, end - _SIZE), _SIZE).decode(errors="replace")

    def answer(self, text: str) -> None:
        self.clear()
        os.write(self.file, text.encode()[: _END - _SIZE])
        self.words.asked = False

    def stacks(self) -> str:
        """The stacks of all threads of this process, as Python writes them."""
        self.clear()
        faulthandler.dump_traceback(self.file)
        return self.behind()

    def write_stacks_on_signal(self) -> None:
        """Makes Python write the stacks also while a thread holds its lock."""
        faulthandler.register(STACKS_SIGNAL, file=self.file, all_threads=True)
        self.words.has_handler = True
