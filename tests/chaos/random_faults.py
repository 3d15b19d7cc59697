"""Any faults in a row, in one training on three hosts of two processes each: alone, two at once, or in a recovery.

After each the job goes on, and with all hosts once what was lost is there again. It ends with the bits of an
undisturbed run. A fault that is over before any timeout must not be noticed.
"""

import os
import pathlib
import re
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import hosts
from coming_hosts import HEARTBEAT, NUM_HOSTS, Job, descendants, running, where_hosts_work
from trial import FALSE_ALARM, HANG, Outcome, Trial, Unexpected

PROCESSES = 2  # of each host
FAULTS = 10  # of a training; one more if the last are two
BRIEF = 1.2  # seconds, with TCP's retransmission less than half of the deadline
STEPS = 50  # trainings end at multiples of this, so that few undisturbed ones are needed
_SAID = re.compile(r"(\d+\.\d+) (enters at|has made step) (\d+)(?: of (\d+))?.* restart (\d+)")


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


class Training(Job):
    def __init__(self, trial: Trial, network: hosts.Hosts, processes: int) -> None:
        self.orders = trial.folder / "orders"
        self.orders.mkdir()
        super().__init__(
            trial, network, processes, steps=10**9,
            options=("--max-restarts", "1000", "--backoff", "0", "--grace", "3"),
            script=("--pause", "0.1", "--audits", "--orders", str(self.orders)),
        )  # fmt: skip

    def generations(self) -> dict[int, Generation]:
        """By number, from the first."""
        found: dict[int, Generation] = {}
        for at, what, step, count, number in sorted(_SAID.findall(self.text()), key=lambda each: float(each[0])):
            generation = found.setdefault(int(number), Generation(int(count or 0), [], []))
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
            time.sleep(0.2)

    def check(self, until: float, missing: str) -> None:
        if time.monotonic() > until:
            raise Unexpected("hang", f"{missing}\n{self.text()}")
        for host, launcher in self.launchers.items():
            if launcher.poll() is not None:
                raise Unexpected("other end", f"{missing}; host {host} has ended\n{self.text()}")

    def pids(self, host: int, name: str = "training.py") -> list[int]:
        """Of the processes of a host that run this file."""
        return [pid for pid in descendants(self.launchers[host].pid) if name.encode() in _command(pid)]

    def some_pid(self, host: int, name: str = "training.py") -> int:
        """Of one of them; waits until there is one."""
        until = time.monotonic() + HANG
        while not (pids := self.pids(host, name)):
            self.check(until, f"no process on host {host}")
            time.sleep(0.02)
        return int(self.trial.random.choice(pids))

    def order(self, name: str, text: str) -> None:
        temporary = self.orders / "new"
        temporary.write_text(text)
        temporary.rename(self.orders / name)

    def leader(self) -> int:
        """The host whose launcher leads."""
        for host in self.launchers:
            said = re.findall(r"this launcher leads|follows the launcher", self.output_of[host].read_text())
            if said and said[-1] == "this launcher leads":
                return host
        raise Unexpected("other end", f"no launcher leads\n{self.text()}")

    def check_leftovers(self) -> None:
        """That there are the processes of this generation alone, and no names of shared memory."""
        for host, launcher in self.launchers.items():
            pids, until = self.pids(host), time.monotonic() + 10
            while len(pids) > self.processes and time.monotonic() < until:
                pids = self.pids(host)
            if len(pids) != self.processes:
                raise Unexpected("leftover", f"processes {pids} on host {host}\n{self.text()}")
            names = [path.name for path in pathlib.Path(f"/proc/{launcher.pid}/root/dev/shm").glob("jax_ring*")]
            mapped = "".join(pathlib.Path(f"/proc/{pid}/maps").read_text() for pid in pids)
            if left := [name for name in names if name not in mapped]:
                raise Unexpected("leftover", f"/dev/shm of host {host}: {left}\n{self.text()}")

    def check_generations(self) -> None:
        """That no two parts went on at the same time, and that no commit was lost."""
        newest = 0
        for number, generation in self.generations().items():
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
        self.steps = (newest // STEPS + 2) * STEPS  # no process is there yet: each pauses before a step
        self.order("steps", str(self.steps))
        self.finish()


# ---- Faults ----------------------------------------------------------------------------------------------------------

Repair = Callable[[], None]


class Fault(NamedTuple):
    """does: to a host; returns how it is repaired, if that takes something."""

    name: str
    does: Callable[[Training, int], Repair | None]
    is_brief: bool = False
    takes_host: bool = False
    loses_memory: bool = False
    hits_leader: bool = False


def _ordered(how: str):
    def does(job: Training, host: int) -> None:
        job.order(str(job.some_pid(host)), how)

    return does


def _signalled(*signals: int):
    def does(job: Training, host: int) -> None:
        pid = job.some_pid(host)
        os.kill(pid, int(job.trial.random.choice(signals)))

    return does


def _killed_service(job: Training, host: int) -> None:
    os.kill(job.some_pid(host, "coordinator/server.py"), signal.SIGKILL)


def _killed_host(job: Training, host: int) -> Repair:
    job.signal(host, signal.SIGKILL)
    job.launchers.pop(host).wait()
    return lambda: job.start(host)


def _lost_launcher(signum: int):
    def does(job: Training, host: int) -> Repair:
        job.lose(host, signum)
        return lambda: job.start(host)

    return does


def _stopped_host(job: Training, host: int) -> Repair:
    job.signal(host, signal.SIGSTOP)
    return lambda: job.signal(host, signal.SIGCONT)


def _cut_off(seconds: float):
    def does(job: Training, host: int) -> Repair:
        until = time.monotonic() + seconds
        job.network.pull_cable(host)

        def repair():
            time.sleep(max(0.0, until - time.monotonic()))
            job.network.plug_in(host)

        return repair

    return does


def _brief(begin, end):
    def does(job: Training, host: int) -> None:
        what = begin(job, host)
        time.sleep(job.trial.random.uniform(0.1, BRIEF))
        end(job, host, what)

    return does


def _stop_one(job: Training, host: int) -> int:
    pid = job.some_pid(host)
    os.kill(pid, signal.SIGSTOP)
    return pid


def _continue_one(job: Training, host: int, pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def _repaired(job: Training, host: int, repair: Repair) -> None:
    repair()


def _slow_link(job: Training, host: int) -> None:
    job.network.limit(host, "2mbit")
    time.sleep(3)
    job.network.limit(host, None)


KINDS = (
    Fault("a process is killed", _signalled(signal.SIGKILL, signal.SIGSEGV)),
    Fault("a process is stopped", _signalled(signal.SIGSTOP)),
    Fault("a process raises an exception", _ordered("raise")),
    Fault("a process hangs in Python", _ordered("hang")),
    Fault("a process hangs in a callback of a step", _ordered("callback")),
    Fault("a bit of a gradient is flipped", _ordered("flip")),
    Fault("JAX's coordination service is killed", _killed_service, hits_leader=True),
    Fault("a host is killed", _killed_host, takes_host=True, loses_memory=True),
    Fault("a launcher is killed", _lost_launcher(signal.SIGKILL), takes_host=True, loses_memory=True),
    Fault("the leading launcher is killed", _lost_launcher(signal.SIGKILL), False, True, True, hits_leader=True),
    Fault("a launcher is told to end", _lost_launcher(signal.SIGTERM), takes_host=True, loses_memory=True),
    Fault("a host is stopped", _stopped_host, takes_host=True),
    Fault("a host is cut off", _cut_off(0), takes_host=True),
    Fault("a host is cut off for 30 s", _cut_off(30), takes_host=True),
    Fault("a process is stopped briefly", _brief(_stop_one, _continue_one), is_brief=True),
    Fault("a host is stopped briefly", _brief(_stopped_host, _repaired), is_brief=True),
    Fault("a link is down briefly", _brief(_cut_off(0), _repaired), is_brief=True),
    Fault("a link is slow for 3 s", _slow_link, is_brief=True),
)


def _drawn(job: Training, number: int) -> list[tuple[Fault, int]]:
    """So many faults, and their hosts. At a time only one loses what a host remembers, and one hits the leader."""
    random = job.trial.random
    while True:
        faults = [KINDS[i] for i in random.integers(len(KINDS), size=number)]
        if max(sum(fault.loses_memory for fault in faults), sum(fault.hits_leader for fault in faults)) < 2:
            break
    victims = list(map(int, random.permutation(NUM_HOSTS)))
    if leader := [i for i, fault in enumerate(faults) if fault.hits_leader]:
        i, j = leader[0], victims.index(job.leader())
        victims[i], victims[j] = victims[j], victims[i]
    return list(zip(faults, victims, strict=False))


def _round(job: Training) -> int:
    """One fault or two; returns how many."""
    random = job.trial.random
    how = random.choice(["alone", "two at once", "in a recovery"], p=[0.6, 0.2, 0.2])
    faults = _drawn(job, 1 if how == "alone" else 2)
    names = " and ".join(f"{fault.name}" for fault, _ in faults)
    job.trial.part = (names if how == "alone" else how, len(faults))
    number = max(job.generations())
    repairs, began = [], time.time()
    for i, (fault, host) in enumerate(faults):
        if i and how == "in a recovery":
            time.sleep(random.uniform(0.2, 10))
        if not fault.is_brief:
            began = time.time()
        repairs.append(fault.does(job, host))
    lost = sum(fault.takes_host for fault, _ in faults)
    seconds: tuple[float, ...] = ()
    if all(fault.is_brief for fault, _ in faults):
        time.sleep(2)
        ended = FALSE_ALARM if max(job.generations()) > number else "is not noticed"
        job.await_progress(job.every, 0, max(job.generations()) - 1)
    else:
        ended = "goes on"
        if lost < 2:
            at = job.await_progress(job.every - lost * job.processes, began, number)
            number = max(job.generations())
        else:
            # None of the three has the others.
            time.sleep(2 * HEARTBEAT)
            began = time.time()
        for repair in filter(None, repairs):
            repair()
        if lost:
            back = job.await_progress(job.every, began, number)
            at = at if lost < 2 else back
        seconds = (at - began,)
    job.trial.outcomes.append((job.trial.part[0], Outcome(ended, len(faults), 0, seconds)))
    return len(faults)


def any_fault(trial: Trial, faults: int = FAULTS, processes: int = PROCESSES) -> Outcome:
    """Faults of all kinds in a row; the training goes on, and ends right."""
    with hosts.Hosts(NUM_HOSTS) as network, running(job := Training(trial, network, processes)):
        done = 0
        while done < faults:
            time.sleep(trial.random.exponential(0.5))
            done += _round(job)
        trial.part = ("the end of a training", 0)
        job.check_leftovers()
        job.end()
        job.check_generations()
    return Outcome("all hosts, right bits")


def _command(pid: int) -> bytes:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


SCENARIOS = (where_hosts_work(any_fault),)
