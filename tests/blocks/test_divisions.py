"""Divisions by a broadcast, whose form XLA chooses by how often the divisor is used, on several numbers of ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import block_sum, value_and_grad

pytestmark = pytest.mark.full  # each number of ranks and each mesh compiles anew

PARTS = 6
RNG = np.random.default_rng(0)
W = RNG.standard_normal((PARTS, 7, 11)).astype(np.float32)
X = RNG.standard_normal((PARTS, 3, 7)).astype(np.float32)


def normalized(y, axis=-1):
    return y / y.sum(axis, keepdims=True)


def adjusted(y):
    """Divided by group, and by the largest magnitudes of both sides."""
    groups = y[:, :10].reshape(len(y), 2, 5)
    groups = groups / (1e-3 + jnp.abs(groups).max(-1, keepdims=True))
    return groups / (1 + jnp.abs(groups).sum((0, 1)))


def three_times(y):
    return lax.scan(lambda y, _: (jnp.tanh(y / (0.1 + jnp.abs(y).sum(-1, keepdims=True))), None), y, None, 3)[0]


FUNCTIONS = {
    "softmax": lambda y, w: jax.nn.softmax(y) * 3,
    "attention": lambda y, w: jax.nn.softmax(y @ y.T) @ y,
    "sum of magnitudes": lambda y, w: y / jnp.abs(y).sum(-1, keepdims=True),
    "columns": lambda y, w: y / jnp.sqrt((y**2).mean(0) + 1e-3),
    "layer norm": lambda y, w: (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5),
    "a scalar": lambda y, w: y / jnp.abs(y).sum(),
    "deviation": lambda y, w: (y - y.mean()) / y.std(),
    "used twice": lambda y, w: y / (1 + y.max(-1, keepdims=True) ** 2) + w[:3] / (1 + y.max(-1, keepdims=True) ** 2),
    "of weights": lambda y, w: y @ (w / jnp.linalg.norm(w, axis=0)).T,
    "log softmax": lambda y, w: jax.nn.log_softmax(y),
    "in a scan": lambda y, w: three_times(y),
    "groups": lambda y, w: adjusted(y),
    "half precision": lambda y, w: jax.nn.softmax(y.astype(jnp.bfloat16)).astype(y.dtype),
    "reciprocal": lambda y, w: y * (1 / (1 + (y**2).sum(-1, keepdims=True))),
    "cosines": lambda y, w: (y / jnp.linalg.norm(y, axis=-1, keepdims=True)) @ (w / jnp.linalg.norm(w, axis=0)).T,
    "rows, then columns": lambda y, w: normalized(normalized(jnp.exp(y)), 0),
}  # fmt: skip


def loss(function, w, x):
    y = function(x @ w, w)
    return (y * jnp.cos(y)).sum()


def of_shards(w, x):
    return {
        name: value_and_grad(functools.partial(lambda f, w, x: loss(f, w, x[0]), f), "i", num_shards=PARTS)(w[0], x)
        for name, f in FUNCTIONS.items()
    }


def of_blocks(w, x):
    def total(f, w, x):
        return block_sum(functools.partial(loss, f), "i", PARTS)(w, x)

    gradients = {
        name: jax.value_and_grad(functools.partial(total, f), (0, 1))(w, x[0]) for name, f in FUNCTIONS.items()
    }
    return {name: (value, dx) for name, (value, (_, dx)) in gradients.items()}, {
        name: dw for name, (_, (dw, _)) in gradients.items()
    }


WAYS = {
    "shards": (of_shards, (P(), P("i")), P()),
    "blocks": (of_blocks, (P("i"), P()), (P(), P("i"))),
}


@pytest.mark.parametrize("way", WAYS)
def test_bits_do_not_depend_on_the_number_of_ranks(way):
    fun, in_specs, out_specs = WAYS[way]
    results = [sharded(fun, mesh=make_mesh((ranks,)), in_specs=in_specs, out_specs=out_specs)(W, X) for ranks in (1, 6)]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results[0]))
    for result in results[1:]:
        assert_same_bits(result, results[0])
