"""reduce_in_backward inside a value_and_grad that sums gradients too: refused, also where JAX has traced it before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import grad, reduce_in_backward, value_and_grad

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

RANKS = 4
MESH = make_mesh((RANKS,))
W = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
X = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
REPLICATED, SPLIT = P(), (P(), P("i"))


def plain_loss(w, x):
    return (jnp.tanh(x @ w) ** 2).mean()


# Not at import, which every worker and rank does.
@functools.cache
def of_one_device():
    return jax.value_and_grad(plain_loss)(W, X)


def on_ranks(fun, check_vma=False, in_specs=SPLIT, **options):
    return sharded(fun, mesh=MESH, check_vma=check_vma, in_specs=in_specs, out_specs=REPLICATED, **options)


def layer(w, x):
    return jnp.tanh(x @ reduce_in_backward(w, "i"))


def scanned(w, x):
    return lax.scan(lambda x, w: (layer(w, x), None), x, w[None])[0]


def stored(w, x):
    """A scan of one function object in all calls, so that JAX finds its trace."""
    return lax.scan(_stored_step, x, w[None])[0]


def _stored_step(x, w):
    return layer(w, x), None


LAYERS = {
    "plain": layer,
    "jitted": jax.jit(layer),
    "scanned": scanned,
    "scanned by one function": stored,
    "rematerialised": jax.checkpoint(layer),
    "rematerialised and jitted": jax.jit(jax.checkpoint(jax.jit(layer))),
    "in a branch": lambda w, x: lax.cond(x.sum() > 1e9, lambda w, x: x, layer, w, x),
    "vmapped": lambda w, x: jax.vmap(lambda row: layer(w, row[None])[0])(x),
}


def loss_of(name):
    return lambda w, x: (LAYERS[name](w, x) ** 2).mean()


# With vma tracking the parameters' types tell.
@pytest.mark.parametrize(("name", "check_vma"), [("jitted", True), *((name, False) for name in LAYERS)])
def test_summing_twice_is_refused(name, check_vma):
    loss = loss_of(name)
    right = on_ranks(value_and_grad(loss, "i", reduced_in_backward=True), check_vma)
    forward = on_ranks(lambda w, x: lax.pmean(loss(w, x), "i"), check_vma)
    # Traced before without value_and_grad, and with the right one.
    np.testing.assert_allclose(forward(W, X), of_one_device()[0], rtol=1e-6)
    for actual, expected in zip(right(W, X), of_one_device(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
    for function in (value_and_grad, grad):
        with pytest.raises(ValueError, match=r"^reduce_in_backward.*pass reduced_in_backward=True"):
            on_ranks(function(loss, "i"), check_vma)(W, X)


@pytest.mark.one_pair
def test_the_error_says_how_wrong_it_would_be():
    with pytest.raises(ValueError, match=r"sums the gradients over \['i'\] as well.*the number of ranks, 4\."):
        on_ranks(value_and_grad(loss_of("plain"), "i"))(W, X)


def test_without_jit():
    with pytest.raises(ValueError, match="pass reduced_in_backward=True"):
        on_ranks(value_and_grad(loss_of("plain"), "i"), jit=False)(W, X)


def test_over_a_vmap_axis():
    parts = X.reshape(RANKS, -1, 3)
    run = functools.partial(jax.vmap, axis_name="i", in_axes=(None, 0))
    gradient = run(grad(loss_of("plain"), "i", reduced_in_backward=True))(W, parts)
    np.testing.assert_allclose(gradient, np.stack([of_one_device()[1]] * RANKS), rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="pass reduced_in_backward=True"):
        run(grad(loss_of("plain"), "i"))(W, parts)


# In a branch that the batch chooses, JAX makes a batch of the parameters.
@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "in a branch"])
def test_differentiated_outside_of_a_vmap(name):
    parts = X.reshape(RANKS, -1, 3)

    def mean(w, in_axis=None):
        return jax.vmap(loss_of(name), axis_name="i", in_axes=(in_axis, 0))(w, parts).mean()

    np.testing.assert_allclose(jax.grad(mean)(W), of_one_device()[1], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="outside of that vmap"):
        jax.grad(lambda w: mean(jnp.stack([w] * RANKS), 0))(W)


@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode(name, check_vma):
    """A product with the Hessian, by the derivative of the gradient."""
    v = np.cos(W)
    expected = jax.jvp(lambda w: jax.grad(plain_loss)(w, X), (W,), (v,))

    def product(w, x):
        gradient = grad(loss_of(name), "i", reduced_in_backward=True)
        return jax.jvp(lambda w: gradient(w, x), (w,), (jnp.cos(w),))

    for actual, wanted in zip(on_ranks(product, check_vma)(W, X), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.one_pair
def test_only_the_axes_that_are_summed_count():
    """Summed over one axis in the backward pass, and over the other after it."""
    mesh = make_mesh((2, 2), ("a", "b"))

    def loss(w, x):
        return (jnp.tanh(x @ reduce_in_backward(w, "a")) ** 2).mean() / 2  # the sum over two ranks is their mean

    f = sharded(grad(loss, "b"), mesh=mesh, check_vma=False, in_specs=(P(), P(("a", "b"))), out_specs=P())
    np.testing.assert_allclose(f(W, X), of_one_device()[1], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"over \['a'\] as well"):
        sharded(grad(loss, ("a", "b")), mesh=mesh, check_vma=False, in_specs=(P(), P(("a", "b"))), out_specs=P())(W, X)


@pytest.mark.one_pair
def test_the_innermost_decides():
    """A gradient inside a loss: the inner function has its own answer, and the outer one its own again after it."""

    def outer(v, w, x, *, hook):
        inner = grad(loss_of("plain"), "i", reduced_in_backward=True)(w, x)
        return (hook(v) * lax.stop_gradient(inner)).sum()

    def gradient(hook):
        f = grad(functools.partial(outer, hook=hook), "i")
        return on_ranks(f, in_specs=(P(), P(), P("i")))(np.ones_like(W), W, X)

    np.testing.assert_allclose(gradient(lambda v: v), of_one_device()[1], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="pass reduced_in_backward=True"):
        gradient(lambda v: reduce_in_backward(v, "i"))


WRAPPERS = {
    "plain": lambda f: f,
    "jitted": jax.jit,
    "rematerialised": jax.checkpoint,
    "both": lambda f: jax.jit(jax.checkpoint(f)),
}


def adapted(layer, *, wrap=lambda f: f, between=lambda g: g):
    """The loss after a step of gradient descent, whose gradients are reduced in the backward pass."""

    def loss(w, x):
        step = wrap(grad(loss_of(layer), "i", reduced_in_backward=True))(w, x)
        return plain_loss(w - 0.1 * between(step), x)

    return loss


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("layer", ["plain", "scanned"])
def test_the_gradient_of_reduced_gradients_is_refused(layer, wrap, check_vma):
    for function in (value_and_grad, grad):
        with pytest.raises(ValueError, match=r"^reduce_in_backward"):
            on_ranks(function(adapted(layer, wrap=wrap), "i"), check_vma)(W, X)


@pytest.mark.one_pair
def test_the_error_of_nested_gradients_says_what_to_do():
    with pytest.raises(ValueError, match=r"of an inner one .* leave that and reduce_in_backward out"):
        on_ranks(grad(adapted("plain"), "i"))(W, X)


@pytest.mark.one_pair
@pytest.mark.parametrize("layer", ["plain", "jitted", "scanned"])
def test_reduced_gradients_that_are_not_differentiated(layer):
    """First-order adaptation: the gradients are constants of the outer loss."""

    def whole(w):
        return plain_loss(w - 0.1 * lax.stop_gradient(jax.grad(plain_loss)(w, X)), X)

    f = on_ranks(grad(adapted(layer, between=lax.stop_gradient), "i"))
    np.testing.assert_allclose(f(W, X), jax.grad(whole)(W), rtol=1e-5, atol=1e-7)


# ---- A sum over another axis ----------------------------------------------------------------------------------------


@pytest.mark.one_pair
def test_adapted_parameters_of_hooked_ones(check_vma):
    """The hook is where the parameters come in, and what is computed from them and from their gradients has none."""

    def adapted(w, x, gradient):
        return plain_loss(w - 0.5 * gradient(plain_loss)(w, x), x)

    def loss(w, x):
        return adapted(reduce_in_backward(w, "i"), x, lambda loss: grad(loss, "i"))

    found = on_ranks(value_and_grad(loss, "i", reduced_in_backward=True), check_vma)(W, X)
    expected = jax.value_and_grad(lambda w: adapted(w, X, jax.grad))(W)
    for actual, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-7)


def test_a_sum_over_another_axis(check_vma):
    """Right with vma tracking. Without it JAX makes it too large by the size of that axis, unless that is named too."""
    mesh = make_mesh((2, 2), ("a", "b"))

    def loss(w, x):
        return lax.psum(plain_loss(w, x) / 2, "b")

    def gradient(axes):
        specs = {"in_specs": (P(), P(("a", "b"))), "out_specs": P()}
        return sharded(grad(loss, axes), mesh=mesh, check_vma=check_vma, **specs)(W, X)

    np.testing.assert_allclose(gradient(("a", "b")), of_one_device()[1], rtol=1e-5, atol=1e-7)
    if check_vma:
        np.testing.assert_allclose(gradient("a"), of_one_device()[1], rtol=1e-5, atol=1e-7)
        return
    # Each rank has the gradient of its own part of the data over "b".
    parts = np.stack([jax.grad(plain_loss)(W, part) for part in X.reshape(4, -1, 3)]).reshape(2, 2, 3, 3)
    np.testing.assert_allclose(gradient("a"), 2 * parts.mean(0)[0] / 2, rtol=1e-5, atol=1e-7)
