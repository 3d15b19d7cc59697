"""Integer leaves among parameters and gradients (float0), and complex parameters: as `jax.value_and_grad` has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import (
    allreduce_gradients,
    feedback_specs,
    grad,
    plan_buckets,
    reduce_in_backward,
    sync_gradients,
    sync_with_feedback,
    value_and_grad,
)

pytestmark = pytest.mark.one_pair  # other cases run with the newest pair

RANKS = 4
MESH = make_mesh((RANKS,))
X = np.random.default_rng(0).standard_normal((RANKS, 2, 3)).astype(np.float32)
PARAMS = {"count": np.int32(2), "ids": np.arange(3), "w": np.arange(1, 4, dtype=np.float32)}
EXPECTED_FLOAT0 = {"count": (), "ids": (3,)}
REPLICATED, SPLIT = P(), (P(), P("i"))


def loss(params, x):
    return ((x * params["w"][params["ids"]]).sum(1) ** 2).mean() * params["count"]


# Not at import, which every worker and rank does.
@functools.cache
def of_one_device():
    return jax.value_and_grad(loss, allow_int=True)(PARAMS, X.reshape(-1, 3))


def on_ranks(fun, check_vma, in_specs=SPLIT, out_specs=REPLICATED):
    return sharded(fun, mesh=MESH, check_vma=check_vma, in_specs=in_specs, out_specs=out_specs)


def assert_gradients(actual):
    expected = of_one_device()[1]
    np.testing.assert_allclose(actual["w"], expected["w"], rtol=1e-5)
    found = {name: leaf.shape for name, leaf in actual.items() if leaf.dtype == jax.dtypes.float0}
    assert found == EXPECTED_FLOAT0


# ---- Gradients of integers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_backward", [False, True])
def test_integer_parameters(in_backward, check_vma):
    def hooked(params, x):
        return loss(reduce_in_backward(params, "i") if in_backward else params, x[0])

    options = {"allow_int": True, "reduced_in_backward": in_backward, "wire": jnp.float32}
    value, grads = on_ranks(value_and_grad(hooked, "i", **options), check_vma)(PARAMS, X)
    np.testing.assert_allclose(value, of_one_device()[0], rtol=1e-5)
    assert_gradients(grads)


def test_grad_of_integer_parameters(check_vma):
    assert_gradients(on_ranks(grad(lambda p, x: loss(p, x[0]), "i", allow_int=True), check_vma)(PARAMS, X))


REDUCTIONS = {
    "sync_gradients": lambda g: sync_gradients(g, "i"),
    "sync_gradients-sum": lambda g: jax.tree.map(
        lambda x: x if x.dtype == jax.dtypes.float0 else x / RANKS, sync_gradients(g, "i", mean=False)
    ),
    "sync_with_feedback": lambda g: sync_with_feedback(g, jax.tree.map(jnp.zeros_like, g), "i", wire=jnp.float32)[0],
    "allreduce_gradients": lambda g: allreduce_gradients("i").update(g, optax.EmptyState())[0],
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_leave_them_out(name, check_vma):
    def step(params, x):
        # A gradient of integers is what JAX makes it: an array of NumPy or a traced value.
        local = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params) if check_vma else params
        return REDUCTIONS[name](jax.grad(loss, allow_int=True)(local, x[0]))

    assert_gradients(on_ranks(step, check_vma)(PARAMS, X))


def test_error_feedback_in_optax(check_vma):
    optimizer = allreduce_gradients("i", wire=jnp.bfloat16, error_feedback=True)
    specs = feedback_specs(jax.eval_shape(optimizer.init, PARAMS), "i")

    def step(params, x):
        local = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params) if check_vma else params
        return optimizer.update(jax.grad(loss, allow_int=True)(local, x[0]), optimizer.init(params))

    updates, state = on_ranks(step, check_vma, out_specs=(REPLICATED, specs))(PARAMS, X)
    np.testing.assert_allclose(updates["w"], of_one_device()[1]["w"], rtol=2**-7)
    assert updates["ids"].dtype == jax.dtypes.float0
    assert jax.tree.map(jnp.shape, state.residual) == {"count": (RANKS,), "ids": (RANKS, 3), "w": (RANKS, 3)}


def test_they_have_no_bucket():
    plan = plan_buckets(of_one_device()[1])
    assert [bucket.leaves for bucket in plan.buckets] == [(2,)]
    assert len(plan.names) == 3


# ---- The errors and values of JAX -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "options"),
    [(PARAMS, {}), (PARAMS["w"], {"holomorphic": True}), (PARAMS["w"] + 1j, {})],
    ids=["integers", "real and holomorphic", "complex"],
)
def test_errors_are_those_of_jax(params, options, check_vma):
    def total(params, x):
        return (sum(leaf.sum() for leaf in jax.tree.leaves(params)) * x.sum()).astype(
            jnp.result_type(*jax.tree.leaves(params))
        )

    with pytest.raises(TypeError) as expected:
        jax.value_and_grad(total, **options)(params, X)
    for function in (value_and_grad, grad):
        with pytest.raises(TypeError) as found:
            on_ranks(function(total, "i", **options), check_vma)(params, X)
        assert str(found.value)[:60] == str(expected.value)[:60]


def test_holomorphic(check_vma):
    def total(w, x):
        return (w**2 * x).sum()

    w = PARAMS["w"] + 1j
    value, gradient = on_ranks(value_and_grad(total, "i", holomorphic=True), check_vma)(w, X)
    expected = jax.value_and_grad(total, holomorphic=True)(w, X)
    np.testing.assert_allclose(value, expected[0] / RANKS, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1] / RANKS, rtol=1e-5)
    assert_same_bits(on_ranks(grad(total, "i", holomorphic=True), check_vma)(w, X), gradient)
