"""A page of memory in which a process notes its steps. Its launcher reads it whatever the process does.

The launcher makes it for each process, as an anonymous file. The words are integers of 64 bits, times are nanoseconds
of the host's monotonic clock. Behind the page the file holds stacks that Python writes on a signal.
"""

import faulthandler
import json
import mmap
import os
import signal
import time
from typing import Any, NamedTuple

NAME = "jax_ring_steps"  # names the file
STACKS_SIGNAL = signal.SIGRTMAX - 7  # one that programs have no use for
PAGE_VARIABLE = "JAX_RING_STEPS"  # the file's descriptor in the process, and the process that has taken it
_MAX_SECONDS = 1e9  # of a limit, as nanoseconds in a word
RECENT = 112  # steps whose times are kept

STEPS, EXECUTIONS = 1, 2  # what a process counts; 0 for nothing
_KIND, _LIMIT, _ENDS_JOB, _GENERATION, _BASE, _STARTED, _RETURNED, _COMPLETED, _COMPLETED_AT = range(9)
_COMPILING_SINCE = 9
_RECENT_AT, _EACH = 16, 4  # per step: its number, when it was started and completed, and its function
_NUM_WORDS = 512
_TEXT_AT = 8 * _NUM_WORDS
SIZE = 8192
assert _RECENT_AT + _EACH * RECENT <= _NUM_WORDS


class Times(NamedTuple):
    """When a step was started and completed, in nanoseconds (0 if not yet), and the index of its function."""

    started: int
    completed: int
    function: int


class Notes(NamedTuple):
    """What a process has noted."""

    counts: int  # STEPS, EXECUTIONS or 0
    limit: float  # seconds after which it is stuck; 0 if it has none
    ends_job: bool  # whether the job ends then
    generation: int  # of which it is a member; -1 for none
    # Numbers of steps in the generation.
    started: int
    returned: int  # launched
    completed: int
    completed_at: int  # when the last one was completed, or the generation entered
    compiling_since: int  # 0 if it does not trace or compile
    recent: dict[int, Times]  # the last steps, by number in the generation
    names: list[str]  # of the watched functions
    compiling: str  # what is compiled


class Page:
    """The page of one process. The launcher reads, the process writes."""

    def __init__(self, file: int) -> None:
        self.file = file
        os.ftruncate(file, max(SIZE, os.fstat(file).st_size))
        self._memory = mmap.mmap(file, SIZE)
        self._words = memoryview(self._memory)[:_TEXT_AT].cast("q")
        self._texts: dict[str, Any] = {"names": [], "compiling": ""}

    @classmethod
    def new(cls, generation: int) -> "Page":
        page = cls(os.memfd_create(NAME))
        page.enter(generation)
        return page

    @classmethod
    def of_launcher(cls) -> "Page | None":
        """The page of this process; None without a launcher."""
        given, _, owner = os.environ.get(PAGE_VARIABLE, "").partition(":")
        if not given or owner not in ("", str(os.getpid())):  # of the parent of a forked process
            return None
        try:
            # A program started by a process of the launcher inherits the variable, but not the file.
            if os.readlink(f"/proc/self/fd/{given}").startswith(f"/memfd:{NAME}"):
                os.environ[PAGE_VARIABLE] = f"{given}:{os.getpid()}"
                return cls(int(given))
        except OSError:
            pass
        return None

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self.file)

    # What the process calls:

    def write_stacks_on_signal(self) -> None:
        """Makes Python write the stacks of all threads behind the page, also while one holds its lock."""
        faulthandler.register(STACKS_SIGNAL, file=self.file, all_threads=True)

    def begin(self, counts: int, limit: float, ends_job: bool, name: str) -> int:
        """Says that it counts, and adds a watched function, whose index it returns. The shortest limit holds."""
        words = self._words
        if words[_KIND] == EXECUTIONS != counts:
            words[_KIND] = words[_BASE] = words[_STARTED] = words[_RETURNED] = words[_COMPLETED] = 0
        given = round(min(limit, _MAX_SECONDS) * 1e9)
        words[_LIMIT] = min(given, words[_LIMIT] or given)
        words[_ENDS_JOB] = words[_ENDS_JOB] or ends_job
        names = self._texts["names"]
        if name not in names:
            names.append(name)
            self._write_texts()
        words[_COMPLETED_AT] = words[_COMPLETED_AT] or time.monotonic_ns()
        words[_KIND] = counts
        return names.index(name)

    @property
    def counts_executions(self) -> bool:
        return self._words[_KIND] == EXECUTIONS

    def enter(self, generation: int) -> None:
        """Counts from 0 again, as a member of a generation; -1 for none."""
        words = self._words
        words[_GENERATION] = -1  # the launcher does not look at what follows
        words[_BASE] = words[_RETURNED] = words[_COMPLETED] = words[_STARTED]
        words[_COMPLETED_AT] = time.monotonic_ns()
        words[_GENERATION] = generation

    def start(self, step: int, function: int) -> None:
        """Notes a step's beginning. Steps are numbered from 1, through all generations."""
        words = self._words
        at = _RECENT_AT + _EACH * (step % RECENT)
        words[at + 1] = time.monotonic_ns()
        words[at + 2] = 0
        words[at + 3] = function
        words[at] = words[_STARTED] = step

    def returned(self, step: int) -> None:
        self._words[_RETURNED] = step

    def complete(self, step: int, all_until: int | None = None) -> None:
        """Notes a step's end. all_until: the last one before which none is left; by default this one."""
        words = self._words
        if step <= words[_COMPLETED]:  # of an earlier generation
            return
        now = time.monotonic_ns()
        at = _RECENT_AT + _EACH * (step % RECENT)
        if words[at] == step:
            words[at + 2] = now
        words[_COMPLETED_AT] = now
        words[_COMPLETED] = max(words[_COMPLETED], step if all_until is None else all_until)

    def compile(self, what: str | None) -> None:
        """Notes what is traced or compiled from now on; None for nothing."""
        words = self._words
        if what is None:
            words[_COMPILING_SINCE] = 0
            return
        self._texts["compiling"] = what
        self._write_texts()
        words[_COMPILING_SINCE] = time.monotonic_ns()

    def _write_texts(self) -> None:
        texts, longest, room = self._texts, SIZE, SIZE - _TEXT_AT - 1
        while len(data := json.dumps(texts).encode()) > room and longest:
            longest //= 2
            names = [name[:longest] for name in self._texts["names"]]
            texts = {"names": names, "compiling": self._texts["compiling"][:longest]}
        self._memory[_TEXT_AT : _TEXT_AT + len(data) + 1] = data + b"\0"

    # What both call:

    def read(self) -> Notes:
        words = self._words.tolist()
        base = words[_BASE]
        recent = {}
        for at in range(_RECENT_AT, _RECENT_AT + _EACH * RECENT, _EACH):
            if (step := words[at] - base) > 0:
                recent[step] = Times(*words[at + 1 : at + _EACH])
        try:
            texts = json.loads(self._memory[_TEXT_AT:].partition(b"\0")[0] or "{}")
        except ValueError:  # it is being written, or has thousands of names
            texts = {}
        return Notes(
            words[_KIND], words[_LIMIT] / 1e9, bool(words[_ENDS_JOB]), words[_GENERATION], words[_STARTED] - base,
            words[_RETURNED] - base, words[_COMPLETED] - base, words[_COMPLETED_AT], words[_COMPILING_SINCE], recent,
            texts.get("names", []), texts.get("compiling", ""),
        )  # fmt: skip

    def stacks(self) -> str:
        """What Python has written behind the page since `forget_stacks`."""
        size = os.fstat(self.file).st_size - SIZE
        return os.pread(self.file, max(size, 0), SIZE).decode(errors="replace")

    def forget_stacks(self) -> None:
        os.ftruncate(self.file, SIZE)
        # The process writes where this file's offset is: it is one for both.
        os.lseek(self.file, SIZE, os.SEEK_SET)
