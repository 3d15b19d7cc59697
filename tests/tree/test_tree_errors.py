"""What sums along the tree refuse, and with which words: when they are traced."""

import dataclasses

import numpy as np
import pytest
from helpers import sharded
from shards import numbers, on_ranks, terms

from jax_ring import ShardSums, ring_pmean, ring_psum, ring_psum_scatter, ring_reduce

RANKS = 4
SUMS = [ring_psum, ring_pmean, ring_psum_scatter, ring_reduce]


def refused(body, own, message, error=ValueError, **options):
    with pytest.raises(error, match=message):
        on_ranks(body, RANKS, **options)(own)


@pytest.mark.parametrize("sum_of", SUMS)
def test_options_that_do_not_go_together(sum_of):
    own = terms(numbers((12, 4)), RANKS)
    refused(lambda own: sum_of(own, "i"), own, "a ShardSums needs order='tree', got order='rank'")
    refused(lambda own: sum_of(own.terms, "i", num_shards=4), own, "num_shards=4 needs order='tree'")
    refused(
        lambda own: sum_of(own.terms, "i", order="tree", num_shards=12), own,
        "num_shards can only be the number of ranks, 4; got num_shards=12.*ShardSums",
    )  # fmt: skip
    refused(lambda own: sum_of(own, "i", order="tree", num_shards=8), own, "num_shards=8 and a ShardSums of 12 shards")
    if sum_of is not ring_psum_scatter:  # which has no algorithm
        refused(lambda own: sum_of(own, "i", order="tree", algorithm="ring"), own, "cannot have algorithm='ring'")
    refused(lambda own: sum_of(own, "j", order="tree"), own, "unbound axis name 'j'", NameError)


def test_numbers_of_shards():
    own = terms(numbers((12, 4)), RANKS)
    odd = dataclasses.replace(own, num_shards=6)
    refused(lambda own: ring_psum(own, "i", order="tree"), odd, "multiple of the number of ranks, 4.*got 6")
    fewer = dataclasses.replace(own, num_shards=8)
    refused(lambda own: ring_psum(own, "i", order="tree"), fewer, r"8 shards on 4 ranks have 1 terms.*\(2, 4\)")
    shards = numbers((12, 3))
    refused(lambda x: ShardSums.of(x, "i", 10), shards, "multiple of the number of ranks, 4.*got 10")
    refused(lambda x: ShardSums.of(x, "i", 8), shards, r"each rank holds 2 of 8 shards.*\(3, 3\)")
    refused(lambda x: ShardSums.of(x, "j", 8), shards, "unbound axis name 'j'", NameError)


def test_groups_and_positional_axes():
    own = terms(numbers((12, 4)), RANKS)
    uneven = [[0, 1, 2], [3]]
    body = lambda own: ring_psum(own, "i", order="tree", axis_index_groups=uneven)  # noqa: E731
    refused(body, own, "must all be of one size.*groups of 1 and 3 ranks", check_vma=False)
    refused(
        lambda own: ring_psum(own.terms, "i", order="tree", num_shards=4, axis_index_groups=uneven), own,
        "the number of ranks, 1 and 3; got num_shards=4", check_vma=False,
    )  # fmt: skip
    body = lambda own: ring_psum(own, ("i", 0), order="tree")  # noqa: E731
    refused(body, own, r"named axes, got the positional axes \(0,\)", check_vma=False)


def test_the_dimension_counts_no_slots():
    own = terms(numbers((12, 4)), RANKS)
    body = lambda own: ring_psum_scatter(own, "i", order="tree", scatter_dimension=1)  # noqa: E731
    refused(body, own, "scatter_dimension 1 is out of bounds for an array of dimension 1", np.exceptions.AxisError)


def test_the_plain_order_takes_no_shards():
    with pytest.raises(ValueError, match="needs order='tree'"):
        sharded(lambda own: ring_psum(own, "i", order="any"))(terms(numbers((8, 4)), 8))
