"""Hosts that come and go, which are launchers on one host here: lost ones, joins, the next leader, and refusals."""

import functools
import os
import pathlib
import re
import signal
import socket
import subprocess
import time

import pytest
from launches import COMMAND, FAILS_BESIDE_A_SLOW_ONE, assert_gone, reserved_ports

from jax_ring.launcher import protocol
from jax_ring.launcher.watching import page

pytestmark = [pytest.mark.one_pair, pytest.mark.usefixtures("secret")]  # the launcher is Python's

TIME_LIMIT = 60
# Prints where it is, and leaves at the next "commit" when members are to change.
SCRIPT = f"""
import os, pathlib, runpy, sys, time
here = pathlib.Path(__file__).parent
control = runpy.run_path({protocol.__file__!r})
control["ask"]("enlist", 1, None)
page = runpy.run_path({page.__file__!r})["Page"].of_launcher()
names = ("RING_RESTART", "PROCESS_ID", "NUM_PROCESSES", "RING_HOSTS")
print("at", *(os.environ["JAX_" + name] for name in names), "pid", os.getpid(), flush=True)
while not (here / "end").exists():
    if (here / ("fail" + os.environ["JAX_PROCESS_ID"] + os.environ["JAX_RING_RESTART"])).exists():
        raise ValueError("bad batch")
    if page.words.change_pending:
        control["leave"]("members change after a commit")
    time.sleep(0.02)
"""


class Launchers:
    """Launchers whose output goes to files. Each has the ports of all, and listens at the first that is free."""

    def __init__(self, folder: pathlib.Path, ports: list[int]) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen] = []
        (folder / "script.py").write_text(SCRIPT)
        self.addresses = [f"127.0.0.1:{port}" for port in ports]

    def start(self, *arguments, nnodes="1:3", processes="1", coordinators=3) -> int:
        index = len(self.started)
        options = ["-n", processes, "--nnodes", nnodes, "--coordinator", ",".join(self.addresses[:coordinators])]
        with open(self.folder / f"output-{index}", "w") as output:
            launcher = subprocess.Popen(
                [*COMMAND, *options, *arguments, str(self.folder / "script.py")], stdout=output, stderr=output
            )
        self.started.append(launcher)
        self.await_text(index, "this launcher leads|follows the launcher|failed")
        return index

    def output(self, index: int) -> str:
        return (self.folder / f"output-{index}").read_text()

    def await_text(self, index: int, pattern: str) -> re.Match:
        until = time.monotonic() + TIME_LIMIT
        while (found := re.search(pattern, self.output(index))) is None:
            assert time.monotonic() < until, f"no {pattern!r}\n{self.outputs()}"
            time.sleep(0.02)
        return found

    def await_process(self, index: int, process: int, of: int, hosts: str, restart: str = r"\d+") -> int:
        """Waits for a process of a launcher, and returns its pid."""
        return int(self.await_text(index, rf"\] at {restart} {process} {of} {hosts} pid (\d+)")[1])

    def outputs(self) -> str:
        return "\n".join(f"---- {index}\n{self.output(index)}" for index in range(len(self.started)))

    def end(self) -> None:
        (self.folder / "end").touch()

    def status(self, index: int) -> int:
        try:
            return self.started[index].wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.outputs()) from None


@pytest.fixture
def launchers(tmp_path):
    with reserved_ports(3) as ports:
        found = Launchers(tmp_path, ports)
        yield found
        for launcher in found.started:
            launcher.kill()
            launcher.wait()


def test_hosts_join_and_any_may_be_lost(launchers):
    start = functools.partial(launchers.start, "--join-timeout", "0.5", coordinators=2)
    a = start()
    launchers.await_process(a, 0, 1, "0", "0")
    b = start(processes="2")
    launchers.await_process(b, 2, 3, "0,1", "1")
    c = start()
    pid = launchers.await_process(c, 3, 4, "0,1,3", "2")
    launchers.started[c].kill()
    assert_gone([pid])
    # Not a restart, of which there are none.
    pid = launchers.await_process(a, 0, 3, "0,1", "3")
    # The launcher that leads is killed; the other knows that it has ended.
    launchers.started[a].kill()
    assert_gone([pid])
    launchers.await_process(b, 1, 2, "0")
    # Another one in its place follows, though it has the first address.
    d = start()
    launchers.await_process(d, 2, 3, "0,2")
    launchers.await_process(b, 1, 3, "0,2")
    with socket.create_connection(launchers.addresses[1].split(":")):  # one that asks, say, as the job ends
        launchers.end()
        assert (launchers.status(b), launchers.status(d)) == (0, 0), launchers.outputs()
    assert "CancelledError" not in launchers.output(b)


@pytest.mark.full
def test_a_stopped_launcher_does_not_go_on_by_itself(launchers):
    options = ("--heartbeat-timeout", "5")
    a = launchers.start(*options, nnodes="2:3")
    others = [launchers.start(*options, nnodes="2:3") for _ in range(2)]
    pid = launchers.await_process(a, 0, 3, "0,1,2")
    launchers.started[a].send_signal(signal.SIGSTOP)
    for each in others:
        launchers.await_text(each, r"\] at 1 \d 2 0,1 ")
    launchers.started[a].send_signal(signal.SIGCONT)
    assert_gone([pid])
    # It is the last now.
    launchers.await_process(a, 2, 3, "0,1,2", "2")
    launchers.end()
    assert [launchers.status(each) for each in (a, *others)] == [0, 0, 0], launchers.outputs()


@pytest.mark.full
def test_one_of_two_does_not_go_on_when_the_other_is_silent(launchers):
    a = launchers.start("--heartbeat-timeout", "2", nnodes="1:2")
    b = launchers.start("--heartbeat-timeout", "2", "--node-timeout", "4", nnodes="1:2")
    pid = launchers.await_process(b, 1, 2, "0,1")
    launchers.started[a].send_signal(signal.SIGSTOP)
    assert launchers.status(b) == 1
    assert_gone([pid])
    last = launchers.output(b).splitlines()[-1]
    assert last.startswith("jax_ring.launch: failed: too few hosts for 4 s (--node-timeout), since ")
    assert f"Missing: {launchers.addresses[0]} (silent, or cannot be reached, since " in last
    assert launchers.output(b).count("] at ") == 1
    launchers.started[a].send_signal(signal.SIGCONT)
    # The first of two goes on: the other has ended.
    launchers.await_process(a, 0, 1, "0")
    launchers.started[a].send_signal(signal.SIGTERM)
    assert launchers.status(a) == 128 + signal.SIGTERM


def test_a_failure_uses_up_a_restart(launchers):
    options = ("--backoff", "0", "--max-restarts", "1")
    hosts = [launchers.start(*options, nnodes="2:2") for _ in range(2)]
    for restart in "01":
        launchers.await_text(hosts[0], rf"\] at {restart} ")
        launchers.await_text(hosts[1], rf"\] at {restart} ")
        (launchers.folder / f"fail1{restart}").touch()
    assert [launchers.status(each) for each in hosts] == [1, 1]
    assert "raised ValueError: bad batch; restart 1 of 1 in 0 s" in launchers.output(hosts[0])
    assert "raised ValueError: bad batch" in launchers.output(hosts[1]).splitlines()[-1]


def test_a_signal_while_the_leader_waits_for_the_processes_of_others(launchers):
    """It leaves the job instead of starting a generation."""
    (launchers.folder / "script.py").write_text(FAILS_BESIDE_A_SLOW_ONE)
    options = ("--max-restarts", "1", "--backoff", "0", "--failure-grace", "60")
    hosts = [launchers.start(*options, nnodes="2:2") for _ in range(2)]
    launchers.await_text(hosts[1], "told")
    launchers.started[hosts[0]].send_signal(signal.SIGTERM)
    launchers.end()
    assert launchers.status(hosts[0]) == 128 + signal.SIGTERM


@pytest.mark.full
def test_a_stopped_process_does_not_hold_up_the_others(launchers):
    options = ("--heartbeat-timeout", "2", "--leave-timeout", "0.5", "--backoff", "0", "--max-restarts", "1")
    hosts = [launchers.start(*options, nnodes="2:2") for _ in range(2)]
    pids = [launchers.await_process(host, i, 2, "0,1", "0") for i, host in enumerate(hosts)]
    # As one may be before it has connected, when no collective waits for it.
    os.kill(pids[1], signal.SIGSTOP)
    for i, host in enumerate(hosts):
        launchers.await_process(host, i, 2, "0,1", "1")
    assert_gone(pids)
    launchers.end()
    assert [launchers.status(each) for each in hosts] == [0, 0], launchers.outputs()
    assert f"(pid {pids[1]}) of host 1 has been stopped for 2 s (--heartbeat-timeout)" in launchers.output(hosts[1])
    assert "rank 1 " in re.search(".* has been stopped for .*", launchers.output(hosts[0]))[0]


def test_what_is_refused(launchers):
    launchers.start("--node-rank", "1", nnodes="2:3", coordinators=1)
    same = launchers.start("--node-rank", "1", nnodes="2:3", coordinators=1)
    assert launchers.status(same) == 2
    refused = rf"{launchers.addresses[0]} has refused this host: "
    assert f"{refused}there is a launcher with --node-rank 1 already, at {launchers.addresses[0]}" in (
        launchers.output(same)
    )
    other = launchers.start(nnodes="1:4", coordinators=1)
    assert launchers.status(other) == 2
    assert f"{refused}it was started with --nnodes 2:3 and --heartbeat-timeout 20, this host with --nnodes 1:4" in (
        launchers.output(other)
    )


def test_too_few_at_the_beginning(launchers):
    a = launchers.start("--node-timeout", "1", nnodes="2:3")
    assert launchers.status(a) == 1
    assert re.search(
        r"1 here, and it takes 2 \(--nnodes 2:3\), and of the 3 hosts of --coordinator more than half, or half with "
        rf"the first. Missing: {launchers.addresses[1]} \(not heard of yet\), {launchers.addresses[2]} ",
        launchers.output(a),
    ), launchers.output(a)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes", "3:2"], "--nnodes MIN:MAX needs MIN <= MAX, got 3:2"),
        (["--nnodes", "0:2"], "--nnodes must be at least 1, got 0:2"),
        (["--nnodes", "2"], "--coordinator takes several addresses with --nnodes MIN:MAX"),
        (["--nnodes", "1:2", "--node-rank", "2"], "--node-rank must be from 0 to 1 with --nnodes 1:2, got 2"),
        (["--nnodes", "1:2", "--coordinator", "a:1,a:1"], "--coordinator has an address twice: a:1,a:1"),
        (["--nnodes", "1:2", "--coordinator", "a:1,b"], "needs --coordinator HOST:PORT, got a:1,b"),
        (["--nnodes", "1:2", "--heartbeat-timeout", "0"], "--heartbeat-timeout must be a positive number"),
    ],
)
def test_arguments(options, message, capsys):
    from jax_ring.launcher import arguments

    with pytest.raises(SystemExit):
        arguments.parse(["-n", "1", "--coordinator", "a:1,b:1", *options, __file__], "")
    assert message in capsys.readouterr().err
