"""Calls in loops and branches. As for every collective, predicates must be equal on all ranks of a group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET, assert_matches_lax, make_mesh, num_calls, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum

RANKS = 4
MESH = make_mesh((RANKS,))
X = np.arange(8, dtype=np.float32) - 3


def mapped(fun, check_vma, **options):
    return sharded(fun, mesh=MESH, check_vma=check_vma, **options)


def matches_lax(fun, *args, check_vma, **options):
    assert_matches_lax(fun, *args, mesh=MESH, check_vma=check_vma, **options)


# Exact, because RANKS is a power of two. Keeps the values in loops small.
def mean(psum, x):
    return psum(x, "i") / RANKS


@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan(unroll, reverse, check_vma):
    def body(psum, x):
        def step(carry, k):
            total = psum(carry + k, "i")
            return jnp.mod(total, 7) + x, (total * x, psum(k * x, "i") * x)

        return lax.scan(step, x, jnp.arange(6, dtype=x.dtype), unroll=unroll, reverse=reverse)

    matches_lax(body, X, check_vma=check_vma, out_specs=(P("i"), P(None, "i")))


def test_scan_over_sharded_elements(check_vma):
    def body(psum, x):
        def step(count, v):
            total = psum(v, "i")
            return count + 1, total + v

        return lax.scan(step, 0, x.reshape(2, 1))[1]

    matches_lax(body, X, check_vma=check_vma, out_specs=P(None, "i"))


@pytest.mark.parametrize("iterations", [0, 1, 250])
def test_fori_loop(iterations, check_vma):
    def body(psum, x):
        return lax.fori_loop(0, iterations, lambda k, v: jnp.mod(psum(v * k, "i"), 11) + x, x)

    matches_lax(body, X, check_vma=check_vma)


def test_a_fixed_point_is_kept_for_a_thousand_iterations(check_vma):
    # The mean of equal values is that value. Mismatched calls would change it.
    def body(x):
        start = ring_psum(x, "i")

        def step(k, v):
            return ring_psum(v + k, "i") / RANKS - k + 0 * x

        return lax.fori_loop(0, 1000, step, start + 0 * x)

    total = X.reshape(RANKS, 2).sum(0)
    np.testing.assert_array_equal(mapped(body, check_vma)(X), np.tile(total, RANKS))


def test_while_loop_with_a_sum_in_the_condition(check_vma):
    def body(psum, x):
        def more(state):
            count, v = state
            return (psum(jnp.max(v), "i") < 1000) & (count < 50)

        return lax.while_loop(more, lambda s: (s[0] + 1, s[1] * 2 + psum(jnp.abs(s[1]), "i")), (0, x))[1]

    matches_lax(body, X, check_vma=check_vma)


def test_while_loop_with_a_sum_in_the_body(check_vma):
    def body(psum, x):
        def step(state):
            count, v = state
            return count + 1, psum(v, "i") / 8 + x

        return lax.while_loop(lambda s: s[0] < 220, step, (0, x))[1]

    # 220 steps are not exact.
    matches_lax(body, X, check_vma=check_vma, rtol=1e-5)


@pytest.mark.parametrize("taken", [True, False])
def test_cond_with_a_sum_in_one_branch(taken, check_vma):
    def body(psum, x, flag):
        return lax.cond(flag, lambda x: psum(x, "i") + x, lambda x: x * 2, x)

    matches_lax(body, X, np.bool_(taken), check_vma=check_vma, in_specs=(P("i"), P()))


@pytest.mark.parametrize("taken", [True, False])
def test_cond_with_different_sums_in_both_branches(taken, check_vma):
    def body(psum, x, flag):
        one = lambda x: psum((x, x * x), "i")  # noqa: E731
        other = lambda x: (psum(psum(x, "i") * x, "i"), psum(x.astype(jnp.int32), "i").astype(x.dtype))  # noqa: E731
        a, b = lax.cond(flag, one, other, x)
        return a + x, b + x

    matches_lax(body, X, np.bool_(taken), check_vma=check_vma, in_specs=(P("i"), P()))


def test_cond_on_a_sum(check_vma):
    # The predicate is the result of a collective, so it is equal on all ranks.
    def body(psum, x):
        return lax.cond(psum(x.sum(), "i") > 0, lambda x: psum(x, "i") * x, lambda x: psum(x * x, "i") - x, x)

    for x in (X, -X):
        matches_lax(body, x, check_vma=check_vma)


@pytest.mark.parametrize("index", [0, 1, 2, 7])
def test_switch(index, check_vma):
    def body(psum, x, index):
        branches = [lambda x: psum(x, "i") + x, lambda x: x, lambda x: psum(psum(x * x, "i") * x, "i") + x]
        return lax.switch(index, branches, x)

    matches_lax(body, X, np.int32(index), check_vma=check_vma, in_specs=(P("i"), P()))


def test_cond_whose_predicate_differs_between_groups():
    # A sum over "i" only needs a predicate that is equal within each group.
    mesh = make_mesh((2, 2), ("g", "i"))

    def body(psum, x):
        return lax.cond(lax.axis_index("g") == 0, lambda x: psum(x, "i") + x, lambda x: x * 3, x)

    # Not compared with lax: XLA's all_reduce spans all groups, and would wait forever for the other branch.
    f = sharded(
        lambda x: body(ring_psum, x), mesh=mesh, in_specs=P(("g", "i")), out_specs=P(("g", "i"))
    )  # fmt: skip
    first, second = X[:4], X[4:]
    expected = np.concatenate([np.tile(first.reshape(2, 2).sum(0), 2) + first, second * 3])
    np.testing.assert_array_equal(f(X), expected)


def test_loops_whose_length_differs_between_groups():
    mesh = make_mesh((2, 2), ("g", "i"))

    def body(x):
        return lax.fori_loop(0, 10 * lax.axis_index("g") + 5, lambda k, v: ring_psum(v, "i") / 2 + 0 * v, x)

    f = sharded(body, mesh=mesh, in_specs=P(("g", "i")), out_specs=P(("g", "i")))
    np.testing.assert_array_equal(f(X), np.repeat(X.reshape(2, 2, 2).mean(1), 2, axis=0).reshape(-1))


def test_nested(check_vma):
    def body(psum, x):
        def inner(k, v):
            return lax.cond(k % 2 == 0, lambda v: mean(psum, v) + x, lambda v: v - k, v)

        def outer(carry, k):
            carry = jnp.mod(lax.fori_loop(0, k, inner, carry), 16)
            return carry, psum(carry, "i") + x

        return lax.scan(outer, x, jnp.arange(4))

    matches_lax(body, X, check_vma=check_vma, out_specs=(P("i"), P(None, "i")))


def test_map(check_vma):
    def body(psum, x):
        return lax.map(lambda v: psum(v * v, "i") + v, x), lax.map(lambda v: psum(v, "i") + v, x, batch_size=2)

    matches_lax(body, np.arange(24, dtype=np.float32).reshape(8, 3), check_vma=check_vma)


def test_associative_scan(check_vma):
    matches_lax(lambda psum, x: lax.associative_scan(lambda a, b: a + mean(psum, b), x), X, check_vma=check_vma)


def test_grad_through_scan(check_vma):
    def body(psum, x):
        def loss(x):
            step = lambda c, k: (psum(c * k, "i") + x, psum(c, "i") * x)  # noqa: E731
            carry, out = lax.scan(step, x, jnp.arange(1, 4, dtype=x.dtype))
            return jnp.sum(carry) + jnp.sum(out)

        return jax.grad(loss)(x)

    matches_lax(body, X, check_vma=check_vma)


def test_grad_through_scan_with_sums_of_constants_of_the_loop(check_vma):
    # One operand is known in the forward pass and the other is linear: partial evaluation splits the call.
    def body(psum, x):
        def loss(w):
            def step(carry, v):
                a, b = psum((w * v, v * v), "i")
                return carry + a * b, a

            carry, out = lax.scan(step, 0 * w, jnp.stack([x, x + 1, x * x]))
            return jnp.sum(carry * w) + jnp.sum(out)

        return jax.value_and_grad(loss)(x)[1]

    matches_lax(body, X, check_vma=check_vma)


@pytest.mark.parametrize("taken", [True, False])
def test_grad_through_cond(taken, check_vma):
    def body(psum, x, flag):
        def loss(x):
            return jnp.sum(lax.cond(flag, lambda x: psum(x * x, "i") * x, lambda x: psum(x, "i") + x * x, x))

        return jax.grad(loss)(x)

    matches_lax(body, X, np.bool_(taken), check_vma=check_vma, in_specs=(P("i"), P()))


def test_jvp_through_while_loop(check_vma):
    def body(psum, x):
        f = lambda x: lax.fori_loop(0, x.size + 2, lambda k, v: mean(psum, v) + x, x)  # noqa: E731
        return jax.jvp(f, (x,), (x * x,))

    matches_lax(body, X, check_vma=check_vma)


def test_vmap_of_scan(check_vma):
    def body(psum, x):
        f = lambda v: lax.scan(lambda c, k: (mean(psum, c) * k + v, psum(k * v, "i") + v), v, jnp.arange(3.0))  # noqa: E731
        return jax.vmap(f)(x)

    matches_lax(body, X, check_vma=check_vma)


def test_vmap_of_cond_with_a_batched_predicate(check_vma):
    # vmap turns the cond into a select, which evaluates both sums.
    def body(psum, x):
        f = lambda v: lax.cond(v > 0, lambda v: psum(v, "i") + v, lambda v: v - psum(v * v, "i"), v)  # noqa: E731
        return jax.vmap(f)(x)

    matches_lax(body, X, check_vma=check_vma)


def test_a_loop_invariant_call_is_hoisted(check_vma):
    def body(x):
        return lax.fori_loop(0, 50, lambda k, v: v + ring_psum(x, "i"), x)

    f = mapped(body, check_vma)
    assert num_calls(f, X) == 1
    text = f.lower(X).compile().as_text()
    # Hoisted out of the loop into the entry computation.
    assert f'custom_call_target="{TARGET}"' in text[text.index("\nENTRY") :]
    np.testing.assert_array_equal(f(X), X + 50 * np.tile(X.reshape(RANKS, 2).sum(0), RANKS))


def test_two_calls_per_iteration_do_not_mix(check_vma):
    def body(psum, x):
        def step(k, state):
            a, b = state
            return jnp.mod(psum(a + k, "i"), 5) + x, jnp.mod(psum(b - a, "i"), 7) + x

        return lax.fori_loop(0, 200, step, (x, 2 * x))

    matches_lax(body, X, check_vma=check_vma)
