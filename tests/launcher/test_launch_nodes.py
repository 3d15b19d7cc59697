"""A job on several hosts, which are launchers on one host here: failures, restarts, and launchers that end."""

import asyncio
import contextlib
import signal
import socket
import time

import pytest
from launches import FAILS_BESIDE_A_SLOW_ONE, WAITS, assert_gone, pids, reserved_ports, run, start

from jax_ring.launcher import events, protocol
from jax_ring.launcher.control_server import ControlServer
from jax_ring.launcher.coordinator.folder import SocketFolder
from jax_ring.launcher.environment import Plan
from jax_ring.launcher.signals import SignalledError, unless_signalled
from jax_ring.launcher.watching import page

pytestmark = [pytest.mark.one_pair, pytest.mark.usefixtures("secret")]  # the launcher is Python's

# Rank 2 fails when the others have printed.
FAILS_ONCE = """
import os, pathlib, time
restart, rank = os.environ["JAX_RING_RESTART"], os.environ["JAX_PROCESS_ID"]
print(restart, "of", os.environ["JAX_NUM_PROCESSES"], "gpu", os.environ["JAX_LOCAL_DEVICE_IDS"], flush=True)
if restart == "0":
    here = pathlib.Path(__file__).parent
    (here / rank).touch()
    if rank == "2":
        while not ((here / "0").exists() and (here / "1").exists()): time.sleep(0.01)
        raise ValueError("bad batch")
    time.sleep(60)
"""


@pytest.fixture
def hosts(tmp_path):
    """Starts launchers with numbers of processes, and other arguments; kills them at the end."""
    with contextlib.ExitStack() as stack:
        (port,) = stack.enter_context(reserved_ports(1))

        def start_hosts(text, counts, *arguments, ranks=None):
            (tmp_path / "script.py").write_text(text)
            launchers = [
                start(
                    "-n", str(count), "--nnodes", "2", "--node-rank", str(rank), "--coordinator", f"127.0.0.1:{port}",
                    *arguments, str(tmp_path / "script.py"),
                )
                for rank, count in (enumerate(counts) if ranks is None else zip(ranks, counts, strict=True))
            ]  # fmt: skip
            for launcher in launchers:
                stack.callback(launcher.communicate)
                stack.callback(launcher.kill)
            return launchers

        yield start_hosts


def ends(launchers):
    """Exit status, sorted lines of output, and errors of each launcher."""
    found = [launcher.communicate(timeout=120) for launcher in launchers]
    return [
        (launcher.returncode, sorted(out.splitlines()), err)
        for launcher, (out, err) in zip(launchers, found, strict=True)
    ]


def test_memory_has_the_same_prefix_on_all_hosts(hosts):
    """One process names it, and each launcher removes what is left of it."""
    text = f"import runpy; print('prefix', runpy.run_path({protocol.__file__!r})['memory_prefix']() or 'none')"
    first, second = ends(hosts(text, [1, 1]))
    prefixes = [line.split()[-1] for _, lines, _ in (first, second) for line in lines]
    assert len(prefixes) == 2, (first, second)
    assert prefixes[0] == prefixes[1] != "none"


def test_a_failure_restarts_the_processes_of_all_hosts(hosts):
    first, second = ends(hosts(FAILS_ONCE, [1, 2], "--max-restarts", "1", "--backoff", "0"))
    assert first[:2] == (0, ["[0] 0 of 3 gpu 0", "[0] 1 of 3 gpu 0"]), first
    assert second[0] == 0, second
    assert second[1] == ["[1] 0 of 3 gpu 0", "[1] 1 of 3 gpu 0", "[2] 0 of 3 gpu 1", "[2] 1 of 3 gpu 1"]
    assert "of host 1 raised ValueError: bad batch; restart 1 of 1 in 0 s" in first[2]


@pytest.mark.parametrize("host", [0, 1])
def test_a_launcher_that_is_killed_ends_the_job(hosts, host):
    launchers = hosts(WAITS.format(""), [1, 1])
    started = [pids(launcher, 1)[0] for launcher in launchers]
    launchers[host].kill()
    status, _, err = ends([launchers[1 - host]])[0]
    assert status == 1, err
    who = ("the launcher of host 0", "host 1 is gone")[host]
    assert err.splitlines()[-1].startswith(f"jax_ring.launch: failed: {who}")
    assert_gone(started)


def test_another_launcher_takes_the_place_of_one_that_has_ended(hosts):
    """It has the same --node-rank. The job has used up a restart, and waited for it."""
    text = WAITS.format("if os.environ['JAX_RING_RESTART'] == '1': sys.exit(print('again', flush=True))")
    options = ("--max-restarts", "1", "--backoff", "0")
    first, second = hosts(text, [1, 1], *options)
    started = [pids(launcher, 1)[0] for launcher in (first, second)]
    second.kill()
    assert_gone(started)
    (third,) = hosts(text, [1], *options, ranks=[1])
    (status, out, err), last = ends([first, third])
    assert (status, out) == (0, ["[0] again"]), err
    assert "failed: host 1 is gone: its launcher has ended, or cannot be reached; restart 1 of 1 in 0 s" in err
    assert last[:2] == (0, ["[1] again"]), last


def test_a_signal_to_host_0_reaches_all(hosts):
    launchers = hosts(WAITS.format(""), [1, 1])
    started = [pids(launcher, 1)[0] for launcher in launchers]
    launchers[0].send_signal(signal.SIGINT)
    for status, _, err in ends(launchers):
        assert status == 128 + signal.SIGINT, err
        assert "received SIGINT" in err
    assert_gone(started)


def test_a_signal_to_another_host_loses_it(hosts):
    """At once: no process of host 0 waits for one of the other."""
    launchers = hosts(WAITS.format(""), [1, 1])
    started = [pids(launcher, 1)[0] for launcher in launchers]
    launchers[1].send_signal(signal.SIGTERM)
    (first, _, err), (second, _, _) = ends(launchers)
    assert (first, second) == (1, 128 + signal.SIGTERM), err
    assert err.splitlines()[-1].startswith("jax_ring.launch: failed: host 1 is gone")
    assert_gone(started)


def test_a_signal_while_host_0_waits_for_the_processes_of_others_ends_the_job(hosts, tmp_path):
    options = ("--max-restarts", "1", "--backoff", "0", "--failure-grace", "60")
    launchers = hosts(FAILS_BESIDE_A_SLOW_ONE, [1, 1], *options)
    assert launchers[1].stdout.readline() == "[1] told\n"
    launchers[0].send_signal(signal.SIGTERM)
    (tmp_path / "end").touch()
    assert [status for status, _, _ in ends(launchers)] == [128 + signal.SIGTERM] * 2


def test_hosts_that_do_not_come(hosts):
    for rank, message in ((0, "failed: hosts 1 are not there after 0.2 s"), (1, "failed: no launcher of host 0 at ")):
        ((status, _, err),) = ends(hosts("", [1], "--node-timeout", "0.2", ranks=[rank]))
        assert status == 1
        assert message in err


def test_a_port_that_is_taken(script):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        status, _, err = run("-n", "1", "--nnodes", "2", "--coordinator", address, script(""))
    assert status == 1, err
    assert err.endswith(". Another program listens there\n")


@pytest.mark.parametrize("nnodes", ["2", "2:2"])
@pytest.mark.parametrize(("name", "is_said"), [("127.0.0.1", False), ("localhost", False), ("127.1", True)])
def test_a_name_that_only_this_host_knows_as_itself(script, nnodes, name, is_said):
    """127.1 stands for a name: to the resolver it is loopback, too."""
    seconds, last = {"2": ("0.2", "(--node-timeout)"), "2:2": ("60", "this launcher leads")}[nnodes]
    options = ["--nnodes", nnodes, "--node-timeout", seconds]
    err = ""
    with reserved_ports(1) as (port,):
        launcher = start("-n", "1", *options, "--coordinator", f"{name}:{port}", script(""))
        while last not in err:  # once it has listened
            err += (line := launcher.stderr.readline())
            assert line, err
        launcher.kill()
        launcher.communicate()
    assert ("listens at 127.0.0.1, which 127.1 is on this host: others cannot reach it" in err) == is_said


def test_signals_are_the_main_thread_s(script):
    """Another one that is preempted before it has noted a signal would let the launcher see later ones first."""
    path = script(
        """
import os, pathlib, signal, time
def blocks(thread):
    blocked = next(line for line in (thread / "status").read_text().splitlines() if line.startswith("SigBlk:"))
    return int(blocked.split()[1], 16) >> (signal.SIGTERM - 1) & 1
threads = list(pathlib.Path(f"/proc/{os.getppid()}/task").iterdir())
(main,) = [thread for thread in threads if thread.name == str(os.getppid())]
until = time.monotonic() + 30
while blocks(main) and time.monotonic() < until:
    time.sleep(0.01)  # while it starts a process
print([thread for thread in threads if not blocks(thread)] == [main])
"""
    )
    with reserved_ports(1) as (port,):  # a name is looked up by a thread
        options = ["-n", "1", "--nnodes", "2", "--coordinator", f"localhost:{port}", path]
        launchers = [start("--node-rank", str(rank), *options) for rank in range(2)]
        assert [end[:2] for end in ends(launchers)] == [(0, [f"[{rank}] True"]) for rank in range(2)]


@pytest.mark.parametrize("line", [b"5\n", b"[]\n", b"GET / HTTP/1.1\r\n"])
def test_a_stranger_at_the_socket_of_processes(line):
    async def scenario():
        asked = []
        folder = SocketFolder()
        server = ControlServer(folder.socket("control"), lambda *question: asked.append(question))
        await server.start()
        reader, writer = await asyncio.open_unix_connection(server.path)
        writer.write(line)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        server.close()
        folder.close()
        return asked

    assert asyncio.run(scenario()) == []


def test_a_stranger_at_a_port(script):
    """Its connection is closed, a line names it, and the job goes on."""
    with reserved_ports(1) as (port,):
        options = ["-n", "1", "--nnodes", "2", "--coordinator", f"127.0.0.1:{port}", script("print('here')")]
        launchers = [start("--node-rank", "0", *options)]
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n")
                own = stranger.getsockname()[1]
                with contextlib.suppress(ConnectionResetError):  # it had more to say
                    while stranger.recv(1 << 16):
                        pass
                break
            assert time.monotonic() < until
            time.sleep(0.02)
        launchers.append(start("--node-rank", "1", *options))
        first, second = ends(launchers)
    assert first[:2] == (0, ["[0] here"]), first
    assert second == (0, ["[1] here"], "")
    assert f"the connection with 127.0.0.1:{own} is closed: b'GET / HT' is no greeting of a launcher" in first[2]
    assert "Traceback" not in first[2]


WRITES = f"""
import os, runpy, time
words = runpy.run_path({page.__file__!r})["Page"].of_launcher().words
if os.environ["JAX_PROCESS_ID"] == "1":
    words.counts = 2**62
    words.limit = words.completed_at = words.compiling_since = float("nan")
    time.sleep(1)  # the launchers look four times a second
print("here")
"""


def test_a_process_that_writes_anything_into_its_page_is_no_matter_of_other_hosts(script):
    with reserved_ports(1) as (port,):
        options = ["-n", "1", "--nnodes", "2", "--coordinator", f"127.0.0.1:{port}", script(WRITES)]
        launchers = [start("--node-rank", str(rank), *options) for rank in range(2)]
        assert ends(launchers) == [(0, [f"[{rank}] here"], "") for rank in range(2)]


def test_events_are_kept_while_something_else_is_awaited():
    """Host 0 starts a job at once when the last host connects, which may not know yet that it has."""
    first, second = events.Begin(Plan("job", 0, (0,), 1, 2, "127.0.0.1:1"), 0, 0), events.ChangePending(True)

    async def scenario():
        queue = asyncio.Queue()

        async def connects():
            queue.put_nowait(first)
            for _ in range(5):
                await asyncio.sleep(0)
            queue.put_nowait(second)

        await unless_signalled(queue, connects(), 10)
        queue.put_nowait(events.Signalled(signal.SIGTERM))
        with pytest.raises(SignalledError) as raised:
            await unless_signalled(queue, asyncio.sleep(10))
        assert raised.value.signum == signal.SIGTERM
        return [await asyncio.wait_for(queue.get(), 10) for _ in range(2)]

    assert asyncio.run(scenario()) == [first, second]
