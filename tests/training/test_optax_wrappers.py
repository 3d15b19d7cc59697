"""allreduce_gradients inside the wrappers of optax, compared with one device that has the whole batch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import allreduce_gradients, feedback_specs

pytestmark = pytest.mark.one_pair  # other cases run with the newest pair

RANKS, STEPS = 4, 7
MESH = make_mesh((RANKS,))
PARAMS = {"w": np.arange(1, 4, dtype=np.float32), "b": np.float32([2])}
BATCHES = np.random.default_rng(0).standard_normal((STEPS, 8, 3)).astype(np.float32)


def loss(params, x):
    return ((x @ params["w"] + params["b"]) ** 2).mean()


def on_one_device(optimizer):
    @jax.jit
    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for x in BATCHES:
        params, state = step(params, state, x)
    return params


def local_grad(params, x, check_vma):
    local = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params) if check_vma else params
    return jax.grad(loss)(local, x)


def on_ranks(optimizer, check_vma):
    """The parameters and the state after each step."""
    specs = feedback_specs(jax.eval_shape(optimizer.init, PARAMS), "i")

    def step(params, state, x):
        updates, state = optimizer.update(local_grad(params, x, check_vma), state, params)
        return optax.apply_updates(params, updates), state

    common = {"mesh": MESH, "check_vma": check_vma}
    step = sharded(step, in_specs=(P(), specs, P("i")), out_specs=(P(), specs), **common)
    params, state = PARAMS, sharded(optimizer.init, in_specs=P(), out_specs=specs, **common)(PARAMS)
    history = []
    for x in BATCHES:
        params, state = step(params, state, x)
        history.append((params, state))
    return history


BOTH = {"w": True, "b": True}
# Each makes an optimizer from allreduce_gradients, or from nothing, for one device.
WRAPPERS = {
    "MultiSteps": lambda reduce: optax.MultiSteps(optax.chain(reduce(), optax.adam(0.1)), 3),
    "MultiSteps, sums": lambda reduce: optax.MultiSteps(
        optax.chain(reduce(), optax.sgd(0.01)), 2, use_grad_mean=False
    ),
    "MultiSteps after it": lambda reduce: optax.chain(
        reduce(), optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation()
    ),
    "MultiSteps of masked": lambda reduce: optax.MultiSteps(
        optax.masked(optax.chain(reduce(), optax.adam(0.1)), BOTH), lambda step: 2 + step
    ),
    "masked": lambda reduce: optax.chain(
        optax.masked(reduce(), {"w": True, "b": False}), optax.masked(reduce(), {"w": False, "b": True}),
        optax.adam(0.1),
    ),
    "multi_transform": lambda reduce: optax.multi_transform(
        {"a": optax.chain(reduce(), optax.adam(0.1)), "b": optax.chain(reduce(), optax.sgd(0.01))}, {"w": "a", "b": "b"}
    ),
    "inject_hyperparams": lambda reduce: optax.inject_hyperparams(
        lambda rate: optax.chain(reduce(), optax.adam(rate))
    )(rate=optax.linear_schedule(0.1, 0, 10)),
    "apply_if_finite after it": lambda reduce: optax.chain(reduce(), optax.apply_if_finite(optax.adam(0.1), 3)),
}  # fmt: skip


# Without vma tracking there are no types that could be wrong: one wrapper is enough.
@pytest.mark.parametrize(
    ("name", "check_vma"),
    full_but(
        [("MultiSteps", False), *((name, True) for name in WRAPPERS)],
        [("MultiSteps", True), ("masked", True), ("apply_if_finite after it", True)],
    ),
)
def test_as_on_one_device(name, check_vma):
    expected = on_one_device(WRAPPERS[name](optax.identity))
    params, _ = on_ranks(WRAPPERS[name](lambda: allreduce_gradients("i")), check_vma)[-1]
    chex.assert_trees_all_close(params, expected, rtol=1e-5)
    assert not np.allclose(expected["w"], PARAMS["w"], rtol=1e-3)  # it has been trained


def test_multi_steps_with_error_feedback(check_vma):
    """Residuals and sums are each rank's own; between two updates the residual stays."""

    reduce = allreduce_gradients("i", wire=jnp.bfloat16, error_feedback=True)
    history = on_ranks(optax.MultiSteps(optax.chain(reduce, optax.sgd(0.01)), 3), check_vma)
    _, before = history[1]
    assert jax.tree.map(jnp.shape, before.acc_grads) == {"w": (RANKS * 3,), "b": (RANKS,)}
    assert len({tuple(row) for row in np.asarray(before.acc_grads["w"]).reshape(RANKS, 3)}) == RANKS
    residual = before.inner_opt_state[0].residual
    assert jax.tree.map(jnp.shape, residual) == {"w": (RANKS, 3), "b": (RANKS, 1)}
    np.testing.assert_array_equal(residual["w"], 0)
    params, after = history[-1]
    assert np.any(after.inner_opt_state[0].residual["w"])
    chex.assert_trees_all_close(params, on_one_device(optax.MultiSteps(optax.sgd(0.01), 3)), rtol=2**-7)


def test_a_state_made_inside(check_vma):
    """All steps in one scan: the sums start as zeros, which are the same on all ranks, and are cast."""
    optimizer = WRAPPERS["MultiSteps"](lambda: allreduce_gradients("i"))

    def train(params, batches, cast):
        state = optimizer.init(params)
        if cast:
            state = state._replace(acc_grads=lax.pcast(state.acc_grads, "i", to="varying"))

        def step(carry, x):
            params, state = carry
            updates, state = optimizer.update(local_grad(params, x, check_vma), state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, state), batches)[0][0]

    def run(cast):
        f = sharded(
            lambda p, b: train(p, b, cast), mesh=MESH, check_vma=check_vma, in_specs=(P(), P(None, "i")), out_specs=P()
        )
        return f(PARAMS, BATCHES)

    chex.assert_trees_all_close(run(check_vma), on_one_device(WRAPPERS["MultiSteps"](optax.identity)), rtol=1e-5)
    if check_vma:
        with pytest.raises(ValueError, match=r"optax\.MultiSteps.*feedback_specs.*state\._replace\(acc_grads"):
            run(False)


def test_a_parameter_without_dimensions():
    optimizer = optax.MultiSteps(allreduce_gradients("i"), 2)
    with pytest.raises(ValueError, match=r"that at \['b'\] has no dimension.*Give the parameter the shape \(1,\)"):
        feedback_specs(jax.eval_shape(optimizer.init, {"b": np.float32(1)}), "i")


def test_sums_of_means_are_replicated():
    optimizer = WRAPPERS["MultiSteps after it"](lambda: allreduce_gradients("i"))
    specs = feedback_specs(jax.eval_shape(optimizer.init, PARAMS), "i")
    assert set(jax.tree.leaves(specs)) == {P()}


def test_skipping_before_the_reduction_is_refused():
    """Each rank would decide by its own gradients, and leave the others waiting. JAX sees it by the types."""
    optimizer = optax.apply_if_finite(optax.chain(allreduce_gradients("i"), optax.adam(0.1)), 3)
    with pytest.raises(TypeError, match="cond branches must have equal output types"):
        on_ranks(optimizer, True)
