"""A process of a job: started, labeled, signalled, described."""

import asyncio
import contextlib
import enum
import errno
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from jax_ring.launcher.arguments import Options
from jax_ring.launcher.output import Output
from jax_ring.launcher.watching.page import Page

_PROGRAM = pathlib.Path(__file__).parent / "worker.py"
# How long the descendants of a process that has ended have to end by themselves. Python's tracker of shared memory does
# so, and then removes names.
_DESCENDANTS_SECONDS = 1.0
_POLL_SECONDS = 0.02
# What to do about a lack that keeps a process, a thread or a file from being there.
_REMEDIES = {
    errno.EAGAIN: "raise the limit of processes (ulimit -u, and pids.max of the control group), or start fewer (-n)",
    errno.ENOMEM: "leave more memory, or start fewer processes (-n)",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or start fewer processes (-n)",
    errno.ENFILE: "close files of other programs, or raise the system's limit (fs.file-max)",
}


class State(enum.IntEnum):
    """What a launcher knows of a process. It goes to a later state only; `Process.status` tells whether it has ended.

    RUNNING: It runs the script.
    RAISED: An exception of its own ends it.
    TOLD: It was told to end, by a signal.
    KILLED: By the launcher.
    """

    RUNNING = enum.auto()
    RAISED = enum.auto()
    TOLD = enum.auto()
    KILLED = enum.auto()


class Process:
    """A process that runs the script, leading a group that is killed with it.

    Attributes:
      number: the launcher's, never used again.
      rank: its index in the job.
      state: what the launcher knows of it.
      status: exit status, or minus its signal; None while it runs.
      page: where it notes its steps.
    """

    def __init__(
        self,
        options: Options,
        number: int,
        rank: int,
        page: Page,
        environment: dict[str, str],
        files: Sequence[int],
    ) -> None:
        """Starts the process, which inherits files, as its forks do. Raises OSError if the system cannot."""
        self.number, self.rank, self.page = number, rank, page
        self.state = State.RUNNING
        self.status: int | None = None
        self._ending: asyncio.Task | None = None  # of its descendants
        files = (*files, self.page.file)
        program = [sys.executable, "-P", str(_PROGRAM), str(os.getpid()), ",".join(map(str, files))]
        self._process = subprocess.Popen(
            [*program, "module" if options.is_module else "script", *options.command], env=environment,
            start_new_session=True,  # the kernel would stop it where it asks on the terminal, as ssh and getpass do
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=files,
        )  # fmt: skip

    def copy_output(self, output: Output, label: str, logs: tuple[int | None, int | None]) -> None:
        output.copy(self._process.stdout, False, label, self.rank, logs[0])
        output.copy(self._process.stderr, True, label, self.rank, logs[1])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def advance(self, state: State) -> None:
        self.state = max(self.state, state)

    def reap(self) -> bool:
        """Whether it has exited since the last call. Its descendants are killed then, after a moment."""
        if self.status is not None or (status := self._process.poll()) is None:
            return False
        self.status = status
        self._ending = asyncio.create_task(self._end_descendants())
        return True

    async def _end_descendants(self) -> None:
        until = time.monotonic() + _DESCENDANTS_SECONDS
        # None are left, or only those of another user.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < until:
                os.killpg(self.pid, 0)
                await asyncio.sleep(_POLL_SECONDS)
            os.killpg(self.pid, signal.SIGKILL)

    def send(self, signum: int, *, to_descendants: bool = True) -> None:
        """Signals it and its descendants, if running; SIGKILL gets to these a moment later."""
        if self._process.returncode is None:
            (os.killpg if to_descendants and signum != signal.SIGKILL else os.kill)(self.pid, signum)

    def kill(self, until: float) -> bool:
        """Kills it, forgets its steps, and waits for its end until a time; returns whether it has ended."""
        self.send(signal.SIGKILL)
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            self.status = -signal.SIGKILL
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            return False
        finally:
            self.reap()
            self.page.close()

    async def descendants_ended(self) -> None:
        """Waits for their end, after its own."""
        if self._ending is not None:
            await self._ending

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it, if the system tells."""
        return state_of(self.pid) in ("T", "t")


def state_of(pid: int) -> str:
    """A process's state, as in `ps`; empty if there is none."""
    try:
        return _stat(pid)[0]
    except (OSError, IndexError):
        return ""


def may_be(pid: int, process: int) -> bool:
    """Whether a pid may be that of a process or of one that it has started. True where the system does not tell."""
    try:
        while pid > 1:
            if process in (pid, os.getsid(pid)):
                return True
            pid = int(_stat(pid)[1])  # its parent
    except (OSError, IndexError):
        return True  # it has ended, or there is no /proc
    return pid == 0  # it is in another namespace


def _stat(pid: int) -> list[str]:
    """The numbers of a process behind its name, as its state and its parent."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()


def is_lack(error: OSError) -> bool:
    """Whether the system has too little of something."""
    return error.errno in _REMEDIES


def explained(error: OSError) -> str:
    """What an error says, and what to do about it, if that is known."""
    return f"{error}: {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else str(error)


def format_ranks(processes: Iterable[Process]) -> str:
    return ", ".join(map(str, sorted(process.rank for process in processes)))


def describe_status(status: int) -> str:
    """How a process ended, from its status or minus its signal."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
