"""The same bits on any number of devices: ten steps of a small model."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import accumulate_gradients, shard_index, value_and_grad

STEPS, LENGTH, WIDTH, HEADS, WORDS = 10, 8, 8, 2, 16


def normed(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def loss(params, tokens, key):
    """A layer of attention and one of two matrices, with embeddings, layer norm, softmax and dropout."""
    x = params["words"][tokens[:, :-1]] + params["places"]
    x = normed(x, params["scale"])
    parts = (x @ params["attention"]).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = (parts[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    weights = jax.nn.softmax(jnp.where(jnp.tri(LENGTH, dtype=bool), q @ k.mT, -1e9))
    x = x + (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    key = jax.random.fold_in(key, shard_index())
    hidden = jax.nn.gelu(normed(x, params["scale"]) @ params["up"] + params["bias"])
    x = x + jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0) @ params["up"].T
    logits = (x @ params["words"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def parameters(dtype):
    rng = np.random.default_rng(0)
    shapes = {"words": (WORDS, WIDTH), "places": (LENGTH, WIDTH), "scale": (WIDTH,), "bias": (4 * WIDTH,),
              "attention": (WIDTH, 3 * WIDTH), "up": (WIDTH, 4 * WIDTH)}  # fmt: skip
    return {name: (rng.standard_normal(shape) / 3).astype(dtype) for name, shape in shapes.items()}


def digest(ranks, shards, dtype="float32", *, check_vma=True, microbatches=1, steps=STEPS):
    """A hash of the parameters, the state of the optimizer and the loss after some steps on so many devices."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    fun = accumulate_gradients(loss, microbatches, in_axes=(0, None)) if microbatches > 1 else loss

    def step(i, carry, tokens):
        params, state, _ = carry
        value, grads = value_and_grad(fun, "i", num_shards=shards, in_axes=(0, None))(
            params, tokens, jax.random.fold_in(jax.random.key(0), i)
        )
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    mapped = jax.shard_map(
        step, mesh=make_mesh((ranks,)), in_specs=(P(), P(), P("i")), out_specs=P(), check_vma=check_vma
    )
    compiled = jax.jit(mapped)
    rng = np.random.default_rng(1)
    params = parameters(dtype)
    carry = params, optimizer.init(params), np.float32(0)
    for i in range(steps):
        tokens = rng.integers(0, WORDS, (shards * microbatches, LENGTH + 1)).astype(np.int32)
        carry = compiled(i, carry, tokens)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(carry)]
    assert all(np.isfinite(leaf.astype(np.float32)).all() for leaf in leaves)
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


@pytest.mark.one_pair
def test_float32_on_any_number_of_devices():
    digests = {ranks: digest(ranks, 6, check_vma=ranks == 3) for ranks in (1, 3)}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.full
@pytest.mark.one_pair
def test_bfloat16_and_micro_batches():
    digests = {ranks: digest(ranks, 2, "bfloat16", microbatches=2) for ranks in (1, 2)}
    assert len(set(digests.values())) == 1, digests


def test_a_loss_of_few_bytes():
    """XLA may compile a small loop over shards as one function, but not the shard of a rank that has only one."""

    def loss(p, x, y):
        return ((x * p * p + p * 1.7 - 0.3).sum(1) * y).mean()

    shards, results = 4, []
    for ranks in (1, 2, 4):
        mapped = jax.shard_map(
            value_and_grad(loss, "i", num_shards=shards),
            mesh=make_mesh((ranks,)), in_specs=(P(), P("i"), P("i")), out_specs=P(),
        )  # fmt: skip
        compiled = jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 3})  # as users compile
        rng = np.random.default_rng(0)
        shapes = (6,), (3 * shards, 6), (3 * shards,)
        results.append(
            [
                np.asarray(leaf)
                for _ in range(20)
                for leaf in compiled(*[rng.standard_normal(shape, np.float32) for shape in shapes])
            ]
        )
    for others in results[1:]:
        assert_same_bits(others, results[0])
