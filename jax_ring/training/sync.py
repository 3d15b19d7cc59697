"""Sums of gradients over data-parallel ranks, one bucket at a time."""

import difflib
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, check_named, num_ranks, split_axes
from jax_ring.distributed.agreement import check_agreement
from jax_ring.training.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, check_bucket_bytes, plan_buckets
from jax_ring.training.implementations import Impl, implementation

T = TypeVar("T")  # a pytree: results have the structure of the argument


class BucketOptions(TypedDict, total=False):
    """Keyword arguments of the functions that reduce gradients; `sync_gradients` documents them."""

    impl: Impl
    bucket_bytes: int
    first_bucket_bytes: int


class ReductionOptions(BucketOptions, total=False):
    """`BucketOptions` and `wire_dtype`."""

    wire_dtype: DTypeLike | None


@dataclass(frozen=True)
class Reduction:
    """How a public function reduces gradients: its name, for errors, and the options of `sync_gradients`."""

    function: str
    impl: Impl = "ring"
    wire_dtype: DTypeLike | None = None
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES

    @classmethod
    def of(cls, function: str, options: ReductionOptions) -> Self:
        """The reduction for the keyword arguments of `function`.

        Raises:
          TypeError: for an unknown keyword argument. It names `function`, as Python does for any other function.
        """
        known = [*ReductionOptions.__annotations__]
        for name in options:
            if name not in known:
                similar = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean {similar[0]!r}?" if similar else f"The options are {', '.join(known)}."
                raise TypeError(f"{function}() got an unexpected keyword argument {name!r}. {hint}")
        return cls(function, **options)

    def __post_init__(self):
        implementation(self.function, self.impl)
        if self.wire_dtype is not None and not jnp.issubdtype(self.wire_dtype, jnp.floating):
            raise TypeError(f"{self.function}: wire_dtype must be a floating-point dtype, got {self.wire_dtype!r}")
        check_bucket_bytes(self.function, self.bucket_bytes, self.first_bucket_bytes)

    def narrow(self, x: jax.Array) -> jax.Array:
        """A leaf as it is sent: floats wider than `wire_dtype` are rounded to it."""
        if self.wire_dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(self.wire_dtype) if jnp.finfo(self.wire_dtype).bits < jnp.finfo(x.dtype).bits else x

    def sum(self, tree: Any, axis_name: AxisName) -> Any:
        """The sums over the ranks of leaves that already have the dtypes in which they are sent."""
        plan = plan_buckets(tree, self.bucket_bytes, self.first_bucket_bytes)
        check_agreement(self.function, f"over {axis_name!r}\n{plan}\nfingerprint {plan.fingerprint}")
        psum = implementation(self.function, self.impl).psum
        leaves, structure = jax.tree.flatten(tree)
        for bucket in plan.buckets:
            sums = psum([leaves[i] for i in bucket.leaves], axis_name)
            for i, total in zip(bucket.leaves, sums, strict=True):
                leaves[i] = total
        return jax.tree.unflatten(structure, leaves)

    def synced(self, tree: Any, axis_name: AxisName, mean: bool) -> Any:
        """The sums or means of this rank's gradients, in their own dtypes."""
        check_local(self.function, tree, axis_name)
        tree = jax.tree.map(jnp.asarray, tree)
        sums = self.sum(jax.tree.map(self.narrow, tree), axis_name)
        return jax.tree.map(partial(_scaled, divisor=num_ranks(axes_of(axis_name)) if mean else 1), sums, tree)

    def synced_with_feedback(self, tree: Any, residual: Any, axis_name: AxisName, mean: bool) -> tuple[Any, Any]:
        """The same for the gradients plus the residual of the last step; and the residual of this step."""
        check_local(self.function, tree, axis_name)
        wanted = jax.tree.map(jnp.add, tree, residual)
        sent = jax.tree.map(self.narrow, wanted)
        sums = self.sum(sent, axis_name)
        synced = jax.tree.map(partial(_scaled, divisor=num_ranks(axes_of(axis_name)) if mean else 1), sums, wanted)
        return synced, jax.tree.map(lambda x, s: x - s.astype(x.dtype), wanted, sent)


def sync_gradients(
    tree: T,
    axis_name: AxisName,
    *,
    mean: bool = True,
    impl: Impl = "ring",
    wire_dtype: DTypeLike | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> T:
    """The mean over data-parallel ranks of the gradients that each rank has computed.

    Each bucket of `plan_buckets` is one call of `ring_psum`, which reads its leaves in place. The result does not
    depend on the buckets, bit for bit.

    Args:
      tree: a pytree of this rank's gradients. Its structure, shapes and dtypes are the same on all ranks.
      axis_name: the name of a mapped axis, or a sequence of names, as for `ring_psum`.
      mean: whether to divide the sum by the number of ranks.
      impl: "ring" for the collectives of jax_ring, "lax" for those of `jax.lax`.
      wire_dtype: a floating-point dtype. Wider floats are rounded to it before they are sent, and so is their sum,
        which is then cast back to the dtype of the leaf. Half the traffic for a loss of precision; see
        `sync_with_feedback`.
      bucket_bytes, first_bucket_bytes: as for `plan_buckets`, counted in the dtypes that are sent.

    Returns:
      A pytree like `tree`, the same on all ranks.

    Raises:
      ValueError: with vma tracking, if a leaf is already the same on all ranks, because its gradients have then been
        summed before (by JAX, if they are with respect to a replicated parameter); and in a program of several
        processes, if their plans differ.
      TypeError: if `wire_dtype` is not a floating-point dtype.
      NameError, jax.errors.JaxRuntimeError: as `ring_psum`.
    """
    reduction = Reduction("sync_gradients", impl, wire_dtype, bucket_bytes, first_bucket_bytes)
    return reduction.synced(tree, axis_name, mean)


def sync_with_feedback(
    tree: T,
    residual: T,
    axis_name: AxisName,
    *,
    wire_dtype: DTypeLike = jnp.bfloat16,
    mean: bool = True,
    **options: Unpack[BucketOptions],
) -> tuple[T, T]:
    """`sync_gradients` with a narrow `wire_dtype`; adds the rounding error of each step to the next one.

    This is the error feedback of Seide et al., "1-Bit Stochastic Gradient Descent" (2014): each rank keeps the part of
    its gradients that was not sent. The error of rounding the sum itself to `wire_dtype` is not fed back.

    Args:
      tree: as for `sync_gradients`.
      residual: the second result of the previous step; zeros like the gradients in the first step. It differs between
        ranks, so it leaves a `shard_map` by `out_specs=P(axis_name)`.
      axis_name, wire_dtype, mean: as for `sync_gradients`.
      **options: `impl`, `bucket_bytes` and `first_bucket_bytes`, as for `sync_gradients`.

    Returns:
      The gradients, and the residual for the next step.

    Raises:
      ValueError, TypeError, NameError, jax.errors.JaxRuntimeError: as `sync_gradients`.
    """
    reduction = Reduction.of("sync_with_feedback", {**options, "wire_dtype": wire_dtype})
    return reduction.synced_with_feedback(tree, residual, axis_name, mean)


def _scaled(total: jax.Array, like: jax.Array, *, divisor: int) -> jax.Array:
    """A sum, divided and cast to the dtype of the leaf; sums of integers keep theirs."""
    total = total.astype(like.dtype) if jnp.issubdtype(like.dtype, jnp.floating) else total
    return total if divisor == 1 else total / divisor


def check_local(function: str, tree: Any, axis_name: AxisName) -> None:
    """Raises ValueError for gradients whose type says that they are the same on all ranks: they are already summed."""
    check_named(function, axes_of(axis_name))
    if not _compat.check_vma():
        return
    _, axes = split_axes(_compat.skip_size_one_axes(axes_of(axis_name)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        same_over = [axis for axis in axes if axis not in _compat.varying_axes(leaf)]
        if same_over:
            raise ValueError(
                f"{function}: the leaf at {jax.tree_util.keystr(path) or 'the root'}, of type {jax.typeof(leaf)}, is "
                f"already the same on all ranks of {same_over}. JAX sums gradients with respect to replicated "
                "parameters before returning them, and a second reduction would make them too large by the number of "
                "ranks. Use jax_ring.value_and_grad instead of jax.value_and_grad, or cast the parameters before "
                f'differentiating: lax.pcast(params, {same_over}, to="varying").'
            )
