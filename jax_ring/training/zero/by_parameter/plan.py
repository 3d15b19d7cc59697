"""Which rank owns which parameters, and how they are packed into blocks of one size."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.options import promoted


class Piece(NamedTuple):
    """Elements `start` to `stop` of the flattened parameter `leaf`."""

    leaf: int
    start: int
    stop: int


def balance(
    leaves: Sequence[jax.ShapeDtypeStruct], num_ranks: int, may_cut: Callable[[int], bool], block: int = 1
) -> list[list[Piece]]:
    """The pieces of each rank, ranks without any last.

    The largest piece goes first, to the rank with the least of its dtype (Graham, "Bounds on Multiprocessing Timing
    Anomalies", 1969). A leaf of more than 1/p of its dtype is cut, if it may be.

    may_cut: (index of a leaf) -> whether it may be cut.
    block: of which pieces begin at multiples.
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
    """Arrays in pieces, and a rank's pieces as a vector for each dtype, with zeros up to the fullest rank's size.

    Attributes:
      arrays: shapes and dtypes.
      ranks: the pieces of each rank.
      names: by array, that of its vector; by default its dtype. A vector has the dtype to which its arrays promote.
    """

    arrays: Sequence[jax.ShapeDtypeStruct]
    ranks: Sequence[Sequence[Piece]]
    names: Sequence[str] | None = None

    @functools.cached_property
    def used(self) -> list[dict[str, int]]:
        """By rank, the elements of its pieces, by dtype."""
        ranks: list[dict[str, int]] = [defaultdict(int) for _ in self.ranks]
        for sizes, pieces in zip(ranks, self.ranks, strict=True):
            for piece in pieces:
                sizes[self._name(piece)] += piece.stop - piece.start
        return ranks

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """A block's elements, by dtype."""
        names = sorted({name for sizes in self.used for name in sizes})
        return {name: max(sizes.get(name, 0) for sizes in self.used) for name in names}

    def pack(self, rank: int, values: Sequence[jax.Array]) -> dict[str, jax.Array]:
        parts = defaultdict(list)
        for piece, value in zip(self.ranks[rank], values, strict=True):
            parts[self._name(piece)].append(jnp.reshape(value, -1).astype(self.arrays[piece.leaf].dtype))
        blocks = {}
        for name, size in self.sizes.items():
            missing = size - sum(part.size for part in parts[name])
            dtype = self._dtypes[name]
            blocks[name] = jnp.concatenate([*parts[name], jnp.zeros(missing, dtype)], dtype=dtype)
        return blocks

    def pack_whole(self, rank: int, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """A rank's blocks, from whole arrays."""
        return self.pack(rank, [jnp.reshape(arrays[i], -1)[start:stop] for i, start, stop in self.ranks[rank]])

    def unpack(self, rank: int, blocks: dict[str, jax.Array]) -> list[jax.Array]:
        ends: defaultdict[str, int] = defaultdict(int)
        values = []
        for piece in self.ranks[rank]:
            name = self._name(piece)
            start, ends[name] = ends[name], ends[name] + piece.stop - piece.start
            values.append(blocks[name][start : ends[name]])
        return values

    def pack_all(self, arrays: Sequence[Any]) -> dict[str, jax.Array]:
        """All ranks' blocks, from whole arrays; None for one without pieces."""
        ranks = [self.pack_whole(rank, arrays) for rank in range(len(self.ranks))]
        return {name: jnp.concatenate([blocks[name] for blocks in ranks]) for name in self.sizes}

    def unpack_all(self, blocks: dict[str, jax.Array]) -> dict[int, jax.Array]:
        """The whole arrays with pieces, from all ranks' blocks."""
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

    @functools.cached_property
    def _dtypes(self) -> dict[str, Any]:
        pieces = [piece for pieces in self.ranks for piece in pieces]
        return {
            name: promoted(*(self.arrays[piece.leaf].dtype for piece in pieces if self._name(piece) == name))
            for name in self.sizes
        }

    def _name(self, piece: Piece) -> str:
        return np.dtype(self.arrays[piece.leaf].dtype).name if self.names is None else self.names[piece.leaf]
