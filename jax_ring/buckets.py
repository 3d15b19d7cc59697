"""Sums of gradients over data-parallel ranks, in buckets that are planned when the program is traced."""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring import _compat
from jax_ring.agreement import check_agreement
from jax_ring.arguments import AxisName, axes_of, check_named, num_ranks, split_axes
from jax_ring.implementations import implementation

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that travel together."""

    dtype: np.dtype
    leaves: tuple[int, ...]  # places in jax.tree.leaves, in the order in which the backward pass makes them
    num_bytes: int


@dataclass(frozen=True)
class BucketPlan:
    """Which leaves of a tree travel together; made by `plan_buckets`. Prints as a table."""

    names: tuple[str, ...]  # of the leaves: their paths and types
    buckets: tuple[Bucket, ...]

    def __str__(self) -> str:
        total = sum(bucket.num_bytes for bucket in self.buckets)
        lines = [f"leaves: {len(self.names)}, bytes: {total}, buckets: {len(self.buckets)}"]
        for i, bucket in enumerate(self.buckets):
            lines.append(f"bucket {i}: {bucket.num_bytes} bytes of {bucket.dtype}")
            lines += [f"  {self.names[leaf]}" for leaf in bucket.leaves]
        return "\n".join(lines)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal plans, and for no others, in all processes."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


def plan_buckets(
    tree: Any, bucket_bytes: int = BUCKET_BYTES, first_bucket_bytes: int = FIRST_BUCKET_BYTES
) -> BucketPlan:
    """Decides which leaves of a tree of gradients travel together.

    Leaves are taken in the reverse order of `jax.tree.leaves`, because the backward pass makes the gradients of the
    last parameters first; each goes into the open bucket of its dtype, or opens a new one if it would make that too
    large. A leaf is never split. The plan depends on shapes, dtypes and sizes alone, so it is the same on all ranks.

    Args:
      tree: a pytree of arrays or `jax.ShapeDtypeStruct`s.
      bucket_bytes: bytes that a bucket holds at most; a larger leaf has a bucket of its own.
      first_bucket_bytes: the same for the first bucket of each dtype: a small one starts early.

    Raises:
      ValueError: if a size is not positive.
    """
    if bucket_bytes <= 0 or first_bucket_bytes <= 0:
        raise ValueError(
            "plan_buckets: bucket_bytes and first_bucket_bytes must be positive, got "
            f"{bucket_bytes} and {first_bucket_bytes}"
        )
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = tuple(
        f"{jax.tree_util.keystr(path) or 'the array'}: {leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in paths_and_leaves
    )
    contents: list[list[int]] = []
    sizes: list[int] = []
    dtypes: list[np.dtype] = []
    open_bucket: dict[np.dtype, int] = {}
    limits: dict[np.dtype, int] = {}
    for i, (_, leaf) in reversed(list(enumerate(paths_and_leaves))):
        dtype, size = np.dtype(leaf.dtype), math.prod(leaf.shape) * leaf.dtype.itemsize
        k = open_bucket.get(dtype)
        if k is None or sizes[k] + size > limits[dtype]:
            limits[dtype] = bucket_bytes if k is not None else min(first_bucket_bytes, bucket_bytes)
            k = open_bucket[dtype] = len(contents)
            contents.append([])
            sizes.append(0)
            dtypes.append(dtype)
        contents[k].append(i)
        sizes[k] += size
    buckets = tuple(Bucket(*fields) for fields in zip(dtypes, map(tuple, contents), sizes, strict=True))
    return BucketPlan(names, buckets)


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
