"""Trainings that lose processes: new ones go on, and the result has the bits of the undisturbed run."""

import contextlib
import json
import os
import pathlib
import re
import socket
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
    """From the fault to the last of the new processes that calls the training function."""
    began = float(re.search(r"([\d.]+) fails", result.stdout)[1])
    return max(float(at) for at in re.findall(r"([\d.]+) enters at [1-9]\d* .* gen 1", result.stdout)) - began


@pytest.mark.one_pair
def test_rank_0_is_killed_and_all_start_again(environment, undisturbed, record_property):
    began = time.monotonic()
    result = launched(environment, 3, {"0": [4, "SIGKILL"]}, launcher_options=["--max-restarts", "1"])
    assert digests(result) == [(undisturbed, 3)] * 3, result.stdout
    assert result.returncode == 0, result.stdout
    # The commit after step 4 lacks process 0.
    assert entries(result) == [(0, 3)] * 3 + [(3, 3)] * 3, result.stdout
    record_property("soak", f"{recovery_seconds(result):.2f} s from the kill, {time.monotonic() - began:.1f} s in all")


@pytest.mark.full
def test_without_restarts_those_that_remain_go_on(environment, undisturbed):
    result = launched(environment, 3, {"0": [4, "SIGKILL"]})
    assert digests(result) == [(undisturbed, 2)] * 2, result.stdout
    assert result.returncode == 0, result.stdout
    assert entries(result) == [(0, 3)] * 3 + [(3, 2)] * 2, result.stdout


@pytest.mark.full
def test_all_are_killed_at_once(environment, undisturbed):
    faults = {str(process): [4, "SIGKILL"] for process in range(3)}
    result = launched(environment, 3, faults, launcher_options=["--max-restarts", "1"])
    assert digests(result) == [(undisturbed, 3)] * 3, result.stdout
    assert entries(result)[3:] == [(3, 3)] * 3, result.stdout


# By the number of processes, faults by the launcher's numbers, which begin anew after those of a generation, and
# how many may be there at the end.
FAULTS = {
    "the last is killed": (3, {"2": [4, "SIGKILL"]}, {2}),
    "one is stopped": (3, {"1": [4, "SIGSTOP"]}, {2}),
    "one raises an error": (3, {"1": [4, "raise"]}, {2}),
    "one hangs": (3, {"0": [4, "hang"]}, {2}),
    "one after the other": (3, {"0": [3, "SIGKILL"], "4": [6, "SIGKILL"]}, {1}),
    # The launcher may end the second before it has killed itself.
    "two at once": (4, {"1": [6, "SIGKILL"], "2": [6, "SIGKILL"]}, {2, 3}),
    # 5 processes do not divide 12 shards: 4 do, and one is not used until another is lost.
    "a spare takes part": (6, {"0": [3, "SIGKILL"], "7": [6, "SIGKILL"]}, {4}),
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
    found = digests(result)
    assert len(found) in left, result.stdout
    assert found == [(undisturbed, len(found))] * len(found), result.stdout
    assert result.stdout.count(" fails ") >= len(faults) - len(left) + 1, result.stdout


@pytest.mark.full
def test_commits_on_disk_outlive_the_launcher(environment, undisturbed, tmp_path, request):
    if not request.config.getoption("--soak"):
        pytest.skip("takes long; --soak 1 runs it")
    faults = {str(process): [6, "SIGKILL"] for process in range(3)}  # the two, and the one that goes on
    first = launched(environment, 2, faults, "--directory", str(tmp_path))
    assert digests(first) == [], first.stdout
    second = launched(environment, 3, {}, "--directory", str(tmp_path))
    assert digests(second) == [(undisturbed, 3)] * 3, second.stdout
    assert entries(second) == [(4, 3)] * 3, second.stdout


# ---- Several hosts, which are launchers on one host here -------------------------------------------------------------


class Hosts:
    """Launchers of two processes each, with a port for each to listen at. The files have what they print."""

    def __init__(self, environment, folder, ports, *options):
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        self._command = [sys.executable, "-P", "-m", "jax_ring.launch", "-n", "2", "--coordinator", addresses, *options]
        self._environment, self._folder, self.launchers = environment, folder, []

    def start(self, name, *arguments, launcher_options=()):
        with open(self._folder / name, "w") as output:
            command = [*self._command, *launcher_options, str(TRAINING), *arguments]
            environment = self._environment | {"JAX_RING_HOST_ID": name}
            self.launchers.append(subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            ))  # fmt: skip
        return self.launchers[-1]

    def output(self, name):
        return (self._folder / name).read_text()

    def await_line(self, name, text):
        until = time.monotonic() + TIME_LIMIT
        while text not in self.output(name):
            assert time.monotonic() < until, self.output(name)
            time.sleep(0.05)


@pytest.fixture
def hosts(environment, secret, tmp_path):
    """Makes hosts, with a number of addresses and options of their launchers."""
    with contextlib.ExitStack() as stack:
        made = []

        def make(count, *options):
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for each in sockets:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the launchers'
                each.bind(("127.0.0.1", 0))
            of_launchers = environment | {"JAX_RING_SECRET": secret}
            made.append(Hosts(of_launchers, tmp_path, [each.getsockname()[1] for each in sockets], *options))
            return made[-1]

        yield make
        for launcher in [launcher for each in made for launcher in each.launchers]:
            launcher.kill()
            launcher.wait()


@pytest.mark.full
def test_a_process_of_another_host_is_killed(hosts, undisturbed, request):
    if not request.config.getoption("--soak"):
        pytest.skip("takes long; --soak 1 runs it")
    both = hosts(1, "--nnodes", "2", "--max-restarts", "1")
    for name, faults in (("0", {}), ("1", {"1": [4, "SIGKILL"]})):
        both.start(name, str(STEPS), json.dumps(faults), launcher_options=["--node-rank", name])
    assert [each.wait(TIME_LIMIT) for each in both.launchers] == [0, 0], both.output("0")
    for name in "01":
        assert both.output(name).count(f"digest {undisturbed} of 4") == 2, both.output(name)
        assert both.output(name).count("enters at 3 of 4") == 2, both.output(name)


@pytest.mark.full
def test_a_host_is_lost_and_another_comes(hosts, environment, request):
    """Its parts of what is divided are on the other; the one that comes gets all of the state."""
    if not request.config.getoption("--soak"):
        pytest.skip("takes long; --soak 1 runs it")
    steps = 30
    alone = run_training(environment, "-P", str(TRAINING), str(steps), "{}")
    both = hosts(2, "--nnodes", "1:2", "--join-timeout", "20")
    arguments = [str(steps), "{}", "--pause", "0.3", "--wait-for", "4"]
    first, second = (both.start(name, *arguments) for name in ("first", "second"))
    both.await_line("first", "has made step 1 ")
    time.sleep(1)
    second.kill()
    both.await_line("first", " of 2 gen 1")
    third = both.start("third", *arguments)
    assert (first.wait(TIME_LIMIT), third.wait(TIME_LIMIT)) == (0, 0), both.output("first") + both.output("third")
    for name in ("first", "third"):
        assert both.output(name).count(f"digest {digests(alone)[0][0]} of 4") == 2, both.output(name)
    assert not re.search(r"enters at 0 of \d gen [1-9]", both.output("first"))
