"""Random collectives in random process layouts; processes are stopped and killed. Run with `pytest --soak SECONDS`."""

import collections
import re
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from job import segments
from random_programs import soak
from watched import Processes, as_text

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # jobs of several processes; native code and Python's

DEADLINE = 4.0
STEP_TIMEOUT = 240.0
LAYOUTS = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2)]  # (processes, devices per process)
EVENTS = ("none", "brief stop", "kill", "long stop")


@pytest.mark.timeout(0)  # run_program has its own timeouts
def test_soak(request, record_property):
    seconds = request.config.getoption("--soak")
    long = seconds > 0
    seed = int(time.time()) if long else 20
    random = np.random.default_rng(seed)
    counts = collections.Counter()
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until or number < 2:
        # The short form runs one program that succeeds and one that fails.
        event = EVENTS[random.integers(len(EVENTS))] if long else ("brief stop", "kill")[number]
        layout = LAYOUTS[random.integers(len(LAYOUTS))] if long else ((2, 2), (3, 1))[number]
        counts.update(run_program(random, layout, event, 600 if long else 60))
        number += 1
    record_property("soak", f"soak (seed {seed}): " + ", ".join(f"{counts[name]} {name}" for name in counts))


def run_program(random, layout, event: str, num_rounds: int) -> dict[str, int]:
    """Runs a program, disturbs it with one event, and returns the counts for the summary."""
    num_processes, devices_each = layout
    fails = event in ("kill", "long stop")
    seed = int(random.integers(2**31))
    environment = {"JAX_RING_TIMEOUT_S": str(DEADLINE), "JAX_ENABLE_RECOVERABILITY": "1"}
    # Process 0 runs JAX's coordinator: JAX terminates all processes if it dies, and stalls them while it is stopped.
    victim = int(random.integers(1 if fails else 0, num_processes))
    description = f"{layout}, {event} of {victim}, seed {seed}"
    with (
        tempfile.TemporaryDirectory() as folder,
        Processes(
            soak, num_processes, devices_each, arguments=[seed, 10**9 if fails else num_rounds, folder],
            environment=environment,
        ) as program,
    ):  # fmt: skip
        for process in range(num_processes):
            program.wait_until(process, "began", timeout=STEP_TIMEOUT)
        time.sleep(random.uniform(0, 3))
        if event == "kill":
            program.popen[victim].send_signal(signal.SIGKILL)
        elif event != "none":
            program.popen[victim].send_signal(signal.SIGSTOP)
            time.sleep(random.uniform(0, DEADLINE / 4) if event == "brief stop" else 2 * DEADLINE)
            program.popen[victim].send_signal(signal.SIGCONT)
        survivors = [i for i in range(num_processes) if event != "kill" or i != victim]
        for process in survivors:
            program.wait_until(process, "failed:" if fails else "done", timeout=STEP_TIMEOUT)
        Path(folder, "end").touch()
        for process in survivors[1:]:
            program.popen[process].wait(STEP_TIMEOUT)
        Path(folder, "last").touch()
        program.popen[0].wait(STEP_TIMEOUT)
        program.kill()
        results = [program.result(i) for i in range(num_processes)]
    output = f"{description}\n{as_text(results)}"
    assert all(results[i].returncode == 0 for i in survivors), output
    calls = [int(re.findall(r"^calls (\d+)$", result.stdout, re.MULTILINE)[-1]) for result in results]
    leaked = segments(results[0].stdout.split("token ")[1].split()[0])
    assert not leaked, f"{output}\n{leaked}"
    plural = {"none": "undisturbed programs", "kill": "kills survived"}.get(event, f"{event}s survived")
    return {"calls checked": sum(calls), "programs": 1, plural: 1}
