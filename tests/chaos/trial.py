"""One trial of the chaos program: its random numbers, its folder and processes, and what it may leave behind."""

import contextlib
import glob
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from watched import Processes, as_text

JOBS = pathlib.Path(__file__).with_name("jobs.py")
DEADLINE = 4.0  # seconds, JAX_RING_TIMEOUT_S of the processes
HANG = 90.0  # seconds after which what has not happened counts as a hang, on a loaded machine as well
FALSE_ALARM = "a false alarm, goes on"  # how what nobody should have noticed has ended
_MARK = "JAX_RING_CHAOS"  # in the environment of all processes of a trial


class Outcome(NamedTuple):
    """How a trial has ended, as expected.

    Attributes:
      ended: in words, for the table.
      faults: how many there were.
      calls: collectives whose results were checked, over all processes.
      seconds: from each fault to the end that was expected of it.
    """

    ended: str
    faults: int = 0
    calls: int = 0
    seconds: tuple[float, ...] = ()


class Unexpected(Exception):
    """A trial has not ended as expected. kind: "hang", "leftover", "wrong bits" or "other end"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Trial:
    """A trial.

    Attributes:
      seed: reproduces it, up to the scheduling of the processes.
      random: its random numbers.
      folder: for its files; the processes have their temporary files there too.
      outcomes: of its parts, with their names, if it has several.
      part: the name of the present one and how many faults it has.
      notes: what has been done so far, with times, for an output that is kept.
      num_hosts: of a training; None to draw it.
    """

    def __init__(self, seed: int, num_hosts: int | None = None) -> None:
        self.seed, self.random, self.num_hosts = seed, np.random.default_rng(seed), num_hosts
        self.notes: list[str] = []
        self.outcomes: list[tuple[str, Outcome]] = []
        self.part: tuple[str, int] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        self.folder = pathlib.Path(self._folder.name)
        self._mark = f"{os.getpid()}-{seed}"
        self.environment = {
            _MARK: self._mark,
            "TMPDIR": str(self.folder),
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",
            "JAX_RING_TIMEOUT_S": str(DEADLINE),
        }

    def run(self, scenario: Callable[["Trial"], Outcome]) -> Outcome:
        """Runs a scenario, and looks for what it has left behind.

        Raises:
          Unexpected: if it does not end as expected.
        """
        segments, mine = set(_segments()), set(os.listdir(self.folder))
        try:
            outcome = scenario(self)
            self._check_leftovers(segments, mine)
        except AssertionError as error:
            raise Unexpected("wrong bits" if "WRONG BITS" in str(error) else "other end", str(error)) from error
        finally:
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._folder.cleanup()
            for path in _unused(set(_segments()) - segments):
                pathlib.Path(path).unlink(missing_ok=True)
        return outcome

    # ---- Processes without a launcher --------------------------------------------------------------------------------

    def start(self, body: Callable, num_processes: int, devices: int = 1, *, arguments: Sequence = (), **options):
        """The processes of a program, as of `watched.Processes`."""
        environment = {**self.environment, "JAX_ENABLE_RECOVERABILITY": "1", **options.pop("environment", {})}
        return Processes(body, num_processes, devices, arguments=arguments, environment=environment, **options)

    def await_text(self, program: Processes, process: int, text: str | tuple[str, ...]) -> str:
        """Waits until a process has written a line that begins with a text, or one of several; returns the last one.

        Raises:
          Unexpected: a hang, if it does not come; another end, if the process ends first.
        """
        try:
            program.wait_until(process, text, timeout=HANG)
        except AssertionError as error:
            kind = "other end" if program.popen[process].poll() is not None else "hang"
            raise Unexpected(kind, str(error)) from error
        return [line for line in program.result(process).stdout.splitlines() if line.startswith(text)][-1]

    def finish(self, program: Processes, survivors: Sequence[int], has_failed: bool = False) -> int:
        """Ends a program whose bodies wait for the files `end` and, in process 0, `last`. Returns the calls checked.

        has_failed: JAX may end the process with any status, since arrays that hold errors are still there.
        """
        (self.folder / "end").touch()
        for process in (*[i for i in survivors if i != 0], *[i for i in survivors if i == 0]):
            if process == 0:
                (self.folder / "last").touch()
            try:
                status = program.popen[process].wait(HANG)
            except subprocess.TimeoutExpired:
                raise Unexpected("hang", f"process {process} does not exit\n{self._output(program)}") from None
            if status != 0 and not has_failed:
                raise Unexpected("other end", f"process {process} returned {status}\n{self._output(program)}")
        return sum(calls_in(program.result(i).stdout) for i in survivors)

    def _output(self, program: Processes) -> str:
        return as_text([program.result(i) for i in range(len(program.popen))])

    # ---- The launcher ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def launch(self, options: Sequence[str], script: Sequence[str], **popen) -> Iterator["Launched"]:
        """`jax_ring.launch` with a script of `jobs.py`. Leaving the block kills the launcher."""
        launched = Launched(self, [*options, str(JOBS), *script], popen)
        try:
            yield launched
        finally:
            launched.process.kill()
            launched.process.wait()
            if launched.process.stdout is not None:
                launched.process.stdout.close()

    # ---- Leftovers ---------------------------------------------------------------------------------------------------

    def _processes(self) -> list[int]:
        """The processes of this trial that are still there."""
        pids = []
        for path in glob.glob("/proc/[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{_MARK}={self._mark}".encode() in pathlib.Path(path).read_bytes().split(b"\0"):
                    pids.append(int(path.split("/")[2]))
        return [pid for pid in pids if pid != os.getpid()]

    def await_end_of_processes(self) -> None:
        """Waits until none is left; the kernel removes killed ones in its own time."""
        until = time.monotonic() + 10
        while pids := self._processes():
            if time.monotonic() > until:
                raise Unexpected("leftover", f"processes {pids}")
            time.sleep(0.05)

    def _check_leftovers(self, segments: set[str], files: set[str]) -> None:
        self.await_end_of_processes()
        if left := _unused(set(_segments()) - segments):
            raise Unexpected("leftover", f"segments {sorted(left)}")
        left = {
            name
            for name in set(os.listdir(self.folder)) - files
            if (self.folder / name).is_socket() or "jax_ring" in name
        }
        if left:
            raise Unexpected("leftover", f"temporary files {sorted(left)}")


class Launched:
    """A launcher that runs. Its output goes to files, so that it never blocks."""

    def __init__(self, trial: Trial, arguments: Sequence[str], popen: dict) -> None:
        self.trial = trial
        self._files = [trial.folder / "launcher.out", trial.folder / "launcher.err"]
        with open(self._files[0], "w") as out, open(self._files[1], "w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jax_ring.launch", *arguments],
                **{
                    "env": {**os.environ, **trial.environment}, "stdin": subprocess.DEVNULL,
                    "stdout": out, "stderr": err, "start_new_session": True, **popen,
                },
            )  # fmt: skip

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self._files)

    def await_lines(self, text: str | tuple[str, ...], number: int = 1) -> list[str]:
        """Waits until so many lines contain the text, or one of several, and returns them."""
        texts, until = (text,) if isinstance(text, str) else text, time.monotonic() + HANG
        while True:
            has_ended = self.process.poll() is not None
            lines = [line for line in self.output().splitlines() if any(each in line for each in texts)]
            if len(lines) >= number:
                return lines
            if has_ended:
                raise Unexpected("other end", f"the launcher returned {self.process.returncode}\n{self.output()}")
            if time.monotonic() > until:
                raise Unexpected("hang", f"no {text!r}\n{self.output()}")
            time.sleep(0.02)

    def pids(self, number: int) -> dict[int, int]:
        """The pid of each rank of `launched_sums`."""
        found = [re.search(r"\[(\d+)\] pid (\d+)", line) for line in self.await_lines("] pid ", number)]
        return {int(match[1]): int(match[2]) for match in found if match}

    def wait(self, limit: float = HANG) -> int:
        """The exit status of the launcher."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise Unexpected("hang", f"the launcher does not exit\n{self.output()}") from None


def calls_in(output: str) -> int:
    """The calls that a process has checked, by what it has written last."""
    found = re.findall(r"\bcalls (\d+)$", output, re.MULTILINE)
    return int(found[-1]) if found else 0


def _unused(segments: set[str]) -> set[str]:
    """Those that stay and that no process has mapped: other programs may run on this machine at the same time."""
    for _ in range(3):
        mapped = ""
        for path in glob.glob("/proc/[0-9]*/maps"):
            with contextlib.suppress(OSError):
                mapped += pathlib.Path(path).read_text()
        segments = {segment for segment in segments if segment not in mapped and os.path.exists(segment)}
        if not segments:
            break
        time.sleep(0.5)
    return segments


def _segments() -> list[str]:
    return glob.glob("/dev/shm/jax_ring*")
