"""Elastic jobs as the launcher sees them: who is a member of which generation. No process here imports JAX."""

import pathlib
import re
import signal
import socket

import pytest
from launches import assert_gone, command_with, run, start

from jax_ring.launcher import protocol
from jax_ring.launcher.members import Formation, Membership, Refusal

pytestmark = pytest.mark.one_pair  # the launcher is Python's

# A member of an elastic job, in which `step` is what a process does in a generation: it returns why it leaves.
ELASTIC = f"""
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("control", {protocol.__file__!r})
control = importlib.util.module_from_spec(spec)
spec.loader.exec_module(control)
launcher = control.Control.connect()
number, rank = int(os.environ["JAX_RING_LAUNCHED"]), os.environ["JAX_PROCESS_ID"]
"""
MEMBER = (
    ELASTIC
    + """
formed = __file__ + ".formed"  # there is a generation without the process that is replaced
while os.environ.get("JAX_RING_JOIN") and not os.path.exists(formed):
    time.sleep(0.01)
launcher.enlist(min_processes=2)
if os.environ.get("JAX_RING_JOIN"):
    member = launcher.next_generation(-1, "new")
else:
    member = control.Member(0, os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(rank))
while True:
    here = f"{member.process_id} of {member.num_processes}"
    print("generation", member.generation, here, os.environ["JAX_RING_GENERATION"], flush=True)
    if member.generation == 2 and os.environ.get("JAX_RING_JOIN"):
        while os.path.exists("/proc/" + open(formed).read()):
            time.sleep(0.01)
        sys.exit(5)
    if member.generation == 2:
        sys.exit()
    if number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if member.generation == 0:
        time.sleep(0.2)
        member = launcher.next_generation(0, "rank 1 does not answer")
        time.sleep(0.5)  # so that what follows may have arrived with the reply
        continue
    with open(formed, "a") as file:
        file.write(str(os.getpid()) * (rank == "0"))
    while member.generation == 1 and not launcher.change_pending():
        time.sleep(0.01)
    if member.generation == 1:
        member = launcher.next_generation(1, "a process waits")
"""
)


def test_a_stopped_member_is_replaced(script):
    """By one that fails in the end, when others have finished."""
    status, out, err = run("-n", "3", "--max-restarts", "1", "--backoff", "0", script(MEMBER))
    assert status == 5, err
    assert re.search(r"rank 1 \(pid \d+\) exited with status 5; others have finished", err), err
    assert err.splitlines()[-1].endswith(" exited with status 5")
    assert out == [
        "[0] generation 0 0 of 3 0",
        "[0] generation 1 0 of 2 1",
        "[0] generation 2 0 of 3 2",
        "[1] generation 0 1 of 3 0",
        "[1] generation 2 2 of 3 2",  # the new process is last: index 0 is one that has the state
        "[2] generation 0 2 of 3 0",
        "[2] generation 1 1 of 2 1",
        "[2] generation 2 1 of 3 2",
    ]
    assert "is stopped, and the others wait for it; killing it" in err
    assert "was killed by SIGKILL; the others go on, and another process starts in its place" in err


def test_a_process_that_waits_to_join_when_the_members_finish_is_not_needed(script):
    path = script(
        ELASTIC
        + """
launcher.enlist(min_processes=1)
formed = __file__ + ".formed"
if os.environ.get("JAX_RING_JOIN"):
    while not os.path.exists(formed):
        time.sleep(0.01)
    launcher.next_generation(-1, "new")
if rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
launcher.next_generation(0, "rank 1 has ended")
open(formed, "x").close()
while not launcher.change_pending():
    time.sleep(0.01)
print("finished", flush=True)
os._exit(0)
"""
    )
    status, out, err = run("-n", "2", "--max-restarts", "1", "--backoff", "0", path)
    assert (status, out) == (0, ["[0] finished"]), err
    assert "is no longer needed: the members have finished; killing it" in err
    assert "Traceback" not in err


def test_a_member_that_does_not_leave_is_killed_and_too_few_are_refused(script):
    path = script(
        ELASTIC
        + """
launcher.enlist(min_processes=2)
if rank == "1": time.sleep(60)
try:
    launcher.next_generation(0, "rank 1 does not answer")
except RuntimeError as error:
    print(error, flush=True)
"""
    )
    status, out, err = run("-n", "2", "--leave-timeout", "0.3", path)
    assert status == 128 + signal.SIGKILL
    assert "has not left generation 0 within 0.3 s (--leave-timeout) of the first; killing it" in err
    reason = "1 processes are left, of which 1 can be members; it needs 2"
    assert f"jax_ring.launch: {reason}" in err
    assert out in ([], [f"[0] jax_ring.launch: {reason}"])  # SIGTERM may come first, or rank 0 end before it
    assert err.splitlines()[-1].endswith("was killed by SIGKILL")


def test_processes_that_are_killed_after_they_have_failed(script):
    """Their exception is named, and their shared memory removed."""
    path = script(
        ELASTIC
        + """
import atexit, mmap
launcher.enlist(min_processes=1)
name = f"/dev/shm/jax_ring-{control.memory_prefix()}{number}-left"
file = open(name, "x+b")
file.truncate(1)
mapped = mmap.mmap(file.fileno(), 1)  # what nobody has mapped tests/chaos would take for left behind, and remove
print(name, flush=True)
atexit.register(time.sleep, 60)
raise KeyError("no such column")
"""
    )
    status, out, err = run("-n", "2", "--failure-grace", "0.3", path)
    assert status == 1, err
    assert err.splitlines()[-1].endswith("raised KeyError: 'no such column'")
    assert not any(pathlib.Path(line.split()[-1]).exists() for line in out)


@pytest.mark.full
def test_a_stopped_member_that_nobody_else_misses_is_killed(script):
    """The only one of its generation, which the process that is to join waits for."""
    path = script(
        ELASTIC
        + """
import pathlib
first = pathlib.Path(__file__).with_name("first")
launcher.enlist(min_processes=1)
if number == 1: os.kill(os.getpid(), signal.SIGKILL)
if number == 0:
    member = launcher.next_generation(0, "rank 1 has ended")
    print("members", member.num_processes, flush=True)
    first.symlink_to(f"/proc/{os.getpid()}")
    os.kill(os.getpid(), signal.SIGSTOP)
while number == 2 and not (first.exists() and b") T" in (first / "stat").read_bytes()):
    time.sleep(0.01)
member = launcher.next_generation(-1, "new")
print("members", member.num_processes, flush=True)
"""
    )
    options = ("--leave-timeout", "0.5", "--max-restarts", "2", "--backoff", "0.1")
    status, out, err = run("-n", "2", *options, path)
    assert status == 0, err
    assert "rank 0 (pid " in err
    assert "has been stopped for 0.5 s (--leave-timeout), and others wait for it; killing it" in err
    assert out == ["[0] members 1", "[0] members 2", "[1] members 2"], (out, err)


@pytest.mark.full
def test_only_the_time_since_a_member_was_stopped_anew_counts(script, tmp_path):
    """Rank 0 is stopped twice. Those who wait for it the first time die, and the second time it goes on soon."""
    path = script(
        ELASTIC
        + f"""
import pathlib, threading
twice = pathlib.Path({str(tmp_path / "twice")!r})
launcher.enlist(min_processes=1)
after = -1
if number == 0:
    twice.with_name("pid").write_text(str(os.getpid()))
    after = launcher.next_generation(0, "rank 1 has ended").generation
    os.kill(os.getpid(), signal.SIGSTOP)
    twice.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
elif number == 1:
    while not twice.with_name("pid").exists(): time.sleep(0.01)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    pid = int(twice.with_name("pid").read_text())
    def await_stop():
        while b") T" not in pathlib.Path(f"/proc/{{pid}}/stat").read_bytes(): time.sleep(0.01)
    await_stop()
    if number == 2:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        time.sleep(3)
        os.kill(pid, signal.SIGCONT)
        while not twice.exists(): time.sleep(0.01)
        await_stop()
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
member = launcher.next_generation(after, "a process waits")
print("members", member.num_processes, flush=True)
"""
    )
    options = ("--leave-timeout", "3", "--max-restarts", "3", "--backoff", "0.1")
    status, out, err = run("-n", "2", *options, path)
    assert status == 0, err
    assert "killing it" not in err
    assert out == ["[0] members 2", "[1] members 2"], (out, err)


@pytest.mark.full
def test_one_that_dies_before_it_connects_does_not_end_the_others(script):
    """Clients of JAX's service wait for all to connect, and would abort their processes in the end."""
    path = script(
        ELASTIC
        + """
from jaxlib import _jax
launcher.enlist(min_processes=1)
member = launcher.next_generation(0, "for a test")
if member.process_id == 1:
    os.kill(os.getpid(), signal.SIGKILL)
client = _jax.get_distributed_runtime_client(
    member.coordinator, member.process_id, init_timeout=30, shutdown_on_destruction=False
)
client.connect()
while not launcher.change_pending():
    time.sleep(0.01)
member = launcher.next_generation(1, "process 1 has died")
print(member.generation, member.process_id, member.num_processes, flush=True)
os._exit(0)
"""
    )
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
    status, out, err = run("-n", "3", path, env=env)
    assert status == 0, err
    assert out == ["[0] 2 0 2", "[2] 2 1 2"]


def test_a_spare_that_ends_while_the_generation_is_being_formed(script):
    """The launcher had it as one that waits, and failed with a KeyError."""
    path = script(
        ELASTIC
        + """
import pathlib
launcher.enlist(min_processes=1, multiple_of=2)
if rank == "3": os.kill(os.getpid(), signal.SIGKILL)
if rank == "2": pathlib.Path(__file__).with_name("spare").symlink_to(f"/proc/{os.getpid()}")
member = launcher.next_generation(0, "rank 3 has ended")
print("members", member.num_processes, flush=True)
"""
    )
    # A service takes until the spare has ended and the launcher has noted it.
    slow = f"""
import asyncio, os, signal
from jax_ring.launcher.coordinator.process import Service
from jax_ring.launcher.members import Membership
service_started, ended = Service.started, Membership.ended
noted = asyncio.Event()
async def started(self):
    pid = int(os.readlink({str(pathlib.Path(path).with_name("spare"))!r}).rpartition("/")[2])
    if not noted.is_set():
        os.kill(pid, signal.SIGKILL)
        Membership.ended = lambda *arguments: (ended(*arguments), noted.set())
    await noted.wait()
    return await service_started(self)
Service.started = started
"""
    status, out, err = run("-n", "4", path, command=command_with(slow))
    assert (status, out) == (0, ["[0] members 2", "[1] members 2"]), err


def test_what_is_refused(script):
    path = script(
        ELASTIC
        + """
def error_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, error)
if rank == "1":
    sys.exit()
error_of(launcher.next_generation, 0, "")
error_of(launcher.enlist, min_processes=3)
launcher.enlist(min_processes=1, multiple_of=4)
error_of(launcher.enlist, min_processes=2, multiple_of=4)
error_of(launcher.next_generation, 3, "")
"""
    )
    status, out, err = run("-n", "1:2", path)
    assert status == 0, err
    # -n 1:2 allows one process, and an exception that is caught is no failure.
    assert [line for line in out if line.startswith("[0]")] == sorted(
        f"[0] {text}"
        for text in (
            "RefusedError jax_ring.launch: this job is not elastic: call enlist() first",
            "ValueError elastic.run(min_processes=3): the job has 2 processes (-n 2): start at least 3, or lower "
            "min_processes",
            "RefusedError jax_ring.launch: elastic.run: another process has min_processes=1 and num_shards for 4 "
            "processes; this one 2, and 4. All processes must ask for the same.",
            "RefusedError jax_ring.launch: next_generation(after=3): the generation is 0",
        )
    )


def test_processes_end_with_a_killed_launcher_and_leave_no_socket(script):
    path = script(
        ELASTIC
        + """
launcher.enlist(min_processes=1)
print(os.environ[control.CONTROL_VARIABLE], os.getpid(), flush=True)
time.sleep(60)
"""
    )
    launcher = start("-n", "2", path)
    lines = [launcher.stdout.readline().split() for _ in range(2)]
    assert all(lines), launcher.stderr.read()
    socket_name, started = lines[0][1], [int(line[2]) for line in lines]
    sockets = pathlib.Path("/proc/net/unix")
    assert socket_name in sockets.read_text()
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(children) > 2  # services too
    launcher.kill()
    launcher.communicate(timeout=30)
    assert_gone([*started, *map(int, children)])
    assert socket_name not in sockets.read_text()


class TestMembership:
    def left(self, members, processes):
        for process in processes:
            members.left(process, members.generation if process in members.members else -1, "")

    def test_survivors_do_not_wait_for_replacements(self):
        members = Membership([0, 1, 2], 2, None)
        members.ended(0)
        members.started(3)
        self.left(members, [2])
        assert members.decide(0) is None  # process 1 has not left
        assert members.members_left_over() == [1]
        assert members.is_change_pending()  # for process 1, which may wait for the dead one in vain
        self.left(members, [1])
        assert not members.is_change_pending()
        assert members.decide(1) == Formation((1, 2), ())
        self.left(members, [3])  # while the generation is being formed
        members.form(Formation((1, 2), ()))
        assert members.is_change_pending()
        assert members.decide(0) is None
        self.left(members, [2, 1])
        assert members.decide(0) == Formation((1, 2, 3), ())

    def test_one_that_dies_while_the_others_wait(self):
        members = Membership([0, 1, 2], 1, None)
        self.left(members, [0])
        members.ended(1)
        assert members.decide(0) is None
        members.ended(2)
        assert members.decide(0) == Formation((0,), ())

    def test_the_number_of_members_divides_that_of_shards(self):
        members = Membership([0, 1, 2, 3], 1, 4)
        members.ended(1)
        self.left(members, [0, 2, 3])
        assert members.decide(0) == Formation((0, 2), (3,))
        members.form(Formation((0, 2), (3,)))
        self.left(members, [3])  # a spare that waits makes nobody leave
        assert not members.is_change_pending()
        assert not members.is_leaving()
        members.started(4)
        self.left(members, [4])
        assert members.is_change_pending()  # 4 divides 4
        members.ended(3)
        assert not members.is_change_pending()
        members.ended(0)
        members.ended(2, is_failure=False)
        assert not members.is_change_pending()  # nobody is left to leave

    def test_too_few(self):
        members = Membership([0, 1, 2], 2, None)
        members.ended(0)
        members.ended(1)
        self.left(members, [2])
        assert members.decide(1) is None  # one will be started
        assert isinstance(members.decide(0), Refusal)

    def test_without_survivors_all_that_start_are_waited_for(self):
        members = Membership([0, 1], 1, None)
        for process, other in ((0, 2), (1, 3)):
            members.ended(process)
            members.started(other)
        self.left(members, [2])
        assert members.decide(0) is None
        self.left(members, [3])
        assert members.decide(1) is None
        assert members.decide(0) == Formation((2, 3), ())

    def test_a_generation_that_cannot_have_been_left(self):
        members = Membership([0, 1], 1, None)
        with pytest.raises(ValueError, match="the generation is 0"):
            members.left(0, 1, "")
        with pytest.raises(ValueError, match="the generation is 0"):
            members.left(0, -1, "")


def test_a_message_that_comes_with_a_reply_counts():
    here, there = socket.socketpair()
    with here, there:
        launcher = protocol.Control(here)
        there.sendall(protocol.encode({"done": True}) + protocol.encode({"change_pending": True}))
        launcher.enlist(min_processes=1)
        assert launcher.change_pending()
        there.sendall(protocol.encode({"error": "too few"}))
        with pytest.raises(RuntimeError, match=r"jax_ring\.launch: too few"):
            launcher.next_generation(0, "")
        there.close()
        with pytest.raises(RuntimeError, match="the launcher has ended"):
            launcher.change_pending()
