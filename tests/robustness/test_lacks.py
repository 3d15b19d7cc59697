"""A launcher for which the system starts no process or thread, once: it says what to do, and uses its restarts."""

import asyncio
import errno
import os
import re
import threading

import pytest
from launches import command_with, reserved_ports, run, start

from jax_ring.launcher import signals

pytestmark = pytest.mark.one_pair  # the launcher is Python's

# The launcher starts what removes its folder, the coordination service, and then rank 0 and rank 1.
FOLDER, SERVICE, RANK_0, RANK_1 = range(4)
REMEDIES = {
    errno.EAGAIN: "raise the limit of processes (ulimit -u, and pids.max of the control group), or start fewer (-n)",
    errno.ENOMEM: "leave more memory, or start fewer processes (-n)",
}


def lacking(number, which):
    """The launcher's command where the call with this number that starts a process fails."""
    return command_with(
        f"""
import os, subprocess
class Popen(subprocess.Popen):
    calls = 0
    def _execute_child(self, *arguments):
        Popen.calls += 1
        if Popen.calls == {which} + 1:
            raise OSError({number}, os.strerror({number}))
        super()._execute_child(*arguments)
subprocess.Popen = Popen
"""
    )


@pytest.mark.parametrize("number", REMEDIES)
@pytest.mark.parametrize(
    ("which", "what"),
    [(SERVICE, "the coordination service could"), (RANK_0, "rank 0 could"), (RANK_1, "rank 1 could")],
)
def test_a_process_that_cannot_be_started(script, number, which, what):
    """A restart has it. The processes that are there are ended as ever."""
    path = script("import os, time; time.sleep(60 * (os.environ['JAX_RING_RESTART'] == '0')); print('ended')")
    said = f"{what} not be started: [Errno {number}] {os.strerror(number)}: {REMEDIES[number]}"
    status, out, err = run(
        "-n", "2", "--max-restarts", "1", "--backoff", "0", path, command=lacking(number, which)
    )  # fmt: skip
    assert (status, out) == (0, ["[0] ended", "[1] ended"]), err
    assert err.splitlines()[-1] == f"jax_ring.launch: failed: {said}; restart 1 of 1 in 0 s"
    status, _, err = run("-n", "2", path, command=lacking(number, which))
    assert status == 1
    assert err.splitlines()[-1] == f"jax_ring.launch: failed: {said}"
    assert "Traceback" not in err


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.usefixtures("secret")
def test_other_hosts_are_told(script, restarts):
    with reserved_ports(1) as (port,):
        options = ["--nnodes", "2", "--coordinator", f"127.0.0.1:{port}", "--max-restarts", str(restarts)]
        launchers = [
            start("-n", "1", *options, "--backoff", "0", "--node-rank", str(rank), script("print('here')"), **command)
            for rank, command in enumerate([{"command": lacking(errno.EAGAIN, SERVICE)}, {}])
        ]
        ends = [(*launcher.communicate(timeout=120), launcher.returncode) for launcher in launchers]
    assert [status for _, _, status in ends] == [1 - restarts] * 2, ends
    if not restarts:
        said = f"the coordination service could not be started: [Errno {errno.EAGAIN}] {os.strerror(errno.EAGAIN)}: "
        assert ends[1][1] == f"jax_ring.launch: failed: host 0: {said}{REMEDIES[errno.EAGAIN]}\n"


@pytest.mark.parametrize("number", REMEDIES)
def test_a_launcher_that_cannot_begin(script, number):
    status, _, err = run("-n", "2", script(""), command=lacking(number, FOLDER))
    assert status == 1
    assert err == (
        "jax_ring.launch: failed: 2 processes cannot be started: "
        f"[Errno {number}] {os.strerror(number)}: {REMEDIES[number]}\n"
    )


def test_a_launcher_that_gets_no_thread(script):
    """For its output."""
    change = """
import threading
def start(self): raise RuntimeError("can't start new thread")
threading.Thread.start = start
"""
    status, _, err = run("-n", "2", script(""), command=command_with(change))
    assert status == 1
    said = f"[Errno {errno.EAGAIN}] can't start new thread: {REMEDIES[errno.EAGAIN]}"
    assert err == f"jax_ring.launch: failed: 2 processes cannot be started: {said}\n"


def test_a_look_up_that_gets_no_thread_finds_nothing(monkeypatch):
    """A launcher then tries again."""

    def start(self):
        raise RuntimeError("can't start new thread")

    async def look_up():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(signals.Threads())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            await loop.getaddrinfo("localhost", 1)

    with pytest.raises(OSError, match="can't start new thread"):
        asyncio.run(look_up())


# Without a file system that hangs there is no process that the kernel keeps: waiting for one takes as long as it may.
KEPT = """
import subprocess
class Popen(subprocess.Popen):
    def wait(self, timeout=None):
        if timeout is not None and self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return super().wait(timeout)
subprocess.Popen = Popen
"""
FAILS_BESIDE_ANOTHER = """
import os, pathlib, signal, sys, time
there = pathlib.Path(sys.argv[1])
if os.environ["JAX_PROCESS_ID"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    there.touch()
    time.sleep(60)
while not there.exists(): time.sleep(0.01)
sys.exit(3)
"""


def test_a_process_that_the_system_keeps(script, tmp_path):
    """The launcher ends without it, and says so."""
    path, there = script(FAILS_BESIDE_ANOTHER), tmp_path / "there"
    status, _, err = run("-n", "2", "--grace", "0.1", path, str(there), command=command_with(KEPT))
    assert status == 3, err
    *_, kept, failed = err.splitlines()
    assert (
        kept == "jax_ring.launch: ranks 1 are killed, and end once the system lets them go, as from a file that hangs"
    )
    assert re.fullmatch(r"jax_ring.launch: failed: rank 0 \(pid \d+\) exited with status 3", failed), failed
