"""Trainings that lose processes: the others go on, and the result has the bits of the undisturbed run."""

import json
import pathlib
import re
import subprocess
import sys
import time

import pytest

TRAINING = pathlib.Path(__file__).with_name("training.py")
STEPS = 8
DEADLINE = 8  # of a call, where processes hang and are left after it; for others it would count slow compilations
TIME_LIMIT = 240


def run_training(environment, *command):
    """The output of a training, in which every process prints its digest."""
    return subprocess.run(
        [sys.executable, *command], env=environment, stdin=subprocess.DEVNULL, text=True, timeout=TIME_LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


def launched(environment, processes, faults, *options, launcher_options=()):
    return run_training(
        environment, "-P", "-m", "jax_ring.launch", "-n", str(processes), *launcher_options, str(TRAINING),
        str(STEPS), json.dumps(faults), *options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def environment():
    import os

    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


@pytest.fixture(scope="module")
def undisturbed(environment):
    """The digest of a run in one process, without a launcher."""
    result = run_training(environment, "-P", str(TRAINING), str(STEPS), "{}")
    assert result.returncode == 0, result.stdout
    return digests(result)[0][0]


def digests(result):
    """(digest, number of processes at the end), from each process that has come to the end."""
    return [(digest, int(count)) for digest, count in re.findall(r"digest (\w{64}) of (\d+)", result.stdout)]


def entries(result):
    """(step, number of processes) of each call of the training function, in the order in which they are printed."""
    return [(int(step), int(count)) for step, count in re.findall(r"enters at (\d+) of (\d+)", result.stdout)]


def recovery_seconds(result):
    """From the fault to the last of the others that calls the training function again."""
    began = float(re.search(r"([\d.]+) fails", result.stdout)[1])
    return max(float(at) for at in re.findall(r"([\d.]+) enters at [1-9]\d* .* gen 1", result.stdout)) - began


@pytest.mark.one_pair
def test_rank_0_is_killed_and_another_process_joins(environment, undisturbed, record_property, tmp_path):
    began = time.monotonic()
    # Where a survivor is slow, the other process could be there before both have left.
    options = ["--wait-for", "3", "--formed", str(tmp_path / "formed")]
    result = launched(environment, 3, {"0": [4, "SIGKILL"]}, *options, launcher_options=["--max-restarts", "1"])
    assert digests(result) == [(undisturbed, 3)] * 3, result.stdout
    assert result.returncode == 0, result.stdout
    seen = entries(result)
    assert seen[:3] == [(0, 3)] * 3, seen
    # The two others, from the commit after step 3 or, if they both had made it, from the one after step 4.
    assert seen[3:5] in ([(3, 2)] * 2, [(4, 2)] * 2), seen
    assert {count for _, count in seen[-3:]} == {3}, seen
    # Nothing is left of the old clients of the coordination service, whose threads would end the process with it.
    assert len(set(re.findall(r"with (\d+) sockets", result.stdout))) == 1, result.stdout
    record_property("soak", f"{recovery_seconds(result):.2f} s from the kill, {time.monotonic() - began:.1f} s in all")


@pytest.mark.full
def test_all_are_killed_at_once(environment, undisturbed):
    """The launcher starts others, which go on from the commits that it has kept."""
    faults = {str(process): [4, "SIGKILL"] for process in range(3)}
    options = ["--max-restarts", "3", "--backoff", "0.1"]
    result = launched(environment, 3, faults, "--keep", "host", "--wait-for", "3", launcher_options=options)
    assert digests(result) == [(undisturbed, 3)] * 3, result.stdout
    # The commit after step 3, which all have made.
    assert entries(result)[3][0] == 3, result.stdout


FAULTS = {
    "the last is killed": (3, {"2": [4, "SIGKILL"]}, 2),
    "one is stopped": (3, {"1": [4, "SIGSTOP"]}, 2),
    "one raises an error": (3, {"1": [4, "raise"]}, 2),
    "one hangs": (3, {"0": [4, "hang"]}, 2),
    "one after the other": (3, {"0": [3, "SIGKILL"], "2": [6, "SIGKILL"]}, 1),
    "two at once": (4, {"1": [6, "SIGKILL"], "2": [6, "SIGKILL"]}, 2),
    # 5 processes do not divide 12 shards: 4 do, and one waits.
    "a spare takes part": (6, {"0": [3, "SIGKILL"], "1": [6, "SIGKILL"]}, 4),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_other_faults(environment, undisturbed, name, request):
    if not request.config.getoption("--soak"):
        pytest.skip("takes long; --soak 1 runs it")
    processes, faults, left = FAULTS[name]
    if name in ("one is stopped", "one hangs"):
        environment = environment | {"JAX_RING_TIMEOUT_S": str(DEADLINE)}
    result = launched(environment, processes, faults)
    assert digests(result) == [(undisturbed, left)] * left, result.stdout


@pytest.mark.full
def test_all_are_killed_and_commits_are_on_disk(environment, undisturbed, tmp_path, request):
    if not request.config.getoption("--soak"):
        pytest.skip("takes long; --soak 1 runs it")
    faults = {str(process): [6, "SIGKILL"] for process in range(2)}
    options = ["--max-restarts", "2", "--backoff", "0.1"]
    result = launched(environment, 2, faults, "--directory", str(tmp_path), "--wait-for", "2", launcher_options=options)
    assert digests(result) == [(undisturbed, 2)] * 2, result.stdout
    assert entries(result)[2][0] == 4


@pytest.mark.full
def test_dead_arrays_say_so(environment, request):
    if not request.config.getoption("--soak"):
        pytest.skip("takes long; --soak 1 runs it")
    result = launched(environment, 2, {"1": [4, "SIGKILL"]}, "--use-dead-array")
    assert "Array has been deleted" in result.stdout, result.stdout
    assert "this is generation 1 of the job" in result.stdout, result.stdout
