"""Parameters of which every data-parallel rank has a copy: made equal, and checked to be."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.arguments import AxisName, axes_of, check_named
from jax_ring.implementations import implementation


def broadcast_params(params: Any, axis_name: AxisName, *, root: int = 0, impl: str = "ring") -> Any:
    """Gives every rank of a mapped axis the parameters of rank `root`, bit for bit.

    Args:
      params: a pytree of arrays of any dtype.
      axis_name, root: as for `ring_broadcast`.
      impl: "ring" or "lax". `jax.lax` has no broadcast; there, all ranks' copies are gathered and one is taken.

    Returns:
      A pytree like `params`, with vma tracking invariant over the axis.

    Raises:
      ValueError: if there is no rank `root`, or `impl` is none of its choices.
      NameError, TypeError, jax.errors.JaxRuntimeError: as `ring_broadcast`.
    """
    check_named("broadcast_params", axes_of(axis_name))
    return implementation("broadcast_params", impl).broadcast(params, axis_name, root=root)


def assert_replicated(tree: Any) -> None:
    """Checks that the copies of each array on this process's devices are the same bits.

    Without vma tracking `shard_map` believes `out_specs=P()`, and a step that forgot to reduce something leaves copies
    that drift apart. Of an array that is sharded over some mesh axes and replicated over others, the copies of each
    shard are compared. It copies everything to the host: call it now and then, outside `jit`.

    Args:
      tree: a pytree of `jax.Array`s. Other leaves have no copies.

    Raises:
      AssertionError: if copies differ. It names the leaf, the ranks (places of devices in the array's sharding), the
        first index at which they differ and what they have there.
      TypeError: under `jit`, where there are no copies to look at.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path) or "the array"
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"assert_replicated: {name} is being traced. Call it outside jit, on the results.")
        if isinstance(leaf, jax.Array):
            _assert_copies_equal(name, leaf)


def _assert_copies_equal(name: str, array: jax.Array) -> None:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    ranks = {device: rank for rank, device in enumerate(array.sharding.devices_indices_map(array.shape))}
    copies = defaultdict(list)
    for shard in sorted(array.addressable_shards, key=lambda shard: ranks[shard.device]):
        copies[str(shard.index)].append((ranks[shard.device], np.asarray(shard.data)))
    for place, ((first_rank, first), *others) in copies.items():
        different = [(rank, copy) for rank, copy in others if copy.tobytes() != first.tobytes()]
        if different:
            which = ", ".join(str(rank) for rank, _ in different)
            rank, copy = different[0]
            index = tuple(int(i) for i in np.argwhere((_bits(first) != _bits(copy)).any(-1))[0])
            of_shard = "" if first.shape == array.shape else f" of the shard {place}"
            raise AssertionError(
                f"assert_replicated: {name}, of type {array.dtype.name}{list(array.shape)}, is not the same on all "
                f"ranks: {which} {'differs' if len(different) == 1 else 'differ'} from {first_rank}. "
                f"The first difference is at index {index}{of_shard}: "
                f"{first[index]!s} on rank {first_rank}, {copy[index]!s} on rank {rank}. Was everything reduced? With "
                "shard_map(..., check_vma=True) JAX checks that when it traces."
            )


def _bits(x: np.ndarray) -> np.ndarray:
    """The bytes of each element, along an additional dimension."""
    return np.frombuffer(x.tobytes(), np.uint8).reshape(*x.shape, x.itemsize)
