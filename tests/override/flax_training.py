"""A typical data-parallel training script with flax, BatchNorm and optax, written without jax_ring.

Used by test_training_script.py. flax averages the statistics of BatchNorm over all devices with `lax.pmean`, and
gradients are clipped by their global norm. They are averaged explicitly with check_vma=False, and by the psum that
differentiation inserts for replicated parameters with check_vma=True.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

CLASSES = 10
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


class Net(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name="data")
        x = nn.relu(norm()(nn.Conv(8, (3, 3))(images)))
        x = nn.relu(norm()(nn.Dense(16)(x.mean((1, 2)))))
        return nn.Dense(CLASSES)(x)


def make_train_step(mesh, check_vma):
    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=check_vma
    )
    def train_step(state, images, labels):
        params, stats, opt_state = state

        def loss_fn(params):
            logits, updated = Net().apply(
                {"params": params, "batch_stats": stats}, images, train=True, mutable=["batch_stats"]
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            # With vma tracking, the gradient of the mean is the mean of the gradients.
            return lax.pmean(loss, "data") if check_vma else loss, updated["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        if not check_vma:
            loss, grads = lax.pmean((loss, grads), "data")
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    return train_step


def init_state():
    variables = Net().init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)
    return variables["params"], variables["batch_stats"], OPTIMIZER.init(variables["params"])


def batches(number, size=32):
    rng = np.random.default_rng(0)
    for _ in range(number):
        labels = rng.integers(0, CLASSES, size)
        images = rng.standard_normal((size, 8, 8, 1)) + labels[:, None, None, None] / CLASSES
        yield images.astype(np.float32), labels


def train(train_step, steps):
    """Returns the final state and the loss of each step."""
    state, losses = init_state(), []
    for images, labels in batches(steps):
        state, loss = train_step(state, images, labels)
        losses.append(float(loss))
    return jax.device_get(state), losses
