"""The launcher that leads hosts that come and go, and one that follows, without processes or connections."""

import asyncio
import types

import pytest

from jax_ring.launcher import events
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.elastic_hosts.groups import Evidence, Group, Host, Register, at_the_beginning
from jax_ring.launcher.elastic_hosts.host import ElasticHost
from jax_ring.launcher.elastic_hosts.leader import Leader
from jax_ring.launcher.shared import Outcome, Shared

pytestmark = pytest.mark.one_pair  # the launcher is Python's

OPTIONS = Options((), nnodes=3, min_nodes=2, coordinators=(("a", 1),))


class Link:
    """A host's connection, whose messages a test gives; None ends it."""

    def __init__(self):
        self.sent, self.messages = [], asyncio.Queue()
        self.heard = self.acknowledged = 0.0
        self.is_silent = False
        self.send, self.receive, self.abort = self.sent.append, self.messages.get, lambda: None


class Job:
    """A leader a with a group of a and b, which runs."""

    def __init__(self):
        shared = Shared(OPTIONS)
        self.queue, self.register = shared.queue, Register(at_the_beginning(["a:1"]))
        self.leader = Leader(Host("a", "a:1", 1), shared, self.register, Evidence(20.0))

    async def comes(self, name, enlisted=None):
        link = Link()
        hello = {
            "host": [name, f"{name}:1", 1], "node_rank": None, "gone": [], "restarts": 0, "enlisted": enlisted,
            "started": self.register.started, "accepted": [], "options": [2, 3, OPTIONS.heartbeat_timeout],
        }  # fmt: skip
        link.serving = asyncio.create_task(self.leader.serve(link, hello))
        await asyncio.sleep(0)
        return link

    async def goes(self, link):
        link.messages.put_nowait(None)
        await link.serving

    async def begin(self):
        member = await self.comes("b")
        group = Group(1, self.leader.hosts())
        self.register.learn(group, [])
        self.leader.begin(group, "a:2")
        member.sent.clear()
        return member

    def events(self):
        found = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        return [event for event in found if not isinstance(event, events.RemoteChanged)]


def test_a_host_that_goes_away_again_changes_nothing():
    async def run():
        job = Job()
        member = await job.begin()
        await job.goes(await job.comes("c"))
        assert member.sent == [{"pending": True, "attempt": 1}, {"pending": False, "attempt": 1}]
        assert job.events() == [events.RemotePending(True), events.RemotePending(False)]
        assert not job.leader.has_changed

    asyncio.run(run())


@pytest.mark.parametrize("comes", [True, False])
def test_a_generation_that_was_left_for_a_host_uses_up_no_restart(comes):
    """Also where that host has gone again: what some processes do the others have to."""

    async def run():
        job = Job()
        member = await job.begin()
        other = await job.comes("c") if comes else None
        job.leader.tell("left", [True, "rank 0 has left"])
        if other:
            await job.goes(other)
        assert member.sent == comes * [{"pending": True, "attempt": 1}]
        member.messages.put_nowait({"left": [True, "rank 1 has left"], "attempt": 1})
        await asyncio.sleep(0)
        job.leader.ended()
        assert job.events()[-1] == events.RemoteLeft("rank 1 has left")
        assert job.leader.hosts() == job.register.started.hosts
        assert job.leader.has_changed == comes

    asyncio.run(run())


@pytest.mark.parametrize("answer", [{"accepted": 1}, None])
def test_a_group_waits_for_its_hosts_as_long_as_they_are_heard_of(answer):
    async def run():
        job = Job()
        links = [await job.comes(name) for name in "bc"]
        agreed = asyncio.create_task(job.leader.agree(hosts := job.leader.hosts()))
        links[0].messages.put_nowait({"accepted": 1})
        await asyncio.sleep(0.05)
        assert not agreed.done()
        links[1].messages.put_nowait(answer)
        assert await agreed == (answer and Group(1, hosts))
        assert list(job.leader.guests) == ["b", "c"][: 2 if answer else 1]

    asyncio.run(run())


def test_a_launcher_that_leads_learns_from_others_what_the_job_needs():
    async def run():
        job = Job()
        await job.comes("b", enlisted=[1, 2])
        await job.comes("c")
        assert [host.id for host in job.leader.hosts()] == ["a", "b"]
        job.register.enlisted = None
        await job.comes("c", enlisted=[4, None])
        assert job.leader.hosts() == ()

    asyncio.run(run())


def alone(monkeypatch, **options):
    """The launcher of one host, with what it says."""
    host, said = ElasticHost(Options((), nnodes=2, min_nodes=1, coordinators=(("localhost", 1),), **options)), []
    monkeypatch.setattr(host, "output", types.SimpleNamespace(log=said.append), raising=False)
    return host, said


def test_enough_hosts_wait_for_more_as_long_as_they_may(monkeypatch):
    host, said = alone(monkeypatch, node_timeout=0.0, join_timeout=0.05)
    host._own = host._own._replace(address="localhost:1")

    async def attempt(leader, group):
        return Outcome(0)

    monkeypatch.setattr(host, "_try_on_all", attempt)
    assert asyncio.run(host._lead()) == Outcome(0), said


def test_the_others_have_time_when_a_host_is_lost_before_it_agrees(monkeypatch):
    """Which may take longer than they wait for hosts."""
    host, _ = alone(monkeypatch, node_timeout=10.0, join_timeout=0.0)
    host._own = host._own._replace(address="localhost:1")

    async def agree(hosts):
        host._since -= 100

    async def next_change(seconds):
        raise LookupError

    host._leader = types.SimpleNamespace(
        hosts=lambda: (host._own,), is_enough=lambda gone: True, agree=agree, next_change=next_change, guests={},
        group=None,
    )  # fmt: skip
    with pytest.raises(LookupError):
        asyncio.run(host._formed(host._leader))
    assert host._left() > 5


def test_a_spare_has_time_to_find_the_next_leader(monkeypatch):
    host, _ = alone(monkeypatch, node_timeout=10.0)
    host._since -= 100
    host.queue.put_nowait(events.RemoteStop(15, 0.0, "the launcher that leads has ended"))
    assert asyncio.run(host._followed(types.SimpleNamespace(is_lost=True))) is None
    assert host._left() > 5


def test_another_program_at_the_address_is_named(monkeypatch):
    host, said = alone(monkeypatch)

    async def run():
        asked = []
        server = await asyncio.start_server(lambda _, writer: [asked.append(writer), writer.close()], "127.0.0.1", 0)
        host._order = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}"]
        search = asyncio.create_task(host._search())
        while len(asked) < 3 and not search.done():
            await asyncio.sleep(0.01)
        search.cancel()
        server.close()
        host._server.close()

    asyncio.run(run())
    assert said == [f"cannot listen at --coordinator {host._order[0]}: another program listens there"]
