"""Reverse-mode differentiation, including gradients of replicated parameters, which are already summed."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_matches_lax, assert_same_trees, make_mesh, num_calls, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum

RANKS = 4
MESH = make_mesh((RANKS,))
X = np.arange(8, dtype=np.float32) - 3
CT = np.arange(8, dtype=np.float32)[::-1] - 2
REPLICATED = P(None)


def cubic(psum, x):
    """Uses the sum twice, once with x; exact for small integers."""
    total = psum(x * x, "i")
    return total * x + total


def loss(psum, x):
    return jnp.sum(cubic(psum, x))


def on_mesh(fun, check_vma, **options):
    return sharded(fun, mesh=MESH, check_vma=check_vma, **options)


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad], ids=["grad", "value_and_grad"])
def test_grad(transform, check_vma):
    def body(psum, x):
        out = transform(lambda x: loss(psum, x))(x)
        return jax.tree.map(lambda leaf: leaf * jnp.ones(2, x.dtype), out)

    assert_matches_lax(body, X, mesh=MESH, check_vma=check_vma)


def test_grad_with_auxiliary_output(check_vma):
    def body(psum, x):
        def f(x):
            total = psum({"sum": x, "squares": x * x}, "i")
            return jnp.sum(total["sum"] * x), total

        gradient, total = jax.grad(f, has_aux=True)(x)
        return gradient, jax.tree.map(lambda t: t + x, total)

    assert_matches_lax(body, X, mesh=MESH, check_vma=check_vma)


def test_grad_of_the_sum_with_vma(check_vma):
    # With vma tracking, the sum is one output, whose derivative in each operand is 1. Without it, the copy of every
    # rank counts as an output, so the derivative is the number of ranks. lax has the same conventions.
    f = on_mesh(lambda x: jax.grad(lambda x: jnp.sum(ring_psum(x, "i")))(x), check_vma)
    np.testing.assert_array_equal(f(X), np.full(8, 1 if check_vma else RANKS))


def test_vjp(check_vma):
    def body(psum, x, ct):
        y, transpose = jax.vjp(lambda x: cubic(psum, x), x)
        return y, transpose(ct)[0], transpose(2 * ct)[0]

    assert_matches_lax(body, X, CT, mesh=MESH, in_specs=(P("i"), P("i")), check_vma=check_vma)


def test_vjp_of_an_invariant_output(check_vma):
    def body(psum, x, ct):
        y, transpose = jax.vjp(lambda x: psum(x * x, "i"), x)
        (gradient,) = transpose(ct)
        return y + x, gradient

    assert_matches_lax(body, X, CT[:2], mesh=MESH, in_specs=(P("i"), REPLICATED), check_vma=check_vma)


def test_grad_of_grad(check_vma):
    def body(psum, x):
        first = lambda x: jnp.sum(jax.grad(lambda x: loss(psum, x))(x) * x)  # noqa: E731
        return jax.grad(first)(x), jax.grad(lambda x: jnp.sum(jax.grad(first)(x)))(x)

    assert_matches_lax(body, X, mesh=MESH, check_vma=check_vma)


@pytest.mark.parametrize("transform", [jax.jacrev, jax.jacfwd, jax.hessian])
def test_jacobians_outside_of_shard_map(transform, check_vma):
    def derivative(psum):
        f = on_mesh(lambda x: jnp.sum(cubic(psum, x), keepdims=True), check_vma)
        return jax.jit(transform(f))(X)

    assert_same_trees(derivative(ring_psum), derivative(lax.psum))


def test_grad_outside_of_shard_map(check_vma):
    def gradient(psum):
        f = on_mesh(lambda x: psum(jnp.sum(cubic(psum, x)), "i"), check_vma, out_specs=P())
        return jax.value_and_grad(f)(X)

    assert_same_trees(gradient(ring_psum), gradient(lax.psum))


def test_forward_over_reverse(check_vma):
    def body(psum, x, t):
        return jax.jvp(jax.grad(lambda x: loss(psum, x)), (x,), (t,))

    assert_matches_lax(body, X, CT, mesh=MESH, check_vma=check_vma)


def test_grad_of_a_tree_of_mixed_dtypes(check_vma):
    def body(psum, x):
        params = {
            "f32": x,
            "bf16": x.astype(jnp.bfloat16),
            "nested": [x.astype(jnp.float16), (x.astype(jnp.complex64) * 1j,)],
        }

        def f(params):
            total = psum(params, "i")
            (z,) = total["nested"][1]
            real = total["f32"] * x + (z * z.conj()).real
            return jnp.sum(real) + jnp.sum((total["bf16"] + total["nested"][0]).astype(jnp.float32) * x)

        return jax.grad(f)(params)

    assert_matches_lax(body, X, mesh=MESH, check_vma=check_vma)


def test_grad_with_integer_leaves(check_vma):
    def body(psum, x):
        def f(params):
            total = psum(params, "i")
            return jnp.sum(total["w"] * total["n"])

        return jax.grad(f, allow_int=True)({"w": x, "n": x.astype(jnp.int32)})["w"]

    assert_matches_lax(body, X, mesh=MESH, check_vma=check_vma)


def test_unused_sums_have_zero_cotangents(check_vma):
    def body(psum, x):
        def f(x, y, z):
            total, _, other = psum((x, y, z), "i")
            return jnp.sum(total * x + lax.stop_gradient(other))

        return jax.grad(f, argnums=(0, 1, 2))(x, 2 * x, 3 * x)

    assert_matches_lax(body, X, mesh=MESH, check_vma=check_vma)


def test_grad_over_two_axes(check_vma):
    mesh = make_mesh((2, 2), ("i", "j"))
    for axes in ("i", "j", ("i", "j"), ("j", "i")):

        def body(psum, x, axes=axes):
            return jax.grad(lambda x: jnp.sum(psum(x * x, axes) * x))(x)

        assert_matches_lax(
            body, X, mesh=mesh, in_specs=P(("i", "j")), out_specs=P(("i", "j")), check_vma=check_vma
        )  # fmt: skip


def test_fused_cotangents_are_one_call():
    # Without vma tracking, psum transposes to psum: one call for three leaves forward, and one backward.
    def f(x):
        total = ring_psum((x, x * x, x * x * x), "i")
        return jnp.sum(total[0] * total[1] * total[2])

    assert num_calls(on_mesh(lambda x: jax.grad(f)(x), False), X) == 2
    # With vma tracking, psum transposes to a cast, which is free.
    assert num_calls(on_mesh(lambda x: jax.grad(f)(x), True), X) == 1


# Gradients of a replicated parameter w: x varies and the local loss is w * x, so the local gradient is x and the summed
# one is x.sum().
DATA = np.arange(1, RANKS + 1, dtype=np.float32)
W = np.float32(2)


def gradient_of_replicated_parameter(finish, check_vma):
    def body(w, x):
        return finish(w, x, lambda w: jnp.sum(w * x))[None]

    out_specs = P("i")
    return np.asarray(on_mesh(body, check_vma, in_specs=(P(), P("i")), out_specs=out_specs)(W, DATA))


def test_gradient_of_a_replicated_parameter_is_summed_already_with_vma():
    gradient = gradient_of_replicated_parameter(lambda w, x, f: lax.pcast(jax.grad(f)(w), "i", to="varying"), True)
    np.testing.assert_array_equal(gradient, np.full(RANKS, DATA.sum()))


def test_gradient_of_a_replicated_parameter_is_local_without_vma():
    gradient = gradient_of_replicated_parameter(lambda w, x, f: jax.grad(f)(w), False)
    np.testing.assert_array_equal(gradient, DATA)


def test_a_cast_before_grad_gives_local_gradients_to_sum():
    def finish(w, x, f):
        local = jax.grad(f)(lax.pcast(w, "i", to="varying"))
        return local + 0 * ring_psum(local, "i")

    np.testing.assert_array_equal(gradient_of_replicated_parameter(finish, True), DATA)
    total = gradient_of_replicated_parameter(
        lambda w, x, f: x * 0 + ring_psum(jax.grad(f)(lax.pcast(w, "i", to="varying")), "i"), True
    )
    np.testing.assert_array_equal(total.reshape(-1), np.full(RANKS, DATA.sum()))


def test_summing_a_summed_gradient_again_matches_lax():
    """lax.psum silently casts an invariant operand to a varying one, so the result is RANKS times too large."""

    def twice(psum):
        def body(w, x):
            return psum(jax.grad(lambda w: jnp.sum(w * x))(w), "i")

        return on_mesh(body, True, in_specs=(P(), P("i")), out_specs=P())(W, DATA)

    chex.assert_trees_all_equal(twice(ring_psum), twice(lax.psum), RANKS * DATA.sum(), strict=True)
