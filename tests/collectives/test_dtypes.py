"""Every dtype that lax.psum accepts, and some more: summed in the specified accumulator, rounded once."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import RANKS, assert_matches_lax, assert_same_bits, make_mesh, num_calls, rank_fold, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import _ffi_cpu, ring_psum

INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
WIDE = ["int64", "uint64", "float64", "complex128"]
EIGHT_BITS = [
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
FLOATS = ["bfloat16", "float16", "float32", "complex64"]
PACKED = ["int2", "int4", "uint2", "uint4", "float4_e2m1fn"]


def as_dtype(name) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def values_of(name, shape, seed=0):
    """Integers over their full range; floats of mixed magnitudes."""
    rng = np.random.default_rng(seed)
    dtype = as_dtype(name)
    if "int" in name:
        bits = ml_dtypes.iinfo(dtype).bits if name in PACKED else np.iinfo(dtype).bits
        return rng.integers(0, 256, (*shape, 8), np.uint8).view(np.uint64)[..., 0].astype(
            f"u{max(bits // 8, 1)}"
        ).view(f"i{max(bits // 8, 1)}").astype(dtype)  # fmt: skip
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 3, shape)
    if dtype.kind == "c":
        return (values + 1j * rng.standard_normal(shape)).astype(dtype)
    return (np.abs(values) if name == "float8_e8m0fnu" else values).astype(np.float32).astype(dtype)


def sum_over_ranks(values, check_vma):
    f = sharded(
        lambda v: ring_psum(v[0], "i"), mesh=make_mesh((len(values),)), out_specs=P(), check_vma=check_vma
    )  # fmt: skip
    assert num_calls(f, values) == 1
    return np.asarray(f(values))


@pytest.mark.one_pair
@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS, *EIGHT_BITS, *PACKED])
def test_the_fold(name, check_vma):
    values = values_of(name, (RANKS, 1003))
    assert_same_bits(sum_over_ranks(values, check_vma), rank_fold(values))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_pair_of_eight_bits(name):
    codes = np.arange(256, dtype=np.uint8)
    values = np.stack(np.meshgrid(codes, codes)).reshape(2, -1).view(as_dtype(name))
    assert_same_bits(sum_over_ranks(values, True), rank_fold(values))


@pytest.mark.one_pair
@pytest.mark.parametrize("name", WIDE)
def test_the_fold_of_wide_types(name, check_vma):
    with jax.enable_x64(True):
        values = values_of(name, (RANKS, 1003))
        total = sum_over_ranks(values, check_vma)
        assert_same_bits(total, rank_fold(values))
        assert total.dtype == np.dtype(name)


def test_bool_becomes_int32(check_vma):
    values = values_of("uint8", (RANKS, 50)) > 100
    total = sum_over_ranks(values, check_vma)
    chex.assert_trees_all_equal(total, values.sum(0, dtype=np.int32), strict=True)


@pytest.mark.parametrize("name", [*INTEGERS, "float32", "float16", "bfloat16", "complex64", "bool"])
def test_same_type_as_lax(name, check_vma):
    # Small integers are exact in all of these dtypes, so the values match as well.
    x = (np.arange(16) % 4).astype(as_dtype(name))
    assert_matches_lax(lambda psum, x: psum((x, x[:1]), "i"), x, out_specs=P(), check_vma=check_vma)


@pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128", "bool"])
def test_same_type_as_lax_with_64_bits(name, check_vma):
    with jax.enable_x64(True):
        x = (np.arange(16) % 4).astype(name)
        assert_matches_lax(
            lambda psum, x: (psum(x, "i"), psum(3, "i"), psum(0.5, "i")), x, out_specs=P(), check_vma=check_vma
        )


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_pair_of_codes(name):
    codes = np.arange(256, dtype=np.uint8).view(as_dtype(name))
    pairs = np.stack([np.repeat(codes, 256), np.tile(codes, 256)])
    assert_same_bits(sum_over_ranks(pairs, True), rank_fold(pairs))


@pytest.mark.parametrize("name", PACKED)
def test_every_pair_of_packed_codes(name):
    dtype = as_dtype(name)
    if "int" in name:
        info = ml_dtypes.iinfo(dtype)
        codes = np.arange(int(info.min), int(info.max) + 1).astype(dtype)
    else:
        codes = np.arange(16, dtype=np.uint8).view(dtype)
    pairs = np.stack([np.repeat(codes, len(codes)), np.tile(codes, len(codes))])
    total = sum_over_ranks(pairs, True)
    assert total.dtype == dtype
    np.testing.assert_array_equal(total.astype(np.float32), rank_fold(pairs).astype(np.float32))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_code_of_sixteen_bits(name):
    codes = np.arange(65536, dtype=np.uint16).view(as_dtype(name))
    for other in (codes[::-1], np.roll(codes, 1), np.roll(codes, 17_001)):
        pairs = np.stack([codes, other])
        assert_same_bits(sum_over_ranks(pairs, True), rank_fold(pairs))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"])
def test_rounded_once(name, check_vma):
    # Each of seven addends is lost when it is added to 1 in the dtype itself, but their sum is not.
    values = np.full((RANKS, 3), float(ml_dtypes.finfo(as_dtype(name)).eps) / 4, as_dtype(name))
    values[0] = 1
    total = sum_over_ranks(values, check_vma)
    assert np.all(total.astype(np.float32) > 1)
    assert_same_bits(total, rank_fold(values))


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32", "uint32", "int4", "uint4"])
def test_integers_wrap_around(name, check_vma):
    dtype = as_dtype(name)
    info = ml_dtypes.iinfo(dtype)
    values = np.full((RANKS, 5), int(info.max), dtype)
    expected = (RANKS * int(info.max) - int(info.min)) % 2**info.bits + int(info.min)
    np.testing.assert_array_equal(sum_over_ranks(values, check_vma).astype(np.int64), expected)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int4"])
def test_narrow_types_under_transformations(name, check_vma):
    values = values_of(name, (4, 2, 3))

    def body(v):
        return jax.vmap(lambda v: ring_psum(v, "i"), in_axes=1, out_axes=1)(v), ring_psum((v, v), "i")[1]

    f = sharded(body, mesh=make_mesh((4,)), out_specs=P(), check_vma=check_vma)
    expected = rank_fold(values)
    for total in f(values):
        np.testing.assert_array_equal(np.asarray(total)[0].astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "complex64"])
def test_gradients_keep_the_dtype(name, check_vma):
    x = (np.arange(8) % 3).astype(as_dtype(name))

    def body(psum, x):
        f = lambda x: jnp.sum((psum(x, "i") * x).real).astype(jnp.float32)  # noqa: E731
        return jax.grad(f)(x), jax.jvp(lambda x: psum(x, "i"), (x,), (x,))[1] + x

    assert_matches_lax(body, x, mesh=make_mesh((4,)), check_vma=check_vma)


def test_large_messages_of_narrow_types():
    # Large enough for several threads, with a remainder that fills no vector of any width.
    for name in ("bfloat16", "float16", "float8_e5m2", "int8", "complex64"):
        values = values_of(name, (4, 400_003))
        assert_same_bits(sum_over_ranks(values, False), rank_fold(values))


@pytest.mark.parametrize("leaf", ["text", "key"])
def test_non_numeric_leaves_raise_as_in_lax(leaf, check_vma):
    x = np.arange(4, dtype=np.uint32)
    raised = []
    for psum in (ring_psum, lax.psum):

        def body(x, psum=psum):
            if leaf == "text":
                return psum("text", "i")
            return jax.random.key_data(psum(jax.random.key(x[0]), "i"))

        with pytest.raises(Exception) as error:  # noqa: PT011
            sharded(body, mesh=make_mesh((4,)), out_specs=P(), check_vma=check_vma)(x)
        raised.append(type(error.value))
    assert raised[0] is raised[1]


def test_the_limit_of_a_dtype():
    for dtype in ("f32", "bf16", "s8", "f8e4m3fn"):
        assert _ffi_cpu.fold_limit_seconds(2, 4096, 1, 1, dtype) > 0
    assert _ffi_cpu.fold_limit_seconds(2, 4096, 1, 1) > 0
    with pytest.raises(ValueError, match="no dtype named float32"):
        _ffi_cpu.fold_limit_seconds(2, 4096, 1, 1, "float32")
