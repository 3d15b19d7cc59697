"""weighted_pmean: its accumulator, and ranks without examples, whose values and gradients do not count."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, sharded
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import ring_psum, value_and_grad, weighted_pmean
from jax_ring.training.wire import reduced_by

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

RANKS = 4
MESH = make_mesh((RANKS,))
COUNTS = np.array([8, 1, 0, 5])


def mean(x, weights, check_vma=True):
    """The weighted mean of rows of `x`, and the same from every rank."""

    def body(x, w):
        out = weighted_pmean(jax.tree.map(lambda x: x[0], x), w[0], "i")
        return out, jax.tree.map(lambda x: jax.lax.pcast(x, "i", to="varying")[None] if check_vma else x[None], out)

    f = sharded(body, mesh=MESH, in_specs=P("i"), out_specs=(P(), P("i")), check_vma=check_vma)
    out, copies = f(x, weights)
    for copy in range(RANKS):
        assert_same_bits(jax.tree.map(lambda x, copy=copy: x[copy], copies), out)
    return out


# ---- The accumulator ------------------------------------------------------------------------------------------------


@pytest.mark.one_pair
@pytest.mark.parametrize("impl", ["ring", "lax"])
@pytest.mark.parametrize(
    ("name", "value", "weight"),
    [
        ("float16", 6e4, "int32"),
        ("float16", 6e4, "float16"),
        ("float8_e4m3fn", 448, "uint8"),
        ("float8_e4m3fn", 448, "float8_e5m2"),
        ("bfloat16", 1, "bfloat16"),
        ("float32", 1e35, "uint8"),
    ],
)
def test_sums_that_the_dtypes_cannot_hold(name, value, weight, impl):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x = np.array([[value], [value], [0], [value]], np.float32).astype(dtype)
    weights = np.array([96, 192, 0, 224]).astype(getattr(ml_dtypes, weight, weight))
    with reduced_by(impl):
        out = mean(x, weights)
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), x[0].astype(np.float64), rtol=1e-6)


@pytest.mark.one_pair
def test_integers_have_float_means(check_vma):
    names = ("bool", "int4", "int2", "uint8", "int32")
    bits = np.arange(RANKS * 3).reshape(RANKS, 3) % 2
    x = {name: bits.astype(getattr(ml_dtypes, name, name)) for name in names} | {
        "large": np.full((RANKS, 3), 2**30, np.int32)
    }
    out = mean(x, COUNTS.astype(np.uint8), check_vma)
    for name, leaf in out.items():
        assert leaf.dtype == np.float32
        np.testing.assert_allclose(leaf, np.average(x[name].astype(np.float64), 0, COUNTS), rtol=1e-6)


@pytest.mark.one_pair
@pytest.mark.parametrize("weight", ["uint8", "int64", "float64"])
def test_64_bits(weight):
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((RANKS, 5))
        exact = np.average(x, 0, COUNTS)
        tree = {"f64": x, "f32": x.astype(np.float32), "f16": x.astype(np.float16), "c": x * 1j, "i": np.int64(x * 9)}
        out = mean(tree, COUNTS.astype(weight))
        dtypes = {"f64": "float64", "f32": "float32", "f16": "float16", "c": "complex128", "i": "float64"}
        assert {name: leaf.dtype.name for name, leaf in out.items()} == dtypes
        np.testing.assert_allclose(out["f64"], exact, rtol=1e-14)
        np.testing.assert_allclose(out["c"], exact * 1j, rtol=1e-14)
        np.testing.assert_allclose(out["f32"], exact, rtol=1e-5)
        np.testing.assert_allclose(out["i"], np.average(np.int64(x * 9), 0, COUNTS), rtol=1e-14)


@pytest.mark.one_pair
def test_float64_weights_of_float32_values():
    with jax.enable_x64(True):
        out = mean(np.ones((RANKS, 1), np.float32), COUNTS * 1e200)
        assert out.dtype == np.float32
        np.testing.assert_array_equal(out, [1])


# ---- Ranks without examples -----------------------------------------------------------------------------------------


X = np.random.default_rng(1).standard_normal((RANKS * 8, 3)).astype(np.float32)
MASK = (np.arange(8) < COUNTS[:, None]).reshape(-1)
# XLA makes a choice of a product with booleans, which removes NaNs.
FLOAT_MASK = MASK.astype(np.float32)
W = np.float32([0.5, -1, 2])


def losses(w, x):
    return jnp.tanh(x @ w) ** 2


def gradient(local_mean, check_vma):
    def loss(w, x, mask):
        return weighted_pmean(local_mean(w, x, mask), mask.sum(), "i")

    f = value_and_grad(loss, "i")
    return sharded(f, mesh=MESH, in_specs=(P(), P("i"), P("i")), out_specs=P(), check_vma=check_vma)(W, X, FLOAT_MASK)


@pytest.mark.one_pair
@pytest.mark.parametrize("impl", ["ring", "lax"])
def test_the_documented_mean_over_the_examples(impl, check_vma):
    """A rank without examples has the mean 0 / 1."""
    expected = jax.value_and_grad(lambda w: losses(w, X[MASK]).mean())(W)
    with reduced_by(impl):
        value, grads = gradient(lambda w, x, mask: (losses(w, x) * mask).sum() / jnp.maximum(mask.sum(), 1), check_vma)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(grads, expected[1], rtol=1e-5)


def test_the_documented_quotient_of_sums(check_vma):
    def loss(w, x, mask):
        return ring_psum((losses(w, x) * mask).sum(), "i") / ring_psum(mask.sum(), "i")

    f = sharded(
        value_and_grad(loss, "i"), mesh=MESH, in_specs=(P(), P("i"), P("i")), out_specs=P(), check_vma=check_vma
    )
    value, grads = f(W, X, FLOAT_MASK)
    expected = jax.value_and_grad(lambda w: losses(w, X[MASK]).mean())(W)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(grads, expected[1], rtol=1e-5)


def test_a_mean_over_no_examples_has_a_value_but_no_gradient():
    """As documented: the cotangent is 0 on the empty rank, but the derivative of 0 / 0 there is not finite."""
    value, grads = gradient(lambda w, x, mask: (losses(w, x) * mask).sum() / mask.sum(), True)
    np.testing.assert_allclose(value, losses(W, X[MASK]).mean(), rtol=1e-6)
    assert np.isnan(grads).all()


@pytest.mark.one_pair
@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("bfloat16", -np.inf), ("complex64", np.nan)])
def test_a_value_that_is_not_finite_does_not_count(dtype, value):
    x = np.array([[1], [2], [value], [3]]).astype(jnp.dtype(dtype))
    expected = np.average([1, 2, 3], weights=COUNTS[COUNTS > 0])
    np.testing.assert_allclose(mean(x, COUNTS).astype(jnp.complex64), [expected], rtol=1e-2)


def test_the_gradient_of_weights(check_vma):
    """A weight of 0 has one: by how much the mean would change."""
    x, w = np.float32([1, 2, 7, 4]), np.float32(COUNTS)
    grads = sharded(
        lambda x, w: jax.grad(lambda w: weighted_pmean(x[0], w[0], "i"))(w), mesh=MESH, check_vma=check_vma
    )(x, w)
    copies = 1 if check_vma else RANKS  # without vma tracking each rank's copy of the mean contributes
    np.testing.assert_allclose(grads, copies * (x - np.average(x, weights=w)) / w.sum(), rtol=1e-5)


@pytest.mark.one_pair
def test_no_examples_at_all():
    assert np.isnan(mean(np.ones((RANKS, 1), np.float32), np.zeros(RANKS, np.int32))).all()


@pytest.mark.one_pair
@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (0, ValueError, "weight is 0 on all ranks"),
        (np.float32(-1), ValueError, "weight must not be negative, got -1"),
        (1j, TypeError, "weight must be a real number, got complex64"),
    ],
    ids=str,
)
def test_constant_weights_that_have_no_mean(weight, error, message, check_vma):
    f = sharded(lambda x: weighted_pmean(x, weight, "i"), mesh=MESH, out_specs=P(), check_vma=check_vma)
    with pytest.raises(error, match=f"weighted_pmean: {message}"):
        f(X)


@pytest.mark.one_pair
def test_weights_of_each_element():
    x, w = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    np.testing.assert_allclose(mean(x, w), np.average(x, weights=w, axis=0), rtol=1e-6)
    for shape, value in (((4, 2), x[:, 0]), ((4, 3), x), ((4, 1, 2), x)):
        with pytest.raises(ValueError, match=r"weight has shape \([\d, ]+\), which does not broadcast"):
            mean(value, np.ones(shape, np.float32))
