"""Buckets of gradients that one call reduces, planned at trace time."""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.options import path_text

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype in one call.

        first = jax_ring.plan_buckets(params).buckets[0]

    Attributes:
      leaves: positions in `jax.tree.leaves`, in the order of the backward pass.
    """

    dtype: np.dtype
    leaves: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class BucketPlan:
    """The result of `plan_buckets`; prints as a table.

        plan = jax_ring.plan_buckets(params)
        first_reduced = [plan.names[i] for i in plan.buckets[0].leaves]

    Attributes:
      names: the leaves' paths and types, in the order of `jax.tree.leaves`.
      buckets: in the order of reduction.
    """

    names: tuple[str, ...]
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
        """The plan's hash, the same in all processes."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


def check_bucket_bytes(function: str, bucket_bytes: Any, first_bucket_bytes: Any) -> None:
    """Raises unless both sizes are positive integers."""
    for name, value in (("bucket_bytes", bucket_bytes), ("first_bucket_bytes", first_bucket_bytes)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{function}: {name} must be a whole number of bytes, got {value!r}")
        if value <= 0:
            raise ValueError(f"{function}: {name} must be positive, got {value}")


def plan_buckets(
    tree: Any, bucket_bytes: int = BUCKET_BYTES, first_bucket_bytes: int = FIRST_BUCKET_BYTES
) -> BucketPlan:
    """Plans which gradients share a bucket.

        print(jax_ring.plan_buckets(params, bucket_bytes=4 << 20))

    Leaves are taken in reverse, because the backward pass begins with the last parameters. Each is added to its dtype's
    open bucket, or opens a new one, and is never split. Gradients of integers (float0) have no bucket. The plan depends
    on shapes, dtypes and sizes alone: all ranks have the same.

    Args:
      tree: of arrays or `jax.ShapeDtypeStruct`.
      bucket_bytes: the most in a bucket; a larger leaf has its own.
      first_bucket_bytes: the most in each dtype's first bucket; a small one starts early.

    Raises:
      ValueError: if a size is not positive.
      TypeError: if a size is no integer, or a leaf no array of numbers.
    """
    check_bucket_bytes("plan_buckets", bucket_bytes, first_bucket_bytes)
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = tuple(
        f"{path_text(path, 'the array')}: {_dtype_of(path, leaf)}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in paths_and_leaves
    )
    buckets: list[Bucket] = []
    last: dict[np.dtype, int] = {}  # each dtype's open bucket
    room: dict[np.dtype, int] = {}  # and the bytes that are left in it
    for i, (_, leaf) in reversed(list(enumerate(paths_and_leaves))):
        if leaf.dtype == jax.dtypes.float0:
            continue
        dtype, size = np.dtype(leaf.dtype), math.prod(leaf.shape) * leaf.dtype.itemsize
        if dtype not in last or size > room[dtype]:
            room[dtype] = bucket_bytes if dtype in last else min(first_bucket_bytes, bucket_bytes)
            last[dtype] = len(buckets)
            buckets.append(Bucket(dtype, (), 0))
        bucket = buckets[last[dtype]]
        buckets[last[dtype]] = Bucket(dtype, (*bucket.leaves, i), bucket.num_bytes + size)
        room[dtype] -= size
    return BucketPlan(names, tuple(buckets))


def _dtype_of(path: Any, leaf: Any) -> np.dtype:
    """A leaf's dtype. Raises TypeError unless it can be a gradient's."""
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype) or not (
        jnp.issubdtype(dtype, jnp.number) or dtype in (np.bool_, jax.dtypes.float0)
    ):
        raise TypeError(
            f"plan_buckets: the leaf at {path_text(path)} of tree must be an array of numbers or a "
            f"jax.ShapeDtypeStruct, got {leaf!r}"
        )
    return dtype
