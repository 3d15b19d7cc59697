"""The functions for outside of `shard_map`, on a mesh of explicit axes, which is what `jax.make_mesh` returns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_ring import zero

RANKS = 4
PARAMS = {"w": np.arange(333, dtype=np.float32).reshape(37, 9), "half": np.ones(300, jnp.bfloat16), "s": np.float32(2)}


OPTIONS = {"flat": {}, "tree": {"order": "tree", "num_shards": 12}, "parameter": {"layout": "parameter"}}


@functools.cache
def started(axis_type, stage, options):
    """An optimizer, its state after a step, and its parameters, or shards of them."""
    optimizer = zero.sharded_optimizer(optax.adam(0.5), "data", stage=stage, **OPTIONS[options])
    is_divided = stage == 3

    def step():
        params = optimizer.shard(PARAMS) if is_divided else PARAMS
        rank = jax.lax.axis_index("data") + 1
        gradients = jax.tree.map(lambda x: x * rank.astype(x.dtype), PARAMS)
        return params, optimizer.update(gradients, optimizer.init(params), params)[1]

    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(axis_type,))
    out_specs = optimizer.param_specs(PARAMS) if is_divided else P(), optimizer.specs(PARAMS)
    params, state = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(), out_specs=out_specs, check_vma=False))()
    return optimizer, state, params


@pytest.mark.parametrize(
    ("num_ranks", "jit"),
    [
        pytest.param(3, False, id="3", marks=pytest.mark.one_pair),
        pytest.param(RANKS, False, id="4", marks=pytest.mark.full),
        pytest.param(3, True, id="jit", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stage", [2, 3])
def test_as_with_axes_that_the_compiler_divides(stage, options, num_ranks, jit):
    def outside(optimizer, state, params):
        whole = params.whole() if stage == 3 else params
        return optimizer.repartition(state, params, num_ranks), optimizer.unsharded(state, params), whole

    found = []
    for axis_type in (AxisType.Explicit, AxisType.Auto):
        optimizer, state, params = started(axis_type, stage, options)
        f = functools.partial(outside, optimizer)
        found.append((jax.jit(f) if jit else f)(state, params))
    assert_same_bits(*found)


def test_stacked_shards():
    optimizer = zero.sharded_optimizer(optax.sgd(0.5), "data", stage=3)
    layers = jax.tree.map(lambda x: np.stack([x, x + 1, x + 2]), PARAMS)
    mesh = jax.make_mesh((RANKS,), ("data",))
    shards = jax.jit(
        jax.shard_map(jax.vmap(optimizer.shard), mesh=mesh, in_specs=P(), out_specs=P(None, "data"), check_vma=False)
    )(layers)
    assert_same_bits(shards.whole(), layers)
