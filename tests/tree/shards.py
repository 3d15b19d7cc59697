"""Values of shards, and their sum along the tree by a recursion of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import make_mesh, sharded
from jax.sharding import PartitionSpec as P

from jax_ring import ShardSums, shard_tree


def wide(dtype) -> np.dtype:
    small_float = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if small_float else np.dtype(dtype)


def tree_sum(values) -> np.ndarray:
    """The sum over the first axis, split at the largest power of two smaller than its length, rounded once."""
    values = np.asarray(values)
    with np.errstate(all="ignore"):
        return _add(values.astype(wide(values.dtype))).astype(values.dtype)


def _add(part: np.ndarray) -> np.ndarray:
    if len(part) == 1:
        return part[0]
    left = 1
    while 2 * left < len(part):
        left *= 2
    return _add(part[:left]) + _add(part[left:])


def terms(values, num_ranks) -> ShardSums:
    """The terms of all ranks, one rank after the other, with numbers that must not matter in the slots in between.

    values: a pytree of arrays whose first dimension is that of the shards.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, values))
    num_shards = len(leaves[0])

    def of_leaf(leaf):
        slots = shard_tree.num_slots(num_shards, num_ranks)
        found = np.full((num_ranks, slots, *leaf.shape[1:]), 77, wide(leaf.dtype))
        for rank in range(num_ranks):
            for slot, node in enumerate(shard_tree.terms_of(num_shards, num_ranks, rank)):
                found[rank, slot] = _add(leaf[node.first : node.first + node.size].astype(found.dtype))
        return np.concatenate(found)

    dtypes = tuple(leaf.dtype for leaf in leaves)
    with np.errstate(all="ignore"):
        return ShardSums(jax.tree.unflatten(structure, list(map(of_leaf, leaves))), num_shards, dtypes)


def numbers(shape, dtype=np.float32, seed=0) -> np.ndarray:
    """Numbers whose sum depends on the order of adding, if they are floats; integers of the whole range."""
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return rng.integers(int(limits.min), int(limits.max), shape, endpoint=True, dtype=np.int64).astype(dtype)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


SAME = P()


def on_ranks(fun, num_ranks, *, check_vma=True, out_specs=SAME):
    """`fun(x)` of each rank's shards, on the first devices."""
    return sharded(fun, mesh=make_mesh((num_ranks,)), out_specs=out_specs, check_vma=check_vma)
