"""JAX's settings that refuse to promote dtypes and ranks: they are for users' code, and no feature needs them off."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import accumulate_gradients, block_max, block_sum, each_block, value_and_grad, zero

pytestmark = pytest.mark.one_pair  # other cases run with the newest pair

V = 8
MESH = make_mesh((4,))
HALF = {"w": np.full((3, 2), 0.5, jnp.bfloat16), "b": np.ones(2, jnp.bfloat16)}
PARAMS = {"half": HALF, "single": {**HALF, "w": np.full((3, 2), 0.5, np.float32)}}
X = (np.arange(96, dtype=np.float32) % 5 - 2).reshape(32, 3)
TX = optax.chain(zero.clip_by_global_norm(1.0, "i"), optax.sgd(0.5))
ROWS, WHOLE = P("i"), P()


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def run(fun, *args, in_specs, out_specs=WHOLE):
    f = jax.shard_map(fun, mesh=MESH, in_specs=in_specs, out_specs=out_specs)
    return jax.block_until_ready(jax.jit(f)(*args))


def loss(params, x):
    squares = (x.astype(params["w"].dtype) @ params["w"]) ** 2
    return squares.astype(jnp.float32).mean() + (params["b"].astype(jnp.float32) ** 2).sum()


def gradients(params, x, step):
    """Of every kind that is reduced by itself."""
    own = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params)
    return [
        value_and_grad(loss, "i")(params, x),
        value_and_grad(loss, "i", wire=jnp.float8_e5m2, check_replicas=step == 0)(params, x),
        value_and_grad(loss, "i", wire="int8")(params, x),
        value_and_grad(accumulate_gradients(loss, 2), "i")(params, x),
        value_and_grad(loss, "i", num_shards=V, audit=2, step=step, check_replicas=step == 0)(params, x),
        jax_ring.sync_with_feedback(own, jax.tree.map(jnp.zeros_like, own), "i", wire=jnp.float8_e5m2)[0],
        jax_ring.allreduce_gradients("i").update(own, jax_ring.allreduce_gradients("i").init(params))[0],
        jax_ring.broadcast_params(own, "i"),
        jax_ring.check_replicas(params, "i"),
        [jax_ring.weighted_pmean(y.mean(), w, "i") for y in (x, x.astype(int)) for w in (x.sum() ** 2, y.size)],
    ]


@pytest.mark.parametrize("dtypes", PARAMS)
def test_gradients(dtypes):
    run(gradients, PARAMS[dtypes], X, np.int32(0), in_specs=(WHOLE, ROWS, WHOLE))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_blocks(dtype):
    def fun(w, x):
        of_sum = jax.grad(lambda x: block_sum(lambda w, x: (x @ w) ** 2, "i", V)(w, x).astype(jnp.float32).sum())
        return (
            of_sum(x),
            block_max(lambda w, x: x @ w, "i")(w, x),
            block_sum(lambda w, x: x @ w, "i", V)(each_block(jnp.sin, w), x),
        )

    run(fun, np.ones((V, 3), dtype), np.ones((2, 3), dtype), in_specs=(ROWS, WHOLE))


@pytest.mark.parametrize("layout", ["flat", "parameter"])
@pytest.mark.parametrize("options", [{}, {"order": "tree"}, {"stage": 1, "wire": "int8"}, {"stage": 3}], ids=str)
def test_zero(layout, options):
    """With gradients of two dtypes for parameters of one."""
    params, is_divided = PARAMS["half"], options.get("stage") == 3
    optimizer = zero.sharded_optimizer(TX, "i", layout=layout, check_replicas=None if is_divided else 2, **options)

    def step(params):
        own = optimizer.shard(params) if is_divided else params
        grads = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params)
        return optimizer.update({**grads, "b": grads["b"].astype(jnp.float32)}, optimizer.init(own), own)

    specs = optimizer.param_specs(params) if is_divided else WHOLE, optimizer.specs(params)
    run(step, params, in_specs=(WHOLE,), out_specs=specs)


def test_replicated_optimizer_and_layers():
    params = PARAMS["half"]
    tx = zero.replicated_optimizer(TX)
    jax.jit(tx.update)(params, tx.init(params), params)
    optimizer = zero.sharded_optimizer(TX, "i", stage=3, order="tree", num_shards=V)
    layer = zero.sharded_layer(lambda p, x: loss(p, x), "i", num_shards=V)

    def fun(params, x):
        return jax.grad(lambda shards: layer(shards, x.reshape(V // 4, -1, 3)).sum())(optimizer.shard(params))

    run(fun, params, X, in_specs=(WHOLE, ROWS), out_specs=optimizer.param_specs(params))
