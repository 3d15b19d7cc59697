"""The slot dimension of a sum along the tree, from `ShardSums` to operands and back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import shard_tree
from jax_ring.collectives.axes import Groups, check_divisible, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.collectives.shard_sums import ShardSums
from jax_ring.lowering.trees import accumulator
from jax_ring.lowering.xla.fallback import rank_in_group
from jax_ring.options import Options, integer


def prepare(
    function: str, x: Any, options: Options, num_shards: int | None, axes: tuple, groups: Groups | None
) -> tuple[Any, Options, Callable]:
    """What a sum of `x`, a pytree or `ShardSums`, adds in these groups of the ranks of some axes.

    Returns:
      The operands, with a first dimension for terms if `options.num_shards` is set (without axes: the sums), the
      primitive's options, and a function from the sum to the call's result.
    """
    has_shards = isinstance(x, ShardSums)
    if num_shards is None and not has_shards:
        return x, options, lambda total: total
    if num_shards is not None:
        num_shards = integer(function, "num_shards", num_shards)
    if options.order != "tree":
        given = "a ShardSums" if has_shards else f"num_shards={num_shards}"
        raise ValueError(f"{function}: {given} needs order='tree', got order={options.order!r}")
    sizes = {num_ranks(axes)} if groups is None else {len(group) for group in groups}
    if not has_shards:
        if sizes != {num_shards}:
            raise ValueError(
                f"{function}: each rank gives one value, so num_shards can only be the number of ranks, "
                f"{_listed(sizes)}; got num_shards={num_shards}. For several shards on each rank pass a "
                "jax_ring.ShardSums."
            )
        return x, options, lambda total: total
    if num_shards not in (None, x.num_shards):
        raise ValueError(
            f"{function}: got num_shards={num_shards} and a ShardSums of {x.num_shards} shards; leave num_shards out"
        )
    if len(sizes) > 1:
        raise ValueError(
            f"{function}: the groups of a ShardSums must all be of one size, so that the ranks hold equally many of "
            f"its {x.num_shards} shards; got groups of {_listed(sizes)} ranks"
        )
    (size,) = sizes
    check_divisible(function, x.num_shards, size)
    slots = shard_tree.num_slots(x.num_shards, size)

    def operand(term):
        term = jnp.asarray(term)
        if term.ndim == 0 or term.shape[0] != slots:
            raise ValueError(
                f"{function}: {x.num_shards} shards on {size} ranks have {slots} terms on each, as the first "
                f"dimension of every leaf of ShardSums.terms; got one of shape {term.shape}. Make the terms with "
                "jax_ring.ShardSums.of over the same axes."
            )
        return term.astype(accumulator(term.dtype))

    def finish(total):
        leaves, structure = jax.tree.flatten(total)
        dtypes = [np.int32 if dtype == np.bool_ else dtype for dtype in x.dtypes]
        return jax.tree.unflatten(structure, [leaf.astype(d) for leaf, d in zip(leaves, dtypes, strict=True)])

    leaves = jax.tree.map(operand, x.terms)
    if not axes:  # a rank alone has one term, its sum
        leaves = jax.tree.map(lambda terms: terms[0], leaves)
    return leaves, dataclasses.replace(options, num_shards=x.num_shards), finish


def spread(cotangents: Sequence[jax.Array], num_shards: int, axes: tuple, groups: Groups | None) -> list[jax.Array]:
    """The cotangents of operands with slots: that of the sum in each used slot, zeros elsewhere."""
    size = num_ranks(axes) if groups is None else len(groups[0])
    counts = np.array([len(shard_tree.terms_of(num_shards, size, rank)) for rank in range(size)], np.int32)
    slots = int(counts.max())
    in_every_slot = [jnp.broadcast_to(own_copy(ct, axes), (slots, *ct.shape)) for ct in cotangents]
    if counts.min() == slots:
        return in_every_slot
    used = lax.iota(np.int32, slots) < jnp.asarray(counts)[rank_in_group(axes, groups)]
    return [jnp.where(jnp.expand_dims(used, range(1, ct.ndim)), ct, jnp.zeros_like(ct)) for ct in in_every_slot]


def _listed(sizes: set[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))
