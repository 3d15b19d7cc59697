"""Faults in a row in one training, on one host or on three: alone, two at once, or one in the recovery from another.

After each the job goes on, and with all hosts once what was lost is there again; only that of one host ends with its
launcher, and begins again with another. It ends with the bits of an undisturbed run. A fault that is over before any
timeout must not be noticed.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from trainings import HEARTBEAT, SERVICE, Training, is_stopped, training, where_hosts_work
from trial import FALSE_ALARM, Outcome, Trial, Unexpected

FAULTS = 10  # of a training; one more if the last are two
PROCESSES = {1: (2, 3), 3: (1, 2)}  # of each host, by the number of hosts
BRIEF = 1.2  # seconds, with TCP's retransmission less than half of the deadline
LONG = 10.0  # seconds, more than all deadlines

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
        _kill(job.some_pid(host), int(job.trial.random.choice(signals)))

    return does


def _signalled_all(signum: int, every_host: bool = False):
    def does(job: Training, host: int) -> None:
        job.some_pid(host)
        for each in job.launchers if every_host else [host]:
            for pid in job.pids(each):
                _kill(pid, signum)

    return does


def _killed_service(job: Training, host: int) -> None:
    _kill(job.pids(job.service_host(), SERVICE)[0], signal.SIGKILL)


def _killed_host(job: Training, host: int) -> Repair | None:
    job.kill(host)
    return _after_loss(job, host)


def _lost_launcher(signum: int):
    def does(job: Training, host: int) -> Repair | None:
        job.lose(host, signum)
        return _after_loss(job, host)

    return does


def _after_loss(job: Training, host: int) -> Repair | None:
    if job.network.count > 1:
        return lambda: job.start(host)
    job.begin_again()
    return None


def _stopped_host(job: Training, host: int) -> Repair:
    # What another fault has stopped stays so.
    pids = [pid for pid in job.all_pids(host) if not is_stopped(pid)]

    def signal_all(signum: int):
        for pid in pids:
            _kill(pid, signum)

    signal_all(signal.SIGSTOP)
    return lambda: signal_all(signal.SIGCONT)


def _stopped_launcher(job: Training, host: int) -> Repair:
    launcher = job.launchers[host]
    launcher.send_signal(signal.SIGSTOP)
    return lambda: launcher.send_signal(signal.SIGCONT)


def _stopped_process(job: Training, host: int) -> Repair:
    pid = job.some_pid(host)
    _kill(pid, signal.SIGSTOP)
    return lambda: _kill(pid, signal.SIGCONT)


def _cut_off(seconds: float):
    def does(job: Training, host: int) -> Repair:
        until = time.monotonic() + seconds
        job.network.pull_cable(host)

        def repair():
            time.sleep(max(0.0, until - time.monotonic()))
            job.network.plug_in(host)

        return repair

    return does


def _for(seconds: tuple[float, float], begin: Callable[[Training, int], Repair]):
    def does(job: Training, host: int) -> None:
        repair = begin(job, host)
        time.sleep(job.trial.random.uniform(*seconds))
        repair()

    return does


def _briefly(begin: Callable[[Training, int], Repair]):
    return _for((0.1, BRIEF), begin)


def _slow_link(job: Training, host: int) -> None:
    job.network.limit(host, "2mbit")
    time.sleep(3)
    job.network.limit(host, None)


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the fault before has ended it
        os.kill(pid, signum)


_OF_PROCESSES = (
    Fault("a process is killed", _signalled(signal.SIGKILL, signal.SIGSEGV)),
    Fault("a process is stopped", _signalled(signal.SIGSTOP)),
    Fault("a process raises an exception", _ordered("raise")),
    Fault("a process hangs in Python", _ordered("hang")),
    Fault("a process hangs in a callback of a step", _ordered("callback")),
    Fault("a bit of a gradient is flipped", _ordered("flip")),
    Fault("all processes of a host are killed", _signalled_all(signal.SIGKILL)),
    Fault("all processes of a host are stopped", _signalled_all(signal.SIGSTOP)),
    Fault("JAX's coordination service is killed", _killed_service, hits_leader=True),
    Fault("a process is stopped briefly", _briefly(_stopped_process), is_brief=True),
    Fault("a launcher is stopped briefly", _briefly(_stopped_launcher), is_brief=True),
    Fault("a host is stopped briefly", _briefly(_stopped_host), is_brief=True),
)
_ON_ONE_HOST = (
    Fault("the launcher is killed", _lost_launcher(signal.SIGKILL)),
    Fault("the launcher is told to end", _lost_launcher(signal.SIGTERM)),
    Fault("all is killed", _killed_host),
    Fault("the launcher is stopped for 10 s", _for((LONG, LONG), _stopped_launcher), is_brief=True),
    Fault("all is stopped for 10 s", _for((LONG, LONG), _stopped_host), is_brief=True),
)
_ON_SEVERAL = (
    Fault("all processes of all hosts are killed", _signalled_all(signal.SIGKILL, every_host=True)),
    Fault("a host is killed", _killed_host, takes_host=True, loses_memory=True),
    Fault("a launcher is killed", _lost_launcher(signal.SIGKILL), takes_host=True, loses_memory=True),
    Fault("the leading launcher is killed", _lost_launcher(signal.SIGKILL), False, True, True, hits_leader=True),
    Fault("a launcher is told to end", _lost_launcher(signal.SIGTERM), takes_host=True, loses_memory=True),
    Fault("a launcher is stopped", _stopped_launcher, takes_host=True),
    Fault("a host is stopped", _stopped_host, takes_host=True),
    Fault("a host is cut off", _cut_off(0), takes_host=True),
    Fault("a host is cut off for 20 s", _cut_off(20), takes_host=True),
    Fault("a link is down briefly", _briefly(_cut_off(0)), is_brief=True),
    Fault("a link is slow for 3 s", _slow_link, is_brief=True),
)
KINDS = {1: (*_OF_PROCESSES, *_ON_ONE_HOST), 3: (*_OF_PROCESSES, *_ON_SEVERAL)}


def _drawn(job: Training, number: int) -> list[tuple[Fault, int]]:
    """So many faults, and their hosts. At a time only one loses what a host remembers, and one hits the leader."""
    random, count = job.trial.random, job.network.count
    kinds = KINDS[count]
    while True:
        faults = [kinds[i] for i in random.integers(len(kinds), size=number)]
        if max(sum(fault.loses_memory for fault in faults), sum(fault.hits_leader for fault in faults)) < 2:
            break
    if count == 1:
        return [(fault, 0) for fault in faults]
    victims = list(map(int, random.permutation(count)))
    if leader := [i for i, fault in enumerate(faults) if fault.hits_leader]:
        i, j = leader[0], victims.index(job.service_host())
        victims[i], victims[j] = victims[j], victims[i]
    return list(zip(faults, victims, strict=False))


def _round(job: Training) -> int:
    """One fault or two; returns how many."""
    random = job.trial.random
    how = random.choice(["alone", "two at once", "in a recovery"], p=[0.6, 0.2, 0.2])
    faults = _drawn(job, 1 if how == "alone" else 2)
    names = " and ".join(fault.name for fault, _ in faults)
    where = "one host" if job.network.count == 1 else f"{job.network.count} hosts"
    title = f"{where}: {names if how == 'alone' else how}"
    job.trial.part = (title, len(faults))
    number, launchers = max(job.generations()), dict(job.launchers)
    repairs, began = [], time.time()
    for i, (fault, host) in enumerate(faults):
        if i and how == "in a recovery":
            time.sleep(random.uniform(0.2, 6))
        if not fault.is_brief:
            began = time.time()
        job.trial.notes.append(f"{time.time():.3f} {how}: {fault.name}, on host {host}")
        repairs.append(fault.does(job, host))
    lost = sum(fault.takes_host for fault, _ in faults)
    seconds: tuple[float, ...] = ()
    if all(fault.is_brief for fault, _ in faults):
        time.sleep(2)
        ended = FALSE_ALARM if max(job.generations()) > number else "is not noticed"
        job.await_progress(job.every, 0, max(job.generations()) - 1)
    else:
        ended = "goes on" if lost or job.launchers == launchers else "ends with its launcher, begins again"
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
    job.check_leftovers()
    job.trial.outcomes.append((title, Outcome(ended, len(faults), 0, seconds)))
    return len(faults)


def any_fault(trial: Trial, faults: int = FAULTS) -> Outcome:
    """Faults of all kinds in a row; the training goes on, and ends right. Even seeds have one host, odd ones three."""
    num_hosts = trial.num_hosts or (3 if trial.seed % 2 else 1)
    with training(trial, num_hosts, int(trial.random.choice(PROCESSES[num_hosts]))) as job:
        done = 0
        while done < faults:
            time.sleep(trial.random.exponential(0.5))
            done += _round(job)
        trial.part = ("the end of a training", 0)
        job.end()
        job.check_generations()
    return Outcome("all processes, right bits")


def split(trial: Trial) -> Outcome:
    """The network of four hosts splits in halves. The one with the first host goes on alone, then all do."""
    with training(trial, 4, 1) as job:
        time.sleep(trial.random.exponential(0.5))
        number = max(job.generations())
        (address,) = set(re.findall(rf"generation {number}: hosts 0 \(([\d.]+):", job.text()))
        first = next(host for host in range(4) if job.network.address(host) == address)
        away = trial.random.permutation([host for host in range(4) if host != first])[:2]
        began = time.time()
        job.network.split(away)
        seconds = job.await_progress(2, began, number) - began
        time.sleep(HEARTBEAT)
        number, generation = max(job.generations().items())
        if generation.count != 2 or any(job.pids(host) for host in map(int, away)):
            raise Unexpected("other end", f"not the half with the first host alone\n{job.text()}")
        began = time.time()
        job.network.join()
        job.await_progress(job.every, began, number)
        job.end()
        job.check_generations()
    return Outcome("one half goes on, then all, right bits", 1, 0, (seconds,))


SCENARIOS = tuple(map(where_hosts_work, (any_fault, split)))
