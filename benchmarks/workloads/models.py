"""The models of the training-step benchmark, an MLP and a small GPT, as parameters and a loss."""

import jax
import jax.numpy as jnp
import numpy as np


def _normal(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]), dtype)


def mlp(dtype, *, width=512, layers=4, batch=32):
    """An MLP of about `layers * width**2` parameters. Returns (parameters, loss, batch of one device)."""
    rng = np.random.default_rng(0)
    params = [{"w": _normal(rng, (width, width), dtype), "b": jnp.zeros(width, dtype)} for _ in range(layers)]

    def loss(params, batch):
        x = batch
        for layer in params:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return jnp.mean((x - batch) ** 2)

    return params, loss, rng.standard_normal((batch, width)).astype(dtype)


def gpt(dtype, *, width=128, layers=4, heads=4, length=64, vocabulary=128, batch=4):
    """A decoder-only transformer of about `12 * layers * width**2` parameters. Returns the same as `mlp`."""
    rng = np.random.default_rng(0)

    def block():
        return {
            "norm1": jnp.ones(width, dtype),
            "qkv": _normal(rng, (width, 3 * width), dtype),
            "out": _normal(rng, (width, width), dtype),
            "norm2": jnp.ones(width, dtype),
            "up": _normal(rng, (width, 4 * width), dtype),
            "down": _normal(rng, (4 * width, width), dtype),
        }

    params = {
        "token": _normal(rng, (vocabulary, width), dtype),
        "position": _normal(rng, (length, width), dtype),
        "blocks": [block() for _ in range(layers)],
        "norm": jnp.ones(width, dtype),
    }
    mask = jnp.tril(jnp.ones((length, length), bool))

    def normed(x, scale):
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

    def attention(x, p):
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(width / heads)
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(x.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]

    def loss(params, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = params["token"][inputs] + params["position"]
        for p in params["blocks"]:
            x = x + attention(normed(x, p["norm1"]), p)
            x = x + jax.nn.gelu(normed(x, p["norm2"]) @ p["up"]) @ p["down"]
        logits = (normed(x, params["norm"]) @ params["token"].T).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))

    return params, loss, rng.integers(0, vocabulary, (batch, length + 1)).astype(np.int32)


MODELS = {"mlp": mlp, "gpt": gpt}
