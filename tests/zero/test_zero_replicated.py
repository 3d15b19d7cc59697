"""Sharded and replicated optimizers: the same bits of parameters and state, compiled as users compile."""

import hashlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jax_ring import value_and_grad, zero

SHARDS, STEPS = 24, 3
OPTIMIZERS = {
    "sgd": optax.sgd(0.03, momentum=0.9, nesterov=True),
    "adam": optax.adam(optax.linear_schedule(1e-2, 1e-3, 7)),
    "adamw_clipped": optax.chain(zero.clip_by_global_norm(0.05, "i"), optax.adamw(1e-2, weight_decay=0.1)),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-2),  # 1 / sqrt(x) as one operation
    "accumulated": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),  # an update in a branch
}
RNG = np.random.default_rng(0)
# Sizes with all kinds of remainders; equal ones, whose divisors could be shared; a scalar.
PARAMS = {
    "w": RNG.standard_normal((70, 50)).astype(np.float32),
    "square": RNG.standard_normal((2, 50, 50)).astype(np.float32),
    "other": RNG.standard_normal((2, 50, 50)).astype(np.float32),
    "b": RNG.standard_normal(17).astype(np.float32),
    "half": RNG.standard_normal((50, 3)).astype(jnp.bfloat16),
    "s": np.float32(1.5),
}


def loss(params, x):
    h = jnp.tanh(x @ params["w"])
    for w in (params["square"] * params["other"]) / 7:
        h = jnp.tanh(h @ w)
    return ((h @ params["half"].astype(h.dtype)) ** 2).mean() * params["s"] + (params["b"] ** 2).sum() * x.mean()


def digests(ranks, stage):
    """By optimizer a digest of parameters and state after some steps; stage None is a replicated training."""
    mesh = jax.sharding.Mesh(jax.devices()[:ranks], ("i",))
    of_mean = value_and_grad(loss, "i", num_shards=SHARDS, reduce_gradients=stage is None)
    if stage is None:
        optimizers = {name: zero.replicated_optimizer(tx) for name, tx in OPTIMIZERS.items()}
        specs = P()
    else:
        num_shards = SHARDS if stage == 3 else None
        optimizers = {
            name: zero.sharded_optimizer(tx, "i", stage=stage, order="tree", num_shards=num_shards)
            for name, tx in OPTIMIZERS.items()
        }
        specs = {
            name: (x.param_specs(PARAMS) if stage == 3 else P(), x.specs(PARAMS)) for name, x in optimizers.items()
        }

    def start(params):
        held = {name: x.shard(params) if stage == 3 else params for name, x in optimizers.items()}
        return {name: (held[name], x.init(held[name])) for name, x in optimizers.items()}

    def step(carry, params, x):
        _, gradients = of_mean(params, x)  # of the first parameters: one loss for all optimizers
        result = {}
        for name, optimizer in optimizers.items():
            params, state = carry[name]
            updates, state = optimizer.update(gradients, state, params)
            result[name] = optax.apply_updates(params, updates), state
        return result

    carry = jax.jit(jax.shard_map(start, mesh=mesh, in_specs=P(), out_specs=specs))(PARAMS)
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P(), P("i")), out_specs=specs))
    for i in range(STEPS):
        carry = step(carry, PARAMS, np.random.default_rng(i).standard_normal((2 * SHARDS, 70)).astype(np.float32))
    found = {}
    for name, (params, state) in jax.device_get(carry).items():
        if stage is not None:
            state = optimizers[name].unsharded(state, params)
            params = params.whole() if stage == 3 else params
        found[name] = digest((params, state))
    return found


def digest(tree):
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))).hexdigest()[:12]


def main(*runs):
    jax.config.update("jax_num_cpu_devices", 8)
    for stage, ranks in runs:
        for name, found in digests(ranks, stage).items():
            print(name, stage, ranks, found, flush=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([(None, 1), (3, 3), (2, 2)], id="some", marks=pytest.mark.one_pair),
        pytest.param([(None, 3), (3, 8), (1, 2)], id="others"),
    ],
)
def test_the_bits_of_replicated_training(runs):
    from helpers import AS_USERS_COMPILE

    program = f"import sys; sys.path.insert(0, {__file__.rpartition('/')[0]!r})\n"
    program += f"import test_zero_replicated as t; t.main(*{runs!r})"
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], env=AS_USERS_COMPILE, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == len(runs) * len(OPTIMIZERS)
    for name in OPTIMIZERS:
        assert len({found for other, _, _, found in lines if other == name}) == 1, result.stdout


def test_on_one_device_without_a_mesh():
    """The update of optax up to rounding, with the state of optax."""
    tx = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-2))
    rounded = zero.replicated_optimizer(tx)
    gradients = jax.tree.map(lambda x: x * np.asarray(0.5, x.dtype), PARAMS)
    (got, state), (want, of_optax) = (jax.jit(x.update)(gradients, x.init(PARAMS), PARAMS) for x in (rounded, tx))
    assert jax.tree.structure(state) == jax.tree.structure(of_optax)
    for x, y in zip(jax.tree.leaves((got, state)), jax.tree.leaves((want, of_optax)), strict=True):
        assert x.dtype == y.dtype
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=1e-2 if np.asarray(y).size == 150 else 1e-5)


def test_derivatives_through_an_update():
    """As in MAML: those of optax."""
    values = {"w": np.float32([1, -2, 3]), "unused": np.float32([4])}

    def loss(params):
        return (params["w"] ** 3).sum()

    def derivatives(clip, wrapped):
        tx = wrapped(optax.chain(clip, optax.adamw(0.1, weight_decay=0.5)))

        def after_a_step(params):
            updates, _ = tx.update(jax.grad(loss)(params), tx.init(params), params)
            return loss(optax.apply_updates(params, updates))

        of_params = jax.grad(after_a_step)
        return jax.jit(lambda: (of_params(values), jax.jvp(of_params, (values,), (values,))[1]))()

    expected = derivatives(optax.clip_by_global_norm(1.0), lambda tx: tx)
    found = derivatives(zero.clip_by_global_norm(1.0, "i"), zero.replicated_optimizer)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), found, expected)


def test_it_is_an_optimizer():
    with pytest.raises(TypeError, match="replicated_optimizer: tx must be an optax GradientTransformation"):
        zero.replicated_optimizer(optax.adam)


def test_a_norm_of_some_gradients_is_refused():
    masked = optax.masked(zero.clip_by_global_norm(1.0, "i"), {name: name == "b" for name in PARAMS})
    with pytest.raises(
        ValueError, match=r"norm is that of all 6 gradients, and it got 1 of them.* in front of the mask"
    ):
        zero.replicated_optimizer(masked).update(PARAMS, masked.init(PARAMS), PARAMS)
