"""A training on hosts that come and go: network namespaces with a launcher on each, of which any is lost.

Each scenario ends with all hosts, and the bits of an undisturbed run.
"""

import contextlib
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import hosts
from trial import HANG, Outcome, Trial, Unexpected

TRAINING = pathlib.Path(__file__).parents[1] / "elastic" / "training.py"
STEPS = 30
PORT = 4613
HEARTBEAT = 6.0  # seconds, --heartbeat-timeout; loaded machines are silent for a while, too
NUM_HOSTS = 3
_DIGEST = re.compile(r"digest (\w{64}) of (\d+)")


@functools.cache
def why_not() -> str:
    return hosts.why_not()


@functools.cache
def undisturbed(steps: int, audits: bool) -> str:
    """The digest of a run in one process without a launcher; with audits in two, because one has nobody to ask."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    launcher = ["-m", "jax_ring.launch", "-n", "2"] if audits else []
    command = [sys.executable, "-P", *launcher, str(TRAINING), str(steps), "{}", *(["--audits"] if audits else [])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=HANG)
    found = _DIGEST.search(result.stdout)
    assert found is not None, result.stdout
    return found[1]


class Job:
    """Launchers on hosts, by index of the host.

    options, script: further arguments of launcher and training.

    Attributes:
      outputs: the files of all launchers that were started.
      output_of: that of each host's last launcher.
    """

    def __init__(
        self, trial: Trial, network: hosts.Hosts, processes: int = 1, *, steps: int = STEPS, options=(),
        script=("--pause", "0.3"),
    ) -> None:  # fmt: skip
        self.trial, self.network, self.processes, self.steps = trial, network, processes, steps
        self.every = network.count * processes
        self._options, self._script = options, script
        self.launchers: dict[int, subprocess.Popen] = {}
        self.outputs: list[pathlib.Path] = []
        self.output_of: dict[int, pathlib.Path] = {}

    def start(self, host: int) -> None:
        count = self.network.count
        coordinators = ",".join(f"{self.network.address(i)}:{PORT}" for i in range(count))
        command = [
            sys.executable, "-P", "-m", "jax_ring.launch", "-n", str(self.processes), "--nnodes", f"2:{count}",
            "--coordinator", coordinators, "--heartbeat-timeout", str(HEARTBEAT), "--devices", "1", *self._options,
            str(TRAINING), str(self.steps), "{}", "--keep", "host", "--wait-for", str(self.every), *self._script,
        ]  # fmt: skip
        output = self.trial.folder / f"output-{len(self.outputs)}-of-host-{host}"
        self.outputs.append(output)
        self.output_of[host] = output
        with open(output, "w") as file:
            self.launchers[host] = subprocess.Popen(
                self.network.command(host, command), env={**os.environ, **self.trial.environment},
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        return "\n".join(f"---- {output.name}\n{output.read_text()}" for output in self.outputs)

    def await_entries(self, processes: int, times: int) -> None:
        """Waits until so many processes have said so often that they enter the training with all of them."""
        until = time.monotonic() + 2 * HANG
        while len(re.findall(rf"enters at \d+ of {processes} ", self.text())) < times:
            if time.monotonic() > until:
                raise Unexpected("hang", f"fewer than {times} entries of {processes} processes\n{self.text()}")
            if any(launcher.poll() is not None for launcher in self.launchers.values()):
                raise Unexpected("other end", self.text())
            time.sleep(0.05)

    def await_steps(self, number: int) -> None:
        until = time.monotonic() + HANG
        while len(re.findall("has made step", self.text())) < number:
            if time.monotonic() > until:
                raise Unexpected("hang", self.text())
            time.sleep(0.05)

    def signal(self, host: int, signum: int) -> None:
        """Signals the launcher of a host, and its processes."""
        for pid in [self.launchers[host].pid, *descendants(self.launchers[host].pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def lose(self, host: int, signum: int) -> None:
        """Ends the launcher of a host alone, which is to end its processes."""
        launcher = self.launchers.pop(host)
        launcher.send_signal(signum)
        launcher.wait(HANG)

    def finish(self) -> None:
        for launcher in self.launchers.values():
            try:
                status = launcher.wait(3 * HANG)
            except subprocess.TimeoutExpired:
                raise Unexpected("hang", self.text()) from None
            assert status == 0, self.text()
        digests, expected = set(_DIGEST.findall(self.text())), undisturbed(self.steps, "--audits" in self._script)
        if digests != {(expected, str(self.every))}:
            raise Unexpected("wrong bits", f"{digests} instead of {expected}\n{self.text()}")


def descendants(pid: int) -> list[int]:
    try:
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]


@contextlib.contextmanager
def running(job: Job) -> Iterator[None]:
    """The job on all hosts, from the first step on. Leaving the block kills it."""
    try:
        for host in range(job.network.count):
            job.start(host)
        job.await_entries(job.every, job.every)
        job.await_steps(job.every)
        yield
    finally:
        for host, launcher in job.launchers.items():
            job.signal(host, signal.SIGKILL)
            launcher.wait()


@contextlib.contextmanager
def _job(trial: Trial, rate: str | None = None, count: int = NUM_HOSTS) -> Iterator[Job]:
    with hosts.Hosts(count, rate=rate) as network, running(job := Job(trial, network)):
        yield job


def _goes_on(trial: Trial, fault, repair, ended: str, victim: int | None = None) -> Outcome:
    """A host is lost, the others go on, it comes again, and all finish."""
    victim = int(trial.random.integers(NUM_HOSTS)) if victim is None else victim
    with _job(trial) as job:
        time.sleep(trial.random.exponential(0.5))
        left, every = (NUM_HOSTS - 1) * job.processes, job.every
        began = time.monotonic()
        fault(job, victim)
        job.await_entries(left, left)
        seconds = time.monotonic() - began
        repair(job, victim)
        job.await_entries(every, 2 * every)
        job.finish()
    return Outcome(f"{ended}, right bits", 1, 0, (seconds,))


def killed(trial: Trial, victim: int | None = None) -> Outcome:
    """A host's launcher and processes are killed; another one is started there."""

    def fault(job: Job, host: int) -> None:
        job.signal(host, signal.SIGKILL)
        job.launchers.pop(host).wait()

    return _goes_on(trial, fault, Job.start, "goes on without the killed host and with a new one", victim)


def stopped(trial: Trial, victim: int | None = None) -> Outcome:
    """All processes of a host are stopped, until the others have gone on."""
    return _goes_on(
        trial, lambda job, host: job.signal(host, signal.SIGSTOP), lambda job, host: job.signal(host, signal.SIGCONT),
        "goes on without the stopped host and with it again", victim,
    )  # fmt: skip


def cut_off(trial: Trial, victim: int | None = None) -> Outcome:
    """The link of a host is down until the others have gone on, and then up again."""
    return _goes_on(
        trial, lambda job, host: job.network.pull_cable(host), lambda job, host: job.network.plug_in(host),
        "goes on without the host that is cut off and with it again", victim,
    )  # fmt: skip


def slow(trial: Trial) -> Outcome:
    """The links have 10 Mbit/s: nobody is lost."""
    with _job(trial, rate="10mbit") as job:
        job.finish()
        assert not re.search("is gone|silent|ended, or cannot", job.text()), job.text()
    return Outcome("goes on with all, right bits", 1)


def split(trial: Trial) -> Outcome:
    """The network of four hosts splits in halves. The one with the first host goes on alone, then all do."""
    with _job(trial, count=4) as job:
        time.sleep(trial.random.exponential(0.5))
        (address,) = set(re.findall(r"generation 0: hosts 0 \(([\d.]+):", job.text()))
        first = next(host for host in range(4) if job.network.address(host) == address)
        began = time.monotonic()
        job.network.split(trial.random.permutation([host for host in range(4) if host != first])[:2])
        job.await_entries(2, 2)
        seconds = time.monotonic() - began
        time.sleep(HEARTBEAT)
        job.network.join()
        job.await_entries(job.every, 2 * job.every)
        half = re.compile(r"enters at \d+ of 2 ")
        went_on = {host for host, output in job.output_of.items() if half.search(output.read_text())}
        assert first in went_on, job.text()
        assert len(went_on) == 2, job.text()
        job.finish()
    return Outcome("one half goes on, then all, right bits", 1, 0, (seconds,))


def where_hosts_work(scenario):
    @functools.wraps(scenario)
    def guarded(trial: Trial) -> Outcome:
        return Outcome(f"not tried: {why_not()}") if why_not() else scenario(trial)

    return guarded


SCENARIOS = tuple(map(where_hosts_work, (killed, stopped, cut_off, slow, split)))
