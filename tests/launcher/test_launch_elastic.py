"""Elastic jobs as the launcher sees them: which processes a generation has. No process here imports JAX."""

import pathlib
import re
import signal

import pytest
from launches import assert_gone, run, start

from jax_ring.launcher import protocol
from jax_ring.launcher.shared import Needs

pytestmark = pytest.mark.one_pair  # the launcher is Python's

# What a process of an elastic job begins with, and what one does that waits for others.
ELASTIC = f"""
import atexit, importlib.util, mmap, os, pathlib, signal, sys, time
spec = importlib.util.spec_from_file_location("control", {protocol.__file__!r})
control = importlib.util.module_from_spec(spec)
spec.loader.exec_module(control)
names = ("PROCESS_ID", "NUM_PROCESSES", "RING_GENERATION")
rank, count, generation = (int(os.environ["JAX_" + name]) for name in names)
here = pathlib.Path(__file__).parent
def enlist(min_processes=1, multiple_of=None):
    control.ask("enlist", min_processes, multiple_of)
    print(f"generation {{generation}}: {{rank}} of {{count}}", flush=True)
    there = here / f"{{rank}} in {{generation}}"
    there.with_suffix(".new").write_text(str(os.getpid()))
    there.with_suffix(".new").rename(there)
def wait_for(*names):
    while not all((here / name).exists() for name in names):
        time.sleep(0.01)
def wait_for_all():
    wait_for(*(f"{{i}} in {{generation}}" for i in range(count)))
def kill_itself():
    wait_for_all()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def generations(out):
    return [line.partition("generation ")[2] for line in out if "generation " in line]


def test_all_start_again_and_then_those_that_remain(script):
    """The commit of the first generation saves the wait before the second."""
    path = script(
        ELASTIC
        + """
enlist()
if generation == 0 and rank == 0:
    slot, *files = map(int, os.environ[control.KEPT_VARIABLE].split(","))
    os.pwrite(files[0], control.KEPT_MARK.pack(True, generation, 1), 0)
    wait_for_all()
if generation < 2:
    kill_itself() if rank == 1 else time.sleep(60)
print("slot", os.environ[control.KEPT_VARIABLE].partition(",")[0])
"""
    )
    status, out, err = run("-n", "3", "--max-restarts", "1", "--backoff", "50", path)
    assert status == 0, err
    expected = [f"{g}: {i} of {n}" for g, n in enumerate((3, 3, 2)) for i in range(n)]
    assert sorted(generations(out)) == expected
    assert [line for line in out if "slot" in line] == ["[0] slot 0", "[1] slot 2"]
    assert re.search(r"failed: rank 1 \(pid \d+\) was killed by SIGKILL; restart 1 of 1 in 0 s\n", err), err
    assert re.search(r"rank 1 .* SIGKILL; no restarts are left \(--max-restarts\), going on with 2 processes\n", err), (
        err
    )


def test_some_are_left_over_where_not_all_divide_the_shards(script):
    """That uses up no restart, and lost processes have one in their place."""
    path = script(
        ELASTIC
        + """
enlist(multiple_of=4)
if count == 5: control.leave("5 do not divide 4")
if generation == 1: kill_itself() if rank == 1 else time.sleep(60)
"""
    )
    status, out, err = run("-n", "5", path)
    assert status == 0, err
    found = generations(out)
    assert set(found) >= {f"{g}: {i} of 4" for g in (1, 2) for i in range(4)}, (out, err)
    assert "; restart " not in err


def test_too_few_are_left(script):
    path = script(ELASTIC + "enlist(2)\nkill_itself() if rank else time.sleep(60)")
    status, _, err = run("-n", "2", path)
    assert status == 128 + signal.SIGKILL
    *_, reason, last = err.splitlines()
    assert reason == "jax_ring.launch: 1 processes are left, and it takes 2 (min_processes)"
    assert last.endswith("was killed by SIGKILL")


def test_no_number_of_processes_suits(script):
    """Shards for one or two processes, of which three are needed: a restart does not help."""
    path = script(ELASTIC + "enlist(3, 2)\ncontrol.leave('3 do not divide 2')")
    status, _, err = run("-n", "3", "--max-restarts", "1", "--backoff", "0", path)
    assert status == 1
    assert err.splitlines()[-1] == (
        "jax_ring.launch: failed: 3 processes are left, and it takes 3 (min_processes), and a number that divides "
        "num_shards, of 2 processes"
    )


def test_none_goes_on_without_restarts_once_one_has_finished(script):
    """The others cannot do again what it has done."""
    path = script(
        ELASTIC
        + """
enlist()
wait_for_all()
if rank == 0: sys.exit()
while os.path.exists("/proc/" + (here / "0 in 0").read_text()): time.sleep(0.01)
kill_itself()
"""
    )
    status, out, err = run("-n", "2", path)
    assert status == 128 + signal.SIGKILL
    assert len(generations(out)) == 2, out
    assert err.splitlines()[-1].endswith("was killed by SIGKILL")


def test_processes_that_are_killed_after_they_have_failed(script):
    """Their exception is named, and their shared memory removed. Others do not wait for their handlers of atexit."""
    path = script(
        ELASTIC
        + """
enlist()
name = f"/dev/shm/jax_ring-{control.memory_prefix()}{rank}-left"
file = open(name, "x+b")
file.truncate(1)
mapped = mmap.mmap(file.fileno(), 1)  # what nobody has mapped tests/chaos would take for left behind, and remove
print(name, flush=True)
wait_for_all()
if rank: time.sleep(60)
atexit.register(time.sleep, 60)
raise KeyError("no such column")
"""
    )
    status, out, err = run("-n", "2", "--failure-grace", "0.3", "--max-restarts", "0", path)
    assert status == 1, err
    assert re.search(r"KeyError: 'no such column'; it has not exited within 0.3 s; killing ranks 1", err), err
    assert "raised KeyError: 'no such column'; no restarts are left (--max-restarts), going on with 1 processes" in err
    assert not any(pathlib.Path(line.split()[-1]).exists() for line in out if "/dev/shm" in line)


def test_a_stopped_process_that_others_blame_is_named_at_once(script):
    path = script(
        ELASTIC
        + """
enlist()
wait_for_all()
if generation: sys.exit()
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
while b") T" not in pathlib.Path("/proc", (here / "1 in 0").read_text(), "stat").read_bytes(): time.sleep(0.01)
control.report_failure("RuntimeError", "rank 1 does not come", 1)
time.sleep(60)
"""
    )
    status, out, err = run("-n", "2", "--max-restarts", "1", "--failure-grace", "50", path)
    assert status == 0, err
    assert re.search(r"failed: rank 1 \(pid \d+\) is stopped; restart 1 of 1", err), err
    assert len(generations(out)) == 4


@pytest.mark.parametrize("is_elastic", [True, False])
def test_a_stopped_process_that_nobody_blames(script, is_elastic):
    """A debugger may hold one of a job that does not go on without it."""
    path = script(
        ELASTIC
        + f"""
if {is_elastic}: enlist()
if generation == 0 and rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
if generation == 0: time.sleep(3)
if rank == 0:
    for process in pathlib.Path(f"/proc/{{os.getppid()}}/task/{{os.getppid()}}/children").read_text().split():
        os.kill(int(process), signal.SIGCONT)
"""
    )
    status, _, err = run("-n", "2", "--max-restarts", "1", "--heartbeat-timeout", "0.5", path)
    assert status == 0, err
    expected = r"failed: rank 1 \(pid \d+\) has been stopped for 0.5 s \(--heartbeat-timeout\); restart 1 of 1"
    assert bool(re.search(expected, err)) == is_elastic, err


def test_one_that_is_stopped_before_it_has_come_is_named(script):
    """Also in a job of which nobody knows yet whether it is elastic: JAX would wait for minutes."""
    path = script(
        ELASTIC
        + """
if generation: sys.exit()
if rank == 1:
    (here / "new").write_text(str(os.getpid()))
    (here / "new").rename(here / "1")
    os.kill(os.getpid(), signal.SIGSTOP)
wait_for("1")
while b") T" not in pathlib.Path("/proc", (here / "1").read_text(), "stat").read_bytes(): time.sleep(0.01)
control.tell_initialize()
time.sleep(60)
"""
    )
    status, _, err = run("-n", "2", "--max-restarts", "1", "--heartbeat-timeout", "0.5", path)
    assert status == 0, err
    assert re.search(r"failed: rank 1 \(pid \d+\) is stopped; restart 1 of 1", err), err


def test_one_that_exits_while_the_others_wait_for_it_is_named(script):
    """It has not come to jax.distributed.initialize()."""
    path = script(
        ELASTIC
        + """
if rank == 1: sys.exit()
control.tell_initialize()
time.sleep(60)
"""
    )
    status, _, err = run("-n", "2", "--failure-grace", "0.3", path)
    assert status == 1, err
    what = "has exited with status 0 without jax.distributed.initialize(), in which others wait for it"
    assert re.search(rf"failed: rank 1 \(pid \d+\) {re.escape(what)}$", err.strip()), err


def test_what_is_refused(script):
    path = script(
        ELASTIC
        + """
def error_of(do, *values):
    try:
        control.ask(do, *values)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, error)
if rank == 1:
    sys.exit()
error_of("dance")
error_of("enlist", "3", None)
error_of("enlist", 3, None)
control.ask("enlist", 1, 4)
error_of("enlist", 2, 4)
"""
    )
    status, out, err = run("-n", "1:2", path)
    assert status == 0, err
    # -n 1:2 allows one process, and an exception that is caught is no failure.
    assert [line for line in out if line.startswith("[0]")] == sorted(
        f"[0] {text}"
        for text in (
            "RefusedError jax_ring.launch: unknown request 'dance'",
            "RefusedError jax_ring.launch: '3' is no int",
            "ValueError elastic.run(min_processes=3): the job has 2 processes (-n 2): start at least 3, or lower "
            "min_processes",
            "RefusedError jax_ring.launch: elastic.run: another process has min_processes=1 and num_shards for 4 "
            "processes; this one 2, and 4. All processes must ask for the same.",
        )
    )


def test_processes_end_with_a_killed_launcher(script):
    path = script(ELASTIC + "enlist()\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    launcher = start("-n", "2", path)
    lines = [line.split() for line in (launcher.stdout.readline() for _ in range(4)) if "generation" not in line]
    assert all(lines), launcher.stderr.read()
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(children) == 4  # the coordination service, and what removes the sockets
    launcher.kill()
    launcher.communicate(timeout=30)
    assert_gone([*(int(line[1]) for line in lines), *map(int, children)])


def test_needs():
    assert [Needs(2).most(n) for n in range(4)] == [0, 0, 2, 3]
    assert [Needs(2, 12).most(n) for n in range(8)] == [0, 0, 2, 3, 4, 4, 6, 6]
    assert Needs(5, 12).most(5) == 0
