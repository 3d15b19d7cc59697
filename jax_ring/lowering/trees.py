"""The trees of a call's groups, for order "tree": their slots and roots, and which of them GPUs can add along."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ring import runtime, shard_tree
from jax_ring.lowering.topology import Groups, rank_table
from jax_ring.options import Options


class GroupTree(NamedTuple):
    """The tree of a group.

    Attributes:
      num_shards: of the tree.
      num_ranks: that hold these shards, also on other hosts.
      ranks: of the members, ascending.
    """

    num_shards: int
    num_ranks: int
    ranks: tuple[int, ...]

    def num_slots(self) -> int:
        """Each rank's places for terms."""
        return shard_tree.num_slots(self.num_shards, self.num_ranks)

    def roots(self) -> list[shard_tree.Node]:
        """The nodes left by the fold over the group."""
        return shard_tree.roots_of(*self)


def trees_of(groups: Groups, intra: Groups, options: Options) -> tuple[GroupTree, ...]:
    """The trees of the groups' parts on each host. intra: these parts, `Levels.intra`."""
    ranks, num_hosts = rank_table(groups), len(intra) // len(groups)
    sizes = [len(group) for group in groups for _ in range(num_hosts)]
    return tuple(
        [
            GroupTree(options.num_shards or size, size, tuple(ranks[list(part)].tolist()))
            for part, size in zip(intra, sizes, strict=True)
        ]
    )


def why_beyond_kernels(trees: Sequence[GroupTree]) -> str:
    """Why the CUDA kernels cannot add along these trees; "" if they can."""
    for tree in set(trees):
        if not runtime.ffi_cuda.serves_tree(*tree):
            return (
                f"the CUDA kernels cannot add {tree.num_shards} shards of {tree.num_ranks} ranks, with up to "
                f"{tree.num_slots()} terms each, along their tree; a num_shards whose quotient by the number of ranks "
                "is a power of two needs one term each"
            )
    return ""


def accumulator(dtype: DTypeLike) -> np.dtype:
    """The dtype of partial sums: at least float32 for floats."""
    is_small = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if is_small else np.dtype(dtype)


def num_slots(groups: Groups, options: Options) -> int:
    """The size of the slot dimension; 0 without one."""
    return 0 if options.num_shards is None else shard_tree.num_slots(options.num_shards, len(groups[0]))


def num_roots(trees: Sequence[GroupTree]) -> int:
    """The most sums left by a group's fold; one without trees."""
    return max((len(tree.roots()) for tree in trees), default=1)


def mean_terms(trees: Sequence[GroupTree]) -> float:
    """A rank's average terms; one without trees."""
    counts = [len(shard_tree.terms_of(*tree[:2], rank)) for tree in trees for rank in tree.ranks]
    return sum(counts) / len(counts) if counts else 1
