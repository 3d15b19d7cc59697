"""wire="int8": the scale groups, the sum over ranks, what is fed back, and every function that takes it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, make_mesh, rank_fold
from helpers import sharded as sharded_over
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import (
    allreduce_gradients,
    explain,
    feedback_specs,
    grad,
    reduce_in_backward,
    sync_gradients,
    sync_with_feedback,
    value_and_grad,
)
from jax_ring.collectives import scale_groups as int8
from jax_ring.training.wire import reduced_by

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

RNG = np.random.default_rng(0)
RANKS = 4
VALUES = RNG.standard_normal((RANKS, 3000)).astype(np.float32)
LARGEST = np.finfo(np.float32).max


sharded = functools.partial(sharded_over, mesh=make_mesh((RANKS,)))


def through_packets(x, key=None) -> np.ndarray:
    """x after rounding, on one device; padded to whole scale groups."""
    groups = np.pad(np.ravel(x), (0, -np.size(x) % int8.GROUP)).reshape(-1, int8.GROUP)
    return np.asarray(_through_packets(groups, key)).reshape(-1)


_through_packets = jax.jit(lambda groups, key: int8.decode(int8.encode(groups, key)))


def block_of(*values) -> np.ndarray:
    """A block that begins with these values, and is zero after them."""
    return np.pad(np.float32(values), (0, int8.GROUP - len(values)))


# ---- Blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_pair
@pytest.mark.parametrize("largest", [1.0, 1e-29, 1e38, LARGEST], ids=str)
def test_rounded_to_nearest(largest):
    x = (RNG.uniform(-1, 1, (4, int8.GROUP)) * largest).astype(np.float32)
    x[:, 7] = largest
    step = largest / 126 * (1 + 2**-16)
    error = np.abs(through_packets(x).astype(np.float64) - x.reshape(-1))
    assert error.max() <= step / 2
    assert error.max() > 0.4 * step  # the bound is tight


@pytest.mark.one_pair
def test_values_on_the_grid_are_exact():
    whole = np.arange(-126, 127, dtype=np.float32)
    for scale in (1.0, 2.0**-20, 3 * 2.0**50):
        x = block_of(*(whole * scale))
        assert_same_bits(through_packets(x), x)
    halves = block_of(126, 0.5, 1.5, 2.5, -0.5, -1.5)
    assert_same_bits(through_packets(halves), block_of(126, 0, 2, 2, 0, -2))  # ties to even


@pytest.mark.one_pair
def test_zeros_and_tiny_values():
    assert_same_bits(through_packets(np.zeros(300, np.float32)), np.zeros(512, np.float32))
    assert_same_bits(through_packets(block_of(-0.0, 1e-45, -1e-38)), block_of())
    assert_same_bits(through_packets(block_of(2.0**-104, 0.4 * 2.0**-104)), block_of(2.0**-104))


@pytest.mark.one_pair
def test_infinities_and_nans_have_codes_of_their_own():
    special = block_of(np.inf, -np.inf, np.nan, 126, -126, 5, 1e-3)
    for key in (None, jax.random.key(0)):
        rounded = through_packets(special, key)
        assert_same_bits(rounded[:6], special[:6])
        assert abs(rounded[6]) <= 1


@pytest.mark.one_pair
def test_products_are_exact():
    """So that no compiler can change the sum by contracting them with the addition."""
    packets = int8.encode(jnp.asarray(VALUES[:, :2560].reshape(-1, int8.GROUP)))
    codes, scales = np.asarray(packets)[:, : int8.GROUP], np.asarray(packets)[:, int8.GROUP :].copy().view(np.float32)
    assert_same_bits(np.asarray(int8.decode(packets)).astype(np.float64), codes * scales.astype(np.float64))


@pytest.mark.one_pair
def test_stochastic_rounding_is_unbiased():
    x = block_of(126, *RNG.uniform(-126, 126, 200))
    rounded = jax.vmap(lambda key: int8.decode(int8.encode(jnp.asarray(x), key)))(
        jax.random.split(jax.random.key(0), 1024)
    )
    rounded = np.asarray(rounded)
    assert ((rounded == np.floor(x)) | (rounded == np.ceil(x))).all()
    # The standard deviation of a mean is at most 0.5 / 32.
    assert np.abs(rounded.mean(0) - x).max() < 5 * 0.5 / 32
    assert np.abs(np.round(x) - x).max() > 0.4  # unlike rounding to nearest


# ---- The sum --------------------------------------------------------------------------------------------------------


def synced(*, mean=False, **options):
    return lambda x: sync_gradients(x[0], "i", wire="int8", mean=mean, **options)


def expected_sum(values) -> np.ndarray:
    """The definition: round, add in rank order, round."""
    total = rank_fold(np.stack([through_packets(x) for x in values]))
    return through_packets(total)[: values[0].size]


@pytest.mark.parametrize("impl", ["ring", "lax"])
def test_sum(impl, check_vma):
    f = sharded(reduced_by(impl)(synced()), out_specs=P(), check_vma=check_vma)
    assert_same_bits(f(VALUES), expected_sum(VALUES))


@pytest.mark.one_pair
def test_fewer_elements_than_ranks():
    few = VALUES[:, :5]
    assert_same_bits(sharded(synced(), out_specs=P())(few), expected_sum(few))


@pytest.mark.one_pair
def test_sum_without_jit():
    few = VALUES[:2, :300]
    eager = sharded(synced(), out_specs=P(), mesh=make_mesh((2,)), jit=False)
    assert_same_bits(eager(few), expected_sum(few))


@pytest.mark.one_pair
def test_sum_over_two_axes(check_vma):
    few = VALUES[:4, :300]
    f = sharded(
        lambda x: sync_gradients(x[0], ("b", "a"), wire="int8", mean=False),
        mesh=make_mesh((2, 2), ("a", "b")), in_specs=P(("b", "a")), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    assert_same_bits(f(few), expected_sum(few))


@pytest.mark.one_pair
def test_the_residuals_are_what_is_missing(check_vma):
    def step(x):
        total, residual = sync_with_feedback(x[0], jnp.zeros_like(x[0]), "i", wire="int8", mean=False)
        return total, residual[None]

    total, residual = sharded(step, out_specs=(P(), P("i")), check_vma=check_vma)(VALUES)
    exact = VALUES.astype(np.float64).sum(0)
    assert np.abs(total - exact).max() > 0.01
    assert np.abs(total + np.asarray(residual, np.float64).sum(0) - exact).max() < 1e-5


@pytest.mark.one_pair
def test_infinities_and_nans_as_in_float32(check_vma):
    values = VALUES.copy()
    values[1, 0] = values[2, 1] = values[3, 2] = values[3, 700] = np.inf
    values[0, 1] = values[1, 2] = -np.inf
    values[0, 3] = np.nan
    values[:, 1500] = LARGEST  # overflows in float32, too
    expected = rank_fold(values)

    def step(x):
        total, residual = sync_with_feedback(x[0], jnp.zeros_like(x[0]), "i", wire="int8", mean=False)
        return total, residual[None]

    total, residual = sharded(step, out_specs=(P(), P("i")), check_vma=check_vma)(values)
    special = ~np.isfinite(expected)
    assert special.sum() == 6
    assert_same_bits(np.asarray(total)[special], expected[special])
    assert np.isfinite(total[~special]).all()
    # Only the block with the large values has a large scale.
    others = ~special & (np.arange(values.shape[1]) // int8.GROUP != 1500 // int8.GROUP)
    assert np.abs(total - expected)[others].max() < 0.2
    assert np.isfinite(residual).all()


@pytest.mark.one_pair
def test_stochastic_sum(check_vma):
    same = np.tile(VALUES[:1, :512], (RANKS, 1))

    def make(impl):
        fun = lambda x, key: sync_gradients(x[0], "i", wire="int8", mean=False, key=key)  # noqa: E731
        return sharded(reduced_by(impl)(fun), in_specs=(P("i"), P()), out_specs=P(), check_vma=check_vma)

    run = make("ring")
    first = np.asarray(run(same, jax.random.key(0)))
    assert_same_bits(run(same, jax.random.key(0)), first)
    assert (run(same, jax.random.key(1)) != first).any()
    # Were the noise the same on all ranks, all of their codes would be the same.
    step = np.abs(same[0].reshape(2, -1)).max(1, keepdims=True) / 126
    assert np.abs(first / RANKS - same[0]).reshape(2, -1).std() < 0.3 * step.max()
    if check_vma:
        assert_same_bits(make("lax")(same, jax.random.key(0)), first)


@pytest.mark.one_pair
def test_the_noise_differs_between_buckets():
    tree = {"a": VALUES[:, :256], "b": VALUES[:, :256]}

    def step(tree):
        tree = jax.tree.map(lambda x: x[0], tree)
        return [
            sync_gradients(tree, "i", wire="int8", bucket_bytes=256, key=key) for key in (None, jax.random.key(0))
        ]  # fmt: skip

    nearest, stochastic = sharded(step, out_specs=P())(tree)
    assert_same_bits(nearest["a"], nearest["b"])
    assert (stochastic["a"] != stochastic["b"]).any()


# ---- Leaves ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_pair
def test_leaves_are_packed_before_groups_are_cut(check_vma):
    """In the order of `plan_buckets`, the last leaf first; a bucket of its own starts a new block."""
    tree = {"a": VALUES[:, :100].reshape(RANKS, 10, 10), "b": VALUES[:, 100:700], "c": VALUES[:, 0]}
    packed = np.concatenate([tree[name].reshape(RANKS, -1) for name in "cba"], axis=1)

    def run(tree, **options):
        fun = lambda t: sync_gradients(jax.tree.map(lambda x: x[0], t), "i", wire="int8", mean=False, **options)  # noqa: E731
        return sharded(fun, out_specs=P(), check_vma=check_vma)(tree)

    expected = expected_sum(packed)
    assert_same_bits(run(tree), {"a": expected[601:].reshape(10, 10), "b": expected[1:601], "c": expected[0]})
    alone = run(tree, bucket_bytes=1)
    for name, x in tree.items():
        assert_same_bits(alone[name].reshape(-1), expected_sum(x.reshape(RANKS, -1)))


@pytest.mark.one_pair
def test_other_leaves_are_sent_as_they_are(check_vma):
    tree = {
        "count": np.arange(RANKS * 2, dtype=np.int32).reshape(RANKS, 2),
        "small": np.ones((RANKS, 3), jnp.float8_e4m3fn),
        "empty": np.ones((RANKS, 0), np.float32),
        "missing": None,
        "x": VALUES[:, :10],
    }

    def step(tree):
        tree = jax.tree.map(lambda x: x[0], tree)
        total, residual = sync_with_feedback(tree, jax.tree.map(jnp.zeros_like, tree), "i", wire="int8", mean=False)
        return total, jax.tree.map(lambda x: x[None], residual)

    total, residual = sharded(step, out_specs=(P(), P("i")), check_vma=check_vma)(tree)
    expected = jax.tree.map(rank_fold, {name: x for name, x in tree.items() if name != "x"})
    assert_same_bits({name: total[name] for name in expected}, expected)
    assert_same_bits(
        {name: residual[name] for name in expected},
        {name: tree[name] if name == "missing" else 0 * tree[name] for name in expected},
    )
    assert_same_bits(total["x"], expected_sum(tree["x"]))


@pytest.mark.one_pair
def test_means_are_divided_in_float32():
    tree = {"half": np.full((RANKS, 256), 6e4, np.float16), "brain": VALUES[:, :256].astype(jnp.bfloat16)}
    fun = lambda t: sync_gradients(jax.tree.map(lambda x: x[0], t), "i", wire="int8")  # noqa: E731
    mean = sharded(fun, out_specs=P())(tree)
    assert {name: x.dtype for name, x in mean.items()} == {name: x.dtype for name, x in tree.items()}
    np.testing.assert_allclose(np.float32(mean["half"]), 6e4, rtol=1e-2)
    exact = tree["brain"].astype(np.float64).mean(0)
    assert np.abs(np.float64(mean["brain"]) - exact).max() < 0.05


@pytest.mark.one_pair
def test_bytes():
    """260 bytes for a block of 1024, in both halves of the sum."""

    def sent(**options):
        found = explain(
            sharded(lambda x: sync_gradients(x[0], "i", **options), out_specs=P()),
            np.zeros((RANKS, 1 << 14), np.float32),
        )
        assert found.predicted_bytes == found.counted_bytes
        return found.counted_bytes

    assert sent(wire="int8") / sent() == 260 / 1024


def test_explain_lists_the_steps():
    fun = sharded(lambda x: sync_gradients(x[0], "i", wire="int8", key=jax.random.key(0)), out_specs=P())
    found = explain(fun, np.zeros((RANKS, 1 << 14), np.float32))
    assert [call.name for call in found.collectives] == ["all_to_all", "all_gather"]
    assert all("test_int8.py" in call.call_site for call in found.collectives)
    assert found.predicted_bytes == found.counted_bytes > 0


# ---- Functions that take it -----------------------------------------------------------------------------------------

X = RNG.standard_normal((32, 16)).astype(np.float32)
W = RNG.standard_normal((16, 40)).astype(np.float32) / 4


def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).mean()


def test_value_and_grad(check_vma):
    specs = {"in_specs": (P(), P("i")), "check_vma": check_vma}
    run = lambda fun, *out: sharded(fun, out_specs=P(), **specs)(W, X)  # noqa: E731
    value, plain = run(value_and_grad(loss, "i"))
    rounded_value, rounded = run(value_and_grad(loss, "i", wire="int8"))
    assert_same_bits(rounded_value, value)
    step = np.abs(plain).max() / 126
    assert 0 < np.abs(rounded - plain).max() < 3 * step
    if check_vma:
        stochastic = run(grad(loss, "i", wire="int8", key=jax.random.key(0)))
        assert 0 < np.abs(stochastic - plain).max() < 6 * step
        assert (stochastic != rounded).any()
    hooked = lambda w, x: loss(reduce_in_backward(w, "i", wire="int8"), x)  # noqa: E731
    in_backward = run(grad(hooked, "i", reduced_in_backward=True))
    assert 0 < np.abs(in_backward - plain).max() < 3 * step


def test_in_a_scan_over_layers(check_vma):
    layers = RNG.standard_normal((3, 16, 16)).astype(np.float32) / 4

    def deep(layers, x, hook=lambda w: w):
        return (lax.scan(lambda x, w: (jnp.tanh(x @ hook(w)), None), x, layers)[0] ** 2).mean()

    hooked = functools.partial(deep, hook=lambda w: reduce_in_backward(w, "i", wire="int8"))
    f = sharded(grad(hooked, "i", reduced_in_backward=True), in_specs=(P(), P("i")), out_specs=P(), check_vma=check_vma)
    plain = jax.grad(deep)(layers, X)
    assert 0 < np.abs(f(layers, X) - plain).max() < np.abs(plain).max() / 30


def test_optax_state_holds_the_key_and_the_residual(check_vma):
    key = jax.random.key(7)
    optimizer = optax.chain(
        allreduce_gradients("i", wire="int8", key=key, error_feedback=True),
        optax.trace(1.0),  # sums the updates
    )
    specs = feedback_specs(jax.eval_shape(optimizer.init, VALUES[0]), "i")
    assert (specs[0].residual, specs[0].key) == (P(("i",)), P())
    init = sharded(optimizer.init, in_specs=P(), out_specs=specs, check_vma=check_vma)
    step = jax.jit(
        sharded(
            lambda x, s: optimizer.update(x[0], s), in_specs=(P("i"), specs), out_specs=(P(), specs), jit=False,
            check_vma=check_vma,
        ),
        donate_argnums=1,
    )  # fmt: skip
    exact = VALUES.astype(np.float64).mean(0)
    errors, noise = [], []
    for _ in range(2):  # the same again, although the state has been donated
        state = init(VALUES[0])
        for n in range(1, 9):
            total, state = step(VALUES, state)
            errors.append(np.abs(np.asarray(total) / n - exact).mean())
        noise.append(np.asarray(total))
    assert_same_bits(*noise)
    assert errors[7] < errors[0] / 5
    assert jax.random.key_data(state[0].key).tolist() != jax.random.key_data(key).tolist()


@pytest.mark.one_pair
def test_optax_without_feedback():
    optimizer = allreduce_gradients("i", wire="int8", key=jax.random.PRNGKey(7))
    state = optimizer.init(VALUES[0])
    assert feedback_specs(state, "i") == (None, P())
    step = sharded(
        lambda x, s: optimizer.update(x[0], s), in_specs=(P("i"), P()), out_specs=(P(), P())
    )  # fmt: skip
    first, state = step(VALUES, state)
    second, state = step(VALUES, state)
    assert (first != second).any()
    stateless = allreduce_gradients("i", wire="int8")
    assert not jax.tree.leaves(stateless.init(VALUES[0]))


@pytest.mark.one_pair
def test_feedback_corrects_constant_gradients():
    """The mean of many steps approaches the exact one, with the error of both roundings fed back."""

    def step(x, residual):
        mean, residual = sync_with_feedback(x[0], residual[0], "i", wire="int8")
        return mean, residual[None]

    step = sharded(step, in_specs=(P("i"), P("i")), out_specs=(P(), P("i")))
    exact, residual, total = VALUES.astype(np.float64).mean(0), 0 * VALUES, 0.0
    for _ in range(32):
        mean, residual = step(VALUES, residual)
        total += np.asarray(mean, np.float64)
    assert np.abs(mean - exact).mean() > 1e-3
    assert np.abs(total / 32 - exact).mean() < 2e-4


# ---- Transformations and errors -------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("key", [None, jax.random.key(0)], ids=["nearest", "stochastic"])
def test_vmap_over_another_axis(key):
    members = VALUES[:4, :900].reshape(4, 300, 3)
    one = lambda x: sync_gradients(x, "i", wire="int8", key=key)  # noqa: E731
    options = {"mesh": make_mesh((4,)), "out_specs": P(), "check_vma": key is None}
    batched = sharded(lambda x: jax.vmap(one, in_axes=1, out_axes=1)(x[0]), **options)(members)
    alone = sharded(lambda x: one(x[0]), **options)
    assert_same_bits(batched, np.stack([alone(members[..., i]) for i in range(3)], axis=1))


def test_vmap_axis():
    few = VALUES[:, :300]
    f = jax.vmap(lambda x: sync_gradients(x, "i", wire="int8", mean=False), axis_name="i", out_axes=None)
    assert_same_bits(jax.jit(f)(few), expected_sum(few))
    with pytest.raises(NotImplementedError, match=r"sync_gradients with wire='int8' over .* includes the vmap axis"):
        sharded(
            lambda x: jax.vmap(lambda x: sync_gradients(x, ("i", "b"), wire="int8"), axis_name="b")(x), check_vma=False
        )(VALUES)


def test_derivatives_are_refused():
    f = lambda x: sync_gradients(x, "i", wire="int8")  # noqa: E731
    for over_ranks in (jax.vmap(f, axis_name="i"), sharded(lambda x: f(x[0])[None], check_vma=False)):
        with pytest.raises(NotImplementedError, match="sync_gradients with wire='int8' has no derivative"):
            jax.jvp(over_ranks, (VALUES[:, :9],), (VALUES[:, :9],))


def test_pmap():
    few = VALUES[:4, :300]
    f = jax.pmap(lambda x: sync_gradients(x, "i", wire="int8", mean=False), axis_name="i")
    assert_same_bits(np.asarray(f(few))[3], expected_sum(few))


@pytest.mark.one_pair
def test_errors():
    x = jnp.ones(2)
    with pytest.raises(ValueError, match=re.escape("key is for stochastic rounding, which only wire='int8' has")):
        sync_gradients(x, "i", key=jax.random.key(0))
    with pytest.raises(ValueError, match="and wire is 'bfloat16'"):
        allreduce_gradients("i", wire="bfloat16", key=jax.random.key(0))
    for key in (3, jnp.ones(2), jax.random.split(jax.random.key(0))):
        with pytest.raises(TypeError, match="sync_gradients: key must be one random key"):
            sync_gradients(x, "i", wire="int8", key=key)
    with pytest.raises(ValueError, match="value_and_grad: gradients that are reduced in the backward pass"):
        value_and_grad(loss, "i", wire="int8", key=jax.random.key(0), reduced_in_backward=True)
    with pytest.raises(ValueError, match=r"reduce_in_backward: .*Leave key out"):
        sharded(lambda x: reduce_in_backward(x, "i", wire="int8", key=jax.random.key(0)), check_vma=False)(VALUES)
    with pytest.raises(NameError, match="sync_gradients: unbound axis name 'x'"):
        sync_gradients(x, "x", wire="int8")
    with pytest.raises(TypeError, match="wire must be a floating-point dtype or 'int8', got 'int16'"):
        sync_gradients(x, "i", wire="int16")


@pytest.mark.one_pair
def test_its_other_names():
    for wire in (jnp.int8, np.dtype("int8")):
        fun = lambda x, wire=wire: sync_gradients(x[0], "i", mean=False, wire=wire)  # noqa: E731
        assert_same_bits(sharded(fun, out_specs=P())(VALUES[:, :9]), expected_sum(VALUES[:, :9]))
