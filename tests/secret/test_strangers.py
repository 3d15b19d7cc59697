"""Strangers at the port of a launcher: with another secret, without one, or where there is none."""

import asyncio
import contextlib
import re
import secrets
import socket
import threading
import time
import types

import pytest
from launches import reserved_ports, start

from jax_ring.launcher.arguments import Options
from jax_ring.launcher.events import Failure
from jax_ring.launcher.hosts.groups import Group, Host
from jax_ring.launcher.hosts.links import BUFFER_BYTES, Link
from jax_ring.launcher.hosts.messages import Answer, Hello, Message
from jax_ring.launcher.hosts.search import Search
from jax_ring.launcher.shared import Shared

pytestmark = pytest.mark.one_pair  # the launcher is Python's

TIME_LIMIT = 60
WAITS_FOR_A_FILE = """
import pathlib, sys, time
print("here", flush=True)
until = time.monotonic() + 60
while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < until: time.sleep(0.02)
"""


@pytest.fixture
def hosts(script):
    """Starts launchers of several hosts, with an address for each if hosts may change; kills them at the end."""
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(reserved_ports(3))

        def start_host(rank, *options, secret=None, nnodes="2", text="print('here')", starter=(), arguments=()):
            addresses = ",".join(f"127.0.0.1:{port}" for port in ports[: int(nnodes[-1]) if ":" in nnodes else 1])
            launcher = start(
                "-n", "1", "--nnodes", nnodes, "--node-rank", str(rank), "--coordinator", addresses, *options,
                script(text), *arguments, starter=[*(["env", f"JAX_RING_SECRET={secret}"] if secret else []), *starter],
            )  # fmt: skip
            stack.callback(launcher.communicate)
            stack.callback(launcher.kill)
            return launcher

        start_host.ports = ports
        yield start_host


def connection(port):
    """To a launcher, as soon as it listens."""
    until = time.monotonic() + TIME_LIMIT
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=TIME_LIMIT)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.02)


def end(launcher):
    out, err = launcher.communicate(timeout=120)
    assert "Traceback" not in err, err
    return launcher.returncode, out, err


OTHER_SECRET = (
    "has another secret than this one (JAX_RING_SECRET, or --secret-file): give all launchers of a job the same"
)


@pytest.mark.parametrize("nnodes", ["2", "2:2"])
def test_a_host_with_another_secret_ends_and_the_right_one_joins(hosts, nnodes):
    """Both sides say so, once."""
    right = secrets.token_hex()
    first = hosts(0, secret=right, nnodes=nnodes)
    connection(hosts.ports[0]).close()
    status, _, err = end(hosts(1, secret=secrets.token_hex(), nnodes=nnodes))
    assert status == 2
    assert err.endswith(f"jax_ring.launch: failed: the launcher at 127.0.0.1:{hosts.ports[0]} {OTHER_SECRET}\n")
    second = hosts(1, secret=right, nnodes=nnodes)
    for launcher in (first, second):
        status, out, err = end(launcher)
        assert (status, out[4:]) == (0, "here\n"), err
        said = re.findall(r"refused the launcher at 127.0.0.1:\d+: it (.*)", err)
        assert said == [OTHER_SECRET] * (launcher is first)


@pytest.mark.full
def test_one_of_another_job_at_an_address_keeps_nobody_from_this_one(hosts):
    """It may have been left behind there."""
    hosts(0, secret=secrets.token_hex(), nnodes="2:3")
    connection(hosts.ports[0]).close()
    right = secrets.token_hex()
    launchers = [hosts(rank, "--join-timeout", "0", secret=right, nnodes="2:3") for rank in (1, 2)]
    ends = [end(launcher) for launcher in launchers]
    assert [(status, out[4:]) for status, out, _ in ends] == [(0, "here\n")] * 2, ends
    # The one that leads has looked at all addresses; the other may have found it first.
    assert f"the launcher at 127.0.0.1:{hosts.ports[0]} {OTHER_SECRET}\n" in ends[0][2] + ends[1][2]


@pytest.mark.parametrize("is_first", [True, False])
def test_one_with_a_secret_and_one_without(hosts, is_first):
    options = [{"secret": secrets.token_hex()}, {}]
    facts = ["has a secret", "was started with --insecure"]
    if not is_first:
        options, facts = options[::-1], facts[::-1]
    first, second = (
        hosts(rank, *([] if each else ["--insecure"]), "--node-timeout", "5", **each)
        for rank, each in enumerate(options)
    )
    status, _, err = end(second)
    assert status == 2
    assert f"failed: the launcher at 127.0.0.1:{hosts.ports[0]} {facts[0]}, and this one {facts[1]}: give" in err
    status, _, err = end(first)
    assert status == 1
    assert f": it {facts[1]}, and this one {facts[0]}: give all launchers of a job the same secret\n" in err


def test_without_a_secret_it_is_said(hosts):
    launchers = [hosts(rank, "--insecure") for rank in range(2)]
    for launcher in launchers:
        status, out, err = end(launcher)
        assert (status, out[4:]) == (0, "here\n"), err
        assert err.startswith(
            "jax_ring.launch: --insecure: whoever reaches the port of a launcher takes part in this job\n"
        )


def test_idle_connections_keep_nobody_out(hosts):
    """Their number and their time are limited, so that files are left; here there are few."""
    right = secrets.token_hex()
    first = hosts(0, secret=right, starter=["sh", "-c", 'ulimit -n 600; exec "$@"', "sh"])
    with contextlib.ExitStack() as stack:
        for _ in range(700):
            stack.enter_context(connection(hosts.ports[0]))
        second = hosts(1, secret=right)
        for launcher in (first, second):
            status, out, err = end(launcher)
            assert (status, out[4:], err) == (0, "here\n", "")


@pytest.mark.full
def test_one_that_says_little_is_closed(hosts):
    hosts(0, secret=secrets.token_hex())
    with connection(hosts.ports[0]) as stranger:
        stranger.sendall(b"jaxring1")
        data = b""
        while part := stranger.recv(1 << 10):
            data += part
    assert len(data) == 41


@pytest.mark.full
def test_many_strangers_are_few_lines(hosts):
    right = secrets.token_hex()
    first = hosts(0, secret=right)
    for _ in range(100):
        with connection(hosts.ports[0]) as stranger:
            stranger.sendall(b"jaxring1s" + bytes(64))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1 << 10):
                    pass
    second = hosts(1, secret=right)
    assert end(second)[0] == 0
    status, _, err = end(first)
    assert status == 0
    assert 0 < err.count("refused the launcher at ") < 30  # at most one in five seconds


@contextlib.contextmanager
def passing_on(port, to):
    """A stranger at a port, who passes on what comes to another port, and what that answers."""

    async def copied(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 12):
                writer.write(data)
        writer.close()

    async def serve(reader, writer):
        try:
            others = await asyncio.open_connection("127.0.0.1", to)
        except ConnectionError:
            writer.close()
        else:
            await asyncio.gather(copied(reader, others[1]), copied(others[0], writer))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", port, reuse_address=True))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.close()


def test_one_who_passes_on_what_a_launcher_says_is_not_that(hosts):
    """In the place of one that is not there. Each of the others asks it, and the first meets itself."""
    right = secrets.token_hex()
    with passing_on(hosts.ports[0], hosts.ports[1]):
        options = ("--join-timeout", "0", "--node-timeout", "20")
        launchers = [hosts(rank, *options, secret=right, nnodes="2:3") for rank in (1, 2)]
        ends = [end(launcher) for launcher in launchers]
    assert [(status, out[4:]) for status, out, _ in ends] == [(0, "here\n")] * 2, ends


def test_who_answers_at_an_address():
    """The user may have written another name for it; where a launcher has any port, the others cannot know that."""
    shared, said = Shared(Options((), hosts_change=True, coordinators=(("a", 1), ("b", 1)))), []
    shared.output = types.SimpleNamespace(log=said.append)
    search = Search(shared)
    other = Answer("another", "b:1", True, False, 0, False)
    assert search._is_of(other, "b:1")
    assert search._is_of(other, "c:1")
    assert not search._is_of(other._replace(id=search.own.id), "b:1")
    assert not said
    for _ in range(2):
        assert not search._is_of(other, "a:1")
        assert not search._is_of(other._replace(address=""), "a:1")
    assert said == [
        f"at a:1 answers the launcher of {where}: give all launchers the same --coordinator"
        for where in ("b:1", "another address")
    ]


# ---- Where there is no secret: what is said is checked nevertheless --------------------------------------------------


def hello(**changes):
    found = Hello(Host("evil", "127.0.0.1:1", (0,)), None, (), 0, 0, None, Group(0, ()), (), ("1:2", 20.0))
    return Message("hello", found._replace(**changes))


def say(port, *sent, answer):
    """Says messages to a launcher without a secret; returns what it answers until it closes the connection."""

    async def scenario():
        connection(port).close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=BUFFER_BYTES)
        link = await Link.opened(reader, writer, 20.0, lambda text: None, b"", listens=False)
        heard = []
        for message in sent:
            link.send(message)
        async with asyncio.timeout(TIME_LIMIT):
            while (message := await link.receive()) is not None:
                heard.append(message)
                for each in answer(message):
                    link.send(each)
        link.abort()
        return heard

    return asyncio.run(scenario())


def takes_part(*messages):
    """What a stranger does: it agrees to all groups, and says these messages of the first generation."""

    def answer(message):
        if message.kind == "propose":
            return [Message("accepted", message.value.number)]
        if message.kind == "start":
            return [Message(each.kind, each.value, message.value[0].number) for each in messages]
        return []

    return answer


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("failed", (("rank 1", 1, "failed", 0, None), True)), "is no message of a launcher"),
        (Message("failed", (("rank 1", 1, "failed", 256, None), True)), "is no message of a launcher"),
        (Message("failed", (("rank 0", 0, "failed", 1, None), True)), "it speaks of the ranks 0, which are not all"),
        (Message("exited", (0, "rank 0")), "speaks of the ranks 0"),
        (Message("exited", (-1, "rank -1")), "speaks of the ranks -1"),
        (Message("left", (0, "")), "speaks of the ranks 0"),
        (Message("initializes", 0), "speaks of the ranks 0"),
        (Message("place", (7, ("", "", "", ""))), "speaks of the ranks 7"),
        (Message("progress", ((0, Message), (1, Message))), "speaks of the ranks 0, 1"),
    ],
)  # fmt: skip
def test_a_stranger_says_what_is_not_for_it_to_say(hosts, message, reason):
    """It never makes the job a success: its processes have not run."""
    if message.kind == "progress":
        notes = (0, 0.0, False, 0, 0, 0.0, 0.0, "", "", "", None)
        message = message._replace(value=tuple((rank, notes) for rank, _ in message.value))
    first = hosts(0, "--insecure", "--node-timeout", "1")
    greeting = hello(options=("2", 20.0), node_rank=1)
    assert any(each.kind == "start" for each in say(hosts.ports[0], greeting, answer=takes_part(message)))
    status, _, err = end(first)
    assert status == 1
    assert reason in err


def test_what_a_stranger_says_is_escaped(hosts):
    forged = "\x1b]0;a title\x07\x1b[2Jrank 1\njax_ring.launch: all is well\u202e\u2028"
    first = hosts(0, "--insecure", "--node-timeout", "1")
    greeting = hello(options=("2", 20.0), node_rank=1)
    failure = Message("failed", (Failure(forged, 1, "failed"), True))
    say(hosts.ports[0], greeting, answer=takes_part(failure, Message("ended", 0)))
    status, _, err = end(first)
    assert status == 1
    assert r"failed: \x1b]0;a title\x07\x1b[2Jrank 1\njax_ring.launch: all is well\u202e\u2028 of host 1 failed" in err
    assert all(line.isprintable() for line in err.splitlines())
    assert not re.search("^jax_ring.launch: all is well", err, re.MULTILINE)


def test_a_process_s_own_words_are_escaped(script):
    text = "raise type('Odd\\nName', (Exception,), {})('\\x1b[31m \\u202e')"
    launcher = start("-n", "1", script(text))
    last = launcher.communicate(timeout=120)[1].splitlines()[-1]
    assert re.fullmatch(
        r"jax_ring.launch: failed: rank 0 \(pid \d+\) raised __main__.Odd\\nName: \\x1b\[31m \\u202e", last
    )


def test_restarts_that_a_stranger_claims_do_not_go_on_for_ever():
    shared = Shared(Options((), max_restarts=1))
    shared.restarts = 10**9
    assert not shared.take_restart()
