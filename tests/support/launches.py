"""Starts `jax_ring.launch` in tests, and waits for the processes that it has started."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax_ring
from jax_ring.launcher.processes import state_of

# Background jobs of a shell ignore SIGINT, and child processes inherit that.
_PYTHON = ["env", "--default-signal=INT,QUIT", sys.executable, "-P"]
MODULE = [*_PYTHON, "-m", "jax_ring.launch"]
# The same without the package's __init__.py, whose import of JAX is most of what a launch costs.
_LAUNCHER = f"""
import sys, types
package = sys.modules["jax_ring"] = types.ModuleType("jax_ring")
package.__path__ = [{str(pathlib.Path(jax_ring.__file__).parent)!r}]
from jax_ring.launch import main
assert "jax" not in sys.modules
sys.exit(main())
"""
COMMAND = [*_PYTHON, "-c", _LAUNCHER]


def command_with(change):
    """The command with a change of the launcher's modules."""
    return [*_PYTHON, "-c", _LAUNCHER.replace("sys.exit", f"{change}\nsys.exit")]


# Runs the code of a test, prints the pid of the process, and waits.
WAITS = """
import os, signal, sys, time
{}
os.write(1, b"pid %d\\n" % os.getpid())  # in one write
time.sleep(60)
"""
# Rank 0 fails when rank 1 is there, which is told to end, says so, and takes until the test has made the file "end".
# Rank 1's pid is in "there".
FAILS_BESIDE_A_SLOW_ONE = """
import os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
def wait_for(name):
    while not (here / name).exists(): time.sleep(0.01)
if os.environ["JAX_PROCESS_ID"] == "0":
    wait_for("there")
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told\\n"))
(here / "there").write_text(str(os.getpid()))
wait_for("end")
"""


@contextlib.contextmanager
def reserved_ports(count):
    """Ports of 127.0.0.1 for launchers, one after the other too, that no program is given which asks for any."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as asyncio's servers, which can bind it then
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]


def start(*arguments, starter=(), command=COMMAND, **options):
    return subprocess.Popen(
        [*starter, *command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def run(*arguments, env=None, command=COMMAND):
    result = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, check=False, env=os.environ | (env or {})
    )
    return result.returncode, sorted(result.stdout.splitlines()), result.stderr


def pids(launcher, count):
    """The pids that `count` processes of WAITS print."""
    lines = [launcher.stdout.readline() for _ in range(count)]
    assert all(lines), launcher.stderr.read()
    return [int(line.split()[-1]) for line in lines]


def assert_gone(pids, seconds=10):
    """Asserts that all processes exit within `seconds`, or are zombies."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if state_of(pid) not in ("", "Z", "X")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
