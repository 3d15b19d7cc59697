"""Restarts, whose failure a job names, modules, nested launches, and the coordination service outside of the ranks."""

import re
import signal

import pytest
from launches import FAILS_BESIDE_A_SLOW_ONE, assert_gone, command_with, run, start

from jax_ring.launcher import environment, protocol
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.environment import Plan
from jax_ring.launcher.shared import Shared

pytestmark = pytest.mark.one_pair  # the launcher is Python's


def test_a_failed_job_starts_again(script):
    path = script(
        """
import os
restart, rank = os.environ["JAX_RING_RESTART"], os.environ["JAX_PROCESS_ID"]
# In one write, also where PYTHONUNBUFFERED is set: a process may be terminated between two.
print("restart " + restart + " " + os.environ["JAX_COORDINATOR_ADDRESS"])
if rank == "1" and restart != "2": raise ValueError("bad batch\\nand more")
if restart != "2": import time; time.sleep(60)
"""
    )
    status, out, err = run("-n", "2", "--max-restarts", "2", "--backoff", "0.05", path)
    assert status == 0, err
    seen = [line.split() for line in out]
    assert {(rank, restart) for rank, _, restart, _ in seen} >= {("[0]", "2"), ("[1]", "0"), ("[1]", "1"), ("[1]", "2")}
    assert len({address for _, _, _, address in seen}) > 1, out  # a port may come again
    assert "raised ValueError: bad batch; restart 1 of 2 in 0.05 s" in err
    assert "raised ValueError: bad batch; restart 2 of 2 in 0.1 s" in err


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_signal_while_a_failure_ends_the_processes_ends_the_job(script, tmp_path, is_slow):
    """It neither starts the job again nor cuts the processes' time short. A slow launcher sees it with their end."""
    path = script(FAILS_BESIDE_A_SLOW_ONE + "print('ended')")
    launcher = start("-n", "2", "--max-restarts", "1", "--backoff", "0", "--failure-grace", "60", path)
    assert launcher.stdout.readline() == "[1] told\n"
    if is_slow:
        launcher.send_signal(signal.SIGSTOP)
    launcher.send_signal(signal.SIGTERM)
    (tmp_path / "end").touch()
    if is_slow:
        assert_gone([int((tmp_path / "there").read_text())])
        launcher.send_signal(signal.SIGCONT)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM, err
    assert out == "[1] ended\n"
    assert "restart 1" not in err


@pytest.mark.parametrize(
    ("backoff", "restarts", "expected"), [(0.5, 1, 0.5), (0.5, 3, 2), (0.0, 5000, 0), (1.0, 5000, 60)]
)
def test_backoff(backoff, restarts, expected):
    job = Shared(Options((), backoff=backoff, max_restarts=restarts))
    for _ in range(restarts):
        job.take_restart()
    assert job.backoff() == expected


@pytest.mark.full
def test_the_death_of_the_coordination_service_is_not_blamed_on_a_rank(script):
    """JAX aborts the processes that are its clients."""
    path = script(
        """
import os, pathlib, signal, time
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        is_service = parent == os.getppid() and b"coordinator/server.py" in (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # before or while it is read
        continue
    if is_service and os.environ["JAX_RING_RESTART"] == "0":
        os.kill(int(process.name), signal.SIGKILL)
        # On a busy machine it takes a while to die. JAX aborts its clients after that.
        while process.exists() and (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        os.abort()
"""
    )
    what = r"failed: the coordination service \(pid \d+\) was killed by SIGKILL"
    status, _, err = run("-n", "1:2", "--max-restarts", "1", "--backoff", "0", path)
    assert status == 0, err
    assert re.search(f"{what}; restart 1 of 1 in 0 s", err), err
    assert "in two attempts on end" not in err
    status, _, err = run("-n", "1", path)
    assert status == 128 + signal.SIGKILL, err
    assert re.search(f"{what}$", err.strip()), err


def test_the_death_of_the_coordination_service_is_noticed_before_anybody_has_connected(script):
    """The processes would wait for it for minutes, as these do."""
    path = script(
        """
import os, pathlib, signal, sys, time
if os.environ["JAX_RING_RESTART"] != "0": sys.exit()
children = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
for pid in children:
    if b"coordinator/server.py" in pathlib.Path("/proc", pid, "cmdline").read_bytes():
        os.kill(int(pid), signal.SIGKILL)
time.sleep(60)
"""
    )
    status, _, err = run("-n", "1", "--max-restarts", "1", "--backoff", "0", path)
    assert status == 0, err
    assert re.search(r"failed: the coordination service \(pid \d+\) was killed by SIGKILL; restart 1 of 1", err), err


def test_one_that_fails_again_and_again_is_left_out(script):
    path = script(
        """
import os, sys
print(os.environ["JAX_RING_RESTART"], os.environ["JAX_NUM_PROCESSES"], os.environ["JAX_LOCAL_DEVICE_IDS"])
sys.exit(5 if os.environ["JAX_LOCAL_DEVICE_IDS"] == "0" else 0)
"""
    )
    status, out, err = run("-n", "1:2", "--max-restarts", "2", "--backoff", "0", path)
    assert status == 0, err
    assert "exited with status 5 in two attempts on end; going on with 1 processes without it" in err
    assert "[0] 2 1 1" in out


# In place of jax_ring.runtime: knows one failure, which is the fault of process 2.
RUNTIME = """
import sys, types
kept = types.SimpleNamespace(process=2)
failure_of = lambda error: kept if str(error).endswith("[failure 7]") else None
sys.modules["jax_ring.runtime"] = types.SimpleNamespace(failure_of=failure_of)
"""


@pytest.mark.parametrize(
    ("leaves", "others_leave"),
    [("raise", "raise OSError('the step failed') from error"), ("sys.exit(1)", "sys.exit(1)")],
)
@pytest.mark.parametrize("message", ["any text [failure 7]", "Gloo: Connection closed by peer"])
def test_the_last_line_names_the_first_that_failed_by_itself(script, message, leaves, others_leave):
    """The others, which fail because of it, exit earlier."""
    path = script(
        f"""{RUNTIME}
import atexit, os, pathlib, sys, time
reported = pathlib.Path(__file__).with_name("reported")
if os.environ["JAX_PROCESS_ID"] == "2":
    atexit.register(time.sleep, 0.5)
    atexit.register(reported.touch)
    try:
        raise ValueError("bad batch")
    except ValueError:
        {leaves}
while not reported.exists(): time.sleep(0.01)
try:
    raise RuntimeError({message!r})
except RuntimeError as error:
    {others_leave}
"""
    )
    status, _, err = run("-n", "3", "--failure-grace", "30", path)
    assert status == 1
    last = err.splitlines()[-1]
    assert last.startswith("jax_ring.launch: failed: rank 2 (pid ")
    assert last.endswith("raised ValueError: bad batch")


# Rank 2 exits with status 7, and the others raise errors that name it as the cause.
EXITS_BESIDE_OTHERS = f"""{RUNTIME}
import os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
is_cause = os.environ["JAX_PROCESS_ID"] == "2"
def wait_for(name):
    while not (here / name).exists(): time.sleep(0.01)
"""


def test_a_process_that_others_blame_has_time_to_exit(script, tmp_path):
    """The launcher has its status, although all others have reported and exited before."""
    path = script(
        EXITS_BESIDE_OTHERS
        + """
if is_cause:
    wait_for("end")
    sys.exit(7)
raise RuntimeError("any text [failure 7]")
"""
    )
    launcher = start("-n", "3", "--failure-grace", "0", "--grace", "60", path)
    assert any("waiting up to 60 s for ranks 2 to exit, which may be the cause" in line for line in launcher.stderr)
    (tmp_path / "end").touch()
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 7, err
    last = err.splitlines()[-1]
    assert last.startswith("jax_ring.launch: failed: rank 2 (pid ")
    assert last.endswith("exited with status 7")


def test_a_process_that_others_blame_and_that_stays(script):
    """It is told to end after --grace, and its status then is none of its own."""
    path = script(
        EXITS_BESIDE_OTHERS
        + """
if is_cause:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    (here / "there").touch()
    time.sleep(60)
wait_for("there")
raise RuntimeError("any text [failure 7]")
"""
    )
    status, _, err = run("-n", "3", "--failure-grace", "0.5", "--grace", "0.7", path)
    assert status == 1, err
    assert re.search("sending SIGTERM to ranks ([01], )*2$", err, re.MULTILINE), err  # others may still run
    assert err.splitlines()[-1].endswith("raised RuntimeError: any text [failure 7]")


def test_the_end_of_a_process_counts_also_before_its_event(script):
    """It has come to its end, and the launcher turns to ending the others before it hears of that."""
    path = script(
        EXITS_BESIDE_OTHERS
        + """
if is_cause:
    (here / "pid.new").write_text(str(os.getpid()))
    (here / "pid.new").rename(here / "pid")
    sys.exit(7)
wait_for("pid")
while os.path.exists("/proc/" + (here / "pid").read_text()): time.sleep(0.01)
raise RuntimeError("any text [failure 7]")
"""
    )
    change = """
import asyncio
from jax_ring.launcher.job import Job
reap = Job._reap
Job._reap = lambda self: asyncio.get_running_loop().call_later(1.0, reap, self)
"""
    status, _, err = run("-n", "3", "--failure-grace", "0.1", "--grace", "60", path, command=command_with(change))
    assert status == 7, err
    assert err.splitlines()[-1].endswith("exited with status 7")


def test_a_process_that_fails_has_time_for_its_handlers_of_atexit(script, tmp_path):
    """--grace, whereas others have --failure-grace. The launcher exits with the status that it has in the end."""
    path = script(
        """
import atexit, os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
def wait_for(name):
    while not (here / name).exists(): time.sleep(0.01)
if os.environ["JAX_PROCESS_ID"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (here / "there").touch()
    time.sleep(60)
wait_for("there")
atexit.register(print, "saved")
atexit.register(wait_for, "end")
try:
    raise ValueError("bad batch")
except ValueError:
    sys.exit(4)
"""
    )
    launcher = start("-n", "2", "--failure-grace", "0.1", "--grace", "60", path)
    assert any("killing ranks 1" in line for line in launcher.stderr)
    (tmp_path / "end").touch()
    out, err = launcher.communicate(timeout=60)
    assert out == "[0] saved\n"
    assert launcher.returncode == 4, err


def test_without_a_first_failure_the_last_line_repeats_the_error(script):
    path = script(f"{RUNTIME}\nraise RuntimeError('any text [failure 7]')")
    status, _, err = run("-n", "2", "--failure-grace", "0.2", path)
    assert status == 1
    assert err.splitlines()[-1].endswith("raised RuntimeError: any text [failure 7]")


def test_modules(script, tmp_path, monkeypatch):
    script("", "__init__.py")
    script("import sys\nprint(__name__, __package__, sys.argv[1:], sys.path[0])", "tool.py")
    monkeypatch.chdir(tmp_path.parent)
    status, out, err = run("-n", "1", "-m", f"{tmp_path.name}.tool", "-n", "x")
    assert status == 0, err
    assert out == [f"[0] __main__ {tmp_path.name} ['-n', 'x'] {tmp_path.parent}"]


@pytest.mark.parametrize(
    ("outer", "devices", "expected"),
    [
        ({}, None, "1"),
        ({}, 2, "2,3"),
        ({"JAX_LOCAL_DEVICE_IDS": "5,6"}, None, "5,6"),  # the user's choice
        ({"JAX_LOCAL_DEVICE_IDS": "5,6"}, 2, "2,3"),
        ({"JAX_LOCAL_DEVICE_IDS": "5,6", protocol.CONTROL_VARIABLE: "@outer"}, None, "6"),  # another launcher's
        ({"JAX_LOCAL_DEVICE_IDS": "4,5,6,7", protocol.CONTROL_VARIABLE: "@outer"}, 2, "6,7"),
        ({"JAX_LOCAL_DEVICE_IDS": "5", protocol.CONTROL_VARIABLE: "@outer"}, None, "1"),  # too few: CPU devices
    ],
)
def test_devices_of_nested_launches(outer, devices, expected):
    outer = outer | {protocol.WATCH_VARIABLE: "1"}
    own, plan = {protocol.CONTROL_VARIABLE: "@inner"}, Plan("job", 0, (0, 1), 0, 2, "127.0.0.1:1")
    found = environment.variables(Options((), devices=devices), plan, own, slot=1, rank=1, outer=outer)
    assert found["JAX_LOCAL_DEVICE_IDS"] == expected
    assert found[protocol.CONTROL_VARIABLE] == "@inner"
    assert protocol.WATCH_VARIABLE not in found


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        ({"no_proxy": "a"}, {}),
        ({"http_proxy": "p"}, {"no_proxy": "::1"}),
        ({"https_proxy": "p", "no_proxy": "a,b"}, {"no_proxy": "a,b,::1"}),
        ({"grpc_proxy": "p", "NO_PROXY": "a"}, {"no_proxy": "a,::1"}),
        ({"http_proxy": "p", "no_proxy": "a", "no_grpc_proxy": "b"}, {"no_proxy": "a,::1", "no_grpc_proxy": "b,::1"}),
    ],
)
def test_the_coordination_service_is_reached_without_a_proxy(outer, expected):
    found = environment.variables(
        Options(()), Plan("job", 0, (0, 1), 0, 2, "[::1]:80"), {}, slot=1, rank=1, outer=outer
    )
    assert {name: found.get(name) for name in expected} == expected


def test_a_socket_needs_nothing_said_of_a_proxy():
    plan, outer = Plan("job", 0, (0, 1), 0, 2, "unix:/tmp/coordinator-1"), {"http_proxy": "p", "no_proxy": "a"}
    assert environment.variables(Options(()), plan, {}, slot=1, rank=1, outer=outer)["no_proxy"] == "a"


@pytest.mark.full
def test_the_death_of_rank_0_leaves_the_others_their_service(script):
    path = script(
        """
import os, time
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
jax.distributed.initialize()
from jax._src import distributed
client = distributed.global_state.client
if jax.process_index() == 0:
    client.wait_at_barrier("both", 60000)
    os.kill(os.getpid(), 9)
client.wait_at_barrier("both", 60000)
time.sleep(1)
client.key_value_set("key", "value")
print("alive, with", client.key_value_try_get("key"), distributed.global_state.service)
os._exit(0)  # JAX's preemption manager waits at exit, after SIGTERM, for a process that has died
"""
    )
    # JAX's preemption notifier keeps rank 1 from ending with SIGTERM.
    status, out, err = run("-n", "2", "--failure-grace", "30", path)
    assert status == 128 + 9
    assert out == ["[1] alive, with value None"], err
    assert err.splitlines()[-1].endswith("was killed by SIGKILL")


def test_control_without_a_launcher(monkeypatch):
    monkeypatch.delenv(protocol.CONTROL_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=r"Start the program with: python -m jax_ring\.launch"):
        protocol.ask("enlist")
    protocol.report_failure("ValueError", "bad batch", None)  # no error of its own
    monkeypatch.setenv(protocol.CONTROL_VARIABLE, "@nobody")
    monkeypatch.setenv(protocol.PROCESS_VARIABLE, "0")
    with pytest.raises(RuntimeError, match="the launcher at JAX_RING_CONTROL=@nobody does not answer"):
        protocol.ask("enlist")
