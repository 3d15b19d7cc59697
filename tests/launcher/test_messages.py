"""What launchers say to each other: each message arrives as it was, and what is none ends the connection."""

import asyncio
import json
import signal
import types

import pytest

from jax_ring.launcher.events import Blamed, ChangePending, End, Failure, JobEnded
from jax_ring.launcher.hosts import links, messages
from jax_ring.launcher.hosts.groups import Group, Host
from jax_ring.launcher.hosts.messages import Answer, Hello, Message
from jax_ring.launcher.shared import Needs
from jax_ring.launcher.watching.page import Notes
from jax_ring.launcher.watching.report import Place

pytestmark = pytest.mark.one_pair  # the launcher is Python's

GROUP = Group(3, (Host("a", "a:1", (0, 1)), Host("b", "", ())), "job")
VALUES = {
    "alive": [(1.5, None), (1.5, 2.5)],
    "answer": [Answer("id", "a:1", True, False, 3, True)],
    "hello": [
        Hello(GROUP.hosts[0], None, (), 0, 0, None, GROUP, (), ("2:3", 20.0)),
        Hello(GROUP.hosts[1], 1, ("b", "c"), 2, 7, Needs(2, None), GROUP, (GROUP, GROUP), ("2", float("inf"))),
    ],
    "welcome": [7],
    "refused": ["it was started with --nnodes 2"],
    "propose": [GROUP],
    "start": [(GROUP, "127.0.0.1:1", 2, 7)],
    "started": [GROUP],
    "over": [JobEnded(7, "rank 1 failed")],
    "end": [End("rank 1 failed", signal.SIGKILL, 0.0)],
    "pending": [ChangePending(True)],
    "blamed": [Blamed(3)],
    "where": [True],
    "accepted": [3],
    "gone": [(), ("a",)],
    "initializes": [0],
    "enlisted": [Needs(1, 24)],
    "failed": [(Failure("rank 1", 1, "failed"), False), (Failure("rank 1", 1, "failed", 7, caused_by=-1), True)],
    "exited": [(0, "rank 0")],
    "left": [(0, "rank 0 has left")],
    "progress": [(), ((1, Notes(name="rank 1")), (2, Notes(1, 2.0, True, 5, 4, 0.5, 0.0, "step", "", "rank 2", 0)))],
    "place": [(1, Place()), (1, Place("in Python", "a call", "a table", "stacks"))],
    "signalled": [End("received SIGINT", signal.SIGINT, 10.0)],
    "ended": [7],
}  # fmt: skip


KEYS = b"what this side sends", b"what this side receives"


def framed(*texts, key=KEYS[1]):
    """Texts as the other side sends them."""
    codes = links._Codes(key)
    return [len(text).to_bytes(4, "big") + codes.next(text) + text for text in texts]


def received(*data):
    """What a link makes of data, and what it says of the other side."""

    async def scenario():
        said, address = [], {"peername": ("::1", 4711, 0, 0)}
        writer = types.SimpleNamespace(write=lambda data: None, get_extra_info=address.get)
        link = links.Link(reader := asyncio.StreamReader(limit=links.BUFFER_BYTES), writer, 20.0, said.append, KEYS)
        for each in data:
            reader.feed_data(each)
        reader.feed_eof()
        found = []
        while (message := await link.receive()) is not None:
            found.append(message)
        return found, said

    return asyncio.run(scenario())


ACCEPTED, ENDED = b'["accepted", 3, 1]', b'["ended", 7, 1]'


def test_every_message_arrives_as_it_was():
    assert set(VALUES) == set(messages._VALUES)
    sent = [Message(kind, value, 3) for kind, values in VALUES.items() for value in values]
    found, said = received(*framed(*(json.dumps(message).encode() for message in sent if message.kind != "alive")))
    assert (found, said) == ([message for message in sent if message.kind != "alive"], [])
    assert [type(message.value) for message in found] == [type(message.value) for message in sent][2:]


@pytest.mark.parametrize(
    "text",
    [
        b"5", b"[]", b"{}", b"null", b"GET / HTTP/1.1\r", b"\xff", b"SSH-2.0-OpenSSH_9.6", b"[" * 50000, b"x" * 70000,
        b'["over", [0, ""]]', b'["over", [0, ""], null]', b'["over", [0], -1]', b'["over", [0, "", 0], -1]',
        b'["over", ["0", ""], -1]', b'["over", [true, ""], -1]', b'["over", 0, -1]', b'["over", "ab", -1]',
        b'["over", {"status": 0, "reason": ""}, -1]', b'["unknown", 0, -1]', b'[["over"], [0, ""], -1]',
        b'["end", ["", 99, 1.0], 1]', b'["end", ["", 15, NaN], 1]', b'["end", ["", 15, null], 1]',
        b'["end", ["", 15, 1' + 400 * b"0" + b'], 1]', b'["accepted", [], 1]', b'["accepted", 1.0, 1]',
        b'["gone", "a", 1]', b'["gone", [1], 1]', b'["propose", [1, [["a", "a:1", [0, "1"]]], ""], 1]',
        b'["propose", [1, [["a", "a:1"]], ""], 1]', b'["alive", [1.0], -1]', b'["alive", null, -1]',
        b'["over", [256, ""], 0]', b'["over", [-1, ""], 0]', b'["failed", [["rank 1", 1, "failed", 0, null], true], 1]',
        b'["failed", [["rank 1", 1, "failed", 256, null], true], 1]', b'["enlisted", [0, null], 1]',
        b'["enlisted", [1, 0], 1]', b'["started", [-1, [], ""], 0]', b'["started", [1, [], "../job"], 0]',
        b'["started", [' + 20 * b"9" + b', [], ""], 0]', b'["started", [1, [["a", "", [1, 1]]], ""], 0]',
        b'["started", [1, [["a", "", [-1]]], ""], 0]', b'["started", [1, [["a", "", [65536]]], ""], 0]',
        b'["started", [1, [["a", "", []], ["a", "", []]], ""], 0]',
    ],
)  # fmt: skip
def test_what_is_no_message_ends_the_connection(text):
    """And a line names the other side."""
    found, said = received(*framed(text))
    assert found == []
    assert len(said) == 1
    assert said[0].startswith("the connection with [::1]:4711 is closed: ")
    assert len(said[0]) < 500


@pytest.mark.parametrize(
    ("data", "count"),
    [
        ([*framed(ACCEPTED, key=b"that of another connection")], 0),
        ([*framed(ACCEPTED, key=KEYS[0])], 0),  # what this side has sent itself
        ([*framed(ACCEPTED), *framed(ACCEPTED)], 1),  # again
        ([framed(ACCEPTED, ENDED)[1]], 0),  # the first one is lacking
        ([framed(ACCEPTED)[0].replace(b"3", b"4")], 0),
    ],
)
def test_nobody_else_writes_into_a_connection(data, count):
    found, said = received(*data)
    assert found == [Message("accepted", 3, 1)][:count]
    assert said == [
        "the connection with [::1]:4711 is closed: a message is not from the launcher that has proved who it is"
    ]


def test_a_message_that_is_too_long_is_not_read():
    _, said = received(b"\xff\xff\xff\xff")
    assert said[0].endswith("is closed: a message of 4294967295 bytes; 1048576 are allowed")


def test_a_message_that_is_too_long_is_not_sent():
    """The other side would close the connection. Later ones arrive."""

    async def scenario():
        sent, said = [], []
        writer = types.SimpleNamespace(write=sent.append, get_extra_info={"peername": ("::1", 4711, 0, 0)}.get)
        link = links.Link(asyncio.StreamReader(), writer, 20.0, said.append, KEYS[::-1])
        link.send(Message("left", (0, "x" * links._MOST_BYTES)))
        link.send(Message("accepted", 3, 1))
        return sent, said

    sent, said = asyncio.run(scenario())
    assert received(*sent) == ([Message("accepted", 3, 1)], [])
    assert said == ["'left' of 1048596 bytes is not sent to [::1]:4711: too long"]


def test_a_launcher_that_ends_within_a_message_is_no_stranger():
    first, second = framed(ACCEPTED, ENDED)
    assert received(first, second[:-3]) == ([Message("accepted", 3, 1)], [])
