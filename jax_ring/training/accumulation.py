"""Gradient accumulation: a loss that is computed and differentiated one micro-batch at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring.collectives.vmap_axis import accumulator_dtype


def accumulate_gradients(
    fun: Callable[..., Any], num_microbatches: int, *, has_aux: bool = False
) -> Callable[..., Any]:
    """The same loss, computed and differentiated one micro-batch at a time, in the memory of one micro-batch.

    Differentiate the result with `value_and_grad`, with respect to its first argument. Its value is the mean of `fun`
    over the micro-batches, and its gradients are the mean of the gradients. They are added in a scan, in float32 if
    they have 16 bits or fewer, and reduced over the ranks once, after the scan.

        value_and_grad(accumulate_gradients(loss, 4), "data")(params, images, labels)

    Args:
      fun: a function of parameters and data, whose value is a mean over the data. If it communicates, it does so for
        every micro-batch.
      num_microbatches: the number of parts. Every leaf of the arguments after the first is split into so many equal
        blocks along its first dimension.
      has_aux: whether `fun` returns a pair. Its second part is stacked over the micro-batches.

    Returns:
      A function with the arguments of `fun`.

    Raises:
      ValueError: if `num_microbatches` is not positive or does not divide the first dimension of the data.
    """
    if num_microbatches < 1:
        raise ValueError(f"accumulate_gradients: num_microbatches must be at least 1, got {num_microbatches}")

    def accumulated(params, *data):
        microbatches = jax.tree_util.tree_map_with_path(partial(_split, num_microbatches), data)

        # Closing over the data makes it a constant: JAX raises if something differentiates with respect to it.
        @jax.custom_vjp
        def mean(params):
            values, aux = lax.map(lambda data: _as_pair(fun(params, *data), has_aux), microbatches)
            return values.mean(), aux

        def forward(params):
            def step(total, data):
                out, grads = jax.value_and_grad(fun, has_aux=has_aux)(params, *data)
                return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), _as_pair(out, has_aux)

            zeros = jax.tree.map(lambda p: jnp.zeros_like(p, accumulator_dtype(p.dtype)), params)
            total, (values, aux) = lax.scan(step, zeros, microbatches)
            return (values.mean(), aux), total

        def backward(total, cotangents):
            scale = cotangents[0] / num_microbatches
            return (jax.tree.map(lambda t, p: (t * scale.astype(t.dtype)).astype(p.dtype), total, params),)

        mean.defvjp(forward, backward)
        value, aux = mean(params)
        return (value, aux) if has_aux else value

    return accumulated


def _split(num_microbatches: int, path, x: jax.Array) -> jax.Array:
    if not x.ndim or x.shape[0] % num_microbatches:
        raise ValueError(
            f"accumulate_gradients: {num_microbatches} micro-batches do not divide the first dimension of the data at "
            f"{jax.tree_util.keystr(path)}, of shape {x.shape}"
        )
    return x.reshape(num_microbatches, x.shape[0] // num_microbatches, *x.shape[1:])


def _as_pair(out: Any, has_aux: bool) -> tuple:
    return out if has_aux else (out, None)
