"""Results of all collectives: types and values match lax, and bits match the specified fold."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from collectives import COLLECTIVES, SHAPE, assert_family_matches_lax, every_collective, is_sum, vary
from helpers import RANKS, assert_matches_lax, assert_same_bits, make_mesh, num_calls, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import ring_all_gather, ring_broadcast, ring_pmax, ring_pmin, ring_psum, ring_psum_scatter, ring_reduce
from jax_ring.lowering import plan

# Small integers, whose sums are exact.
X = (np.arange(RANKS * np.prod(SHAPE)) % 7 - 3).astype(np.float32).reshape(RANKS * SHAPE[0], SHAPE[1])

DTYPES = [
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2fnuz", "complex64",
    "int8", "int16", "int32", "uint8", "uint16", "uint32", "int4", "uint2", "float4_e2m1fn",
]  # fmt: skip


def values_of(name, seed=0):
    """Operands of all ranks, with different signs and magnitudes over the range of the dtype."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if "int" in name:
        info = ml_dtypes.iinfo(dtype)
        kind = np.uint64 if info.min == 0 else np.int64
        return rng.integers(int(info.min), int(info.max), (RANKS, *SHAPE), kind, endpoint=True).astype(dtype)
    values = rng.standard_normal((RANKS, *SHAPE)) * 2.0 ** rng.integers(-3, 3, (RANKS, *SHAPE))
    if dtype.kind == "c":
        return (values + 1j * rng.standard_normal(values.shape)).astype(dtype)
    return values.astype(np.float32).astype(dtype)


def results_of(collective, values, check_vma=False, compiler_options=None, **options):
    """The results of all ranks, stacked, if the operand of rank r is values[r]."""
    f = sharded(lambda v: collective(v[0], "i", **options)[None], mesh=make_mesh((len(values),)), check_vma=check_vma)
    if values.size:
        assert num_calls(f, values) == 1
    return np.asarray(f.lower(values).compile(compiler_options)(values))


def test_matches_lax(subtests, check_vma):
    def body(fun, x, pair):
        return fun(x, "i"), fun(x.astype(jnp.int32), "i"), vary(fun(x - 1, "i"), "i")

    assert_family_matches_lax(subtests, body, X, check_vma=check_vma)


def check_bits(collective, dtypes):
    """Asserts that a tree with a leaf of each dtype matches the oracle bit for bit, with one call per dtype.

    Those that are converted to the same dtype before the call share it.
    """
    values = {dtype: values_of(dtype) for dtype in dtypes if collective.differentiable or "complex" not in dtype}

    def body(values):
        results = collective.ring(jax.tree.map(lambda v: v[0], values), "i")
        return jax.tree.map(lambda result: result[None], results)

    f = sharded(body, check_vma=False)
    assert num_calls(f, values) == len({jnp.dtype(plan.WIDENED.get(dtype, dtype)) for dtype in values})
    assert_same_bits(f(values), jax.tree.map(collective.oracle, values))


@every_collective(lambda name, pair: name != "pmean")
def test_bits(collective):
    check_bits(collective, DTYPES)


@every_collective(
    lambda name, pair: name != "pmean", plain=[*(name for name in COLLECTIVES if "psum" in name), "all_gather"]
)
def test_bits_of_wide_types(collective):
    with jax.enable_x64(True):
        check_bits(collective, ["float64", "int64", "uint64", "complex128"])


def test_types_match_lax(subtests, check_vma):
    def body(fun, x, pair):
        dtypes = ["float16", "int8", "float32", *["complex64"] * pair.differentiable]
        return fun({"bool": x > 0, **{dtype: x.astype(dtype) for dtype in dtypes}}, "i")

    assert_family_matches_lax(
        subtests, body, X, lambda name, pair: not name.startswith("psum_scatter"), check_vma=check_vma
    )


@every_collective(lambda name, pair: "gather" in name or name in ("broadcast", "all_to_all", "ppermute"))
def test_moved_bits_are_unchanged(collective):
    # Includes all NaN patterns, which a conversion would merge.
    codes = np.arange(RANKS * np.prod(SHAPE), dtype=np.uint16).reshape(RANKS, *SHAPE) + 0x7F00
    # Without optimizations, XLA's own copies change NaNs of bfloat16.
    optimized = {"xla_backend_optimization_level": 3}
    moved = results_of(collective.ring, codes.view(ml_dtypes.bfloat16), compiler_options=optimized).view(np.uint16)
    np.testing.assert_array_equal(moved, collective.oracle(codes))


@every_collective(is_sum)
def test_sums_are_the_same_fold_everywhere(collective):
    # 1e8 + 1 is 1e8 in float32, so the order of additions is visible.
    values = np.ones((RANKS, *SHAPE), np.float32)
    values[0], values[1] = 1e8, -1e8
    results = results_of(collective.ring, values)
    assert set(np.unique(results)) <= {0, 6 / 8, 6}
    values[[1, 7]] = values[[7, 1]]
    assert set(np.unique(results_of(collective.ring, values))) == {0}


def test_parts_of_a_sum_have_the_same_bits():
    values = values_of("bfloat16")
    total = results_of(ring_psum, values)[0]
    scattered = results_of(ring_psum_scatter, values, tiled=True)
    assert_same_bits(np.concatenate(scattered), total)
    assert_same_bits(results_of(ring_reduce, values, root=6)[6], total)


def test_ring_order_of_a_scatter():
    # Block r is folded from rank r + 1 on, for any size.
    values = values_of("float32")
    scattered = results_of(ring_psum_scatter, values, order="ring")
    for rank in range(RANKS):
        rotated = np.roll(values[:, rank], -(rank + 1), axis=0)
        total = rotated[0]
        for value in rotated[1:]:
            total = total + value
        assert_same_bits(scattered[rank], total)


def test_ring_order_of_a_reduce_is_that_of_the_sum():
    values = values_of("float32")
    total = results_of(ring_psum, values, order="ring")[2]
    assert_same_bits(results_of(ring_reduce, values, order="ring", root=2)[2], total)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_extrema_of_zeros_and_nans(dtype):
    values = np.zeros((RANKS, 5), np.float32)
    values[3, 0] = values[:, 1] = -0.0
    values[5, 2] = np.nan
    values[:, 3] = np.arange(RANKS) - 9
    values[1:, 4] = -0.0
    values = values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    largest = results_of(ring_pmax, values)[6].astype(np.float32)
    smallest = results_of(ring_pmin, values)[6].astype(np.float32)
    np.testing.assert_array_equal(largest, [0, 0, np.nan, -2, 0])
    np.testing.assert_array_equal(smallest, [0, 0, np.nan, -9, 0])
    np.testing.assert_array_equal(np.signbit(largest[[0, 1, 4]]), [False, True, False])
    np.testing.assert_array_equal(np.signbit(smallest[[0, 1, 4]]), [True, True, True])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (1023,), (40_003,), (2, 3, 5)], ids=str)
def test_shapes(shape, check_vma):
    values = np.random.default_rng(0).standard_normal((RANKS, *shape)).astype(np.float32)
    for name in ("psum", "pmax", "all_gather", "reduce", "broadcast"):
        assert_same_bits(results_of(COLLECTIVES[name].ring, values, check_vma), COLLECTIVES[name].oracle(values))
    stacked = np.stack([values] * RANKS, axis=1)
    assert_same_bits(results_of(ring_psum_scatter, stacked, check_vma), COLLECTIVES["psum_scatter"].oracle(stacked))


@pytest.mark.parametrize("dimension", [0, 1, 2, -1, -2])
def test_dimensions(dimension, check_vma):
    values = np.random.default_rng(0).standard_normal((RANKS, 8, 16, 8)).astype(np.float32)
    for tiled in (False, True):
        gathered = results_of(ring_all_gather, values, check_vma, axis=dimension, tiled=tiled)
        join = np.concatenate if tiled else np.stack
        assert_same_bits(gathered, np.stack([join(values, dimension)] * RANKS))
        square = values[:, :, :8]
        scattered = results_of(ring_psum_scatter, square, check_vma, scatter_dimension=dimension, tiled=tiled)
        total = square[0]
        for value in square[1:]:
            total = total + value
        parts = np.split(total, RANKS, dimension)
        assert_same_bits(scattered, np.stack(parts if tiled else [part.squeeze(dimension) for part in parts]))


@pytest.mark.parametrize("root", range(RANKS))
def test_every_root(root, check_vma):
    values = values_of("int32")[:, 0]
    reduced = results_of(ring_reduce, values, check_vma, root=root)
    np.testing.assert_array_equal(reduced[root], values.sum(0, dtype=np.int32))
    assert not np.delete(reduced, root, axis=0).any()
    np.testing.assert_array_equal(results_of(ring_broadcast, values, check_vma, root=root), [values[root]] * RANKS)


def test_one_rank(subtests, check_vma):
    def body(fun, x, pair):
        keywords = getattr(pair.ring, "keywords", {})
        one = {name: value for name, value in {"root": 0, "perm": [(0, 0)]}.items() if name in keywords}
        if "scatter_dimension" in keywords and not keywords["tiled"]:
            x = x[:1]
        return vary(fun(x, "i", **one), "i")[None]

    assert_family_matches_lax(subtests, body, X[:8, :8], mesh=make_mesh((1,)), check_vma=check_vma)


@pytest.mark.parametrize("axes", [("i", "j"), ("j", "i")], ids=str)
def test_several_axes(subtests, axes, check_vma):
    mesh = make_mesh((2, 4), ("i", "j"))
    assert_family_matches_lax(
        subtests, lambda fun, x, pair: vary(fun(x, axes), axes), X, lambda name, pair: name != "ppermute", mesh=mesh,
        in_specs=P(("i", "j")), out_specs=P(("i", "j")), check_vma=check_vma,
    )  # fmt: skip


def test_one_axis_of_two(subtests, check_vma):
    mesh = make_mesh((2, 8), ("j", "i"))
    x = np.concatenate([X, X + 1])
    assert_family_matches_lax(
        subtests, lambda fun, x, pair: vary(fun(x, "i"), "i"), x,
        lambda name, pair: name not in ("reduce", "broadcast"), mesh=mesh,
        in_specs=P(("j", "i")), out_specs=P(("j", "i")), check_vma=check_vma,
    )  # fmt: skip


def test_operand_that_is_the_same_on_all_ranks(subtests, check_vma):
    factors = {pair: float(i) for i, pair in enumerate(COLLECTIVES.values(), 2)}  # equal operands would be sent once

    def body(fun, x, pair):
        return vary(fun(jnp.ones_like(x, shape=SHAPE) * factors[pair], "i"), "i")

    assert_family_matches_lax(subtests, body, X, check_vma=check_vma)


def test_positional_axes():
    for pair in (COLLECTIVES["pmax"], COLLECTIVES["pmin"], COLLECTIVES["psum"]):
        for axes in (("i", 0), (1, "i"), (0,)):
            assert_matches_lax(
                lambda fun, x, axes=axes: fun(x, axes) + x[0, 0], X, pair=pair[:2], check_vma=False
            )  # fmt: skip


def test_mean_in_groups_of_different_sizes():
    groups = [[0, 1, 2], [3, 4, 5, 6, 7]]
    means = sharded(lambda x: COLLECTIVES["pmean"].ring(x, "i", axis_index_groups=groups), check_vma=False)(
        np.arange(8.0)
    )
    np.testing.assert_array_equal(means, [1, 1, 1, 5, 5, 5, 5, 5])


@every_collective()
def test_pmap(collective):
    x = X.reshape(RANKS, *SHAPE)
    results = [jax.pmap(lambda x, fun=fun: fun(x, "p"), axis_name="p")(x) for fun in collective[:2]]
    chex.assert_trees_all_equal(*results, collective.oracle(x), strict=True)


def test_inside_a_loop(subtests, check_vma):
    def body(fun, x, pair):
        def step(_, carry):
            return carry + jnp.sum(vary(fun(carry + x, "i"), "i")) % 3

        return lax.fori_loop(0, 5, step, x)

    assert_family_matches_lax(subtests, body, X, check_vma=check_vma)
