"""How gradients are sent: the range of each type on the wire, what is kept for the next step, and refused types."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from gradient_functions import CALLS
from helpers import assert_same_bits, make_mesh, rank_fold, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import (
    allreduce_gradients,
    feedback_specs,
    grad,
    reduce_in_backward,
    sync_gradients,
    sync_with_feedback,
    value_and_grad,
)

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

RANKS = 8
REPLICATED = P()
# The largest number of each type that may be on the wire, as in the table of docs/compression.md.
LARGEST = {
    "bfloat16": 3.39e38,
    "float16": 65504,
    "float8_e5m2": 57344,
    "float8_e5m2fnuz": 57344,
    "float8_e4m3fn": 448,
    "float8_e4m3": 240,
    "float8_e4m3fnuz": 240,
    "float8_e4m3b11fnuz": 30,
    "float8_e3m4": 15.5,
}
NARROW = [name for name in LARGEST if name != "bfloat16"]


def on_ranks(fun, *, check_vma=True, out_specs=REPLICATED, ranks=RANKS):
    """`fun` on each rank's part of trees with leaves of shape (ranks, ...)."""
    return sharded(
        lambda *trees: fun(*jax.tree.map(lambda x: x[0], trees)),
        mesh=make_mesh((ranks,)), check_vma=check_vma, out_specs=out_specs,
    )  # fmt: skip


def per_rank(value, dtype=np.float32):
    return np.full((RANKS, 3), value, dtype)


# ---- Range ----------------------------------------------------------------------------------------------------------


def hooked(x, **options):
    return value_and_grad(
        lambda w: (reduce_in_backward(w, "i", **options) * x).sum(), "i", reduced_in_backward=True
    )(jnp.ones(3))[1]  # fmt: skip


# Each takes this rank's gradient.
MEANS = {
    "sync_gradients": lambda x, **options: sync_gradients(x, "i", **options),
    "sync_with_feedback": lambda x, **options: sync_with_feedback(x, jnp.zeros_like(x), "i", **options)[0],
    "allreduce_gradients": lambda x, **options: allreduce_gradients("i", **options).update(x, optax.EmptyState())[0],
    "value_and_grad": lambda x, **options: value_and_grad(lambda w: (w * x).sum(), "i", **options)(jnp.ones(3))[1],
    "grad": lambda x, **options: grad(lambda w: (w * x).sum(), "i", **options)(jnp.ones(3)),
    "reduce_in_backward": hooked,
}


def means_by_all(x, check_vma=True, **options):
    return on_ranks(lambda x: {name: mean(x, **options) for name, mean in MEANS.items()}, check_vma=check_vma)(x)


def test_a_mean_in_range_does_not_overflow(check_vma):
    """The sum of the ranks' 10,000 is larger than 65,504, the largest float16."""
    means = means_by_all(per_rank(1e4), check_vma, wire=jnp.float16)
    assert_same_bits(means, dict.fromkeys(MEANS, np.full(3, 1e4, np.float32)))


@pytest.mark.one_pair
def test_the_largest_mean():
    largest = {name: float(ml_dtypes.finfo(name).max) for name in LARGEST}
    assert largest == pytest.approx(LARGEST, rel=1e-3)
    # bfloat16 has the range of float32, and is not divided first.
    largest["bfloat16"] /= RANKS
    means = on_ranks(lambda tree: {name: sync_gradients(x, "i", wire=name) for name, x in tree.items()})
    for factor in (1, -0.5):
        tree = {name: per_rank(factor * x) for name, x in largest.items()}
        assert_same_bits(means(tree), {name: x[0] for name, x in tree.items()})
    for name, mean in means({name: per_rank(2 * x) for name, x in largest.items()}).items():
        assert not np.isfinite(mean).any(), name


@pytest.mark.one_pair
def test_the_smallest_gradient():
    half = {name: RANKS * float(ml_dtypes.finfo(name).smallest_subnormal) / 2 for name in NARROW}
    means = on_ranks(lambda tree: {name: sync_gradients(x, "i", wire=name) for name, x in tree.items()})
    for factor, expected in ((0.99, 0), (1.01, 2)):
        for name, mean in means({name: per_rank(factor * x) for name, x in half.items()}).items():
            np.testing.assert_array_equal(mean, np.float32(expected * half[name]), name)


@pytest.mark.one_pair
def test_nan_and_infinity_reach_all_ranks(check_vma):
    x = np.ones((RANKS, 4), np.float32)
    x[3, 1:] = np.nan, np.inf, -np.inf
    means = on_ranks(lambda x: {name: sync_gradients(x, "i", wire=name) for name in LARGEST}, check_vma=check_vma)(x)
    for name, mean in means.items():
        np.testing.assert_array_equal(np.isfinite(mean), [True, False, False, False], name)


@pytest.mark.one_pair
def test_gradients_of_narrow_types(check_vma):
    """Gradients that are float16 themselves, and a loss that is."""

    def means(x):
        return sync_gradients(x, "i"), value_and_grad(lambda w: (w * x).sum(), "i")(jnp.ones(3, x.dtype))

    mean, value_and_grads = on_ranks(means, check_vma=check_vma)(per_rank(1e4, np.float16))
    assert_same_bits(mean, np.full(3, 1e4, np.float16))
    assert_same_bits(value_and_grads, (np.float16(3e4), np.full(3, 1e4, np.float16)))


@pytest.mark.one_pair
def test_float64_on_a_float32_wire():
    with jax.enable_x64(True):
        mean = on_ranks(lambda x: sync_gradients(x, "i", wire=jnp.float32))(per_rank(2.0**127, np.float64))
        assert_same_bits(mean, np.full(3, 2.0**127))


@pytest.mark.one_pair
def test_a_sum_is_not_divided():
    """What a sum loses at the top it keeps at the bottom: 2^-24 is the smallest float16."""
    total = on_ranks(lambda x: sync_gradients(x, "i", wire=jnp.float16, mean=False))
    assert_same_bits(total(per_rank(2.0**-24)), np.full(3, 2.0**-21, np.float32))
    assert np.isinf(total(per_rank(1e4))).all()


@pytest.mark.one_pair
def test_ranks_that_are_no_power_of_two(check_vma):
    x = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    mean = on_ranks(lambda x: sync_gradients(x, "i", wire=jnp.float16), check_vma=check_vma, ranks=3)(x)
    assert_same_bits(mean, rank_fold((x / np.float32(3)).astype(np.float16)).astype(np.float32))
    exact = x.astype(np.float64).mean(0)
    assert np.abs(mean - exact).max() <= 2**-11 * (np.abs(x).mean(0) + np.abs(exact)).max()


def test_dtypes_are_kept(check_vma):
    tree = {
        name: np.ones((RANKS, 3), name) for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "complex64")
    }

    def all_of(tree):
        zeros = jax.tree.map(jnp.zeros_like, tree)
        wires = (None, jnp.bfloat16, jnp.float8_e5m2)
        plain = [sync_gradients(tree, "i", wire=wire) for wire in wires]
        return plain, [sync_with_feedback(tree, zeros, "i", wire=wire) for wire in wires]

    means, with_feedback = on_ranks(
        all_of, check_vma=check_vma, out_specs=(REPLICATED, [(REPLICATED, P("i"))] * 3)
    )(tree)  # fmt: skip
    expected = {name: np.ones(3, name) for name in tree}
    for mean, (fed, residual) in zip(means, with_feedback, strict=True):
        assert_same_bits(mean, expected)
        assert_same_bits(fed, expected)
        assert {name: leaf.dtype.name for name, leaf in residual.items()} == {name: name for name in tree}


# ---- Error feedback -------------------------------------------------------------------------------------------------


def steps_with_feedback(gradients, check_vma=True, residual=0.0):
    """For each wire the results, and the residuals of rank 0, of one step for each row of its gradients."""

    def steps(gradients):
        def step(residual, gradients):
            pairs = {w: sync_with_feedback(g, residual[w], "i", wire=w) for w, g in gradients.items()}
            residual = {w: r for w, (_, r) in pairs.items()}
            return residual, ({w: mean for w, (mean, _) in pairs.items()}, residual)

        start = jax.tree.map(lambda g: jnp.full_like(g[0], residual), gradients)
        means, residuals = lax.scan(step, start, gradients)[1]
        return means, jax.tree.map(lambda r: r[None], residuals)

    f = on_ranks(steps, check_vma=check_vma, out_specs=(REPLICATED, P("i")))
    means, residuals = f({w: np.stack([np.float32(g)] * RANKS) for w, g in gradients.items()})
    return {w: (np.asarray(mean, np.float64), np.asarray(residuals[w][0])) for w, mean in means.items()}


@pytest.mark.one_pair
def test_a_value_out_of_range_is_sent_in_parts(check_vma):
    """One gradient is out of range: its rest follows in the next steps."""
    steps = steps_with_feedback({w: np.array([2.5, 0, 0, 0]) * LARGEST[w] for w in NARROW}, check_vma)
    for wire, (means, residuals) in steps.items():
        np.testing.assert_array_equal(means, np.array([1, 1, 0.5, 0]) * LARGEST[wire], wire)
        np.testing.assert_array_equal(residuals, np.array([1.5, 0.5, 0, 0]) * LARGEST[wire], wire)


@pytest.mark.one_pair
def test_the_residual_stays_finite(check_vma):
    """All ranks see the step that failed, and the next one is right."""
    gradients = np.array([[1, 1, 1], [np.inf, -np.inf, np.nan], [1, 1, 1]])
    for wire, (means, residuals) in steps_with_feedback(dict.fromkeys(LARGEST, gradients), check_vma).items():
        np.testing.assert_array_equal(means[[0, 2]], 1, wire)
        assert not np.isfinite(means[1]).any(), wire
        np.testing.assert_array_equal(residuals, 0, wire)


@pytest.mark.one_pair
def test_a_spoilt_residual_recovers():
    ((means, residuals),) = steps_with_feedback({"float8_e4m3fn": [1, 1]}, residual=np.nan).values()
    assert np.isnan(means[0])
    assert means[1] == 1
    np.testing.assert_array_equal(residuals, 0)


@pytest.mark.one_pair
def test_a_residual_of_higher_precision(check_vma):
    """With gradients in bfloat16 and a state in float32, results keep the gradients' dtype and the state its own."""

    def step(g, r):
        mean, residual = sync_with_feedback({"g": g}, {"g": r}, "i")
        return mean["g"], residual["g"][None]

    f = on_ranks(step, check_vma=check_vma, out_specs=(REPLICATED, P("i")))
    mean, residual = f(np.ones((RANKS, 2), jnp.bfloat16), np.full((RANKS, 2), 2.0**-12, np.float32))
    assert_same_bits(mean, np.ones(2, jnp.bfloat16))
    assert_same_bits(residual, np.full((RANKS, 2), 2.0**-12, np.float32))


@pytest.mark.one_pair
def test_float16_gradients_and_a_residual_of_float32():
    """The sum of the ranks' gradients and residuals is out of the range of float16, and their mean is not."""
    f = on_ranks(lambda g, r: sync_with_feedback(g, r, "i", wire=None)[0])
    assert_same_bits(f(per_rank(1e4, np.float16), per_rank(8)), np.full(3, 10008, np.float16))


@pytest.mark.one_pair
def test_a_sum_with_feedback_is_sent_in_parts():
    f = on_ranks(
        lambda x: sync_with_feedback(x, jnp.zeros_like(x), "i", wire=jnp.float16, mean=False),
        out_specs=(REPLICATED, P("i")),
    )
    total, residual = f(per_rank(1e4))
    assert np.isfinite(total).all()
    np.testing.assert_array_equal(RANKS * (1e4 - residual.reshape(RANKS, 3)[0]), total)


@pytest.mark.one_pair
def test_underflow_is_made_up_for():
    """A gradient that is too small for the wire arrives once enough of it has accumulated."""
    ((means, _),) = steps_with_feedback({"float16": np.full(64, 1e-7)}).values()
    assert (means == 0).any()
    assert means.mean() == pytest.approx(1e-7, rel=0.1)


def test_feedback_in_optax_recovers(check_vma):
    optimizer = allreduce_gradients("i", wire="float8_e4m3fn", error_feedback=True)
    specs = feedback_specs(jax.eval_shape(optimizer.init, np.ones(3, np.float32)), "i")
    mesh = make_mesh((RANKS,))
    shared = {"mesh": mesh, "check_vma": check_vma}
    state = sharded(optimizer.init, in_specs=REPLICATED, out_specs=specs, **shared)(np.ones(3, np.float32))
    step = sharded(
        lambda x, s: optimizer.update(x[0], s), in_specs=(P("i"), specs), out_specs=(REPLICATED, specs), **shared
    )
    bad = per_rank(np.nan)
    for x, expected in ((per_rank(100), 96), (bad, np.nan), (per_rank(16), 16)):
        mean, state = step(x, state)
        np.testing.assert_array_equal(mean, np.full(3, expected))


# ---- The argument ---------------------------------------------------------------------------------------------------


@pytest.mark.one_pair
@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float8_e8m0fnu", "must have a zero, a sign and NaN.*would send 0 as nan, -1 as nan"),
        ("float4_e2m1fn", "must have a zero, a sign and NaN.*would send nan as -?0"),
        (ml_dtypes.float6_e2m3fn, "must have a zero, a sign and NaN.*would send nan as"),
        (jnp.int16, "must be a floating-point dtype or 'int8', got"),
        (jnp.complex64, "must be a floating-point dtype or 'int8', got"),
        ("float17", "must be a floating-point dtype or 'int8', got 'float17'"),
    ],
)
def test_types_that_cannot_be_on_the_wire(function, dtype, message):
    call = jax.vmap(lambda x: CALLS[function](wire=dtype), axis_name="i")
    with pytest.raises(TypeError, match=rf"^{function}: wire {message}"):
        call(jnp.ones(2))


@pytest.mark.one_pair
def test_every_function_sends_as_told():
    x = np.random.default_rng(0).standard_normal((RANKS, 3)).astype(np.float32)
    rounded = rank_fold(x.astype(jnp.bfloat16)).astype(np.float32) / RANKS
    assert_same_bits(means_by_all(x, wire=jnp.bfloat16), dict.fromkeys(MEANS, rounded))


@pytest.mark.one_pair
def test_feedback_is_in_bfloat16_by_default():
    x = np.random.default_rng(0).standard_normal((RANKS, 3)).astype(np.float32)

    def means(x):
        zeros = jnp.zeros_like(x)
        return [
            sync_with_feedback(x, zeros, "i", **options)[0] for options in ({}, {"wire": jnp.bfloat16}, {"wire": None})
        ]

    default, bfloat16, exact = on_ranks(means)(x)
    assert_same_bits(default, bfloat16)
    assert_same_bits(exact, rank_fold(x) / np.float32(RANKS))
