"""A training step of flax whose BatchNorm averages its statistics over all devices, written without jax_ring."""

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

SIZES = {f"bn-{rows}x{features}": (rows, features) for rows, features in ((8, 64), (32, 256), (128, 512), (16, 1024))}
LAYERS = 4


def make_net(dtype, features: int, axis_name: str | None):
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(LAYERS):
                x = nn.Dense(features, dtype=dtype, param_dtype=dtype)(x)
                x = nn.relu(nn.BatchNorm(False, axis_name=axis_name, dtype=dtype, param_dtype=dtype)(x))
            return x

    return Net()


def initial(dtype, features: int):
    variables = make_net(dtype, features, None).init(jax.random.key(0), np.zeros((2, features), dtype))
    return variables["params"], variables["batch_stats"]


def make_batch(dtype, rows: int, features: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, features)).astype(dtype)


def keep_in_memory(grads, batch):
    """The gradients, in a program that writes them to memory as it would for a collective.

    Otherwise XLA fuses the update with what computes them, which can be slower than either by itself. The number of
    iterations is zero, but only the values tell. XLA removes `optimization_barrier` before it fuses.
    """
    times = (batch.reshape(-1)[0] > 1 << 30).astype(np.int32)

    def negate(carry):
        return carry[0] + 1, jax.tree.map(lambda g: -g, carry[1])

    return lax.while_loop(lambda carry: carry[0] < times, negate, (0, grads))[1]


def make_step(mesh, dtype, features: int, synced: bool):
    """The step, or the same without any collective, where each device trains by itself."""
    net = make_net(dtype, features, "data" if synced else None)

    def step(state, batch):
        params, stats = state

        def loss(params):
            out, updated = net.apply({"params": params, "batch_stats": stats}, batch, mutable=["batch_stats"])
            return ((out - batch) ** 2).mean(), updated["batch_stats"]

        grads, stats = jax.grad(loss, has_aux=True)(params)
        grads = lax.pmean(grads, "data") if synced else keep_in_memory(grads, batch)
        return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), params, grads), stats

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0)
