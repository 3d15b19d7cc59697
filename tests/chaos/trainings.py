"""An elastic training with a launcher on each host, of which any may be lost. Hosts are network namespaces."""

import contextlib
import functools
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import hosts
from trial import HANG, Outcome, Trial, Unexpected

TRAINING = pathlib.Path(__file__).parents[1] / "elastic" / "training.py"
PORT = 4613
HEARTBEAT = 6.0  # seconds, --heartbeat-timeout; loaded machines are silent for a while, too
STEPS = 50  # trainings end at multiples of this, so that few undisturbed ones are needed
SERVICE = "coordinator/server.py"
_DIGEST = re.compile(r"digest (\w{64}) of (\d+)")
_SAID = re.compile(r"(\d+\.\d+) (enters at|has made step) (\d+)(?: of (\d+))?.* (\d+)$", re.MULTILINE)


@functools.cache
def why_not() -> str:
    return hosts.why_not()


def where_hosts_work(scenario):
    @functools.wraps(scenario)
    def guarded(trial: Trial) -> Outcome:
        return Outcome(f"not tried: {why_not()}") if why_not() else scenario(trial)

    return guarded


@functools.cache
def undisturbed(steps: int) -> str:
    """The digest of a run without faults; in two processes, because one has nobody to ask for an audit."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-m", "jax_ring.launch", "-n", "2", str(TRAINING), str(steps), "{}", "--audits"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=2 * HANG)
    found = _DIGEST.search(result.stdout)
    assert found is not None, result.stdout
    return found[1]


class Generation(NamedTuple):
    """What its processes have said.

    Attributes:
      count: how many processes there are.
      entered: the steps at which they have entered the training.
      made: when each has made its first step.
    """

    count: int
    entered: list[int]
    made: list[float]


class Training:
    """A training that goes on until `end`, with a launcher on each host of a network.

    Attributes:
      every: the number of all processes.
      launchers: by index of the host.
      orders: the folder in which the processes look for what they shall do.
    """

    def __init__(self, trial: Trial, network: hosts.Hosts, processes: int) -> None:
        self.trial, self.network, self.processes = trial, network, processes
        self.every = network.count * processes
        self.secret = secrets.token_hex()  # of the launchers
        self.launchers: dict[int, subprocess.Popen] = {}
        self.orders = trial.folder / "orders"
        self.orders.mkdir()
        # Of each launcher that was started: its output, and where the generations of its job begin to count.
        self._outputs: list[tuple[pathlib.Path, int]] = []
        self._held: dict[int, tuple[int, int]] = {}  # by pid of a launcher, at first: descriptors and threads

    # ---- Launchers ---------------------------------------------------------------------------------------------------

    def start(self, host: int, begins: int = 0) -> None:
        """Starts a launcher; `begins` is the number that the first generation of a new job shall have here."""
        count = self.network.count
        coordinators = ",".join(f"{self.network.address(i)}:{PORT}" for i in range(count))
        several = ["--nnodes", f"{min(2, count)}:{count}", "--coordinator", coordinators] if count > 1 else []
        command = [
            sys.executable, "-P", "-m", "jax_ring.launch", "-n", str(self.processes), *several, "--devices", "1",
            "--heartbeat-timeout", str(HEARTBEAT), "--max-restarts", "1000", "--backoff", "0", "--grace", "3",
            str(TRAINING), str(10**9), "{}", "--wait-for", str(self.every), "--pause", "0.1", "--audits",
            "--orders", str(self.orders),
        ]  # fmt: skip
        output = self.trial.folder / f"output-{len(self._outputs)}-of-host-{host}"
        self._outputs.append((output, begins))
        with open(output, "w") as file:
            self.launchers[host] = subprocess.Popen(
                self.network.command(host, command),
                env={**os.environ, **self.trial.environment, "JAX_RING_SECRET": self.secret},
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def all_pids(self, host: int) -> list[int]:
        """Of the launcher of a host, and of its processes."""
        return [self.launchers[host].pid, *descendants(self.launchers[host].pid)]

    def kill(self, host: int) -> None:
        """Kills the launcher of a host and its processes."""
        for pid in self.all_pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launchers.pop(host).wait()

    def lose(self, host: int, signum: int) -> None:
        """Ends the launcher of a host alone, which is to end its processes."""
        launcher = self.launchers.pop(host)
        launcher.send_signal(signum)
        launcher.wait(HANG)

    def begin_again(self) -> None:
        """Starts the job of one host again, once nothing is left of it."""
        self.trial.await_end_of_processes()
        self.start(0, max(self.generations(), default=-1) + 1)

    def service_host(self) -> int:
        """The host of JAX's coordination service, whose launcher leads."""
        until = time.monotonic() + HANG
        while not (found := [host for host in self.launchers if self.pids(host, SERVICE)]):
            self.check(until, "no coordination service")
            time.sleep(0.02)
        return found[0]

    # ---- What the processes say --------------------------------------------------------------------------------------

    def text(self) -> str:
        return "\n".join(f"---- {output.name}\n{output.read_text()}" for output, _ in self._outputs)

    def generations(self) -> dict[int, Generation]:
        """By number, from the first."""
        found: dict[int, Generation] = {}
        for output, begins in self._outputs:
            for at, what, step, count, number in _SAID.findall(output.read_text()):
                generation = found.setdefault(begins + int(number), Generation(int(count or 0), [], []))
                if what == "enters at":
                    generation.entered.append(int(step))
                else:
                    generation.made.append(float(at))
        return dict(sorted(found.items()))

    def await_progress(self, processes: int, after: float, number: int) -> float:
        """Waits until so many processes go on in a later generation, after a time; returns when they did."""
        until = time.monotonic() + 2 * HANG
        while True:
            for each, generation in self.generations().items():
                goes_on = len(generation.made) == generation.count == processes
                if each > number and goes_on and max(generation.made) > after:
                    return max(generation.made)
            self.check(until, f"no {processes} processes go on after generation {number}")
            time.sleep(0.1)

    # ---- Processes ---------------------------------------------------------------------------------------------------

    def pids(self, host: int, name: str = TRAINING.name) -> list[int]:
        """Of the processes of a host that run this file, in the order of their numbers."""
        return sorted(pid for pid in descendants(self.launchers[host].pid) if name.encode() in _command(pid))

    def some_pid(self, host: int) -> int:
        """Of a process of the training; waits until there is one."""
        until = time.monotonic() + HANG
        while not (pids := self.pids(host)):
            self.check(until, f"no process on host {host}")
            time.sleep(0.02)
        return int(self.trial.random.choice(pids))

    def order(self, name: str, text: str) -> None:
        temporary = self.orders / "new"
        temporary.write_text(text)
        temporary.rename(self.orders / name)

    # ---- What is expected --------------------------------------------------------------------------------------------

    def check(self, until: float, missing: str) -> None:
        if time.monotonic() > until:
            raise Unexpected("hang", f"{missing}\n{self.text()}")
        for host, launcher in self.launchers.items():
            if launcher.poll() is not None:
                raise Unexpected("other end", f"{missing}; host {host} has ended\n{self.text()}")

    def check_leftovers(self) -> None:
        """That each host has the processes of this generation alone, no unused shared memory, and no more open files.

        The first time that a launcher is looked at is what the later ones are compared with.
        """
        for host, launcher in self.launchers.items():
            pids, until = self.pids(host), time.monotonic() + 10
            while len(pids) > self.processes and time.monotonic() < until:
                pids = self.pids(host)
            if len(pids) != self.processes:
                raise Unexpected("leftover", f"processes {pids} on host {host}\n{self.text()}")
            process = pathlib.Path(f"/proc/{launcher.pid}")
            names = [path.name for path in (process / "root/dev/shm").glob("jax_ring*")]
            mapped = "".join(pathlib.Path(f"/proc/{pid}/maps").read_text() for pid in pids)
            if left := [name for name in names if name not in mapped]:
                raise Unexpected("leftover", f"/dev/shm of host {host}: {left}\n{self.text()}")
            held = len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))
            first = self._held.setdefault(launcher.pid, held)
            # Whoever leads has connections to the others, and each the signs of life of a service and its processes.
            if max(now - before for now, before in zip(held, first, strict=True)) > 3 * self.network.count:
                raise Unexpected(
                    "leftover", f"the launcher of host {host} had {first} open files and threads, has {held}\n"
                    f"{self.text()}",
                )  # fmt: skip

    def check_generations(self) -> None:
        """That no two parts went on at the same time, and that no commit was lost while its job went on."""
        newest = job = 0
        for number, generation in self.generations().items():
            # The first generation of a job may have ended before it has said anything.
            if (begins := max(begins for _, begins in self._outputs if begins <= number)) != job:
                newest, job = 0, begins
            if len(generation.entered) > generation.count or len(generation.made) > generation.count:
                raise Unexpected("other end", f"two parts in generation {number}\n{self.text()}")
            if len({newest, *generation.entered}) > 2 or min(generation.entered) < newest:
                raise Unexpected(
                    "other end", f"generation {number} enters at {generation.entered}, after {newest}\n{self.text()}"
                )
            newest = max([newest, *generation.entered])

    def end(self) -> None:
        """Has the training end, and compares its result."""
        newest = max(map(int, re.findall(r"is at (\d+)", self.text())), default=0)
        steps = (newest // STEPS + 2) * STEPS  # no process is there yet: each pauses before a step
        self.order("steps", str(steps))
        for launcher in self.launchers.values():
            try:
                status = launcher.wait(3 * HANG)
            except subprocess.TimeoutExpired:
                raise Unexpected("hang", f"the training does not end\n{self.text()}") from None
            assert status == 0, self.text()
        digests, expected = set(_DIGEST.findall(self.text())), undisturbed(steps)
        if digests != {(expected, str(self.every))}:
            raise Unexpected("wrong bits", f"{digests} instead of {expected}\n{self.text()}")


@contextlib.contextmanager
def training(trial: Trial, num_hosts: int, processes: int) -> Iterator[Training]:
    """A training on so many hosts, from the first step on. Leaving the block kills it."""
    with hosts.Hosts(num_hosts) as network:
        job = Training(trial, network, processes)
        try:
            for host in range(num_hosts):
                job.start(host)
            job.await_progress(job.every, 0, -1)
            job.check_leftovers()
            yield job
        finally:
            for host in list(job.launchers):
                job.kill(host)


def descendants(pid: int) -> list[int]:
    try:
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def is_stopped(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _command(pid: int) -> bytes:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
