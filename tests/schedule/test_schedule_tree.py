"""The order "tree": its shape, what ranks contribute, and the proof that its sums do not depend on their number."""

import random
from functools import partial

import numpy as np
import pytest
from model import cost

from jax_ring import schedule, shard_tree
from jax_ring.schedule import along_tree
from jax_ring.shard_tree import Node


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def sum_of(node):
    """The sum that the tree defines, as an expression."""
    if node.size == 1:
        return f"{node.first},"
    left = 1
    while 2 * left < node.size:
        left *= 2
    return f"({sum_of(Node(node.first, left))}{sum_of(Node(node.first + left, node.size - left))})"


def join(a, b):
    return np.array([f"({x}{y})" for x, y in zip(a, b, strict=True)], object)


def messages(num_shards, num_ranks, num_elements, result_slots=0):
    """Each rank's message, whose terms are the expressions of their sums."""
    slots = shard_tree.num_slots(num_shards, num_ranks) + result_slots
    for rank in range(num_ranks):
        message = np.full((slots, num_elements), "no term", object)
        for slot, node in enumerate(shard_tree.terms_of(num_shards, num_ranks, rank)):
            message[slot] = sum_of(node)
        yield message.reshape(-1)


def test_the_tree_is_split_at_the_largest_power_of_two():
    assert sum_of(Node(0, 6)) == "(((0,1,)(2,3,))(4,5,))"
    assert Node(0, 24).children() == (Node(0, 16), Node(16, 8))
    assert Node(16, 8).children() == (Node(16, 4), Node(20, 4))
    assert shard_tree.terms_of(24, 8, 0) == (Node(0, 2), Node(2, 1))
    assert shard_tree.terms_of(24, 8, 1) == (Node(3, 1), Node(4, 2))
    assert shard_tree.terms_of(24, 3, 1) == (Node(8, 8),)


@pytest.mark.parametrize("num_shards", range(1, 65))
def test_terms_are_few_and_have_each_shard_once(num_shards):
    for p in divisors(num_shards):
        each = num_shards // p
        terms = [shard_tree.terms_of(num_shards, p, rank) for rank in range(p)]
        for rank, own in enumerate(terms):
            shards = [shard for node in own for shard in range(node.first, node.first + node.size)]
            assert shards == list(range(rank * each, (rank + 1) * each))
            assert len(own) <= max(1, 2 * np.log2(each))
            if each & (each - 1) == 0:
                assert len(own) == 1


@pytest.mark.parametrize("num_shards", range(1, 65))
def test_the_sum_does_not_depend_on_the_number_of_ranks(num_shards):
    for p in divisors(num_shards):
        for algorithm, n in ((along_tree.one_shot, 1), (along_tree.two_shot, min(p, 5))):
            run = schedule.run(partial(algorithm, num_shards=num_shards), list(messages(num_shards, p, n)), join)
            assert all((output[:n] == sum_of(Node(0, num_shards))).all() for output in run.outputs), (p, algorithm)


@pytest.mark.parametrize("num_shards", [4, 6, 8, 12, 16, 18, 24])
def test_the_sum_does_not_depend_on_the_hosts(num_shards):
    shuffle = random.Random(num_shards).shuffle
    for p in divisors(num_shards):
        for num_hosts in (h for h in divisors(p) if 1 < h < p):
            for interleaved in (False, True):
                ranks = list(range(p))
                if interleaved:
                    shuffle(ranks)
                on_host = p // num_hosts
                hosts = tuple(tuple(sorted(ranks[i : i + on_host])) for i in range(0, p, on_host))
                most = max(len(shard_tree.roots_of(num_shards, p, members)) for members in hosts)
                algorithm = partial(along_tree.two_level, num_shards=num_shards, hosts=hosts)
                run = schedule.run(algorithm, list(messages(num_shards, p, p, most)), join)
                assert all((output[:p] == sum_of(Node(0, num_shards))).all() for output in run.outputs), hosts


@pytest.mark.parametrize("p", [2, 3, 6, 8])
def test_bytes(p):
    n = 64 * p
    for num_shards in (p, 2 * p, 4 * p, 3 * p):
        inputs = np.zeros((p, along_tree.num_elements_of(num_shards, p, n)), np.int8)
        run = schedule.run(partial(along_tree.two_shot, num_shards=num_shards), inputs)
        terms = [len(shard_tree.terms_of(num_shards, p, rank)) for rank in range(p)]
        assert run.bytes_sent() == [(count + 1) * (p - 1) * n // p for count in terms]
        if num_shards != 3 * p:
            assert run.bytes_sent() == [cost.two_shot(p, n).sent] * p
        run = schedule.run(partial(along_tree.one_shot, num_shards=num_shards), inputs)
        assert run.bytes_sent() == [count * (p - 1) * n for count in terms]


def test_refuses_shards_that_do_not_fit():
    with pytest.raises(ValueError, match="10 shards cannot be divided evenly among 4 ranks"):
        along_tree.two_shot(4, 16, 0, num_shards=10)
    with pytest.raises(ValueError, match="a message of 15 elements does not have 2 slots"):
        along_tree.two_shot(8, 15, 0, num_shards=24)
