"""Forward-mode differentiation: the sum of the tangents, and no call for zero tangents."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_matches_lax, make_mesh, num_calls, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum

MESH = make_mesh((4,))
X = np.arange(8, dtype=np.float32) - 3
T = np.arange(8, dtype=np.float32)[::-1] - 2


def cubic(psum, x):
    """Uses the sum twice, once with x; exact for small integers."""
    total = psum(x * x, "i")
    return total * x + total


def test_jvp_is_the_sum_of_tangents(check_vma):
    f = sharded(
        lambda x, t: jax.jvp(lambda x: ring_psum(x * x, "i"), (x,), (t,)),
        mesh=MESH, in_specs=P("i"), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    expected = tuple(values.reshape(4, 2).sum(0) for values in (X * X, 2 * X * T))
    chex.assert_trees_all_equal(f(X, T), expected, strict=True)


def test_jvp(check_vma):
    assert_matches_lax(
        lambda psum, x, t: jax.jvp(lambda x: cubic(psum, x), (x,), (t,)), X, T, mesh=MESH, check_vma=check_vma
    )


def test_jvp_of_jvp(check_vma):
    def second(psum, x, t):
        first = lambda x: jax.jvp(lambda x: cubic(psum, x), (x,), (t,))[1]  # noqa: E731
        return jax.jvp(first, (x,), (t,))

    assert_matches_lax(second, X, T, mesh=MESH, check_vma=check_vma)


def test_linearize(check_vma):
    def linearized(psum, x, t):
        y, linear = jax.linearize(lambda x: cubic(psum, x), x)
        return y, linear(t), linear(2 * t)

    assert_matches_lax(linearized, X, T, mesh=MESH, check_vma=check_vma)


def test_linear_transpose(check_vma):
    def transposed(psum, x, t):
        linear = lambda t: 3 * psum(2 * t, "i")  # noqa: E731
        example = lax.pcast(jnp.zeros_like(x), (), to="varying")
        ct = psum(t, "i")
        return jax.linear_transpose(linear, example)(ct)[0]

    assert_matches_lax(transposed, X, T, mesh=MESH, check_vma=check_vma)


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev], ids=["jacfwd", "jacrev"])
def test_jacobian(transform, check_vma):
    assert_matches_lax(lambda psum, x: transform(lambda x: cubic(psum, x))(x), X, mesh=MESH, check_vma=check_vma)


def test_hessian(check_vma):
    def hessian(psum, x):
        return jax.hessian(lambda x: jnp.sum(psum(x * x * x, "i") * x))(x)

    assert_matches_lax(hessian, X, mesh=MESH, check_vma=check_vma)


def test_jvp_outside_of_shard_map(check_vma):
    def jvp(psum):
        f = sharded(lambda x: cubic(psum, x), mesh=MESH, check_vma=check_vma)
        return jax.jvp(f, (X,), (T,))

    chex.assert_trees_all_equal(jvp(ring_psum), jvp(lax.psum), strict=True)


def test_jvp_with_respect_to_some_leaves(check_vma):
    def partly(psum, x, t):
        def f(a):
            tree = psum({"a": a * a, "b": x, "c": (a * x, lax.stop_gradient(a))}, "i")
            return tree["a"] * tree["b"] + tree["c"][0] + tree["c"][1]

        return jax.jvp(f, (x,), (t,))

    assert_matches_lax(partly, X, T, mesh=MESH, check_vma=check_vma)


def test_jvp_of_integer_leaves(check_vma):
    def mixed(psum, x, t):
        def f(x):
            total, count = psum((x * x, x.astype(jnp.int32)), "i")
            return total * count.astype(x.dtype), count

        out, tangents = jax.jvp(f, (x,), (t,))
        assert tangents[1].dtype == jax.dtypes.float0
        return out, tangents[0]

    assert_matches_lax(mixed, X, T, mesh=MESH, check_vma=check_vma)


@pytest.mark.parametrize(
    ("fun", "calls"),
    [
        (lambda x, t: ring_psum(x, "i"), 1),
        # Those of primal and tangent are joined.
        (lambda x, t: jax.jvp(lambda x: ring_psum(x, "i"), (x,), (t,)), 1),
        # The operand does not depend on the input, so its tangent is a symbolic zero.
        (lambda x, t: jax.jvp(lambda y: ring_psum(x, "i") + y, (x,), (t,)), 1),
        (lambda x, t: jax.jvp(lambda x: ring_psum(lax.stop_gradient(x), "i") + x, (x,), (t,)), 1),
        (lambda x, t: jax.jvp(lambda x: (ring_psum(x.astype(jnp.int32), "i"), x)[1:], (x,), (t,)), 0),
        (lambda x, t: jax.jvp(lambda y: ring_psum((x, y), "i"), (x,), (t,)), 1),
        # The operand of the second tangent depends on the first sum.
        (lambda x, t: jax.jvp(lambda x: ring_psum(x * ring_psum(x, "i"), "i"), (x,), (t,)), 2),
    ],
    ids=["no_jvp", "jvp", "constant", "stop_gradient", "dead", "half_of_a_tree", "chain"],
)
def test_number_of_calls(fun, calls, check_vma):
    def used(x, t):
        # Adding x makes the result vary over the axis.
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(fun(x, t)) if leaf.dtype == x.dtype)[None] + x

    # Counted after compilation, which removes dead calls.
    assert num_calls(sharded(used, mesh=MESH, check_vma=check_vma), X, T) == calls


def test_operands_of_zero_tangents_are_dropped(check_vma):
    def tangent_equations(x, t):
        jaxpr = jax.make_jaxpr(lambda x, t: jax.jvp(lambda y: ring_psum((x, y, x), "i"), (x,), (t,))[1][1])(x, t)
        operands.extend(len(e.invars) for e in jaxpr.eqns if e.primitive.name.startswith("ring_psum"))
        return x

    operands = []
    sharded(tangent_equations, mesh=MESH, check_vma=check_vma)(X, T)
    assert operands == [3, 1]
