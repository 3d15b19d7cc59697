"""Models of flax and equinox and a solver of optax: what the extra `test` brings. CI runs these."""

import jax
import jax.numpy as jnp
import numpy as np

from programs.registry import divide, program, put


@program("flax", data=4)
def flax_batch_norm(mesh):
    """flax.nnx: convolutions with batch norm and dropout, optimized by optax; parameters whole, the batch divided."""
    import optax
    from flax import nnx

    rng = np.random.default_rng(0)
    x = put(rng.normal(size=(32, 8, 8, 1)).astype(np.float32), mesh, "data")
    labels = put(rng.integers(0, 4, 32), mesh, "data")
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Conv(1, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.relu, nnx.Dropout(0.1, rngs=rngs),
        lambda x: nnx.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1), nnx.Linear(128, 4, rngs=rngs),
    )  # fmt: skip
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    nnx.update((model, optimizer), put(nnx.state((model, optimizer)), mesh))

    @nnx.jit
    def step(model, optimizer, x, labels):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    def calculate():
        losses = [step(model, optimizer, x, labels) for _ in range(3)]
        return losses, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))

    return calculate


@program("equinox", data=2, model=2)
def equinox_attention(mesh):
    """equinox: attention and an MLP over a batch, weights divided over one axis and the batch over the other."""
    import equinox as eqx
    import optax

    keys = jax.random.split(jax.random.key(0), 3)
    x = put(jax.random.normal(keys[0], (8, 6, 16)), mesh, "data")
    model = (eqx.nn.MultiheadAttention(4, 16, key=keys[1]), eqx.nn.MLP(16, 16, 64, 2, key=keys[2]))
    arrays, static = eqx.partition(model, eqx.is_array)
    model = eqx.combine(divide(arrays, mesh, "model"), static)
    tx = optax.adam(1e-2)
    state = eqx.filter_jit(tx.init)(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, x):
        @eqx.filter_value_and_grad
        def loss(model):
            attention, mlp = model
            return jnp.mean((jax.vmap(lambda row: jax.vmap(mlp)(attention(row, row, row)))(x) - x) ** 2)

        value, grads = loss(model)
        updates, state = tx.update(grads, state)
        return value, eqx.apply_updates(model, updates), state

    def calculate():
        losses, now, of_tx = [], model, state
        for _ in range(3):
            value, now, of_tx = step(now, of_tx, x)
            losses.append(value)
        return losses, eqx.filter(now, eqx.is_array)

    return calculate


@program("optax", data=4)
def optax_lbfgs(mesh):
    """optax: L-BFGS with its line search, a while loop within a scan, for a logistic regression on divided rows."""
    import optax

    rng = np.random.default_rng(0)
    x = put(rng.normal(size=(256, 12)).astype(np.float32), mesh, "data")
    y = put(rng.integers(0, 2, 256).astype(np.float32), mesh, "data")
    tx = optax.lbfgs()

    @jax.jit
    def fit(x, y):
        def loss(w):
            return optax.sigmoid_binary_cross_entropy(x @ w, y).mean() + 1e-3 * (w @ w)

        value_and_grad = optax.value_and_grad_from_state(loss)

        def step(carry, _):
            w, state = carry
            value, grad = value_and_grad(w, state=state)
            updates, state = tx.update(grad, state, w, value=value, grad=grad, value_fn=loss)
            return (optax.apply_updates(w, updates), state), value

        w = jnp.zeros(x.shape[1])
        return jax.lax.scan(step, (w, tx.init(w)), length=8)

    return lambda: fit(x, y)
