"""XLA's collectives between hosts, and how a sum's chunks cross hosts by them: in an all-reduce or an exchange."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering import trees
from jax_ring.lowering.topology import Groups
from jax_ring.lowering.xla import bitcasts, ops

# ---- XLA's collectives, in groups of mesh positions ------------------------------------------------------------------
#
# As operations, because JAX's rules derive groups from mesh axes, with which hosts need not be aligned, and traced
# `lax` would be overridden.

_REDUCERS = {"sum": hlo.add, "max": hlo.maximum, "min": hlo.minimum}


def all_reduce(op: str, groups: Groups, x: ir.Value) -> ir.Value:
    """The sum, maximum or minimum of x over each group."""
    call = hlo.AllReduceOp(
        [x.type],
        [x],
        replica_groups=mlir.dense_int_elements(groups),
        channel_handle=_channel(),
        use_global_device_ids=True,
    )
    scalar = ir.RankedTensorType.get((), ir.RankedTensorType(x.type).element_type)
    block = call.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        hlo.return_([_REDUCERS[op](*block.arguments)])
    return call.result


def all_gather(groups: Groups, x: ir.Value) -> ir.Value:
    """The members' x, along a new leading dimension."""
    type_of = ir.RankedTensorType(x.type)
    call = hlo.AllGatherOp(
        [ir.RankedTensorType.get([len(groups[0]), *type_of.shape], type_of.element_type)],
        [ops.reshape(x, (1, *type_of.shape))],
        all_gather_dim=mlir.i64_attr(0),
        replica_groups=mlir.dense_int_elements(groups),
        channel_handle=_channel(),
        use_global_device_ids=True,
    )
    return call.results[0]


def all_to_all(groups: Groups, x: ir.Value) -> ir.Value:
    """What members send: x has a block for each along the leading dimension."""
    call = hlo.AllToAllOp(
        [x],
        split_dimension=mlir.i64_attr(0),
        concat_dimension=mlir.i64_attr(0),
        split_count=mlir.i64_attr(len(groups[0])),
        replica_groups=mlir.dense_int_elements(groups),
        channel_handle=_channel(),
    )
    return call.results[0]


def permute(pairs: Sequence[tuple[int, int]], x: ir.Value) -> ir.Value:
    """What each mesh position is sent, by pairs; else zeros."""
    return hlo.CollectivePermuteOp(x, mlir.dense_int_elements(np.array(pairs)), channel_handle=_channel()).result


def _channel() -> ir.Attribute:
    return hlo.ChannelHandle.get(_compat.COLLECTIVE_CHANNEL_ID, mlir.DEVICE_TO_DEVICE_TYPE)


# ---- How a sum's chunks cross: each way takes a rank's chunk of its host's sum, and gives what the host gathers ------


class Types(NamedTuple):
    """The dtypes of reduce-scatter, all-reduce across hosts, and all-gather."""

    scattered: np.dtype
    crossing: np.dtype
    gathered: np.dtype


def types_of(op: str, dtype: np.dtype) -> Types:
    """The dtypes of an all-reduce of `dtype` across hosts.

    Sums of small floats cross in float32 and are rounded once, as on one host. CPU devices send no more for it: XLA's
    all-reduce is in float32, too. Maxima and minima of floats cross as integers of the same order, because XLA's
    all-reduce drops NaNs on CPU devices.
    """
    if op == "sum":
        accumulator = trees.accumulator(dtype)
        return Types(accumulator, accumulator, dtype)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return Types(dtype, bitcasts.ordered_dtype(dtype) if is_float else dtype, dtype)


class Step(NamedTuple):
    """A collective of XLA between hosts.

    Attributes:
      compute: (ctx, x) to what crosses, computed while something else crosses.
      cross: (ctx, x) to the collective's result.
    """

    compute: Callable
    cross: Callable


class Crossing(NamedTuple):
    """How a rank's chunk crosses hosts.

    Attributes:
      scattered: a chunk's dtype.
      result: the dtype after the all-gather.
      bytes_each: an element's bytes when the number of parts is decided.
      unit: of which a chunk's elements are a multiple.
      max_parts: of a message; each is a few calls.
      rounded: the small float to which sums are rounded before hosts gather; or None.
    """

    scattered: np.dtype
    result: np.dtype
    steps: list[Step]
    bytes_each: int
    unit: int = 1
    max_parts: int = 16
    rounded: np.dtype | None = None


def by_all_reduce(op: str, groups: Groups, types: Types) -> Crossing:
    """XLA's all-reduce. groups: ranks with one chunk on different hosts."""

    def cross(ctx, x):
        if types.crossing != types.scattered:
            x = ops.inline_one(ctx, partial(encoded, op=op, types=types), x)
        x = all_reduce(op, groups, x)
        if types.gathered != types.crossing:
            x = ops.inline_one(ctx, partial(decoded, types=types), x)
        return x

    return Crossing(types.scattered, types.gathered, [Step(lambda ctx, x: x, cross)], types.crossing.itemsize)


def by_exchange(groups: Groups, rounded: np.dtype) -> Crossing:
    """The sum of small floats: hosts exchange float32, each adds and rounds a part, and all gather its bits.

    An all-reduce would send sums in float32, where rounded bits are enough. Ranks may widen what they gather.
    """
    num_hosts, wide = len(groups[0]), np.dtype(np.float32)

    def split(x):
        return bitcasts.to_words(x.reshape(num_hosts, x.size // num_hosts))

    def add(x):
        return bitcasts.to_words(fold(bitcasts.from_words(x, wide)).astype(rounded))

    def join(x):
        return bitcasts.from_words(x, rounded).reshape(-1)

    def gather(ctx, x):
        return ops.inline_one(ctx, join, all_gather(groups, x))

    steps = [
        Step(lambda ctx, x: ops.inline_one(ctx, split, x), lambda ctx, x: all_to_all(groups, x)),
        Step(lambda ctx, x: ops.inline_one(ctx, add, x), gather),
    ]
    # Twice an all-reduce's bytes per element. A rank goes on once it has sent a part and received one. With smaller
    # parts the links wait less for the slower direction of each pair of ranks.
    return Crossing(wide, rounded, steps, bytes_each=8, unit=num_hosts, max_parts=24, rounded=rounded)


def encoded(x: jax.Array, op: str, types: Types) -> jax.Array:
    """What crosses of a chunk, in another dtype."""
    return bitcasts.to_ordered_integers(x, key_type=types.crossing, largest=op == "max")


def decoded(x: jax.Array, types: Types) -> jax.Array:
    """The chunk of the result from the reduction of what crossed."""
    if types.crossing == types.scattered:
        return x.astype(types.gathered)
    return bitcasts.from_ordered_integers(x, dtype=types.gathered)


_FOLDS = {"sum": lax.add, "max": lax.max, "min": lax.min}


def fold(terms: jax.Array, op: str = "sum") -> jax.Array:
    """The sum, maximum or minimum along the leading dimension, in order."""
    total = terms[0]
    for i in range(1, len(terms)):
        total = _FOLDS[op](total, terms[i])
    return total


def chunk_size(num_elements: int, num_chunks: int, unit: int = 1) -> int:
    """The elements of each chunk; the last ones are padded."""
    return math.ceil(num_elements / num_chunks / unit) * unit
