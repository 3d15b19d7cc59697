"""ring_psum in functions with custom_jvp and custom_vjp, and in their rules."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_matches_lax, make_mesh, num_calls, sharded
from jax import lax

from jax_ring import _compat, ring_psum

MESH = make_mesh((4,))
X = np.arange(8, dtype=np.float32) - 3
T = np.arange(8, dtype=np.float32)[::-1] - 2


def with_custom_jvp(psum):
    """The sum of squares. Its rule returns three times the derivative, to show that the rule is used."""

    @jax.custom_jvp
    def f(x):
        return psum(x * x, "i")

    @f.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return f(x), psum(6 * x * t, "i")

    return f


def with_custom_vjp(psum):
    """A custom_vjp with sums in the function, its forward rule and its backward rule."""

    @jax.custom_vjp
    def f(x):
        return psum(x * x, "i") * x

    def forwards(x):
        total = psum({"x": x, "squares": x * x}, "i")
        return total["squares"] * x, (x, total)

    def backwards(residuals, ct):
        x, total = residuals
        return (psum(3 * ct * x, "i") * x + total["x"] * ct,)

    f.defvjp(forwards, backwards)
    return f


@pytest.fixture(params=[with_custom_jvp, with_custom_vjp])
def custom(request):
    return request.param


def check(body, check_vma):
    assert_matches_lax(body, X, T, mesh=MESH, check_vma=check_vma)


def test_value(custom, check_vma):
    check(lambda psum, x, t: custom(psum)(x) + t, check_vma)


def test_grad(custom, check_vma):
    check(lambda psum, x, t: jax.grad(lambda x: jnp.sum(custom(psum)(x) * t))(x), check_vma)


def test_value_and_grad_outside_of_shard_map(custom, check_vma):
    def gradient(psum):
        f = sharded(lambda x: custom(psum)(x) * x, mesh=MESH, check_vma=check_vma)
        return jax.grad(lambda x: jnp.sum(f(x) * T))(X)

    chex.assert_trees_all_equal(gradient(ring_psum), gradient(lax.psum), strict=True)


def test_jvp(check_vma):
    check(lambda psum, x, t: jax.jvp(with_custom_jvp(psum), (x,), (t,)), check_vma)


def test_grad_of_grad(custom, check_vma):
    def body(psum, x, t):
        first = jax.grad(lambda x: jnp.sum(custom(psum)(x) * t))
        return jax.grad(lambda x: jnp.sum(first(x) * t))(x)

    check(body, check_vma)


def test_vmap(custom, check_vma):
    def body(psum, x, t):
        f = custom(psum)
        batch = jnp.stack([x, t])
        return jax.vmap(f)(batch).sum(0) + x, jax.vmap(jax.grad(lambda v: jnp.sum(f(v))))(batch).sum(0)

    check(body, check_vma)


def test_within_scan_and_checkpoint(custom, check_vma):
    def body(psum, x, t):
        f = jax.checkpoint(custom(psum))
        step = lambda c, k: (jnp.mod(f(c), 5) + x * k, ())  # noqa: E731
        return jax.grad(lambda x: jnp.sum(lax.scan(step, x, jnp.arange(3.0))[0] * t))(x)

    check(body, check_vma)


def with_one_call_for_tangents_and_values(psum):
    """t times the sum of t x. Its rule sums a value, a tangent and a constant at once."""

    @jax.custom_jvp
    def f(x, t):
        return psum(x * t, "i") * t

    @f.defjvp
    def rule(primals, tangents):
        x, t = primals
        total, tangent, scale = psum((x * t, tangents[0] * t, t), "i")
        return total * t, tangent * scale * t

    return f


def test_a_rule_with_one_call_for_tangents_and_values(check_vma):
    def body(psum, x, t):
        f = with_one_call_for_tangents_and_values(psum)
        in_scan = lambda x, t: lax.scan(lambda c, _: (jnp.mod(f(c, t), 5) + x, ()), x, length=2)[0]  # noqa: E731
        saved = jax.checkpoint(in_scan, policy=jax.checkpoint_policies.everything_saveable)
        functions = [f, jax.jit(f), jax.checkpoint(f), in_scan, jax.checkpoint(in_scan), saved]
        return [jax.grad(lambda x, f=f: jnp.sum(f(x, t) * x))(x) for f in functions]

    check(body, check_vma)


def test_as_many_leaves_are_summed_as_with_lax(check_vma):
    """By a rule that sums tangents and values at once, also where checkpoints compute sums again."""

    def num_leaves(jaxpr):
        inner = jax.tree.leaves([list(e.params.values()) for e in jaxpr.eqns], is_leaf=_compat.is_jaxpr)
        own = sum(len(e.invars) for e in jaxpr.eqns if "psum" in e.primitive.name)
        return own + sum(num_leaves(getattr(x, "jaxpr", x)) for x in inner if _compat.is_jaxpr(x))

    def leaves(psum):
        counts = []

        def body(x, t):
            f = with_one_call_for_tangents_and_values(psum)
            twice = lambda x, t: jnp.sin(f(jnp.sin(f(x, t)), t))  # noqa: E731
            saved = jax.checkpoint(twice, policy=jax.checkpoint_policies.everything_saveable)
            for each in (twice, saved, jax.checkpoint(twice)):
                gradient = jax.grad(lambda x, t, f=each: jnp.sum(f(x, t) * x))
                counts.append(num_leaves(jax.make_jaxpr(gradient)(x, t).jaxpr))
            return x

        sharded(body, mesh=MESH, check_vma=check_vma)(X, T)
        return counts

    assert leaves(ring_psum) == leaves(lax.psum)


def test_transposes_of_calls_that_sum_constants_as_well(check_vma):
    def body(psum, x, t):
        def linear(x):
            total, scale = psum((x, t), "i")
            return total * scale

        def solve(x):
            # The matrix is a multiple of the identity, plus what sums over the ranks.
            def product(v):
                total, scale = psum((v * t, t * t), "i")
                return scale * v + 0 * total

            return lax.custom_linear_solve(product, x, lambda _, x: x / psum(t * t, "i"), symmetric=True)

        (of_linear,) = jax.linear_transpose(linear, x)(psum(t, "i"))
        return of_linear, jax.grad(lambda x: jnp.sum(solve(x) * t))(x)

    check(body, check_vma)


def test_nondifferentiable_argument(check_vma):
    def body(psum, x, t):
        from functools import partial

        @partial(jax.custom_vjp, nondiff_argnums=(0,))
        def scaled(factor, x):
            return psum(factor * x, "i")

        scaled.defvjp(lambda factor, x: (scaled(factor, x), x), lambda factor, x, ct: (factor * ct + x,))
        return jax.grad(lambda x: jnp.sum(scaled(3, x) * x))(x) + t

    check(body, check_vma)


def test_a_reverse_rule_that_sums_the_gradient(check_vma):
    """The usual way to reduce gradients at the point of use: identity forward, sum backward."""

    def body(psum, x, t):
        @jax.custom_vjp
        def reduced(w):
            return w

        reduced.defvjp(lambda w: (w, None), lambda _, ct: (psum(ct, "i") + 0 * ct,))
        return jax.grad(lambda w: jnp.sum(reduced(w) * t * t))(x)

    check(body, check_vma)
    f = sharded(lambda x, t: body(ring_psum, x, t), mesh=MESH, check_vma=check_vma)
    assert num_calls(f, X, T) == 1
    np.testing.assert_array_equal(f(X, T), np.tile((T * T).reshape(4, 2).sum(0), 4))


def test_a_custom_rule_around_constants_needs_no_call(check_vma):
    @jax.custom_jvp
    def scaled(x):
        return x * ring_psum(1, "i")

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * ring_psum(2.0, "i")))
    f = sharded(lambda x, t: jax.jvp(scaled, (x,), (t,)), mesh=MESH, check_vma=check_vma)
    assert num_calls(f, X, T) == 0
    chex.assert_trees_all_equal(f(X, T), (4 * X, 8 * T), strict=True)
