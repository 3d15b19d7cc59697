"""Sums along the tree have the same bits on any number of ranks: those of a recursion in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, num_calls, rank_fold, sharded, tree_fold
from jax.sharding import PartitionSpec as P
from shards import numbers, on_ranks, terms
from tiers import full_but

from jax_ring import ShardSums, ring_pmean, ring_psum, ring_psum_scatter, ring_reduce
from jax_ring.lowering import plan
from jax_ring.lowering.call import Service

pytestmark = pytest.mark.one_pair  # native code

V = 24


@pytest.fixture(params=["engine", "XLA"])
def served_by(request, monkeypatch):
    """Who serves the calls: the engine, or XLA, which then moves the data and adds nothing."""
    if request.param == "XLA":
        monkeypatch.setattr(plan, "service_of", lambda *args: Service(None, why_not="of the test"))
    return request.param


@pytest.mark.parametrize("ranks", full_but([1, 2, 3, 4, 6, 8, 12], [1, 3, 8]))
def test_all_sums_on_any_number_of_ranks(ranks, served_by):
    x = {
        "a": numbers((V, 24, 5)),
        "b": [numbers((V, 48), jnp.bfloat16), numbers((V, 24), np.int8)],
        "c": numbers((V, 0, 3)),
    }

    def body(own):
        mean = ring_pmean(own, "i", order="tree")
        scattered = ring_psum_scatter(own, "i", order="tree", num_shards=V, tiled=True)
        rooted = ring_reduce(own, "i", order="tree", root=ranks - 1)
        return ring_psum(own, "i", order="tree"), mean, scattered, jax.tree.map(lambda leaf: leaf[None], rooted)

    f = on_ranks(body, ranks, check_vma=ranks % 4 != 0, out_specs=(P(), P(), P("i"), P("i")))
    total, mean, scattered, rooted = f(terms(x, ranks))
    expected = jax.tree.map(tree_fold, x)
    assert_same_bits(total, expected)
    assert_same_bits(scattered, expected)
    assert_same_bits(jax.tree.map(lambda leaf: leaf[-1], rooted), expected)
    assert not any(np.asarray(leaf[:-1]).any() for leaf in jax.tree.leaves(rooted))
    assert_same_bits(mean["a"], np.asarray(jax.jit(lambda s: s / V)(expected["a"])))
    assert mean["b"][1].dtype == jnp.float32


@pytest.mark.parametrize("ranks", [2, 8])
def test_partial_sums_of_shards(ranks, check_vma):
    x = numbers((V, 5)), numbers((V, 2), np.float16), numbers((V, 3)) > 0
    f = on_ranks(lambda x: ring_psum(ShardSums.of(x, "i", V), "i", order="tree"), ranks, check_vma=check_vma)
    assert_same_bits(f(x), (tree_fold(x[0]), tree_fold(x[1]), x[2].sum(0).astype(np.int32)))


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_one_value_on_each_rank(ranks, served_by):
    x = numbers((ranks, 7)), numbers((ranks, 30), np.float16), numbers((ranks, 4), np.complex64)
    body = lambda x: ring_psum([leaf[0] for leaf in x], "i", order="tree")  # noqa: E731
    f = on_ranks(body, ranks, check_vma=ranks % 2 == 0)
    assert_same_bits(f(x), [tree_fold(leaf) for leaf in x])
    assert num_calls(f, x) == (3 if served_by == "engine" else 0)


def test_the_order_of_ranks_gives_other_bits():
    x = np.float32([[1e8], [1], [-1e8], [1]])
    assert tree_fold(x)[0] == 0 != rank_fold(x)[0]
    for order, expected in (("tree", tree_fold(x)), ("rank", rank_fold(x))):
        assert_same_bits(on_ranks(lambda x, order=order: ring_psum(x[0], "i", order=order), 4)(x), expected)


@pytest.mark.parametrize("algorithm", ["auto", "one_shot", "two_shot"])
def test_algorithms(algorithm):
    x = numbers((6, 1000), jnp.bfloat16)
    f = on_ranks(lambda own: ring_psum(own, "i", order="tree", algorithm=algorithm), 2)
    assert_same_bits(f(terms(x, 2)), tree_fold(x))


DTYPES = ["int4", "uint2", "uint8", "int16", "uint32", "float16", "float8_e4m3fn", "float8_e8m0fnu", "complex64"]


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name, served_by):
    dtype = np.dtype(getattr(jnp, name))
    x = jnp.abs(numbers((6, 16)) + 2).astype(dtype) if name == "float8_e8m0fnu" else numbers((6, 16), dtype)
    x = np.asarray(x)

    def body(x, own):
        scattered = ring_psum_scatter(x[0], "i", order="tree", tiled=True)
        return ring_psum(x[0], "i", order="tree"), scattered, ring_psum(own, "i", order="tree")

    out = on_ranks(body, 2, out_specs=(P(), P("i"), P()))(x[:2], terms(x, 2))
    assert_same_bits(out, (tree_fold(x[:2]), tree_fold(x[:2]), tree_fold(x)))


def test_booleans_are_counted():
    x = numbers((6, 9)) > 0
    f = on_ranks(lambda x: ring_psum(x[0], "i", order="tree"), 6)
    assert_same_bits(f(x), x.sum(0).astype(np.int32))


def test_constants_are_not_sent():
    f = on_ranks(lambda x: x + ring_psum(2.5, "i", order="tree"), 6, out_specs=P("i"))
    assert_same_bits(f(np.zeros(6, np.float32)), np.full(6, 15, np.float32))
    assert num_calls(f, np.zeros(6, np.float32)) == 0


def test_terms_that_are_constants_are_added():
    own = ShardSums(np.float32([[1, 2], [3, 4]]), 6, (np.dtype(np.float32),))
    f = on_ranks(lambda x: ring_psum(own, "i", order="tree"), 2)
    assert_same_bits(f(np.zeros(2, np.float32)), np.float32([8, 12]))


@pytest.mark.parametrize("groups", [[[0, 3], [1, 2]], [[2, 0, 3], [1]]])
def test_groups(groups, served_by):
    x = numbers((4, 5))
    f = on_ranks(
        lambda x: ring_psum(x, "i", order="tree", axis_index_groups=groups), 4, check_vma=False, out_specs=P("i")
    )
    expected = np.empty_like(x)
    for group in groups:
        expected[group] = tree_fold(x[group])
    assert_same_bits(f(x), expected)


def test_shards_in_groups(served_by):
    groups = [[3, 0], [1, 2]]
    x = [numbers((6, 5), seed=i) for i in range(2)]
    of_ranks = np.empty((4, 2, 5), np.float32)
    for group, values in zip(groups, x, strict=True):
        of_ranks[group] = terms(values, 2).terms.reshape(2, 2, 5)
    own = ShardSums(of_ranks.reshape(8, 5), 6, (np.dtype(np.float32),))

    def body(own):
        total = ring_psum(own, "i", order="tree", axis_index_groups=groups)
        parts = ring_psum_scatter(own, "i", order="tree", axis_index_groups=groups, tiled=True, scatter_dimension=-1)
        return total[None], parts

    own = ShardSums(np.concatenate([own.terms, own.terms[:, :1]], 1), 6, own.dtypes)
    total, parts = on_ranks(body, 4, check_vma=False, out_specs=P("i"))(own)
    sums = [tree_fold(np.concatenate([values, values[:, :1]], 1)) for values in x]
    assert_same_bits(total, np.stack([sums[0], sums[1], sums[1], sums[0]]))
    assert_same_bits(parts, np.concatenate([sums[0][3:], sums[1][:3], sums[1][3:], sums[0][:3]]))


def test_several_axes_and_axes_of_one_rank():
    x, axes = numbers((12, 5)), ("k", "j", "i")
    mesh = make_mesh((2, 1, 3), ("i", "j", "k"))
    f = sharded(lambda own: ring_psum(own, axes, order="tree"), mesh=mesh, in_specs=P(axes), out_specs=P())
    assert_same_bits(f(terms(x, 6)), tree_fold(x))
    alone = sharded(lambda own: ring_psum(own, "j", order="tree"), mesh=mesh, in_specs=P(), out_specs=P())
    assert_same_bits(alone(terms(x, 1)), tree_fold(x))
    assert num_calls(alone, terms(x, 1)) == 0
