"""Which hosts may go on: the rule, a random search for two parts that both do, and evidence of the end of others."""

import itertools
import random

import pytest

from jax_ring.launcher.hosts import groups
from jax_ring.launcher.hosts.groups import Evidence, Group, Host, Register, at_the_beginning, chosen
from jax_ring.launcher.shared import Needs

pytestmark = pytest.mark.one_pair  # the launcher is Python's


def host(name, processes=1):
    return Host(name, f"{name}:1", tuple(range(processes)))


def group(number, names):
    return Group(number, tuple(map(host, names)))


@pytest.mark.parametrize(
    ("names", "present", "may"),
    [
        ("abc", "bc", True),
        ("abc", "a", False),
        ("abcd", "ab", True),
        ("abcd", "ad", True),
        ("abcd", "bcd", True),
        ("abcd", "cd", False),
        ("abcd", "bcxy", False),
        ("a", "a", True),
        ("a", "b", False),
        ("ab", "a", False),
        ("ab", "abx", True),
    ],
)
def test_more_than_half_or_half_with_the_first(names, present, may):
    assert group(3, names).may_go_on(set(present), {}) == may


def test_one_of_two_needs_to_know_of_the_other():
    pair = group(3, "ab")
    assert pair.may_go_on({"a"}, {"a": ["b"]})
    assert pair.may_go_on({"b", "x"}, {"b": ["a"]})
    assert not pair.may_go_on({"b", "x"}, {"x": ["a"]})


def test_at_the_beginning_addresses_count():
    beginning = at_the_beginning(["a:1", "b:1"])
    assert beginning.may_go_on({"id", "a:1"}, {})
    assert not beginning.may_go_on({"id", "b:1"}, {})


def test_what_is_accepted_counts_until_a_later_group_has_started():
    register = Register(at_the_beginning(["a:1"]))
    register.learn(group(1, "abc"), [group(2, "bcd")])
    assert register.next_number() == 3
    assert not register.may_go_on({"a", "b"}, {})
    assert register.may_go_on({"b", "c"}, {})
    register.learn(group(1, "abc"), [])
    assert register.accepted
    register.learn(group(2, "bcd"), [])
    assert not register.accepted
    assert not register.may_go_on({"a", "b"}, {})


def test_those_that_were_there_come_first():
    waiting = [host("d"), host("b"), host("e"), host("a")]
    assert [h.id for h in chosen(group(3, "abc"), waiting, 3, Needs())] == ["a", "b", "d"]


def test_processes_that_do_not_divide_the_shards_are_left_out():
    waiting = [host("a", 2), host("b", 2), host("c", 2)]
    assert [(h.id, len(h.slots)) for h in chosen(group(3, "abc"), waiting, 3, Needs(1, 8))] == [("a", 2), ("b", 2)]
    assert [len(h.slots) for h in chosen(group(3, "abc"), waiting, 3, Needs(5, 5))] == [2, 2, 1]
    assert chosen(group(3, "abc"), waiting, 3, Needs(6, 5)) == ()


def test_the_place_of_a_rank():
    hosts = Host("a", "a:1", (0, 1)), Host("b", "b:1", (1, 3))
    assert [Group(1, hosts).place_of(rank) for rank in range(4)] == [("a", 0), ("a", 1), ("b", 1), ("b", 3)]


class World:
    """Hosts that form groups at random, lose messages of it, and end; several may lead at the same time."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.names = "abcdef"
        addresses = [host(name).address for name in self.names[:3]]
        self.registers = {name: Register(at_the_beginning(addresses)) for name in self.names}
        self.started = []  # groups

    def try_to_form(self):
        """A leader meets some hosts. Each hears of the proposal or not, and then of the start or not."""
        present = self.random.sample(self.names, self.random.randint(1, 5))
        leader = self.registers[present[0]]
        for name in present[1:]:
            leader.learn(self.registers[name].started, self.registers[name].accepted)
        there = {*present, *(host(name).address for name in present)}
        if not leader.may_go_on(there, {}):
            return
        hosts = chosen(leader.started, [host(name) for name in present], self.random.randint(1, 5), Needs())
        proposal = Group(leader.next_number(), hosts)
        have_accepted = [name for name in present if name == present[0] or self.random.random() < 0.8]
        for name in have_accepted:
            self.registers[name].learn(self.registers[name].started, [proposal])
        if len(have_accepted) == len(present):
            self.started.append(proposal)
            for name in present:
                if name == present[0] or self.random.random() < 0.8:
                    self.registers[name].learn(proposal, [])


@pytest.mark.parametrize("seed", range(3))
def test_there_is_one_line_of_groups(seed):
    """No two groups of one number, and each is started by hosts that know the one before: so parts never both go on."""
    for trial in range(300):
        world = World(1000 * seed + trial)
        for _ in range(30):
            world.try_to_form()
        numbers = [group.number for group in world.started]
        assert numbers == sorted(set(numbers)), world.started
    assert len(world.started) > 1


def test_evidence(monkeypatch):
    now = 100.0
    monkeypatch.setattr(groups.time, "monotonic", lambda: now)
    pair = group(3, "ab")
    first, second = Evidence(20.0), Evidence(20.0)
    for each, other in ((first, "b"), (second, "a")):
        assert each.gone("ab".replace(other, ""), pair) == []
        each.lost(other, heard=99.0, acknowledged=98.0)
    # Neither knows more than that the connection has ended.
    assert (first.gone("a", pair), second.gone("b", pair)) == ([], [])
    now = 120.0
    # After silence the first goes on, and the second does not.
    assert (first.gone("a", pair), second.gone("b", pair)) == (["b"], [])
    # The second comes to know too late: the first may have gone on without it, and then have ended.
    second.ended("a")
    assert second.gone("b", pair) == []
    second.lost("a", heard=119.0, acknowledged=118.0)
    second.ended("a")
    assert second.gone("b", pair) == ["a"]
    assert second.is_accounted_for("a")
    assert second.describe("a").startswith("ended since")
    second.found("a")
    assert second.gone("b", pair) == []
    # Of larger groups nobody is left out by that.
    assert first.gone("a", group(4, "abc")) == []


def test_two_majorities_always_meet():
    for size in (1, 3, 4, 5):
        names = "abcde"[:size]
        parts = [set(p) for k in range(size + 1) for p in itertools.combinations(names, k)]
        enough = [part for part in parts if group(3, names).may_go_on(part, {})]
        assert all(a & b for a in enough for b in enough)
