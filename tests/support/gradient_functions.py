"""A call of each function of gradients, which takes its options."""

import jax_ring


def loss(params, x):
    return (params * x).sum()


CALLS = {
    "value_and_grad": lambda **options: jax_ring.value_and_grad(loss, "i", **options),
    "grad": lambda **options: jax_ring.grad(loss, "i", **options),
    "reduce_in_backward": lambda **options: jax_ring.reduce_in_backward(1.0, "i", **options),
    "allreduce_gradients": lambda **options: jax_ring.allreduce_gradients("i", **options),
    "sync_gradients": lambda **options: jax_ring.sync_gradients(1.0, "i", **options),
    "sync_with_feedback": lambda **options: jax_ring.sync_with_feedback(1.0, 0.0, "i", **options),
}
