"""A jaxpr evaluated without equal expressions: the same results, and nothing left for XLA to find."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_same_bits
from jax import lax

from jax_ring.training.same_bits.evaluation import evaluate

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)


def simplified(fun, *args):
    closed = jax.make_jaxpr(fun)(*args)
    return jax.make_jaxpr(lambda *args: evaluate(closed, args))(*args)


def operations(fun, *args):
    return collections.Counter(eqn.primitive.name for eqn in simplified(fun, *args).jaxpr.eqns)


def assert_same_results(fun, *args):
    closed = jax.make_jaxpr(fun)(*args)
    results = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
    assert_same_bits([np.asarray(x) for x in evaluate(closed, args)], [np.asarray(x) for x in results])


def test_equal_expressions_are_computed_once():
    layer = jax.jit(lambda x, y: jnp.sin(x * 2) + y)
    found = operations(lambda x: layer(x, x) + layer(x, 1.0), X)
    assert found["sin"] == found["mul"] == 1
    assert "jit" not in found
    assert operations(lambda x: x**3 * x**2 + jnp.square(x), X)["mul"] == 3  # x * x, (x * x) * x, and the product
    assert operations(lambda x, m: (x + m) * jnp.exp(m - x), X, X[:, :1])["broadcast_in_dim"] == 1


def test_different_expressions_stay():
    found = operations(lambda x: jnp.sum(x, 0).sum() + jnp.sum(x, 1).sum() + x[0, 0] * 2.0 + x[0, 0] * 2, X)
    assert found["reduce_sum"] == 4
    assert operations(lambda x: x.astype(np.int32) * 2 + (x * 2).astype(np.int32), X)["mul"] == 2


def test_recomputation_stays():
    f = jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())
    assert operations(f, X)["optimization_barrier"] == 1
    assert_same_results(f, X)


def test_control_flow():
    def f(x):
        def body(carry, row):
            return lax.cond(row[0] > 0, lambda: carry * row**-2, lambda: carry + row), (row + 1.5) * (row + 1.5)

        total, rows = lax.scan(body, x[0], x, reverse=True, unroll=2)
        count, _ = lax.while_loop(
            lambda s: (s[0] < 5) & (s[1].sum() < x.sum() + 9), lambda s: (s[0] + 1, s[1] + x), (0, x)
        )
        return total, rows, count, x**0, jax.nn.relu(x), jax.random.normal(jax.random.key(3), (2,))

    assert_same_results(f, X)
    inner = next(eqn for eqn in simplified(f, X).jaxpr.eqns if eqn.primitive.name == "scan")
    assert sum(eqn.primitive.name == "add" for eqn in inner.params["jaxpr"].jaxpr.eqns) == 1


def test_branches_for_other_platforms_are_not_lowered():
    def f(x, y):
        first = lax.platform_dependent(x, cpu=lambda x: x * 2, cuda=jnp.sin, rocm=jnp.sin)
        return first + lax.platform_dependent(x, y, cuda=lambda x, y: jnp.tan(x), default=lambda x, y: x * y)

    assert_same_results(f, X, X)
    text = jax.jit(lambda *args: evaluate(jax.make_jaxpr(f)(*args), args)).lower(X, X).as_text()
    assert "stablehlo.multiply" in text
    assert "stablehlo.sine" not in text
    assert "stablehlo.tan" not in text
