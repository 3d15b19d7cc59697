"""Which rank owns which parameters or pieces of them, and how it packs them into vectors of one size.

`ParameterShards` are the parameters divided so at rest, with `stage=3` and `layout="parameter"`.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.options import promoted
from jax_ring.training.zero.interface import Shapes, on_all_devices


class Piece(NamedTuple):
    """Elements `start` to `stop` of the flattened parameter `leaf`."""

    leaf: int
    start: int
    stop: int


def balance(
    leaves: Sequence[jax.ShapeDtypeStruct], num_ranks: int, may_cut: Callable[[int], bool], multiple: int = 1
) -> list[list[Piece]]:
    """The pieces of each rank, ranks without any last.

    The largest piece goes first, to the rank with the least of its dtype (Graham, "Bounds on Multiprocessing Timing
    Anomalies", 1969). A leaf of more than 1/p of its dtype is cut, if it may be.

    may_cut: (index of a leaf) -> whether it may be cut.
    multiple: the number of elements at multiples of which pieces begin.
    """
    totals: defaultdict[Any, int] = defaultdict(int)
    for leaf in leaves:
        totals[leaf.dtype] += leaf.size
    pieces = []
    for i, leaf in enumerate(leaves):
        share = -(-totals[leaf.dtype] // num_ranks)
        units = -(-leaf.size // multiple)
        count = min(-(-leaf.size // share), units) if leaf.size > share and units > 1 and may_cut(i) else 1
        ends = [min(units * k // count * multiple, leaf.size) for k in range(count + 1)]
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
class Packing:
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
        """The elements of each rank's pieces, by dtype."""
        ranks: list[dict[str, int]] = [defaultdict(int) for _ in self.ranks]
        for sizes, pieces in zip(ranks, self.ranks, strict=True):
            for piece in pieces:
                sizes[self._name(piece)] += piece.stop - piece.start
        return ranks

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The elements of a vector, by dtype."""
        names = sorted({name for sizes in self.used for name in sizes})
        return {name: max(sizes.get(name, 0) for sizes in self.used) for name in names}

    def pack(self, rank: int, values: Sequence[jax.Array]) -> dict[str, jax.Array]:
        by_name = defaultdict(list)
        for piece, value in zip(self.ranks[rank], values, strict=True):
            by_name[self._name(piece)].append(jnp.reshape(value, -1).astype(self.arrays[piece.leaf].dtype))
        vectors = {}
        for name, size in self.sizes.items():
            missing, dtype = size - sum(x.size for x in by_name[name]), self._dtypes[name]
            vectors[name] = jnp.concatenate([*by_name[name], jnp.zeros(missing, dtype)], dtype=dtype)
        return vectors

    def pack_whole(self, rank: int, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """A rank's vectors, from whole arrays."""
        return self.pack(rank, [jnp.reshape(arrays[i], -1)[start:stop] for i, start, stop in self.ranks[rank]])

    def unpack(self, rank: int, vectors: dict[str, jax.Array]) -> list[jax.Array]:
        ends: defaultdict[str, int] = defaultdict(int)
        values = []
        for piece in self.ranks[rank]:
            name = self._name(piece)
            start, ends[name] = ends[name], ends[name] + piece.stop - piece.start
            values.append(vectors[name][start : ends[name]])
        return values

    def pack_all(self, arrays: Sequence[Any]) -> dict[str, jax.Array]:
        """All ranks' vectors, from whole arrays; None for one without pieces."""
        ranks = [self.pack_whole(rank, arrays) for rank in range(len(self.ranks))]
        return {name: jnp.concatenate([vectors[name] for vectors in ranks]) for name in self.sizes}

    def unpack_all(self, vectors: dict[str, jax.Array]) -> dict[int, jax.Array]:
        """The whole arrays with pieces, from all ranks' vectors."""
        by_leaf: dict[int, list] = defaultdict(list)
        for rank, pieces in enumerate(self.ranks):
            own = {name: vectors[name][rank * size : (rank + 1) * size] for name, size in self.sizes.items()}
            for piece, value in zip(pieces, self.unpack(rank, own), strict=True):
                by_leaf[piece.leaf].append((piece.start, value))
        whole = {}
        for leaf, found in by_leaf.items():
            in_order = [value for _, value in sorted(found, key=lambda pair: pair[0])]
            whole[leaf] = jnp.concatenate(in_order).reshape(self.arrays[leaf].shape)
        return whole

    @functools.cached_property
    def _dtypes(self) -> dict[str, Any]:
        pieces = [piece for pieces in self.ranks for piece in pieces]
        return {
            name: promoted(*(self.arrays[piece.leaf].dtype for piece in pieces if self._name(piece) == name))
            for name in self.sizes
        }

    def _name(self, piece: Piece) -> str:
        return np.dtype(self.arrays[piece.leaf].dtype).name if self.names is None else self.names[piece.leaf]


class Division(NamedTuple):
    """What decides who owns which parameters, besides the number of ranks. Can be compared and be a key.

    Attributes:
      shapes: of the parameters.
      may_cut: for each whether it may be cut.
      multiple: the number of elements at multiples of which pieces begin.
    """

    shapes: Shapes
    may_cut: tuple[bool, ...]
    multiple: int

    @functools.cache  # noqa: B019
    def packing(self, num_ranks: int) -> Packing:
        leaves = jax.tree.leaves(self.shapes.params)
        return Packing(leaves, balance(leaves, num_ranks, self.may_cut.__getitem__, self.multiple))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["own"], meta_fields=["division"])
@dataclass(frozen=True)
class ParameterShards:
    """Parameters of which each rank has those that it owns, with `stage=3` and `layout="parameter"`. A pytree.

        optimizer = zero.sharded_optimizer(optax.lamb(1e-3), "data", stage=3, layout="parameter")
        shards = optimizer.shard(params)  # under shard_map, with out_specs=P("data")

    Attributes:
      own: by dtype an array of shape (1, size), as large as the fullest rank's; outside of `shard_map` all ranks',
        (p, size).
      division: the structure, shapes and dtypes of the parameters, and which may be cut.
    """

    own: dict[str, jax.Array]
    division: Division = field(metadata={"static": True})

    @property
    def like(self) -> Any:
        """The parameters' types: a tree of `jax.ShapeDtypeStruct`."""
        return self.division.shapes.params

    def whole(self) -> Any:
        """The parameters, outside of `shard_map`; inside of it `ShardedOptimizer.gather` returns them.

        Raises:
          ValueError: if this is the partition of one rank.
        """
        num_ranks = max((len(x) for x in self.own.values()), default=1)
        packing = self.division.packing(num_ranks)
        for name, size in packing.sizes.items():
            if (found := jnp.shape(self.own[name])) != (num_ranks, size):
                raise ValueError(
                    f"ParameterShards.whole: these are a rank's shards, of shape {found} where all of {name} have "
                    f"{(num_ranks, size)}. Inside of shard_map use gather of the sharded optimizer."
                )
        return self.unpacked({name: jnp.reshape(x, -1) for name, x in on_all_devices(self.own).items()}, num_ranks)

    def unpacked(self, vectors: dict[str, jax.Array], num_ranks: int) -> Any:
        """The parameters, from the vectors of all ranks."""
        leaves = self.division.packing(num_ranks).unpack_all(vectors)
        return jax.tree.unflatten(self.division.shapes.structure, [leaves[i] for i in range(len(leaves))])


def check_partition(shards: Any) -> None:
    """Raises ValueError for parameters that are not divided so."""
    if not isinstance(shards, ParameterShards):
        raise ValueError(
            "sharded_optimizer: with stage=3 and layout='parameter' parameters are a ParameterShards, got a "
            f"{type(shards).__name__}. Make it by optimizer.shard(params), once, under shard_map, and keep it."
        )
