"""Means of integers are floats, also of those that JAX has no promotion for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import ring_pmax, ring_pmean, ring_pmin, ring_psum, ring_psum_scatter

check_vma = vma_fixture(with_vma=pytest.mark.one_pair)  # the other mode runs with the newest pair

RANKS = 4
MESH = make_mesh((RANKS,))
INTEGERS = ["int4", "uint4", "int8", "uint16", "int32", "bool"]
TWO_BITS = ["int2", "uint2"]
UNEQUAL = [[0, 3], [1], [2]]  # a division by 3 would depend on XLA's rounding


def codes(name) -> np.ndarray:
    """Values over the range of the dtype, small enough for four to be added; two bits hold no such sum."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    low = 0 if name.startswith(("u", "b")) else -2
    return (np.arange(RANKS * 6).reshape(RANKS, 6) * 3 % 4 + low).astype(dtype)


def mean(fun, x, check_vma, **arguments):
    return sharded(lambda x: fun(x[0], "i", **arguments), mesh=MESH, out_specs=P(), check_vma=check_vma)(x)


@pytest.mark.parametrize("name", INTEGERS)
def test_the_mean_is_that_of_lax(name, check_vma):
    x = codes(name)
    ours, theirs = (mean(fun, x, check_vma) for fun in (ring_pmean, lax.pmean))
    assert ours.dtype == jnp.float32
    assert_same_bits(ours, theirs)
    assert_same_bits(ours, x.astype(np.float32).mean(0))


@pytest.mark.parametrize("name", TWO_BITS)
def test_the_mean_of_two_bits_is_right(name, check_vma):
    # lax.pmean fails to compile, and over a vmap axis divides by the number of ranks in two bits.
    x = codes(name)
    expected = x.astype(np.float32).mean(0)
    assert_same_bits(mean(ring_pmean, x, check_vma), expected)
    assert_same_bits(mean(lambda x, i: ring_pmean({"x": x}, i)["x"], x, check_vma), expected)
    assert_same_bits(jax.jit(jax.vmap(lambda x: ring_pmean(x, "i"), axis_name="i"))(x)[0], expected)


@pytest.mark.one_pair
@pytest.mark.parametrize("name", ["int4", "uint4", *TWO_BITS, "int8", "bool", "float8_e4m3fn"])
def test_the_mean_in_groups_of_unequal_sizes(name):
    x = codes(name)
    f = sharded(lambda x: ring_pmean(x, "i", axis_index_groups=UNEQUAL), mesh=MESH, check_vma=False)
    values = x.astype(np.float32)
    pair = (values[0] + values[3]) / 2
    expected = np.stack([pair, values[1], values[2], pair])
    assert_same_bits(f(x), expected.astype(x.dtype) if name == "float8_e4m3fn" else expected)


@pytest.mark.one_pair
def test_the_mean_of_wide_integers_in_groups_of_unequal_sizes():
    with jax.enable_x64(True):
        x = np.arange(RANKS * 2).reshape(RANKS, 2)
        f = sharded(lambda x: ring_pmean(x, "i", axis_index_groups=UNEQUAL), mesh=MESH, check_vma=False)
        equal = sharded(lambda x: lax.pmean(x, "i"), mesh=MESH, check_vma=False)
        for dtype in (np.int8, np.int32, np.int64):
            assert f(x.astype(dtype)).dtype == equal(x.astype(dtype)).dtype
        assert_same_bits(f(x), np.array([[3.0, 4.0], [2.0, 3.0], [4.0, 5.0], [3.0, 4.0]]))


@pytest.mark.parametrize("name", [*TWO_BITS, "int4"])
def test_other_reductions_keep_the_dtype(name, check_vma):
    x = codes(name)
    dtype, wide = x.dtype, x.astype(np.int32)
    assert_same_bits(mean(ring_psum, x, check_vma), wide.sum(0).astype(np.int8).astype(dtype))
    assert_same_bits(mean(ring_pmax, x, check_vma), wide.max(0).astype(dtype))
    assert_same_bits(mean(ring_pmin, x, check_vma), wide.min(0).astype(dtype))
    blocks = sharded(lambda x: ring_psum_scatter(x[0, :RANKS], "i", tiled=True), mesh=MESH, check_vma=check_vma)
    assert_same_bits(blocks(x), wide.sum(0)[:RANKS].astype(np.int8).astype(dtype))
