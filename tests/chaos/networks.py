"""Scenarios of two hosts, which are network namespaces: a cable is pulled, a link is slow."""

import functools
import os
import pathlib
import re
import subprocess
import sys
import time

import hosts
from trial import DEADLINE, HANG, JOBS, Outcome, Trial, Unexpected, calls_in

PORT = 4611


@functools.cache
def _why_not() -> str:
    return hosts.why_not()


def pulled_cable(trial: Trial) -> Outcome:
    """The cable of a host is pulled: within the deadline all have an error that names the call and the other host."""
    return _on_hosts(trial, rate=None, pull=True)


def slow_link(trial: Trial) -> Outcome:
    """The hosts are joined by a link of 1 Gbit/s: right bits."""
    return _on_hosts(trial, rate="1gbit", pull=False)


def _on_hosts(trial: Trial, rate: str | None, pull: bool) -> Outcome:
    if _why_not():
        return Outcome(f"not tried: {_why_not()}")
    # One rank on each host, which leaves the call to XLA alone; or several, in one process or in two.
    processes_each, devices = ((1, 1), (1, 2), (2, 1))[trial.random.integers(3)]
    number = 2 * processes_each
    with hosts.Hosts(2, rate=rate) as network:
        outputs = [trial.folder / f"output-{i}" for i in range(number)]
        processes = []
        for i, output in enumerate(outputs):
            arguments = [str(trial.folder), f"{network.address(0)}:{PORT}", str(number), str(i), str(devices)]
            command = [sys.executable, "-P", str(JOBS), "sums_on_hosts", *arguments]
            with open(output, "w") as file:
                processes.append(
                    subprocess.Popen(
                        network.command(i // processes_each, command), env={**os.environ, **trial.environment},
                        stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        try:
            for output in outputs:
                _await(output, "ready", outputs)
            time.sleep(trial.random.exponential(0.3))
            if not pull:
                time.sleep(2)
                (trial.folder / "enough").touch()
                for output in outputs:
                    _await(output, "done", outputs)
                return Outcome("right bits", 1, sum(calls_in(output.read_text()) for output in outputs))
            began = time.monotonic()
            network.pull_cable(1)
            for i, output in enumerate(outputs):
                _await(output, "failed: ", outputs)
                text = output.read_text()
                far = network.name(1 - i // processes_each)
                assert "ring_psum of int32" in text, f"process {i} does not name the call\n{text}"
                is_named = far in text or re.search(r"Process \d+ \(rank", text)
                assert is_named, f"process {i} names neither {far} nor a process\n{text}"
            seconds = time.monotonic() - began
            assert seconds < 3 * DEADLINE + 15, f"the error came after {seconds:.1f} s"
            return Outcome("error names host and call", 1, sum(calls_in(o.read_text()) for o in outputs), (seconds,))
        finally:
            (trial.folder / "end").touch()
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _await(output: pathlib.Path, text: str, outputs: list[pathlib.Path]) -> None:
    until = time.monotonic() + HANG
    while text not in output.read_text():
        if time.monotonic() > until:
            raise Unexpected("hang", f"no {text!r} in {output.name}\n" + "\n".join(o.read_text() for o in outputs))
        time.sleep(0.02)


SCENARIOS = (pulled_cable, slow_link)
