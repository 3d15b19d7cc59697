"""What processes ask their launcher: by any number of connections, in the place of others, or nothing at all."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest
from launches import command_with, run, start

from jax_ring.launcher import protocol
from jax_ring.launcher.coordinator.folder import SocketFolder
from jax_ring.launcher.processes import may_be, state_of

pytestmark = pytest.mark.one_pair  # the launcher is Python's

# Keeps more connections than the launcher may have files, and asks it something.
FLOODS = f"""
import os, resource, runpy, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
held, until = [], time.monotonic() + 60
while len(held) < 600 and time.monotonic() < until:
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].setblocking(False)
    try:
        held[-1].connect(os.environ["JAX_RING_CONTROL"])
    except BlockingIOError:  # it has not accepted the last ones yet
        held.pop().close()
        time.sleep(0.01)
control = runpy.run_path({protocol.__file__!r})
try:
    control["ask"]("enlist", 1, None, seconds=60)
    print("answered", len(held), flush=True)
except RuntimeError as error:
    print(error, flush=True)
if os.environ["JAX_RING_RESTART"] == "0":
    sys.exit(3)
print("folder", os.path.dirname(os.environ["JAX_RING_CONTROL"]))
"""


def test_connections_of_its_processes_take_no_file_that_the_launcher_needs(script):
    """It answers, starts them again and removes its folder, and says nothing of them."""
    few = ["sh", "-c", 'ulimit -S -n 200; exec "$@"', "sh"]
    launcher = start("-n", "1", "--max-restarts", "1", "--backoff", "0", script(FLOODS), starter=few)
    out, err = launcher.communicate(timeout=120)
    assert out.splitlines()[:2] == ["[0] answered 600"] * 2, err
    assert launcher.returncode == 0
    assert len(err.splitlines()) == 2, err  # that it has failed, and the restart
    assert not pathlib.Path(out.split()[-1]).exists()


def test_a_process_waits_until_the_launcher_has_accepted_others(monkeypatch):
    own = SocketFolder()
    monkeypatch.setenv(protocol.CONTROL_VARIABLE, own.socket("control"))
    monkeypatch.setenv(protocol.PROCESS_VARIABLE, "3")
    try:
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as other:
            server.bind(own.socket("control"))
            server.listen(0)  # that is one
            other.connect(own.socket("control"))
            with pytest.raises(RuntimeError, match="temporarily unavailable"):
                protocol.ask("initialize", awaits_answer=False, seconds=0.1)
            with monkeypatch.context() as patch:
                patch.setattr(protocol.time, "sleep", lambda _: server.accept()[0].close())
                protocol.ask("initialize", awaits_answer=False, seconds=60)
            with server.accept()[0] as accepted:
                assert accepted.recv(100) == b'[3, "initialize", []]\n'
    finally:
        own.close()


def test_a_process_that_says_nothing_is_not_waited_for(script):
    text = """
import os, socket
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(30)
    connection.connect(os.environ["JAX_RING_CONTROL"])
    connection.sendall(b"[0, ")
    print(connection.recv(1))
"""
    command = command_with("import jax_ring.launcher.newcomers as n; n._SECONDS = 0.1")
    assert run("-n", "1", script(text), command=command) == (0, ["[0] b''"], "")


# Rank 1 speaks as rank 0, then as itself by a program of its own in another session.
SPEAKS = f"""
import os, runpy, subprocess, sys
ask = runpy.run_path({protocol.__file__!r})["ask"]
if sys.argv[1:]:
    ask("enlist", 1, None)
    print("enlisted")
elif os.environ["JAX_PROCESS_ID"] == "1":
    program = [sys.executable, __file__, "as itself"]
    subprocess.run(program, check=True, start_new_session=True)
    os.environ["JAX_RING_LAUNCHED"] = "0"
    try: ask("report", "Error", "of another", None)
    except RuntimeError as error: print(error)
"""


def test_a_process_does_not_speak_for_another(script):
    status, out, err = run("-n", "2", script(SPEAKS))
    assert (status, err) == (0, "")
    assert out[0] == "[1] enlisted"
    assert re.fullmatch(
        r"\[1\] jax_ring.launch: process \d+ asks for something as rank 0 \(pid \d+\), which has not started it", out[1]
    )


def test_a_process_of_any_name():
    """It chooses its name, which the system writes before its parent."""
    comm = pathlib.Path("/proc/self/comm")
    before = comm.read_bytes()
    try:
        for name in (b"\xff", b") R 1 1", b"a b\n"):
            comm.write_bytes(name)
            assert state_of(os.getpid()) in ("R", "S")
            assert may_be(os.getpid(), os.getppid())
    finally:
        comm.write_bytes(before)


def test_whose_process_it_may_be():
    """One that has ended, or is in another namespace, is known by its user alone."""
    options = {"start_new_session": True, "stdin": subprocess.PIPE}
    reads = [sys.executable, "-c", "input()"]
    with subprocess.Popen(reads, **options) as first, subprocess.Popen(reads, **options) as second:
        assert may_be(first.pid, first.pid)
        assert may_be(first.pid, os.getpid())
        assert not may_be(first.pid, second.pid)
        assert not may_be(os.getpid(), first.pid)
        assert not may_be(1, first.pid)
        for each in (first, second):
            each.communicate(b"\n")
    assert may_be(first.pid, second.pid)
    assert may_be(0, second.pid)
