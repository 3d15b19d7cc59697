"""Sums of gradients over data-parallel ranks, a bucket at a time."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, check_named, num_ranks, split_axes
from jax_ring.distributed.agreement import check_agreement
from jax_ring.training.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, plan_buckets
from jax_ring.training.implementations import implementation


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed: the options of `sync_gradients`, which documents them."""

    impl: str = "ring"
    wire_dtype: Any = None
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES

    def __post_init__(self):
        implementation("sync_gradients", self.impl)
        if self.wire_dtype is not None and not jnp.issubdtype(self.wire_dtype, jnp.floating):
            raise TypeError(f"sync_gradients: wire_dtype must be a floating-point dtype, got {self.wire_dtype!r}")

    def narrow(self, x: jax.Array) -> jax.Array:
        """A leaf as it travels: floats that are wider than `wire_dtype` are rounded to it."""
        if self.wire_dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(self.wire_dtype) if jnp.finfo(self.wire_dtype).bits < jnp.finfo(x.dtype).bits else x

    def sum(self, function: str, tree: Any, axis_name: AxisName) -> Any:
        """The sums of leaves that already have the types in which they travel."""
        plan = plan_buckets(tree, self.bucket_bytes, self.first_bucket_bytes)
        check_agreement(function, f"over {axis_name!r}\n{plan}\nfingerprint {plan.fingerprint}")
        psum = implementation(function, self.impl).psum
        leaves, structure = jax.tree.flatten(tree)
        for bucket in plan.buckets:
            sums = psum([leaves[i] for i in bucket.leaves], axis_name)
            for i, total in zip(bucket.leaves, sums, strict=True):
                leaves[i] = total
        return jax.tree.unflatten(structure, leaves)


def sync_gradients(
    tree: Any,
    axis_name: AxisName,
    *,
    mean: bool = True,
    impl: str = "ring",
    wire_dtype: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> Any:
    """The mean over data-parallel ranks of the gradients that each has computed.

    Each bucket of `plan_buckets` is one call of `ring_psum`, which takes its leaves where they are. The result does
    not depend on the buckets, bit for bit.

    Args:
      tree: a pytree of this rank's gradients, alike on all ranks but for the values.
      axis_name: the name of a mapped axis, or a sequence of names, as for `ring_psum`.
      mean: whether the sum is divided by the number of ranks.
      impl: "ring" for the collectives of jax_ring, "lax" for those of `jax.lax`.
      wire_dtype: a floating-point dtype, to which wider floats are rounded before they are sent. The sum comes back
        rounded to it, too, and is then given the dtype that the leaf had. Half the traffic for a loss of precision;
        see `sync_with_feedback`.
      bucket_bytes, first_bucket_bytes: as for `plan_buckets`, of the types that travel.

    Raises:
      ValueError: with vma tracking, if a leaf is the same on all ranks, because its gradients have then been summed
        already (by JAX, if it was differentiated with respect to a replicated parameter); and if, in a program of
        several processes, these have different plans.
      TypeError: if `wire_dtype` is not a floating-point dtype.
      NameError, jax.errors.JaxRuntimeError: as `ring_psum`.
    """
    reduction = Reduction(impl, wire_dtype, bucket_bytes, first_bucket_bytes)
    check_local("sync_gradients", tree, axis_name)
    tree = jax.tree.map(jnp.asarray, tree)
    sums = reduction.sum("sync_gradients", jax.tree.map(reduction.narrow, tree), axis_name)
    return jax.tree.map(partial(_scaled, divisor=num_ranks(axes_of(axis_name)) if mean else 1), sums, tree)


def sync_with_feedback(
    tree: Any, residual: Any, axis_name: AxisName, *, wire_dtype: Any = jnp.bfloat16, mean: bool = True, **options: Any
) -> tuple[Any, Any]:
    """`sync_gradients` with a narrow `wire_dtype`, where what rounding took from a step is added to the next one.

    This is the error feedback of Seide et al., "1-Bit Stochastic Gradient Descent" (2014): each rank keeps the part of
    its gradients that was not sent. What the sum itself loses when it is rounded to `wire_dtype` is not fed back.

    Args:
      tree: as for `sync_gradients`.
      residual: what this function returned in the step before; zeros like the gradients in the first step. It differs
        between ranks, so that it leaves a `shard_map` by `out_specs=P(axis_name)`.
      axis_name, wire_dtype, mean: as for `sync_gradients`.
      **options: the others of `sync_gradients`.

    Returns:
      The gradients, and the residual for the next step.

    Raises:
      ValueError, TypeError, NameError, jax.errors.JaxRuntimeError: as `sync_gradients`.
    """
    reduction = Reduction(wire_dtype=wire_dtype, **options)
    check_local("sync_with_feedback", tree, axis_name)
    wanted = jax.tree.map(jnp.add, tree, residual)
    sent = jax.tree.map(reduction.narrow, wanted)
    sums = reduction.sum("sync_with_feedback", sent, axis_name)
    synced = jax.tree.map(partial(_scaled, divisor=num_ranks(axes_of(axis_name)) if mean else 1), sums, wanted)
    return synced, jax.tree.map(lambda x, s: x - s.astype(x.dtype), wanted, sent)


def _scaled(total: jax.Array, like: jax.Array, *, divisor: int) -> jax.Array:
    """A sum as it came, in the type of the leaf that was sent."""
    total = total.astype(like.dtype) if jnp.issubdtype(like.dtype, jnp.floating) else total
    return total if divisor == 1 else total / divisor


def check_local(function: str, tree: Any, axis_name: AxisName) -> None:
    """Refuses gradients that are the same on all ranks by their type: they are no longer one rank's."""
    check_named(function, axes_of(axis_name))
    if not _compat.check_vma():
        return
    _, axes = split_axes(_compat.skip_size_one_axes(axes_of(axis_name)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        same_over = [axis for axis in axes if axis not in _compat.varying_axes(leaf)]
        if same_over:
            raise ValueError(
                f"{function}: the leaf at {jax.tree_util.keystr(path) or 'the root'}, of type {jax.typeof(leaf)}, is "
                f"already the same on all ranks of {same_over}. Gradients with respect to replicated parameters are "
                "summed by JAX before they are seen, and a second reduction would make them too large by the number of "
                "ranks. Use jax_ring.value_and_grad instead of jax.value_and_grad, or cast the parameters before "
                f'they are differentiated: lax.pcast(params, {same_over}, to="varying").'
            )
