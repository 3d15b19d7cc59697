"""Sums of gradients over data-parallel ranks, by buckets."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, axes_of_equality, check_named, num_ranks
from jax_ring.collectives.quantized import quantized_psum
from jax_ring.collectives.shard_sums import ShardSums
from jax_ring.distributed.discovery import check_agreement
from jax_ring.lowering.trees import accumulator
from jax_ring.options import ORDERS, Order, check_arrays, check_choice, path_text
from jax_ring.training.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, check_bucket_bytes, plan_buckets
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.trees import is_float0, merge, split
from jax_ring.training.wire import UNCHANGED, FloatWire, Int8Wire, collectives_here, is_by_lax, wire_of

T = TypeVar("T")  # a pytree: results keep the structure of the argument


class ReductionOptions(TypedDict, total=False):
    """How gradients are reduced: keyword arguments of `sync_gradients`, `value_and_grad` and others.

        options: jax_ring.ReductionOptions = {"wire": jnp.bfloat16, "bucket_bytes": 4 << 20}
        grads = jax_ring.sync_gradients(grads, "data", **options)

    Attributes:
      bucket_bytes: the most bytes in a bucket, in the dtypes sent; a larger leaf has its own. By default 25 MiB.
      first_bucket_bytes: the most in each dtype's first bucket, by default 1 MiB: a small one starts early.
      wire: a floating-point dtype, to which wider floats and their sum are rounded; or "int8", for groups of 256
        integers with a common scale. By default nothing is rounded. docs/compression.md has ranges, errors and bytes.
      key: a random key, the same on all ranks and new in each step, for stochastic rounding with wire="int8". The
        default is to nearest, ties to even.
      overlap: whether GPUs run jax_ring's calls beside computation (docs/gpu.md), as they do by default. No effect on
        results or CPU devices.
      order: of addition: "rank", the default, "ring", "any" or "tree". `ring_psum` says what they are.
    """

    bucket_bytes: int
    first_bucket_bytes: int
    wire: DTypeLike | None
    key: jax.Array | None
    overlap: bool
    order: Order


class Reduced(NamedTuple):
    """Divided sums, in the leaves' dtypes; what this rank has not sent, with feedback; the means of `value`."""

    tree: Any
    residual: Any
    value: Any


@dataclass(frozen=True)
class Reduction:
    """A public function's reduction: its name, for errors, and `ReductionOptions`.

    Attributes:
      after_last: whether what is computed from the sums comes after what the last leaf of `value` is computed from,
        such as digests of parameters: if the update could overwrite these first, XLA would copy them in every step.
    """

    function: str
    order: Order = "rank"
    wire: FloatWire | Int8Wire = UNCHANGED
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    overlap: bool = True
    after_last: bool = False

    @classmethod
    def of(cls, function: str, options: ReductionOptions) -> Self:
        """The reduction for `function`'s keyword arguments. TypeError for an unknown one, as Python raises it."""
        known = [*ReductionOptions.__annotations__]
        for name in options:
            if name not in known:
                if name == "mean":
                    raise TypeError(
                        f"{function}() has no argument 'mean': jax_ring.value_and_grad takes means over the ranks. For "
                        "sums multiply the loss by the number of ranks, or pass this rank's own gradients to "
                        "sync_gradients(..., mean=False)."
                    )
                similar = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean {similar[0]!r}?" if similar else f"The options are {', '.join(known)}."
                raise TypeError(f"{function}() got an unexpected keyword argument {name!r}. {hint}")
        wire = wire_of(function, "wire", options.get("wire"), options.get("key"))
        others: Any = {name: value for name, value in options.items() if name not in ("wire", "key")}
        return cls(function, wire=wire, **others)

    def __post_init__(self):
        if not isinstance(self.overlap, bool):
            raise TypeError(f"{self.function}: overlap must be True or False, got {self.overlap!r}")
        check_choice(self.function, "order", self.order, ORDERS)
        if self.order in ("tree", "ring") and isinstance(self.wire, Int8Wire):
            raise ValueError(
                f"{self.function}: order={self.order!r} cannot have wire='int8', whose blocks are added in rank order"
            )
        check_bucket_bytes(self.function, self.bucket_bytes, self.first_bucket_bytes)

    def reduce(
        self,
        tree: Any,
        axis_name: AxisName,
        divisor: int,
        *,
        headroom: int = 0,
        residual: Any = None,
        value: Any = None,
    ) -> Reduced:
        """The sums of the leaves of `tree`, divided by `divisor`; decides the wire.

        Args:
          tree: gradients, or `ShardSums` of them; float0 ones are not sent.
          divisor: ranks, or shards, for a mean; 1 for a sum.
          headroom: ranks whose values must fit the wire together; default `divisor`.
          residual: a tree to be added to `tree`.
          value: a tree to be averaged in the same buckets, never rounded; beside `ShardSums` summed, by `divisor`.
        """
        if isinstance(tree, ShardSums):
            return self._reduce_shards(tree, axis_name, divisor, residual, value)
        wire = self.wire
        if isinstance(wire, Int8Wire):
            return self._reduce_in_groups(wire, tree, axis_name, divisor, residual, value)
        numbers = _numbers(tree, tree)
        wanted = numbers if residual is None else jax.tree.map(jnp.add, numbers, _numbers(tree, residual))
        scales = jax.tree.map(lambda x: wire.scale_of(x, divisor, headroom or divisor), wanted)
        count = num_ranks(axes_of(axis_name))
        # With a residual, a later step sends what does not fit.
        send = partial(wire.sent, saturate_for=0 if residual is None else count)
        sent = jax.tree.map(send, wanted, scales)
        value_scales = jax.tree.map(lambda x: UNCHANGED.scale_of(x, count, count), value)
        sums, value_sums = self._sum((sent, jax.tree.map(UNCHANGED.sent, value, value_scales)), axis_name)
        value = jax.tree.map(partial(UNCHANGED.received, divisor=count), value_sums, value, value_scales)

        received = jax.tree.map(partial(wire.received, divisor=divisor), sums, numbers, scales)
        # Create it here: a float0 that varies over the axis has the wrong type for a mean.
        float0 = jax.tree.map(lambda x: np.zeros(jnp.shape(x), jax.dtypes.float0), tree)
        if residual is not None:
            unsent = jax.tree.map(wire.unsent, wanted, sent, scales)
            unsent = jax.tree.map(lambda x, like: x.astype(like.dtype), unsent, _numbers(tree, residual))
            residual = merge(unsent, residual)
        return Reduced(merge(received, float0), residual, value)

    def _reduce_in_groups(
        self, wire: Int8Wire, tree: Any, axis_name: AxisName, divisor: int, residual: Any, value: Any
    ) -> Reduced:
        """`reduce` for wire="int8": in scale groups, divided in float32; other leaves as without a wire.

        A bucket's leaves are concatenated before they are cut, so groups may span leaves. Its bytes are those of codes.
        """
        is_chosen = jax.tree.map(wire.takes, tree)
        chosen, others = split(tree, is_chosen)
        own_residual, other_residual = (None, None) if residual is None else split(residual, is_chosen)
        rest = replace(self, wire=UNCHANGED).reduce(others, axis_name, divisor, residual=other_residual, value=value)
        likes, structure = jax.tree.flatten(chosen)
        leaves, residuals = [x.astype(jnp.float32) for x in likes], jax.tree.leaves(own_residual)
        if residual is not None:
            leaves = [x + r.astype(jnp.float32) for x, r in zip(leaves, residuals, strict=True)]
        codes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int8), chosen)
        plan = plan_buckets(codes, self.bucket_bytes, self.first_bucket_bytes)
        check_agreement(self.function, f"over {axis_name!r} in blocks\n{plan}\nfingerprint {plan.fingerprint}")
        sums, errors = list(leaves), list(leaves)
        packs = [pack for bucket in plan.buckets for pack in _of_one_type(bucket.leaves, leaves)]
        for number, pack in enumerate(packs):
            packed = jnp.concatenate([leaves[i].reshape(-1) for i in pack])
            key = None if wire.key is None else jax.random.fold_in(wire.key, number)
            total, error = quantized_psum(
                self.function, packed, axis_name, key=key, by_host=not is_by_lax(), with_error=residual is not None
            )
            begin = 0
            for i in pack:
                part = slice(begin, begin := begin + leaves[i].size)
                sums[i] = total[part].reshape(leaves[i].shape)
                if error is not None:
                    errors[i] = error[part].reshape(leaves[i].shape)
        sums = [(s if divisor == 1 else s / divisor).astype(like.dtype) for s, like in zip(sums, likes, strict=True)]
        reduced = merge(jax.tree.unflatten(structure, sums), rest.tree)
        if residual is not None:
            errors = [e.astype(r.dtype) for e, r in zip(errors, residuals, strict=True)]
            residual = merge(jax.tree.unflatten(structure, errors), rest.residual)
        return Reduced(reduced, residual, rest.value)

    def _reduce_shards(self, tree: ShardSums, axis_name: AxisName, divisor: int, residual: Any, value: Any) -> Reduced:
        """`reduce` along the tree: divided in the accumulator, rounded once."""
        num_shards = tree.num_shards
        along = replace(self, order="tree")
        leaves, structure = jax.tree.flatten(tree.terms)
        if self.wire != UNCHANGED or residual is not None:
            self.refuse_rounding(num_shards, axis_name)
            own = [x if is_float0(x) else x[0].astype(d) for x, d in zip(leaves, tree.dtypes, strict=True)]
            plain = jax.tree.unflatten(structure, own)
            return along.reduce(plain, axis_name, divisor, residual=residual, value=value)
        if value is not None:
            sums, value = along._reduce_shards(_with_value(tree, value), axis_name, divisor, None, None).tree
            return Reduced(sums, None, value)
        likes: list[Any] = [
            x if is_float0(x) else jax.ShapeDtypeStruct(x.shape[1:], d)
            for x, d in zip(leaves, tree.dtypes, strict=True)
        ]

        def psum(terms: list, axis_name: AxisName) -> list:
            wide = ShardSums(terms, num_shards, tuple(x.dtype for x in terms))
            return along._psum(wide, axis_name)

        sums = along._in_buckets(jax.tree.unflatten(structure, likes), leaves, axis_name, psum, num_shards)
        means = [
            np.zeros(x.shape, x.dtype) if is_float0(like) else UNCHANGED.received(x, like, 1, divisor)
            for x, like in zip(sums, likes, strict=True)
        ]
        # Code after the fence compiles alike whether the sums come from an engine, from XLA or, on one rank, from
        # nothing. XLA would also join the divisor with a constant by which the caller multiplies, unless an audit
        # lies between.
        return Reduced(jax.tree.unflatten(structure, fence(means)), None, None)

    def refuse_rounding(self, num_shards: int, axis_name: AxisName) -> None:
        """Raises ValueError for a wire that would round partial sums."""
        count = num_ranks(axes_of(axis_name))
        if num_shards != count:
            raise ValueError(
                f"{self.function}: partial sums of several shards are not rounded to a wire, nor is the rounding fed "
                "back, because the result would depend on the number of ranks; got wire="
                f"{getattr(self.wire, 'dtype', None) or 'int8'!s} with {num_shards} shards on {count} ranks. Leave "
                f"wire and error_feedback out, or take num_shards={count}."
            )

    def _sum(self, tree: Any, axis_name: AxisName) -> Any:
        """Sums of leaves in their sent dtypes."""
        leaves, structure = jax.tree.flatten(tree)
        sums = self._in_buckets(tree, leaves, axis_name, self._psum, num_ranks(axes_of(axis_name)))
        return jax.tree.unflatten(structure, sums)

    @property
    def _psum(self) -> Callable:
        return collectives_here(self.overlap, self.order).psum

    def _in_buckets(self, likes: Any, leaves: list, axis_name: AxisName, psum: Callable, num_shards: int) -> list:
        """Sums of leaves, with a psum per bucket of a tree of their results' types."""
        plan = plan_buckets(likes, self.bucket_bytes, self.first_bucket_bytes)
        terms = f"order {self.order}, {num_shards} terms"
        check_agreement(self.function, f"over {axis_name!r}\n{terms}\n{plan}\nfingerprint {plan.fingerprint}")
        sums = list(leaves)
        for bucket in plan.buckets:
            for i, total in zip(bucket.leaves, psum([leaves[i] for i in bucket.leaves], axis_name), strict=True):
                sums[i] = total
        return fence(sums, sums[-1]) if self.after_last else sums

    def synced(self, tree: Any, axis_name: AxisName, mean: bool, residual: Any = None, value: Any = None) -> Reduced:
        """Sums or means of gradients, and the mean of `value`."""
        check_local(self.function, tree, axis_name)
        count = tree.num_shards if isinstance(tree, ShardSums) else num_ranks(axes_of(axis_name))
        numbers = jax.tree.map(jnp.asarray, tree)
        return self.reduce(numbers, axis_name, count if mean else 1, residual=residual, value=value)


def _with_value(sums: ShardSums, value: Any) -> ShardSums:
    """The sums of (terms, value). The value is the rank's first term, which every rank has."""
    slots = next(len(x) for x in jax.tree.leaves(sums.terms) if not is_float0(x))

    def terms(x):
        own = x.astype(accumulator(x.dtype))
        return jnp.concatenate([own[None], jnp.zeros_like(own, shape=(slots - 1, *own.shape))])

    dtypes = (np.dtype(x.dtype) for x in jax.tree.leaves(value))
    return ShardSums((sums.terms, jax.tree.map(terms, value)), sums.num_shards, (*sums.dtypes, *dtypes))


def _numbers(gradients: Any, tree: Any) -> Any:
    """`tree` without float0 leaves."""
    return jax.tree.map(lambda g, x: None if is_float0(g) else x, gradients, tree)


def sync_gradients(
    tree: T,
    axis_name: AxisName,
    *,
    mean: bool = True,
    **options: Unpack[ReductionOptions],
) -> T:
    """The mean over the ranks of gradients that each has computed.

        grads = sync_gradients(jax.grad(loss)(local_params, x, y), "data")  # under shard_map

    Each bucket of `plan_buckets` is one `ring_psum`, which reads its leaves in place. The bits do not depend on the
    buckets, except with `wire="int8"`.

    Args:
      tree: a pytree of this rank's gradients, of the same structure, shapes and dtypes on all ranks, or a `ShardSums`,
        which is summed along the tree, divided in its accumulator, and rounded once. Gradients of integers (float0)
        come back unchanged.
      axis_name: the name of a mapped axis, or a sequence of names.
      mean: whether to divide by the number of ranks or shards.
      **options: `ReductionOptions`.

    Returns:
      A pytree like `tree`, or like its terms, the same on all ranks.

    Raises:
      ValueError: with vma tracking, for a leaf that JAX has already summed; if processes' plans differ; for a `key`
        with another wire, an order that `wire` lacks, and a `wire` with more shards than ranks.
      TypeError: if `wire` is neither "int8" nor a float with zero, sign and NaN; if `key` is no random key, or
        `overlap` no boolean; for an unknown option.
      NameError: if no enclosing transformation binds the axis.
      jax.errors.JaxRuntimeError: at run time, if a rank does not arrive in time.
    """
    return Reduction.of("sync_gradients", options).synced(tree, axis_name, mean).tree


def sync_with_feedback(
    tree: T, residual: T, axis_name: AxisName, *, mean: bool = True, **options: Unpack[ReductionOptions]
) -> tuple[T, T]:
    """`sync_gradients` with a narrow `wire`, whose rounding errors are added to the next step.

        grads, residual = sync_with_feedback(grads, residual, "data")  # under shard_map

    Error feedback of Seide et al., "1-Bit Stochastic Gradient Descent" (2014). Errors of the sum itself are fed back
    with `wire="int8"` only. docs/compression.md has large values, infinities and NaNs.

    Args:
      tree: a pytree of this rank's gradients, or a `ShardSums` with one shard per rank.
      residual: the previous step's second result, first zeros like the gradients. Ranks have different ones:
        `out_specs=P(axis_name)`.
      axis_name: the name of a mapped axis, or a sequence of names.
      mean: whether to divide by the number of ranks.
      **options: `ReductionOptions`; `wire` is bfloat16 by default.

    Returns:
      The gradients and the residual for the next step, in their own dtypes.

    Raises:
      ValueError: if `residual` is no tree like the gradients.
      ValueError, TypeError, NameError, jax.errors.JaxRuntimeError: where `sync_gradients` raises them.
    """
    options.setdefault("wire", jnp.bfloat16)
    own, like = _tree_and_shapes(residual), _tree_and_shapes(tree)
    if own != like:
        raise ValueError(
            "sync_with_feedback: residual must be a tree like that of the gradients, with zeros in the first step: "
            f"{like[0]} with shapes {like[1]}; got {own[0]} with shapes {own[1]}"
        )
    reduced = Reduction.of("sync_with_feedback", options).synced(tree, axis_name, mean, residual)
    return reduced.tree, reduced.residual


def _tree_and_shapes(tree: Any) -> tuple[Any, list[tuple]]:
    """The structure and the leaves' shapes, without slots."""
    slots = isinstance(tree, ShardSums)
    leaves, structure = jax.tree.flatten(tree.terms if slots else tree)
    return structure, [jnp.shape(x)[slots and not is_float0(x) :] for x in leaves]


_HINTS = {
    "allreduce_gradients": " If optax.MultiSteps has added them up, its sums have to vary as well: pass its state "
    "through shard_map by jax_ring.feedback_specs, or cast what init returned inside: "
    'state._replace(acc_grads=lax.pcast(state.acc_grads, axis_name, to="varying")).'
}


def check_local(function: str, tree: Any, axis_name: AxisName) -> None:
    """Raises ValueError for gradients that are, by their type, already summed."""
    check_named(function, axes_of(axis_name))
    check_arrays(function, "the gradients", tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(_numbers(tree, tree)):
        if same_over := axes_of_equality(leaf, axis_name):
            raise ValueError(
                f"{function}: the leaf at {path_text(path)}, of type {jax.typeof(leaf)}, is "
                f"already the same on all ranks of {same_over}. JAX sums gradients with respect to replicated "
                "parameters before returning them, and a second reduction would make them too large by the number of "
                "ranks. Use jax_ring.value_and_grad instead of jax.value_and_grad, or cast the parameters before "
                f'differentiating: lax.pcast(params, {same_over}, to="varying").{_HINTS.get(function, "")}'
            )


def _of_one_type(places: Sequence[int], leaves: Sequence[jax.Array]) -> list[list[int]]:
    """The places, by axes over which leaves vary: what is packed varies over all."""
    packs: dict[frozenset, list[int]] = {}
    for i in places:
        packs.setdefault(_compat.varying_axes(leaves[i]), []).append(i)
    return list(packs.values())
