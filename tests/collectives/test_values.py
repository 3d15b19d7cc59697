"""Sums compared with float64, and bit for bit with the specified fold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import RANKS, assert_same_bits, make_mesh, rank_fold, sharded
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum

pytestmark = pytest.mark.one_pair  # other cases run with the newest pair

SHAPES = [(), (1,), (3,), (0,), (2, 0, 3), (7, 5), (1023,), (1024,), (1025,), (2, 3, 4, 5), (100_003,)]


def random_values(dtype, shape, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def psum_of_ranks(values, *, mesh=None, groups=None):
    """ring_psum where rank r holds values[r]. Returns the results of all ranks, stacked."""
    mesh = mesh or make_mesh((len(values),))
    f = sharded(
        lambda v: ring_psum(v[0], "i", axis_index_groups=groups)[None],
        mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False,
    )  # fmt: skip
    return np.asarray(f(values))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape):
    values = random_values(np.float32, (RANKS, *shape))
    exact = values.astype(np.float64).sum(0)
    # RANKS - 1 additions; each rounds by at most half a ULP of a partial sum.
    bound = (RANKS - 1) * np.finfo(np.float32).eps / 2 * np.abs(values.astype(np.float64)).sum(0) + 1e-45
    for result in psum_of_ranks(values):
        assert np.all(np.abs(result - exact) <= bound)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint8", "float8_e4m3fn", "complex64"]),
    ranks=st.integers(1, 16),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_rank_has_the_fold(shape, dtype, ranks, seed):
    values = random_values(jnp.dtype(dtype), (ranks, *shape), seed)
    expected = rank_fold(values)
    for result in psum_of_ranks(values):
        assert_same_bits(result, expected)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_groups_are_independent(data):
    ranks = data.draw(st.integers(1, 12))
    order = data.draw(st.permutations(range(ranks)))
    cuts = sorted(data.draw(st.sets(st.integers(1, ranks - 1)) if ranks > 1 else st.just(set())))
    groups = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, ranks], strict=True)]
    values = random_values(np.float32, (ranks, 5), seed=ranks)
    results = psum_of_ranks(values, groups=groups)
    for group in groups:
        # The fold of a group follows the order of its list.
        expected = rank_fold(values[group])
        for rank in group:
            assert_same_bits(results[rank], expected)


def test_large_and_unaligned_messages_use_the_same_fold():
    # Large enough for several threads. The odd size makes each rank's block end within a vector.
    values = random_values(np.float32, (RANKS, 300_007))
    for result in psum_of_ranks(values):
        assert_same_bits(result, rank_fold(values))


def test_subnormal_numbers_survive_in_every_thread():
    values = np.full((RANKS, 200_000), 1e-40, np.float32)
    for result in psum_of_ranks(values):
        assert_same_bits(result, rank_fold(values))
        assert result[0] > 0


def test_negative_zero_is_kept():
    values = np.full((RANKS, 3), -0.0, np.float32)
    assert np.all(np.signbit(psum_of_ranks(values)))


def test_infinities_and_nan():
    values = np.zeros((RANKS, 4), np.float32)
    values[2] = [np.inf, np.inf, -np.inf, np.nan]
    values[5] = [np.inf, -np.inf, 0, 0]
    result = psum_of_ranks(values)[0]
    np.testing.assert_array_equal(result, [np.inf, np.nan, -np.inf, np.nan])


def test_same_bits_on_every_run_and_next_to_other_leaves():
    values = random_values(np.float32, (RANKS, 4096))
    alone = psum_of_ranks(values)
    together = sharded(
        lambda v: jax.tree.map(lambda x: x[None], ring_psum({"a": v[0, :7], "b": v[0], "c": v[0, :1000]}, "i")),
        check_vma=False,
    )
    for _ in range(5):
        assert_same_bits(together(values)["b"], alone)
        assert_same_bits(psum_of_ranks(values), alone)
