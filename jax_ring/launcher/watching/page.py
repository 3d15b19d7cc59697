"""A page of memory in which a process notes its steps. Its launcher reads it whatever the process does.

The launcher makes it for each process, as an anonymous file. Behind the page the process says where it is, if asked.
"""

import contextlib
import faulthandler
import mmap
import os
import signal
import time
from typing import NamedTuple

NAME = "jax_ring_steps"  # names the file
PAGE_VARIABLE = "JAX_RING_STEPS"  # the file's descriptor in the process, and the process that has taken it
STACKS_SIGNAL = signal.SIGRTMAX - 7  # one that programs have no use for
_SIZE = 4096
# The words: integers of 64 bits. Times are nanoseconds of the host's monotonic clock.
COUNTS, LIMIT, ENDS_JOB, STARTED, COMPLETED, COMPLETED_AT, COMPILING_SINCE, HAS_HANDLER, QUESTION = range(9)
STEPS, EXECUTIONS = 1, 2  # what a process counts; 0 for nothing
ASKED, ANSWERED = 1, 2  # the question where a process is
FUNCTION, COMPILING = slice(256, 1024), slice(1024, 2048)  # texts


class Notes(NamedTuple):
    """What a process has noted."""

    counts: int = 0
    limit: float = 0.0  # seconds after which it is stuck; 0 if it has none
    ends_job: bool = False  # whether the job ends then
    started: int = 0
    completed: int = 0
    completed_ago: float = 0.0  # seconds since the last one was completed, or counting began
    compiling_for: float = 0.0  # seconds; 0 if it does not trace or compile
    function: str = ""  # the watched one that it has begun last
    compiling: str = ""  # what is compiled


class Page:
    """The page of one process. The launcher reads, the process writes."""

    def __init__(self, file: int) -> None:
        self.file = file
        os.ftruncate(file, max(_SIZE, os.fstat(file).st_size))
        self._memory = mmap.mmap(file, _SIZE)
        self.words = memoryview(self._memory)[: FUNCTION.start].cast("q")

    @classmethod
    def new(cls) -> "Page":
        return cls(os.memfd_create(NAME))

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
        self.words.release()
        self._memory.close()
        os.close(self.file)

    def write_stacks_on_signal(self) -> None:
        """Makes Python write the stacks of all threads behind the page, also while one holds its lock."""
        faulthandler.register(STACKS_SIGNAL, file=self.file, all_threads=True)
        self.words[HAS_HANDLER] = True

    def write(self, place: slice, text: str) -> None:
        data = text.encode(errors="replace")[: place.stop - place.start - 1] + b"\0"
        self._memory[place.start : place.start + len(data)] = data

    def answer(self, text: str) -> None:
        os.pwrite(self.file, text.encode(errors="replace"), _SIZE)
        self.words[QUESTION] = ANSWERED

    def ask(self, question: int) -> None:
        """Forgets what is behind the page. question: `ASKED`, or 0 for stacks, which the signal brings."""
        self.words[QUESTION] = question
        os.ftruncate(self.file, _SIZE)
        os.lseek(self.file, _SIZE, os.SEEK_SET)  # where Python writes: the offset is one for both processes

    def behind(self) -> str:
        """What the process has written behind the page."""
        size = os.fstat(self.file).st_size - _SIZE
        return os.pread(self.file, max(size, 0), _SIZE).decode(errors="replace")

    def read(self) -> Notes:
        words, now = self.words.tolist(), time.monotonic_ns()
        texts = [self._memory[place].partition(b"\0")[0] for place in (FUNCTION, COMPILING)]
        return Notes(
            words[COUNTS], words[LIMIT] / 1e9, bool(words[ENDS_JOB]), words[STARTED], words[COMPLETED],
            (now - words[COMPLETED_AT]) / 1e9, words[COMPILING_SINCE] and (now - words[COMPILING_SINCE]) / 1e9,
            *(text.decode(errors="ignore") for text in texts),  # a long one is cut
        )  # fmt: skip
