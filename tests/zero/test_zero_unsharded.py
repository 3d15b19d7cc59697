"""The state of a sharded optimizer as the optimizer itself has it, for the functions of optax that read it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SHARDED, assert_same_bits, make_mesh, sharded
from jax.sharding import PartitionSpec as P

from jax_ring import zero

RANKS, STEPS = 4, 3
# All numbers here are exact, so that nothing depends on how compilers fuse.
PARAMS = {"w": np.arange(15, dtype=np.float32).reshape(5, 3), "half": np.ones(7, jnp.bfloat16), "scale": np.float32(2)}
BATCH = np.arange(4 * RANKS, dtype=np.float32)


def loss(params, x):
    return sum(((p.astype(np.float32) + p.size) * x.mean()).sum() for p in jax.tree.leaves(params))


def averaged(tx):
    """`tx`, with a running mean of the parameters in its state."""

    def init(params):
        return tx.init(params), params

    def update(updates, state, params):
        updates, inner = tx.update(updates, state[0], params)
        return updates, (inner, optax.incremental_update(optax.apply_updates(params, updates), state[1], 0.5))

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "schedule-free": optax.contrib.schedule_free(optax.sgd(0.5), 0.5, b1=0.5),
    "running mean": averaged(optax.sgd(0.5, momentum=0.5)),
    "hyperparameters": optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.5, 0.25, 2), momentum=0.5),
    "micro-batches": optax.MultiSteps(optax.sgd(0.5, momentum=0.5), 2),
}
CASES = [
    *((name, {"layout": layout}) for name in OPTIMIZERS for layout in ("flat", "parameter")),
    ("schedule-free", {"order": "tree"}),
    ("micro-batches", {"layout": "parameter", "order": "tree"}),
    ("schedule-free", {"check_replicas": 2}),
]
PLAIN = [("schedule-free", {"layout": "flat"}), ("running mean", {"layout": "parameter"})]


def started(optimizer, specs, gradients):
    """A step, and the state before the first one."""

    def step(params, state, x):
        updates, state = optimizer.update(gradients(params, x), state, params)
        return optax.apply_updates(params, updates), state

    mesh = make_mesh((RANKS,))
    step = sharded(step, mesh=mesh, in_specs=(P(), specs, SHARDED), out_specs=(P(), specs), check_vma=False)
    return step, sharded(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False)(PARAMS)


def trained(optimizer, specs, gradients):
    step, state = started(optimizer, specs, gradients)
    params = PARAMS
    for _ in range(STEPS):
        params, state = step(params, state, BATCH)
    return params, state


@functools.cache
def replicated(name, wrapped=lambda tx: tx):
    return trained(wrapped(OPTIMIZERS[name]), P(), lambda params, _: jax.grad(loss)(params, BATCH))


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(*case, marks=pytest.mark.one_pair if case in PLAIN else pytest.mark.full) for case in CASES],
)
def test_has_the_bits_of_the_optimizer_itself(name, options):
    tx = OPTIMIZERS[name]
    # Operations on bfloat16 are rounded one by one where the layout is flat and the order that of the tree.
    is_rounded = options == {"order": "tree"}
    params, expected = replicated(name, zero.replicated_optimizer) if is_rounded else replicated(name)
    optimizer = zero.sharded_optimizer(tx, "i", **options)
    own, state = trained(optimizer, optimizer.specs(PARAMS), jax.grad(loss))
    assert_same_bits(own, params)
    whole = optimizer.unsharded(state, own)
    assert jax.tree.structure(whole) == jax.tree.structure(expected)
    assert_same_bits(whole, expected)
    if name == "schedule-free":
        of_state = optax.contrib.schedule_free_eval_params
        assert_same_bits(jax.jit(of_state)(whole, own), jax.jit(of_state)(expected, params))


@pytest.mark.parametrize("layout", ["flat", "parameter"])
def test_a_state_without_vectors(layout):
    optimizer = zero.sharded_optimizer(optax.sgd(optax.constant_schedule(0.5)), "i", layout=layout)
    _, state = trained(optimizer, optimizer.specs(PARAMS), jax.grad(loss))
    assert optax.tree.get(optimizer.unsharded(state, PARAMS), "count") == STEPS
    assert optax.tree.get(state, "count") == STEPS


@pytest.mark.parametrize("layout", ["flat", "parameter"])
def test_a_state_of_other_parameters_is_refused(layout):
    optimizer = zero.sharded_optimizer(optax.adam(1.0), "i", layout=layout)
    specs = optimizer.specs(PARAMS)
    state = sharded(optimizer.init, mesh=make_mesh((2,)), in_specs=P(), out_specs=specs, check_vma=False)(PARAMS)
    with pytest.raises(ValueError, match=r"sharded_optimizer: .*state"):
        optimizer.unsharded(state, {"w": np.ones(3000, np.float32)})


@pytest.mark.full
def test_lookahead_by_hand():
    """As the error says that refuses it."""
    fast = optax.sgd(0.5, momentum=0.5)
    whole = optax.lookahead(fast, 2, 0.5)
    expected = optax.LookaheadParams.init_synced(PARAMS)
    expected_state = whole.init(expected)
    optimizer = zero.sharded_optimizer(fast, "i")
    step, state = started(optimizer, optimizer.specs(PARAMS), jax.grad(loss))
    params = slow = jax.tree.map(jnp.asarray, PARAMS)
    for i in range(1, 6):
        updates, expected_state = whole.update(jax.grad(loss)(expected.fast, BATCH), expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, state = step(params, state, BATCH)
        if i % 2 == 0:
            slow = optax.incremental_update(params, slow, 0.5)
            params = slow
    assert_same_bits(params, expected.fast)
    assert_same_bits(slow, expected.slow)
