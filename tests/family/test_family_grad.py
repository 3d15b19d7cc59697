"""Derivatives of the collectives: the same as those of lax; pmax and pmin have none."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import COLLECTIVES, PERM, SHAPE, assert_family_matches_lax, every_collective, vary
from helpers import RANKS, num_calls, sharded
from jax import lax

from jax_ring import (
    ring_all_gather,
    ring_all_to_all,
    ring_broadcast,
    ring_pmax,
    ring_ppermute,
    ring_psum_scatter,
    ring_reduce,
)

pytestmark = pytest.mark.one_pair  # the values of the family cover all of its code

X = (np.arange(RANKS * np.prod(SHAPE)) % 5 - 2).astype(np.float32).reshape(RANKS * SHAPE[0], SHAPE[1])


def comparable(name, pair):
    """Without vma tracking, all_gather(to="invarying") of JAX 0.10 has the derivative of the tracked form."""
    return pair.differentiable and ("invarying" not in name or jax.__version_info__ >= (0, 12))


def differentiable(name, pair):
    return pair.differentiable


def loss(fun, x):
    """A scalar per rank that depends on the x of each rank with different weights."""
    y = vary(fun(x * x, "i"), "i")
    weights = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 3 + lax.axis_index("i")
    return jnp.sum(weights * y * y)


def test_grad(subtests, check_vma):
    def body(fun, x, pair):
        return jax.grad(lambda x: loss(fun, x))(x)

    # With tracking, both have the same derivatives for all.
    assert_family_matches_lax(subtests, body, X, differentiable if check_vma else comparable, check_vma=check_vma)


def test_jvp_and_linearize(subtests, check_vma):
    def body(fun, x, pair):
        f = lambda x: vary(fun(x * x, "i"), "i")  # noqa: E731
        linear = jax.linearize(f, x)
        return jax.jvp(f, (x,), (x + 1,)), linear[0], linear[1](x - 1)

    assert_family_matches_lax(subtests, body, X, differentiable, check_vma=check_vma)


@pytest.mark.full
def test_second_derivatives(subtests, check_vma):
    def body(fun, x, pair):
        gradient = jax.grad(lambda x: loss(fun, x))
        return jax.jvp(gradient, (x,), (x,))[1], jax.grad(lambda x: jnp.sum(gradient(x) * x))(x)

    assert_family_matches_lax(subtests, body, X, comparable, check_vma=check_vma, rtol=1e-6)


def test_remat_and_scan(subtests, check_vma):
    def body(fun, x, pair):
        step = jax.checkpoint(lambda c, _: (c + jnp.sum(vary(fun(c, "i"), "i")) / 64, None))
        return jax.grad(lambda x: jnp.sum(lax.scan(step, x, None, length=3)[0] ** 2))(x)

    assert_family_matches_lax(subtests, body, X, comparable, check_vma=check_vma, rtol=1e-5)


@pytest.mark.full
@every_collective(comparable)
def test_gradient_from_outside_of_the_map(collective, check_vma):
    gradients = []
    for fun in collective[:2]:
        mapped = sharded(lambda x, fun=fun: vary(fun(x, "i"), "i"), check_vma=check_vma)
        gradients.append(jax.jit(jax.grad(lambda x, mapped=mapped: jnp.sum(mapped(x) ** 2)))(X))
    chex.assert_trees_all_equal(*gradients, strict=True)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (lambda x: ring_psum_scatter(x, "i"), "all_gather"),
        (lambda x: ring_all_gather(x, "i"), "reduce_scatter"),
        (lambda x: ring_reduce(x, "i", root=2), "broadcast"),
        (lambda x: ring_broadcast(x, "i", root=2), "reduce"),
        (lambda x: ring_all_to_all(x, "i", 0, 1), "all_to_all"),
        (lambda x: ring_ppermute(x, "i", PERM), "permute"),
    ],
    ids=["psum_scatter", "all_gather", "reduce", "broadcast", "all_to_all", "ppermute"],
)
def test_transposes(forward, backward):
    # The transpose is a call of the engine as well.
    def body(x):
        y, pull = jax.vjp(forward, x)
        return pull(jnp.cos(y))[0]

    f = sharded(body, check_vma=False)
    text = f.lower(X).compile().as_text()
    assert text.count('custom_call_target="jax_ring_') == 2
    assert text.count(f'custom_call_target="jax_ring_{backward}"') == (
        2 if backward in ("all_to_all", "permute") else 1
    )


@pytest.mark.parametrize("name", ["psum_scatter", "all_gather", "reduce", "broadcast", "all_to_all", "ppermute"])
def test_transposing_twice_is_the_function(name):
    fun = COLLECTIVES[name].ring

    def body(x):
        transpose = jax.linear_transpose(lambda x: fun(x, "i"), x)
        twice = jax.linear_transpose(lambda y: transpose(y)[0], fun(x, "i"))
        return twice(x)[0] - fun(x, "i")

    assert not np.any(sharded(body, check_vma=False)(X))


def test_invariant_results_need_no_call_in_the_backward_pass():
    for fun in (COLLECTIVES["all_gather_invarying"].ring, COLLECTIVES["broadcast"].ring, COLLECTIVES["psum"].ring):

        def body(x, fun=fun):
            y, pull = jax.vjp(lambda x: fun(x, "i"), x)
            return pull(jnp.ones_like(y))[0]

        assert num_calls(sharded(body), X) == 0


@pytest.mark.parametrize("name", ["pmax", "pmin"])
def test_extrema_have_no_derivative(name, check_vma):
    for fun in COLLECTIVES[name][:2]:
        for derivative in (
            jax.grad(lambda x, fun=fun: jnp.sum(fun(x, "i"))),
            lambda x, fun=fun: jax.jvp(lambda x: fun(x, "i"), (x,), (x,)),
        ):
            with pytest.raises(NotImplementedError, match=f"^Differentiation rule for '(ring_)?{name}' not"):
                sharded(derivative, check_vma=check_vma)(X)


def test_extrema_of_constants_in_a_differentiated_function(check_vma):
    def body(x):
        return jax.grad(lambda x: jnp.sum(x / ring_pmax(lax.stop_gradient(jnp.abs(x)), "i")))(x)

    scale = np.abs(X).reshape(RANKS, *SHAPE).max(0)
    np.testing.assert_array_equal(
        sharded(body, check_vma=check_vma)(X), np.tile(1 / scale, (RANKS, 1)).astype(np.float32)
    )  # fmt: skip


def test_gradient_of_one_leaf(subtests, check_vma):
    # The tangents and cotangents of the other leaves are symbolic zeros.
    def body(fun, x, pair):
        def f(x):
            out = fun({"a": x, "b": 2 * lax.stop_gradient(x), "c": 3 * x}, "i")
            return jnp.sum(out["a"] ** 2)

        return jax.grad(f)(x)

    def where(name, pair):
        return name.startswith(("psum_scatter", "all_gather")) and comparable(name, pair)

    assert_family_matches_lax(subtests, body, X, where, check_vma=check_vma)
