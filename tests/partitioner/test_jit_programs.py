"""Programs as people write them, of `jit` and NamedSharding alone, have the bits of XLA's and no collective of XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_partitioned_values import check

pytestmark = pytest.mark.full  # many programs of the same kinds

RNG = np.random.default_rng(0)


def put(shape, mesh, *spec):
    return jax.device_put(RNG.normal(size=shape).astype(np.float32), NamedSharding(mesh, P(*spec)))


def fully_sharded_layers():
    """Layers in a scan, rematerialised, whose weights are divided; clipping by the global norm and Adam."""
    mesh = make_mesh((8,), ("fsdp",))
    layers, x = put((5, 64, 64), mesh, None, "fsdp"), put((32, 64), mesh, "fsdp")
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def step(layers, state, x):
        def loss(layers):
            y, _ = lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w / 8), None)), x, layers)
            return ((y - x) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(layers)
        updates, state = tx.update(grads, state, layers)
        return value, lax.with_sharding_constraint(layers + updates, NamedSharding(mesh, P(None, "fsdp"))), state

    return step, (layers, jax.jit(tx.init)(layers), x)


def mixture_of_experts():
    """Each expert is on one device of a row; tokens go to the best one of each, up to a capacity."""
    mesh = make_mesh((2, 4), ("data", "expert"))
    num_experts, width, hidden, capacity = 8, 16, 32, 16
    ups, downs = put((num_experts, width, hidden), mesh, "expert"), put((num_experts, hidden, width), mesh, "expert")
    router, x = put((width, num_experts), mesh), put((64, width), mesh, ("data", "expert"))

    def loss(ups, downs, router, x):
        gates = jax.nn.softmax(x @ router)
        chosen = jax.nn.one_hot(gates.argmax(-1), num_experts)
        place = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1).astype(int)
        sent = chosen[:, :, None] * jax.nn.one_hot(place, capacity)[:, None, :]
        at_experts = jnp.einsum("tec,td->ecd", sent, x)
        at_experts = lax.with_sharding_constraint(at_experts, NamedSharding(mesh, P("expert")))
        y = jnp.einsum("ech,ehd->ecd", jax.nn.relu(jnp.einsum("ecd,edh->ech", at_experts, ups)), downs)
        y = jnp.einsum("tec,ecd->td", sent * gates.max(-1)[:, None, None], y)
        y = lax.with_sharding_constraint(y, NamedSharding(mesh, P(("data", "expert"))))
        return ((y - x) ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1, 2)), (ups, downs, router, x)


def heat_equation():
    """Steps of finite differences on a grid that is divided both ways: neighbours exchange their borders."""
    mesh = make_mesh((4, 2), ("x", "y"))

    def run(u):
        def step(u, _):
            laplacian = sum(jnp.roll(u, shift, axis) for shift in (1, -1) for axis in (0, 1)) - 4 * u
            return lax.with_sharding_constraint(u + 0.1 * laplacian, NamedSharding(mesh, P("x", "y"))), None

        u, _ = lax.scan(step, u, length=20)
        return u, jnp.linalg.norm(u)

    return run, (put((64, 64), mesh, "x", "y"),)


def sampler():
    """Hamiltonian Monte Carlo with the chains divided, and statistics over all of them."""
    mesh = make_mesh((8,), ("chains",))
    precision = jnp.array([[2.0, 0.5, 0, 0], [0.5, 1, 0, 0], [0, 0, 1, 0.2], [0, 0, 0.2, 3]])

    def log_density(q):
        return -0.5 * (q @ precision * q).sum(-1)

    slope = jax.vmap(jax.grad(log_density))

    def run(q, key):
        def step(old, key):
            momentum_key, accept_key = jax.random.split(key)
            q, p = old, jax.random.normal(momentum_key, old.shape)
            energy = log_density(q) - 0.5 * (p**2).sum(-1)
            for _ in range(5):
                p = p + 0.05 * slope(q)
                q = q + 0.1 * p
                p = p + 0.05 * slope(q)
            gain = log_density(q) - 0.5 * (p**2).sum(-1) - energy
            accepted = jnp.log(jax.random.uniform(accept_key, gain.shape)) < gain
            q = jnp.where(accepted[:, None], q, old)
            return q, (q.mean(0), accepted.mean(), jnp.quantile(q[:, 0], 0.5))

        return lax.scan(step, q, jax.random.split(key, 10))

    return run, (put((64, 4), mesh, "chains"), jax.random.key(0))


@pytest.mark.parametrize("make", [fully_sharded_layers, mixture_of_experts, heat_equation, sampler])
def test_the_bits_of_xla(make):
    fun, operands = make()
    assert check(fun, *operands).total() >= 2
