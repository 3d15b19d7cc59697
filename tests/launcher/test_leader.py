"""The launcher that leads hosts that come and go, and one that follows, without processes or connections."""

import asyncio
import dataclasses
import os
import signal
import types

import pytest
from launches import reserved_ports

from jax_ring.launcher import environment, events, protocol
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.events import ChangePending, Failure
from jax_ring.launcher.hosts.follower import Follower
from jax_ring.launcher.hosts.generation import Generation, Outcome, Phase
from jax_ring.launcher.hosts.groups import Evidence, Group, Host, Register, at_the_beginning
from jax_ring.launcher.hosts.leader import Leader
from jax_ring.launcher.hosts.messages import Hello, Message
from jax_ring.launcher.job import Job
from jax_ring.launcher.shared import Needs, Shared
from jax_ring.launcher.signals import SignalledError

pytestmark = pytest.mark.one_pair  # the launcher is Python's

OPTIONS = Options((), nnodes=3, min_nodes=2, hosts_change=True, node_rank=None, coordinators=(("a", 1),))


class Link:
    """A host's connection, whose messages a test gives; None ends it."""

    def __init__(self):
        self.sent, self.messages = [], asyncio.Queue()
        self.heard = self.acknowledged = 0.0
        self.is_silent = False
        self.send, self.receive, self.abort = self.sent.append, self.messages.get, lambda: None

    async def close(self):
        pass


class Hosts:
    """A leader a with a group of a and b, which runs."""

    def __init__(self, options=OPTIONS):
        shared = Shared(options)
        self.shared, self.queue, self.register = shared, shared.queue, Register(at_the_beginning(["a:1"]))
        self.leader = Leader(Host("a", "a:1", (0,)), shared, self.register, Evidence(20.0))

    async def comes(self, name, needs=None, newest_commit=0):
        link = Link()
        options = ("2:3", OPTIONS.heartbeat_timeout)
        hello = Hello(
            Host(name, f"{name}:1", (0,)), None, (), 0, newest_commit, needs, self.register.started, (), options
        )
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
        return [self.queue.get_nowait() for _ in range(self.queue.qsize())][1:]  # after the beginning


def test_a_host_is_lost_whatever_ends_its_connection(monkeypatch):
    """Also an error of this launcher: else the host would count as one that is here, and nobody would hear it."""

    async def run():
        job = Hosts()
        await job.begin()
        guest = await job.comes("c")
        monkeypatch.setattr(job.leader, "_hear", lambda *_: 1 / 0)
        guest.messages.put_nowait(Message("gone", ()))
        with pytest.raises(ZeroDivisionError):
            await guest.serving
        assert list(job.leader.guests) == ["a", "b"]

    asyncio.run(run())


def test_a_host_that_goes_away_again_changes_nothing():
    async def run():
        job = Hosts()
        member = await job.begin()
        await job.goes(await job.comes("c"))
        assert member.sent == [Message("pending", ChangePending(change), 1) for change in (True, False)]
        assert job.events() == [ChangePending(True), ChangePending(False)]
        job.leader.generation.end("for a test")
        assert not job.leader.generation.outcome(Failure("a", 0, "failed")).has_changed

    asyncio.run(run())


@pytest.mark.parametrize("comes", [True, False])
def test_a_generation_that_was_left_for_a_host_uses_up_no_restart(comes):
    """Also where that host has gone again: what some processes do the others have to."""

    async def run():
        job = Hosts()
        member = await job.begin()
        other = await job.comes("c") if comes else None
        job.leader.follower.tell("left", [0, "rank 0 has left"])
        if other:
            await job.goes(other)
        assert member.sent == comes * [Message("pending", ChangePending(True), 1)]
        member.messages.put_nowait(Message("left", (1, "rank 1 has left"), 1))
        await asyncio.sleep(0)
        assert job.events()[-1] == events.End("rank 1 has left", signal.SIGKILL, 0.0)
        assert job.leader.hosts() == job.register.started.hosts
        assert job.leader.generation.outcome(None).has_changed == comes

    asyncio.run(run())


@pytest.mark.parametrize("answer", [Message("accepted", 1), None])
def test_a_group_waits_for_its_hosts_as_long_as_they_are_heard_of(answer):
    async def run():
        job = Hosts()
        links = [await job.comes(name) for name in "bc"]
        agreed = asyncio.create_task(job.leader.agree(hosts := job.leader.hosts(), "job"))
        links[0].messages.put_nowait(Message("accepted", 1))
        await asyncio.sleep(0.05)
        assert not agreed.done()
        links[1].messages.put_nowait(answer)
        assert await agreed == (answer and Group(1, hosts, "job"))
        assert list(job.leader.guests) == ["a", "b", "c"][: 3 if answer else 2]

    asyncio.run(run())


def test_a_host_with_the_id_of_the_launcher_that_leads_is_refused():
    async def run():
        job = Hosts()
        link = await job.comes("a")
        await asyncio.wait_for(link.serving, 10)
        assert link.sent == [Message("refused", "it is this launcher")]
        assert list(job.leader.guests) == ["a"]

    asyncio.run(run())


def test_a_host_whose_processes_do_not_end_is_dropped(monkeypatch):
    monkeypatch.setattr("jax_ring.launcher.hosts.leader._SLACK_SECONDS", 0.05)

    async def run():
        job = Hosts(dataclasses.replace(OPTIONS, failure_grace=0.0, grace=0.0))
        member = await job.begin()
        member.abort = lambda: member.messages.put_nowait(None)
        job.leader.generation.end("for a test")
        job.leader.follower.tell("ended", 0)
        await asyncio.wait_for(job.leader.finish(), 10)
        assert list(job.leader.guests) == ["a"]
        assert job.leader.generation.is_over()

    asyncio.run(run())


def test_all_know_of_commits_that_any_launcher_has_known_of():
    """Also of those whose hosts are gone: who is left does not begin anew."""

    async def run():
        job = Hosts()
        job.shared.kept = environment.kept_files(1)
        member = await job.comes("b", newest_commit=2)
        for told, newest in ((3, 2), (1, 3), (0, 3)):
            job.register.learn(group := Group(job.register.next_number(), job.leader.hosts()), [])
            job.leader.begin(group, "a:2")
            assert member.sent[-1] == Message("start", (group, "a:2", 0, newest))
            assert job.queue.get_nowait().newest_commit == newest
            job.events()
            member.messages.put_nowait(Message("ended", told, group.number))
            await asyncio.sleep(0)
            job.leader.ended()
        protocol.write_mark(job.shared.kept[1], True, 0, 4)
        assert job.shared.newest_commit() == 4
        for file in job.shared.kept:
            os.close(file)

    asyncio.run(run())


def test_who_is_taken_in_knows_of_commits_before_it_takes_part():
    """It may be all that is left when the next generation is to begin."""

    async def run(port):
        searches = [alone(coordinators=(("127.0.0.1", port),))[1] for _ in range(2)]
        leading, other = searches
        leading._shared.kept = environment.kept_files(1)
        protocol.write_mark(leading._shared.kept[0], True, 0, 4)
        await leading._listen()
        leading.lead()
        assert await other.follow(leading.own.address) is not None
        newest = other._shared.newest_commit()
        leading.leader.drop()
        await other.leave()
        for search in searches:
            search.close()
        for file in leading._shared.kept:
            os.close(file)
        return newest

    with reserved_ports(1) as (port,):
        assert asyncio.run(run(port)) == 4


def test_a_launcher_that_leads_learns_from_others_what_the_job_needs():
    async def run():
        job = Hosts()
        await job.comes("b", needs=Needs(1, 2))
        await job.comes("c")
        assert [host.id for host in job.leader.hosts()] == ["a", "b"]
        job.shared.needs = None
        await job.comes("c", needs=Needs(4, None))
        assert job.leader.hosts() == ()

    asyncio.run(run())


def alone(**options):
    """A launcher that nobody else is with, its search, and what it says."""
    given = {"nnodes": 2, "min_nodes": 1, "hosts_change": True, "node_rank": None, "coordinators": (("localhost", 1),)}
    job, said = Job(Options((), **{**given, **options})), []
    job._shared.output = types.SimpleNamespace(log=said.append)
    return job, job._search, said


def leads(search):
    search.own = search.own._replace(address="localhost:1")
    return search.lead()


def test_enough_hosts_wait_for_more_as_long_as_they_may(monkeypatch):
    job, search, said = alone(node_timeout=0.0, join_timeout=0.05)
    search.own = search.own._replace(address="localhost:1")

    async def generation(leader, group):
        return Outcome(0)

    monkeypatch.setattr(job, "_generation", generation)
    assert asyncio.run(job._lead()) == 0, said


def test_the_others_have_time_when_a_host_is_lost_before_it_agrees(monkeypatch):
    """Which may take longer than they wait for hosts."""
    _, search, _ = alone(node_timeout=10.0, join_timeout=0.0)

    async def agree(hosts, job):
        search._since -= 100

    async def next_change(seconds):
        raise LookupError

    async def scenario():
        leader = leads(search)
        monkeypatch.setattr(leader, "agree", agree)
        monkeypatch.setattr(leader, "next_change", next_change)
        with pytest.raises(LookupError):
            await search.formed(leader)

    asyncio.run(scenario())
    assert search.seconds_left() > 5


def test_a_spare_has_time_to_find_the_next_leader():
    job, search, said = alone(node_timeout=10.0)
    search._since -= 100

    job._shared.queue.put_nowait(events.LeaderLost("the launcher that leads has ended"))
    assert asyncio.run(job._followed(None)) is None
    assert said == ["the launcher that leads has ended"]
    assert search.seconds_left() > 5


def test_another_program_at_the_address_is_named():
    _, search, said = alone()

    async def run():
        asked = []
        server = await asyncio.start_server(lambda _, writer: [asked.append(writer), writer.close()], "127.0.0.1", 0)
        search._order = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}"]
        task = asyncio.create_task(search.found())
        while len(asked) < 3 and not task.done():
            await asyncio.sleep(0.01)
        task.cancel()
        server.close()
        search.close()

    asyncio.run(run())
    assert said == [f"cannot listen at --coordinator {search._order[0]}: another program listens there"]


# ---- Who goes on after a failure -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "goes_on", "said"),
    [
        (Outcome(1, Failure("rank 1", 1, "failed"), frozenset({1})), (0, 2, 3), "going on with 3 processes"),
        (Outcome(1, Failure("rank 1", 1, "failed"), frozenset({1, 2, 3})), None, "it takes 2 (min_processes)"),
        (Outcome(1, Failure("rank 1", 1, "failed"), frozenset({1}), has_finished=True), None, ""),
        (Outcome(1, Failure("host 1", -1, "is gone")), None, ""),
    ],
)
def test_those_that_remain_go_on_without_restarts(outcome, goes_on, said):
    fixed = {"nnodes": 1, "min_nodes": 1, "hosts_change": False, "node_rank": 0, "coordinators": ()}
    job, search, lines = alone(processes=4, **fixed)
    job._shared.needs, job._shared.kept = Needs(2), ()

    async def scenario():
        leader = search.lead()
        group = await search.formed(leader)
        if await job._goes_on(leader, group, outcome):
            (host,) = leader.hosts()
            return host.slots
        return None

    assert asyncio.run(scenario()) == goes_on
    assert said in "\n".join(lines)


@pytest.mark.parametrize(("has_commit", "wait"), [(False, 4), (True, 0)])
def test_nobody_waits_after_a_generation_with_a_commit(has_commit, wait, monkeypatch):
    job, search, lines = alone(nnodes=1, hosts_change=False, node_rank=0, coordinators=(), max_restarts=1, backoff=4.0)
    slept = []

    async def sleep(seconds, *_):
        slept.append(seconds)

    monkeypatch.setattr(job._shared, "has_commit_of", lambda generation, hosts: has_commit)

    async def scenario():
        leader = search.lead()
        group = await search.formed(leader)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        return await job._goes_on(leader, group, Outcome(1, Failure("rank 0", 0, "failed"), frozenset({0})))

    assert asyncio.run(scenario())
    assert slept == [wait]
    assert lines == [f"failed: rank 0 failed; restart 1 of 1 in {wait} s"]


def test_what_is_a_commit_of_a_generation():
    """On several hosts the one that a generation starts from is none."""
    shared = Shared(Options(()))
    shared.kept = [os.memfd_create("kept") for _ in range(2)]
    assert not shared.has_commit_of(3, hosts=1)
    protocol.write_mark(shared.kept[0], True, 3, 7)
    assert [shared.has_commit_of(3, hosts=hosts) for hosts in (1, 2)] == [True, False]
    protocol.write_mark(shared.kept[1], True, 3, 8)
    assert [shared.has_commit_of(g, hosts=2) for g in (2, 3)] == [False, True]
    for file in shared.kept:
        os.close(file)


# ---- How a generation comes to its end -------------------------------------------------------------------------------


class Watched:
    """A generation of ranks 0 and 1 on one host, and 2 and 3 on another. seconds: --failure-grace."""

    def __init__(self, seconds=0.0, grace=0.0, needs=None):
        shared = Shared(Options((), failure_grace=seconds, grace=grace, leave_timeout=0.05))
        shared.output, shared.needs = types.SimpleNamespace(log=lambda text: None), needs
        self.sent = []
        hosts = tuple(Host(name, "", (0, 1)) for name in "ab")
        self.generation = Generation(shared, Group(1, hosts), 0, lambda *message: self.sent.append(message))

    def fails(self, rank, *, is_final=True, **options):
        failure = Failure(f"rank {rank}", rank, "failed", **options)
        self.generation.take(rank // 2, "failed", (failure, is_final))

    def exits(self, *ranks):
        for rank in ranks:
            self.generation.take(rank // 2, "exited", [rank, f"rank {rank}"])

    @property
    def ends(self):
        return [value for kind, value in self.sent if kind == "end"]


def soon(scenario):
    async def run():
        scenario()
        await asyncio.sleep(0.02)

    asyncio.run(run())


def test_it_is_over_when_all_have_exited():
    watched = Watched()
    soon(lambda: watched.generation.take(0, "initializes", 0))
    soon(lambda: watched.exits(0, 1, 2))
    assert not watched.generation.is_over()
    soon(lambda: watched.exits(3))
    assert watched.generation.is_over()
    assert (watched.generation.outcome(None), watched.ends) == (Outcome(0), [])


@pytest.mark.parametrize(("needs", "signum"), [(None, signal.SIGTERM), (Needs(), signal.SIGKILL)])
def test_a_failure_ends_it_once(needs, signum):
    watched = Watched(needs=needs)
    soon(lambda: [watched.fails(2, status=7), watched.fails(3)])
    assert watched.ends == [("rank 2 of host 1 failed", signum, 0.0)]
    assert not watched.generation.is_over()
    for host in range(2):
        watched.generation.take(host, "ended", 0)
    assert watched.generation.is_over()
    outcome = watched.generation.outcome(None)
    assert (outcome.status, str(outcome.failure), outcome.lost) == (7, "rank 2 of host 1 failed", {2, 3})


def test_a_process_that_others_blame_has_time_to_fail():
    watched = Watched(seconds=0.1)

    async def scenario():
        watched.fails(0, caused_by=3)
        assert watched.sent == [("blamed", events.Blamed(3))]  # its host looks whether it is stopped
        assert watched.generation.phase is Phase.DOUBTING
        await asyncio.sleep(0.02)
        watched.fails(3, status=9)

    asyncio.run(scenario())
    assert watched.ends == [("rank 3 of host 1 failed", signal.SIGTERM, 0.1)]
    assert watched.generation.outcome(None).lost == {3}


def test_the_blamed_one_is_lost_where_nothing_is_known_of_it():
    watched = Watched(needs=Needs())
    soon(lambda: watched.fails(0, caused_by=3))
    assert len(watched.ends) == 1
    assert watched.generation.outcome(None).lost == {3}


def test_nobody_waits_for_a_cause_that_has_exited():
    """With status 0, which the last line says."""
    watched = Watched(seconds=0.0, grace=60.0)

    async def scenario():
        watched.fails(0, caused_by=3)
        await asyncio.sleep(0.02)
        assert (watched.generation.phase, watched.ends) == (Phase.DOUBTING_LONGER, [])
        watched.exits(3)

    asyncio.run(scenario())
    last = "rank 0 failed; rank 3 of host 1 had exited with status 0"
    assert watched.ends == [(last, signal.SIGTERM, 0.0)]
    assert str(watched.generation.outcome(None).failure) == last


def test_a_handler_that_exits_with_0_makes_no_success():
    """As of SIGTERM, in a process that was told to end because of its own failure."""
    watched = Watched()
    soon(lambda: watched.fails(0, is_final=False, caused_by=1))
    assert len(watched.ends) == 1
    watched.exits(0, 2, 3)
    outcome = watched.generation.outcome(None)
    assert (outcome.status, str(outcome.failure), outcome.has_finished) == (1, "rank 0 failed", False)


def test_a_blame_that_is_caught_while_its_cause_is_awaited():
    watched = Watched(grace=0.1)

    async def scenario():
        watched.fails(0, caused_by=3)
        await asyncio.sleep(0.02)
        assert watched.generation.phase is Phase.DOUBTING_LONGER
        watched.exits(0)
        await asyncio.sleep(0.2)

    asyncio.run(scenario())
    assert (watched.generation.phase, watched.ends) == (Phase.RUNNING, [])


def test_a_blame_that_is_left_when_another_is_caught():
    watched = Watched(grace=0.1)

    async def scenario():
        watched.fails(0, caused_by=3)
        watched.fails(1, caused_by=3)
        await asyncio.sleep(0.02)
        watched.exits(0)
        assert watched.generation.phase is Phase.DOUBTING_LONGER
        await asyncio.sleep(0.2)

    asyncio.run(scenario())
    assert watched.ends == [("rank 1 failed; rank 0 had exited with status 0", signal.SIGTERM, 0.0)]


def test_an_exception_that_is_caught_is_no_failure():
    watched = Watched()
    soon(lambda: [watched.fails(1, is_final=False), watched.fails(0, is_final=False, caused_by=1), watched.exits(1, 0)])
    assert watched.ends == [("rank 0 failed", signal.SIGTERM, 0.0)]  # the blame alone would have ended it
    watched = Watched()
    soon(lambda: [watched.fails(1, is_final=False), watched.exits(1)])
    assert watched.ends == []


def test_those_that_have_left_wait_for_the_others():
    watched = Watched()

    async def scenario():
        watched.generation.take(0, "left", [0, "rank 0 has left"])
        await asyncio.sleep(0.2)

    asyncio.run(scenario())
    late = "rank 0 has left; others have not within 0.05 s (--leave-timeout)"
    assert watched.ends == [(late, signal.SIGKILL, 0.0)]
    watched.generation.lose(1, "is gone", is_change=True)
    assert watched.generation.outcome(None).has_changed
    assert len(watched.ends) == 1


def test_what_a_launcher_says_at_once_is_not_lost(monkeypatch):
    """It may start a generation before the other one knows that it follows."""
    job, search, _ = alone()

    async def follow(address):
        search.follower = Follower(search.own, search._register, job._shared.queue, lambda message: None)
        job._shared.queue.put_nowait(events.JobEnded(7, "for a test"))
        return search.follower

    async def leave():
        pass

    monkeypatch.setattr(search, "follow", follow)
    monkeypatch.setattr(search, "leave", leave)
    assert asyncio.run(asyncio.wait_for(job._follow("localhost:1"), 10)) == 7


def test_a_signal_before_the_processes_of_a_generation_have_begun(monkeypatch):
    """The launcher waits for none of them."""
    nothing = types.SimpleNamespace(failure=lambda: None, end=lambda: None)
    monkeypatch.setattr("jax_ring.launcher.job.Service", lambda *_: nothing)
    job, search, _ = alone(nnodes=1, hosts_change=False, node_rank=0, coordinators=())
    job._shared.sockets = types.SimpleNamespace(socket=str)

    async def scenario():
        def begin(self, group, coordinator):
            job._shared.queue.put_nowait(events.Signalled(signal.SIGTERM))
            return Leader.begin(self, group, coordinator)

        leader = search.lead()
        search.lead = lambda: leader
        leader.begin = types.MethodType(begin, leader)
        with pytest.raises(SignalledError):
            await asyncio.wait_for(job._lead(), 10)

    asyncio.run(scenario())
