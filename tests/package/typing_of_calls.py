"""A user's program for mypy: see test_typing.py. Lines that mypy must refuse name the code of its error."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_ring
from jax_ring import ring_all_gather, ring_pmax, ring_pmean, ring_psum, ring_psum_scatter, sync_gradients, zero

x: jax.Array = jnp.ones(8)
tree: dict[str, jax.Array] = {"a": x}

# The type of the argument comes back.
total: jax.Array = ring_psum(x, "i", algorithm="one_shot", order="rank")
fastest: jax.Array = ring_psum(x, "i", order="any")
sums: dict[str, jax.Array] = ring_psum(tree, "i")
means: dict[str, jax.Array] = ring_pmean(tree, ("i", "j"))
block: jax.Array = ring_psum_scatter(x, "i", tiled=True)
whole: tuple[jax.Array, int] = ring_all_gather((x, 1), "i", to="invarying")
turned: list[jax.Array] = jax_ring.ring_ppermute([x], "i", [(0, 1), (1, 0)])
exchanged: dict[str, jax.Array] = jax_ring.ring_all_to_all(tree, ("i", "j"), 0, 0, tiled=True)
swapped: jax.Array = jax_ring.ring_pswapaxes(jax_ring.ring_pshuffle(x, "i", [1, 0]), "i", 0)
received: jax.Array = jax_ring.ring_ragged_all_to_all(x, x, x, x, x, x, axis_name="i")
copied: dict[str, jax.Array] = jax_ring.ring_pbroadcast(tree, "i", x)
jax_ring.ring_ppermute(x, "i", [0, 1])  # refused: list-item
jax_ring.ring_all_to_all(x, "i", 0)  # refused: call-arg
jax_ring.ring_pbroadcast(x, "i", "0")  # refused: arg-type
synced: dict[str, jax.Array] = sync_gradients(tree, "i", wire=jnp.bfloat16)
sent: dict[str, jax.Array] = sync_gradients(tree, "i", wire="bfloat16")
copies: dict[str, jax.Array] = jax_ring.broadcast_params(tree, "i", root=1)
number: int = ring_psum(x, "i")  # refused: assignment
other: list[jax.Array] = ring_psum(tree, "i")  # refused: arg-type

# Options with fixed choices.
ring_psum(x, "i", algorithm="oneshot")  # refused: arg-type
ring_psum(x, "i", order="tree_order")  # refused: arg-type
ring_pmax(x, "i", algorithm="fast")  # refused: arg-type
ring_all_gather(x, "i", algorithm="ring")  # refused: call-arg
ring_all_gather(x, "i", to="invariant")  # refused: arg-type
sync_gradients(tree, "i", order="nccl")  # refused: arg-type
ring_psum(x, "i", algorithms="ring")  # refused: call-arg


def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return (params["a"] * batch).sum()


# Options that are passed on.
step: Callable[[dict[str, jax.Array], jax.Array], tuple[Any, Any]] = jax_ring.value_and_grad(
    loss, "i", bucket_bytes=1 << 20, wire=jnp.bfloat16
)
jax_ring.grad(loss, "i", wire=jnp.float16, allow_int=True, holomorphic=False)
jax_ring.grad(loss, "i", wire=3)  # refused: arg-type
jax_ring.allreduce_gradients("i", wire="float16", error_feedback=True)
jax_ring.sync_with_feedback(tree, tree, "i", wire=jnp.float16)
step(tree, x)
step(x)  # refused: call-arg, arg-type
jax_ring.value_and_grad(loss, "i")(tree)  # refused: call-arg
jax_ring.value_and_grad(loss, "i", bucket_byte=1 << 20)  # refused: call-arg
jax_ring.grad(loss, "i", order="gloo")  # refused: arg-type
jax_ring.reduce_in_backward(tree, "i", wire_dtyp=jnp.bfloat16)  # refused: call-arg
jax_ring.allreduce_gradients("i", error_feedback=True, bucket_bytes="1 MiB")  # refused: arg-type
jax_ring.sync_with_feedback(tree, tree, "i", first_bucket_byte=1)  # refused: call-arg
optimizer: jax_ring.ShardedOptimizer = zero.sharded_optimizer(optax.adam(1e-3), "i", stage=1)
zero.sharded_optimizer(optax.adam(1e-3), "i", stage=4)  # refused: arg-type
plan: jax_ring.BucketPlan = jax_ring.plan_buckets(tree)
found: jax_ring.Explanation = jax_ring.explain(loss, tree, x)
override: jax_ring.Override = jax_ring.override_lax()
