"""The sharded optimizer with layout="parameter": exact for every optimizer that updates each parameter by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SHARDED, make_mesh, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import sync_gradients, zero

REPLICATED = P()
RNG = np.random.default_rng(0)
PARAMS = {
    "embedding": RNG.standard_normal((24, 4)).astype(np.float32),
    "layers": [
        {"w": RNG.standard_normal((4, 6)).astype(np.float32), "b": RNG.standard_normal(6).astype(np.float32)},
        {"w": RNG.standard_normal((6, 4)).astype(np.float32), "b": RNG.standard_normal(4).astype(np.float32)},
    ],
    "half": RNG.standard_normal((4, 4)).astype(jnp.bfloat16),
    "scale": np.float32(1),
}


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "first" if "embedding" in str(path) else "rest", params)


OPTIMIZERS = {
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "lars": optax.lars(0.1, weight_decay=0.1, momentum=0.9),
    "muon": optax.contrib.muon(0.1, weight_decay=0.1),
    "mask by shape": optax.adamw(0.1, weight_decay=0.1, mask=matrices),
    "mask by tree": optax.adamw(0.1, weight_decay=0.1, mask=matrices(PARAMS)),
    "labels": optax.partition({"first": optax.sgd(0.1, momentum=0.9), "rest": optax.lamb(0.1)}, labels),
    "block rms": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1, momentum=0.9)),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.adam(0.1)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.adam(0.1)),
    "schedule": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.01, 3)),
    "every other step": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


def gradients_of(params, x):
    """Gradients of this rank's examples, cheap to compile, different for all ranks and elements."""
    return jax.tree.map(lambda p: (jnp.sin(p * (1 + x[0])) * x[1]).astype(p.dtype), params)


@functools.cache
def batch(ranks):
    return np.random.default_rng(1).standard_normal(2 * ranks).astype(np.float32)


def replicated_steps(tx, ranks, steps=3):
    def step(params, state, x):
        grads = sync_gradients(gradients_of(params, x), "i")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    specs = (REPLICATED, REPLICATED, SHARDED)
    f = sharded(step, mesh=make_mesh((ranks,)), in_specs=specs, out_specs=specs[:2], check_vma=False)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        params, state = f(params, state, batch(ranks))
    return params, state


class Sharded:
    def __init__(self, tx, ranks, check_vma=True, **options):
        self.mesh = make_mesh((ranks,))
        self.optimizer = zero.sharded_optimizer(tx, "i", layout="parameter", **options)
        self.specs = self.optimizer.specs(PARAMS)

        def step(params, state, x):
            own = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params) if check_vma else params
            updates, state = self.optimizer.update(gradients_of(own, x), state, params)
            return optax.apply_updates(params, updates), state

        common = {"mesh": self.mesh, "check_vma": check_vma}
        specs = (REPLICATED, self.specs, SHARDED)
        self.step = sharded(step, in_specs=specs, out_specs=specs[:2], **common)
        self.params = jax.device_put(PARAMS, NamedSharding(self.mesh, REPLICATED))
        self.state = sharded(self.optimizer.init, in_specs=REPLICATED, out_specs=self.specs, **common)(PARAMS)

    def run(self, steps=3):
        for _ in range(steps):
            self.params, self.state = self.step(self.params, self.state, batch(self.mesh.size))
        return self.params


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=2e-5 if a.dtype == jnp.float32 else 2e-2
        ),
        actual,
        expected,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_match_the_unsharded_optimizer(name, check_vma):
    tx = OPTIMIZERS[name]
    assert_close(Sharded(tx, 4, check_vma).run(), replicated_steps(tx, 4)[0])
