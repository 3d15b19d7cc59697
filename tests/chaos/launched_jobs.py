"""Scenarios with `jax_ring.launch`: deaths and stops of any rank, exceptions, restarts, output that nobody reads."""

import os
import re
import signal
import subprocess
import time

from trial import HANG, Outcome, Trial, Unexpected, calls_in

GRACE = "3"  # seconds
ENOUGH = 30.0  # seconds in which a launcher must have ended after the first failure, on a loaded machine too


def killed_rank(trial: Trial) -> Outcome:
    """Any rank, 0 too, is killed: the launcher names it, and the others have had an error that names it."""
    processes = int(trial.random.integers(2, 5))
    with trial.launch(["-n", str(processes), "--grace", GRACE], ["launched_sums", str(trial.folder)]) as launched:
        pids = launched.pids(processes)
        if trial.random.integers(2):  # else the kill may come while they form their group
            launched.await_lines("] ready", processes)
        time.sleep(trial.random.exponential(0.3))
        victim = int(trial.random.integers(processes))
        began = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        status = launched.wait()
        seconds = _in_time(began)
        output = launched.output()
    last = _last_of_launcher(output)
    assert status == 128 + signal.SIGKILL, f"status {status}\n{output}"
    assert f"rank {victim} " in last or f"rank {victim} (" in output, output
    return Outcome("names the rank", 1, _calls(output), (seconds,))


def stopped_rank(trial: Trial) -> Outcome:
    """Any rank is stopped past the deadline: the others have an error, and the launcher ends."""
    processes = int(trial.random.integers(2, 5))
    with trial.launch(["-n", str(processes), "--grace", GRACE], ["launched_sums", str(trial.folder)]) as launched:
        pids = launched.pids(processes)
        launched.await_lines("] ready", processes)
        victim = int(trial.random.integers(processes))
        began = time.monotonic()
        os.kill(pids[victim], signal.SIGSTOP)
        status = launched.wait()
        seconds = _in_time(began)
        output = launched.output()
    assert status != 0, output
    assert f"Process {victim} " in output, output
    return Outcome("error names it", 1, _calls(output), (seconds,))


def exception(trial: Trial) -> Outcome:
    """One rank raises: the others' error names it and its exception, and so does the launcher's last line."""
    processes = int(trial.random.integers(2, 5))
    victim = int(trial.random.integers(processes))
    with trial.launch(
        ["-n", str(processes), "--grace", GRACE], ["raising", str(trial.folder), str(victim)]
    ) as launched:
        launched.await_lines("] ready", processes)
        until = time.monotonic() + HANG
        while not (trial.folder / "raised").exists():
            if time.monotonic() > until:
                raise Unexpected("hang", launched.output())
            time.sleep(0.01)
        began = time.monotonic()
        status = launched.wait()
        seconds = _in_time(began)
        output = launched.output()
    last = _last_of_launcher(output)
    assert status == 1, f"status {status}\n{output}"
    assert f"rank {victim} " in last, f"the last line does not name rank {victim}: {last}\n{output}"
    assert "KeyError" in last, f"the last line does not name the exception: {last}\n{output}"
    assert "KeyError" in output.split(f"[{(victim + 1) % processes}] ", 1)[-1], output
    return Outcome("names rank and exception", 1, 0, (seconds,))


def blocked_pipe(trial: Trial) -> Outcome:
    """Nobody reads the launcher's standard output: SIGTERM still ends it."""
    processes = int(trial.random.integers(1, 4))
    options = ["-n", str(processes), "--grace", "1"]
    with trial.launch(options, ["writing", str(trial.folder)], stdout=subprocess.PIPE) as launched:
        until = time.monotonic() + HANG
        while not all((trial.folder / f"ready-{i}").exists() for i in range(processes)):
            if time.monotonic() > until:
                raise Unexpected("hang", "the processes do not start")
            time.sleep(0.02)
        time.sleep(0.5)  # until the pipe is full
        began = time.monotonic()
        launched.process.send_signal(signal.SIGTERM)
        launched.wait()
        seconds = _in_time(began)
    return Outcome("ends", 1, 0, (seconds,))


def killed_launcher(trial: Trial) -> Outcome:
    """The launcher is killed: its processes end too, and its folder goes."""
    processes = int(trial.random.integers(1, 4))
    with trial.launch(["-n", str(processes)], ["launched_sums", str(trial.folder)]) as launched:
        pids = launched.pids(processes)
        launched.await_lines("] ready", processes)
        began = time.monotonic()
        launched.process.kill()
        launched.process.wait()
        until = began + HANG
        for pid in pids.values():
            while _is_running(pid):
                if time.monotonic() > until:
                    raise Unexpected("leftover", f"process {pid}")
                time.sleep(0.01)
        while left := list(trial.folder.glob("*jax_ring*")):  # its sockets' folder
            if time.monotonic() > until:
                raise Unexpected("leftover", str(left))
            time.sleep(0.01)
        seconds = time.monotonic() - began
    return Outcome("nothing is left", 1, 0, (seconds,))


def restarts(trial: Trial) -> Outcome:
    """A rank ends in the middle, in the first runs: the job is started again, and the last run ends right."""
    processes, failures = int(trial.random.integers(2, 4)), int(trial.random.integers(1, 3))
    options = ["-n", str(processes), "--grace", "1", "--max-restarts", str(failures)]
    began = time.monotonic()
    with trial.launch(options, ["restarted", str(trial.folder), str(failures)]) as launched:
        status = launched.wait(2 * HANG)
        output = launched.output()
    assert status == 0, f"status {status}\n{output}"
    assert output.count(f"] run {failures}") == processes, output
    return Outcome(
        "started again, right bits", failures, _calls(output), ((time.monotonic() - began) / (failures + 1),)
    )


def too_many_failures(trial: Trial) -> Outcome:
    """More failures than restarts: the launcher gives up with the failed process's status."""
    options = ["-n", "2", "--grace", "1", "--max-restarts", "1"]
    began = time.monotonic()
    with trial.launch(options, ["restarted", str(trial.folder), "2"]) as launched:
        status = launched.wait(2 * HANG)
        output = launched.output()
    assert status == 7, f"status {status}\n{output}"
    return Outcome("gives up with its status", 2, 0, (time.monotonic() - began,))


def _in_time(began: float) -> float:
    seconds = time.monotonic() - began
    if seconds > ENOUGH:
        raise Unexpected("hang", f"the launcher took {seconds:.0f} s to end")
    return seconds


def _last_of_launcher(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.startswith("jax_ring.launch: ")), "")


def _calls(output: str) -> int:
    """The calls that all ranks have checked."""
    return sum(calls_in(line) for line in re.findall(r"\] (calls \d+)$", output, re.MULTILINE))


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before or while it is read
        return False


SCENARIOS = (
    killed_rank,
    stopped_rank,
    exception,
    blocked_pipe,
    killed_launcher,
    restarts,
    too_many_failures,
)
