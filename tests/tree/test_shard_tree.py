"""The order "tree": its shape, what ranks contribute, and the proof that its sums do not depend on their number."""

import random

import numpy as np
import pytest
from tiers import full_but

from jax_ring import shard_tree
from jax_ring.shard_tree import Node, Term

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version


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


def add(a, b):
    return f"({a}{b})"


def sums_left(num_shards, nodes):
    """What is left of the sums of these nodes, from left to right, once they are added as far as the tree allows."""
    terms = [Term(i, 0, merges) for i, merges in enumerate(shard_tree.merges_of(num_shards, nodes))]
    return shard_tree.run_fold(terms, lambda i, _: sum_of(nodes[i]), add)


def test_the_tree_is_split_at_the_largest_power_of_two():
    assert sum_of(Node(0, 6)) == "(((0,1,)(2,3,))(4,5,))"
    assert Node(0, 24).children() == (Node(0, 16), Node(16, 8))
    assert Node(16, 8).children() == (Node(16, 4), Node(20, 4))
    assert shard_tree.terms_of(24, 8, 0) == (Node(0, 2), Node(2, 1))
    assert shard_tree.terms_of(24, 8, 1) == (Node(3, 1), Node(4, 2))
    assert shard_tree.terms_of(24, 3, 1) == (Node(8, 8),)


@pytest.mark.parametrize("num_shards", full_but(range(1, 65), [1, 2, 3, 6, 8, 24, 64]))
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


@pytest.mark.parametrize("num_shards", full_but(range(1, 65), [1, 2, 3, 6, 8, 24, 64]))
def test_the_sum_does_not_depend_on_the_number_of_ranks(num_shards):
    for p in divisors(num_shards):
        terms = [list(map(sum_of, shard_tree.terms_of(num_shards, p, rank))) for rank in range(p)]
        fold = shard_tree.fold_of(num_shards, p)
        assert shard_tree.run_fold(fold, lambda rank, slot, terms=terms: terms[rank][slot], add) == [
            sum_of(Node(0, num_shards))
        ]


@pytest.mark.parametrize("num_shards", full_but([4, 6, 8, 12, 16, 18, 24], [6, 8, 24]))
def test_the_sum_does_not_depend_on_the_hosts(num_shards):
    shuffle = random.Random(num_shards).shuffle
    for p in divisors(num_shards):
        for num_hosts in (h for h in divisors(p) if 1 < h < p):
            for interleaved in (False, True):
                ranks = list(range(p))
                if interleaved:
                    shuffle(ranks)
                on_host = p // num_hosts
                hosts = [sorted(ranks[i : i + on_host]) for i in range(0, p, on_host)]
                roots = [shard_tree.roots_of(num_shards, p, members) for members in hosts]
                for members, own in zip(hosts, roots, strict=True):
                    terms = [node for rank in members for node in shard_tree.terms_of(num_shards, p, rank)]
                    assert sums_left(num_shards, terms) == list(map(sum_of, own)), hosts
                of_all = sorted(root for own in roots for root in own)
                assert sums_left(num_shards, of_all) == [sum_of(Node(0, num_shards))], hosts
