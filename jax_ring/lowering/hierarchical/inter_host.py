"""How the shards of a sum on two levels cross hosts: by XLA's all-reduce or by an exchange.

Either takes a rank's shard of its host's sum, and gives what the ranks of a host gather.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring.lowering.group_tables import Groups
from jax_ring.lowering.hierarchical import xla_ops
from jax_ring.lowering.xla import bitcasts, ops
from jax_ring.lowering.xla.ops import aval_of


class Types(NamedTuple):
    """The element types of the reduce-scatter, the all-reduce across hosts, and the all-gather."""

    scattered: np.dtype
    crossing: np.dtype
    gathered: np.dtype


def types_of(op: str, dtype) -> Types:
    """The element types of the steps of an all-reduce of `dtype` across hosts.

    Sums of small floats stay in float32 until they have crossed, so that they are rounded once, as on one host. On CPU
    devices this adds no network traffic, since XLA's all-reduce of them is in float32, too. Maxima and minima of floats
    cross as integers of the same order, because XLA's all-reduce of floats drops NaNs on CPU devices.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return Types(dtype, dtype, dtype)
    is_double = jnp.finfo(dtype).bits == 64
    if op != "sum":
        return Types(dtype, np.dtype(np.int64 if is_double else np.int32), dtype)
    accumulator = dtype if is_double else np.dtype(np.float32)
    return Types(accumulator, accumulator, dtype)


class Step(NamedTuple):
    """A collective of XLA between hosts.

    Attributes:
      compute: (ctx, x) to what crosses; emitted apart, so that it is computed while something else crosses.
      before: its type.
      cross: (ctx, x) to the result of the collective.
      after: its type.
    """

    compute: Callable
    before: jax.core.ShapedArray
    cross: Callable
    after: jax.core.ShapedArray


class Crossing(NamedTuple):
    """How a rank's shard crosses hosts.

    Attributes:
      scattered: the dtype of a shard.
      result: the dtype of the result, after the all-gather.
      steps: (the number of elements of a shard) to the steps.
      bytes_each: what an element counts where it is decided into how many parts a message is cut.
      unit: a shard has a multiple of so many elements.
      max_parts: into how many parts a message is cut at most. Each is a few calls of the program.
      rounded: the small float to which sums are rounded before hosts gather them; None if they are not.
    """

    scattered: np.dtype
    result: np.dtype
    steps: Callable[[int], list[Step]]
    bytes_each: int
    unit: int = 1
    max_parts: int = 16
    rounded: np.dtype | None = None


def by_all_reduce(op: str, groups: Groups, types: Types) -> Crossing:
    """XLA's all-reduce. groups: of the ranks that have the same shard on different hosts."""

    def all_reduce(before, after, ctx, x):
        to = types.crossing
        if jnp.issubdtype(before.dtype, jnp.floating) and op != "sum":
            keys = before.update(dtype=to)
            x = ops.inline_one(ctx, partial(_to_ordered_integers, key_type=to, largest=op == "max"), x, before)
            x = xla_ops.all_reduce(ctx, op, groups, x, to)
            return ops.inline_one(ctx, partial(_from_ordered_integers, dtype=after.dtype), x, keys)
        return ops.convert(ctx, xla_ops.all_reduce(ctx, op, groups, x, to), after.dtype)

    def steps(size: int) -> list[Step]:
        before, after = aval_of(types.scattered, size), aval_of(types.gathered, size)
        return [Step(lambda ctx, x: x, before, partial(all_reduce, before, after), after)]

    return Crossing(types.scattered, types.gathered, steps, types.crossing.itemsize)


def by_exchange(groups: Groups, rounded: np.dtype) -> Crossing:
    """The sum of small floats: hosts exchange float32, each adds a part, rounds it, and they gather the bits of it.

    An all-reduce would send the sums in float32 as well, where their rounded bits are enough. The ranks of a host may
    widen what they gather.
    """
    num_hosts, wide = len(groups[0]), np.dtype(np.float32)

    def steps(size: int) -> list[Step]:
        shard, gathered = aval_of(wide, size), aval_of(rounded, size)
        sent = aval_of(np.uint32, num_hosts, size // num_hosts)
        bits = aval_of(bitcasts.bits_dtype(rounded), size // num_hosts)
        by_host = aval_of(bits.dtype, num_hosts, *bits.shape)

        def split(x):
            return bitcasts.to_words(x.reshape(sent.shape))

        def add(x):
            return bitcasts.to_words(fold(bitcasts.from_words(x, wide)).astype(rounded))

        def join(x):
            return bitcasts.from_words(x, rounded).reshape(-1)

        def gather(ctx, x):
            return ops.inline_one(ctx, join, xla_ops.all_gather(groups, x), by_host)

        return [
            Step(
                lambda ctx, x: ops.inline_one(ctx, split, x, shard), sent,
                lambda ctx, x: xla_ops.all_to_all(groups, x), sent,
            ),
            Step(lambda ctx, x: ops.inline_one(ctx, add, x, sent), bits, gather, gathered),
        ]  # fmt: skip

    # Twice what the all-reduce of an element takes. A rank goes on when it has sent a part and received one, and the
    # smaller these are, the less the links wait for the slower direction of each pair of ranks.
    return Crossing(wide, rounded, steps, bytes_each=8, unit=num_hosts, max_parts=24, rounded=rounded)


def fold(terms: jax.Array) -> jax.Array:
    """The sum of terms along the leading dimension, in their order."""
    total = terms[0]
    for i in range(1, len(terms)):
        total = lax.add(total, terms[i])
    return total


def shard_size(num_elements: int, num_shards: int, unit: int = 1) -> int:
    """The number of elements of each shard. The last shards are padded."""
    return math.ceil(num_elements / num_shards / unit) * unit


def _to_ordered_integers(x, *, key_type, largest: bool):
    """Integers that compare as the floats do, with -0 below +0, and NaN as the largest or the smallest value."""
    keys = lax.bitcast_convert_type(x.astype(f"float{key_type.itemsize * 8}"), key_type)
    limits = jnp.iinfo(key_type)
    # The bits of negative floats order in reverse.
    keys = jnp.where(keys < 0, keys ^ limits.max, keys)
    return jnp.where(jnp.isnan(x), limits.max if largest else limits.min, keys)


def _from_ordered_integers(keys, *, dtype):
    """The inverse of `_to_ordered_integers`. The limits decode to NaN."""
    bits = jnp.where(keys < 0, keys ^ jnp.iinfo(keys.dtype).max, keys)
    return lax.bitcast_convert_type(bits, f"float{bits.dtype.itemsize * 8}").astype(dtype)
