"""ring_psum under pmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_trees, num_calls, ours_and_lax
from jax import lax

from jax_ring import ring_psum

RANKS = 4
X = np.arange(RANKS * 6, dtype=np.float32).reshape(RANKS, 2, 3) - 7


def mapped(fun, **options):
    return jax.pmap(fun, axis_name="i", devices=jax.devices()[:RANKS], **options)


def assert_same_as_lax(fun, *args, **options):
    """Asserts that fun(psum, *args) under pmap gives the same with ring_psum and lax.psum; returns the result."""
    ours, theirs = (
        mapped(lambda *args, psum=psum: fun(psum, *args), **options)(*args)
        for psum in ours_and_lax(ring_psum, lax.psum)
    )
    assert_same_trees(ours, theirs)
    return ours


def test_sum():
    total = assert_same_as_lax(lambda psum, x: psum(x, "i"), X)
    np.testing.assert_array_equal(total, np.broadcast_to(X.sum(0), X.shape))


def test_served_by_the_engine():
    assert num_calls(mapped(lambda x: ring_psum((x, x * x), "i")), X) == 1


def test_tree_with_constants():
    assert_same_as_lax(lambda psum, x: psum({"x": x, "n": 1, "b": x > 0, "k": (x.astype(jnp.int8), None)}, "i"), X)


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[3, 0], [2, 1]], [[2], [0], [1], [3]]], ids=str)
def test_groups(groups):
    total = assert_same_as_lax(lambda psum, x: psum(x, "i", axis_index_groups=groups), X)
    for group in groups:
        for rank in group:
            np.testing.assert_array_equal(total[rank], X[group].sum(0))


def test_gradient_inside():
    assert_same_as_lax(lambda psum, x: jax.grad(lambda x: jnp.sum(psum(x * x, "i") * x))(x), X)


def test_gradient_outside():
    def gradient(psum):
        f = mapped(lambda x: psum(x * x, "i") * x)
        return jax.grad(lambda x: jnp.sum(f(x)))(X)

    assert_same_trees(gradient(ring_psum), gradient(lax.psum))


def test_jvp_inside():
    assert_same_as_lax(lambda psum, x: jax.jvp(lambda x: psum(x * x, "i") * x, (x,), (x + 1,)), X)


def test_vmap_inside():
    def body(psum, x):
        one = jax.vmap(lambda v: psum(v, "i") + v)(x)
        return one + jax.vmap(lambda v: psum(v, ("b", "i")), axis_name="b")(x)

    assert_same_as_lax(body, X)


def test_loop_inside():
    assert_same_as_lax(lambda psum, x: lax.fori_loop(0, 100, lambda k, v: jnp.mod(psum(v + k, "i"), 9) + x, x), X)


def test_broadcast_argument():
    assert_same_as_lax(lambda psum, x, y: psum(x * y, "i") + psum(y, "i"), X, X[0], in_axes=(0, None))


def test_a_training_step():
    """The classic use: an explicit sum of the gradients of replicated parameters."""

    def step(psum, w, x):
        gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - psum(gradient, "i") / 8

    assert_same_as_lax(step, np.ones((RANKS, 3, 2), np.float32), X)


def test_unbound_axis():
    with pytest.raises(NameError, match=r"'j'.*bound here: 'i'"):
        mapped(lambda x: ring_psum(x, "j"))(X)
