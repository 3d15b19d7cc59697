"""Scenarios of two hosts, which are network namespaces: a cable is pulled, a link is slow, a host dies."""

import contextlib
import functools
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import hosts
from trial import DEADLINE, HANG, JOBS, Outcome, Trial, Unexpected, calls_in

PORT = 4611


@functools.cache
def _why_not() -> str:
    return hosts.why_not()


def pulled_cable(trial: Trial) -> Outcome:
    """The cable of a host is pulled: within the deadline all have an error that names the call and the other host."""
    with _jobs(trial) as jobs:
        began = time.monotonic()
        jobs.network.pull_cable(1)
        return _all_have_an_error(jobs, jobs.outputs, began)


def killed_host(trial: Trial) -> Outcome:
    """All processes of a host are killed: those of the other host have an error that names the call and the host.

    With one rank on each host the call is XLA's alone, and so is the error, which names the address.
    """
    with _jobs(trial) as jobs:
        began = time.monotonic()
        for process in jobs.processes[jobs.each :]:
            process.kill()
        return _all_have_an_error(jobs, jobs.outputs[: jobs.each], began)


def replugged_cable(trial: Trial) -> Outcome:
    """The cable of a host is out for less than the deadline: right bits."""
    with _jobs(trial) as jobs:
        for _ in range(3):
            jobs.network.pull_cable(1)
            time.sleep(trial.random.uniform(0, 0.5))
            jobs.network.plug_in(1)
            time.sleep(DEADLINE / 2)  # TCP sends again after twice the time each
        return _right_bits(trial, jobs, faults=3)


def slow_link(trial: Trial) -> Outcome:
    """The hosts are joined by a link of 1 Gbit/s: right bits."""
    with _jobs(trial, rate="1gbit") as jobs:
        time.sleep(2)
        return _right_bits(trial, jobs, faults=1)


class _Jobs(NamedTuple):
    """The processes of two hosts, so many on each, with so many ranks on each, and their outputs."""

    network: hosts.Hosts
    each: int
    ranks_each: int
    processes: list[subprocess.Popen]
    outputs: list[pathlib.Path]


@contextlib.contextmanager
def _jobs(trial: Trial, rate: str | None = None) -> Iterator[_Jobs]:
    """Starts sums on two hosts, and waits until all are in the middle of them."""
    # One rank on each host, which leaves the call to XLA alone; or several, in one process or in two.
    each, devices = ((1, 1), (1, 2), (2, 1))[trial.random.integers(3)]
    with hosts.Hosts(2, rate=rate) as network:
        outputs = [trial.folder / f"output-{i}" for i in range(2 * each)]
        processes = []
        for i, output in enumerate(outputs):
            arguments = [str(trial.folder), f"{network.address(0)}:{PORT}", str(2 * each), str(i), str(devices)]
            command = [sys.executable, "-P", str(JOBS), "sums_on_hosts", *arguments]
            with open(output, "w") as file:
                processes.append(
                    subprocess.Popen(
                        network.command(i // each, command), env={**os.environ, **trial.environment},
                        stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        try:
            for output in outputs:
                _await(output, "ready", outputs)
            time.sleep(trial.random.exponential(0.3))
            yield _Jobs(network, each, each * devices, processes, outputs)
        finally:
            (trial.folder / "end").touch()
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _right_bits(trial: Trial, jobs: _Jobs, faults: int) -> Outcome:
    (trial.folder / "enough").touch()
    for output in jobs.outputs:
        _await(output, "done", jobs.outputs)
    return Outcome("right bits", faults, sum(calls_in(output.read_text()) for output in jobs.outputs))


def _all_have_an_error(jobs: _Jobs, outputs: list[pathlib.Path], began: float) -> Outcome:
    ended = "error names host and call"
    for i, output in enumerate(outputs):
        _await(output, "failed: ", jobs.outputs)
        text, far = output.read_text(), 1 - i // jobs.each
        if jobs.ranks_each == 1 and "failed: UNKNOWN: Gloo " in text and f"[{jobs.network.address(far)}]" in text:
            ended = "XLA's error names the address"
            continue
        far = jobs.network.name(far)
        assert "ring_psum of int32" in text, f"process {i} does not name the call\n{text}"
        is_named = far in text or re.search(r"Process \d+ \(rank", text)
        assert is_named, f"process {i} names neither {far} nor a process\n{text}"
    seconds = time.monotonic() - began
    assert seconds < 3 * DEADLINE + 15, f"the error came after {seconds:.1f} s"
    return Outcome(ended, 1, sum(calls_in(output.read_text()) for output in outputs), (seconds,))


def _await(output: pathlib.Path, text: str, outputs: list[pathlib.Path]) -> None:
    until = time.monotonic() + HANG
    while text not in output.read_text():
        if time.monotonic() > until:
            raise Unexpected("hang", f"no {text!r} in {output.name}\n" + "\n".join(o.read_text() for o in outputs))
        time.sleep(0.02)


def _where_hosts_work(scenario):
    @functools.wraps(scenario)
    def guarded(trial: Trial) -> Outcome:
        return Outcome(f"not tried: {_why_not()}") if _why_not() else scenario(trial)

    return guarded


SCENARIOS = tuple(map(_where_hosts_work, (pulled_cable, killed_host, replugged_cable, slow_link)))
