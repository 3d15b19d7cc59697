"""Which rank owns which parameters, and how ranks pack what belongs to theirs into blocks of the same size."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Piece(NamedTuple):
    """Elements `start` to `stop` of a flattened array, here of the parameter with index `leaf`."""

    leaf: int
    start: int
    stop: int


def balance(
    leaves: Sequence[jax.ShapeDtypeStruct], num_ranks: int, may_cut: Callable[[int], bool], block: int = 1
) -> list[list[Piece]]:
    """The pieces of each rank. Ranks without any come last.

    The largest piece goes first, each to the rank that has least of its dtype (the greedy algorithm of Graham, "Bounds
    on Multiprocessing Timing Anomalies", 1969). A leaf with more than 1/p of its dtype's elements is cut, if it may be.

    Args:
      leaves: shapes and dtypes of the parameters.
      num_ranks: p.
      may_cut: (index of a leaf) -> whether it may be cut into pieces. Called for leaves that exceed their share.
      block: pieces begin at multiples of this number of elements.
    """
    totals: defaultdict[Any, int] = defaultdict(int)
    for leaf in leaves:
        totals[leaf.dtype] += leaf.size
    pieces = []
    for i, leaf in enumerate(leaves):
        share = -(-totals[leaf.dtype] // num_ranks)
        blocks = -(-leaf.size // block)
        count = min(-(-leaf.size // share), blocks) if leaf.size > share and blocks > 1 and may_cut(i) else 1
        ends = [min(blocks * k // count * block, leaf.size) for k in range(count + 1)]
        pieces += [Piece(i, *bounds) for bounds in itertools.pairwise(ends)]
    of_dtype: list[defaultdict[Any, int]] = [defaultdict(int) for _ in range(num_ranks)]
    num_bytes = [0] * num_ranks
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for piece in sorted(pieces, key=lambda piece: (piece.start - piece.stop, piece)):
        dtype = leaves[piece.leaf].dtype
        rank = min(range(num_ranks), key=lambda r: (of_dtype[r][dtype], num_bytes[r], r))
        of_dtype[rank][dtype] += piece.stop - piece.start
        num_bytes[rank] += (piece.stop - piece.start) * dtype.itemsize
        ranks[rank].append(piece)
    return sorted((sorted(pieces) for pieces in ranks), key=lambda pieces: not pieces)


@dataclass(frozen=True)
class Blocks:
    """Arrays that are divided into pieces, and the blocks that hold a rank's pieces: one vector per dtype.

    All ranks' blocks of a dtype have the size of the fullest; zeros fill the others.

    Attributes:
      arrays: shapes and dtypes.
      ranks: the pieces of each rank.
    """

    arrays: Sequence[jax.ShapeDtypeStruct]
    ranks: Sequence[Sequence[Piece]]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The elements of a block, by the name of its dtype."""
        used = [self._used(rank) for rank in range(len(self.ranks))]
        return {
            name: max(sizes.get(name, 0) for sizes in used) for name in sorted({k for sizes in used for k in sizes})
        }

    @property
    def used_bytes(self) -> list[int]:
        """For each rank the bytes of its pieces, without the zeros."""
        used = [self._used(rank) for rank in range(len(self.ranks))]
        return [sum(size * np.dtype(name).itemsize for name, size in sizes.items()) for sizes in used]

    @property
    def block_bytes(self) -> int:
        """The bytes of all blocks of one rank."""
        return sum(size * np.dtype(name).itemsize for name, size in self.sizes.items())

    def pack(self, rank: int, values: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """The blocks of a rank, from its pieces."""
        parts = defaultdict(list)
        for piece, value in zip(self.ranks[rank], values, strict=True):
            parts[self._dtype(piece)].append(jnp.reshape(value, -1).astype(self.arrays[piece.leaf].dtype))
        blocks = {}
        for name, size in self.sizes.items():
            missing = size - sum(part.size for part in parts[name])
            blocks[name] = jnp.concatenate([*parts[name], jnp.zeros(missing, np.dtype(name))])
        return blocks

    def unpack(self, rank: int, blocks: dict[str, jax.Array]) -> list[jax.Array]:
        """The pieces of a rank, from its blocks."""
        ends: defaultdict[str, int] = defaultdict(int)
        values = []
        for piece in self.ranks[rank]:
            name = self._dtype(piece)
            start, ends[name] = ends[name], ends[name] + piece.stop - piece.start
            values.append(blocks[name][start : ends[name]])
        return values

    def pack_all(self, arrays: Sequence[jax.Array | None]) -> dict[str, jax.Array]:
        """The blocks of all ranks, one after the other, from whole arrays. None for one without pieces."""
        flat = {i: jnp.reshape(x, -1) for i, x in enumerate(arrays) if x is not None}
        ranks = [
            self.pack(rank, [flat[piece.leaf][piece.start : piece.stop] for piece in pieces])
            for rank, pieces in enumerate(self.ranks)
        ]
        return {name: jnp.concatenate([blocks[name] for blocks in ranks]) for name in self.sizes}

    def unpack_all(self, blocks: dict[str, jax.Array]) -> dict[int, jax.Array]:
        """The whole arrays that any rank has pieces of, from the blocks of all ranks, one after the other."""
        parts: dict[int, list] = defaultdict(list)
        for rank, pieces in enumerate(self.ranks):
            own = {name: blocks[name][rank * size : (rank + 1) * size] for name, size in self.sizes.items()}
            for piece, value in zip(pieces, self.unpack(rank, own), strict=True):
                parts[piece.leaf].append((piece.start, value))
        return {
            leaf: jnp.concatenate([value for _, value in sorted(values, key=lambda part: part[0])]).reshape(
                self.arrays[leaf].shape
            )
            for leaf, values in parts.items()
        }

    def _dtype(self, piece: Piece) -> str:
        return np.dtype(self.arrays[piece.leaf].dtype).name

    def _used(self, rank: int) -> dict[str, int]:
        sizes: defaultdict[str, int] = defaultdict(int)
        for piece in self.ranks[rank]:
            sizes[self._dtype(piece)] += piece.stop - piece.start
        return sizes
