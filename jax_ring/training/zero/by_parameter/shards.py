"""Parameters divided at rest as their owners have them, with `stage=3` and `layout="parameter"`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ring.training.zero.by_parameter.plan import Blocks, balance
from jax_ring.training.zero.interface import on_all_devices
from jax_ring.training.zero.vectors import Shapes


class Division(NamedTuple):
    """What decides who owns which parameters, besides the number of ranks. Can be compared and be a key.

    Attributes:
      shapes: of the parameters.
      may_cut: for each whether it may be cut.
      block: of which pieces begin at multiples.
    """

    shapes: Shapes
    may_cut: tuple[bool, ...]
    block: int

    @functools.cache  # noqa: B019
    def blocks(self, num_ranks: int) -> Blocks:
        leaves = jax.tree.leaves(self.shapes.params)
        return Blocks(leaves, balance(leaves, num_ranks, self.may_cut.__getitem__, self.block))


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
          ValueError: if these are the shards of one rank.
        """
        num_ranks = max((len(x) for x in self.own.values()), default=1)
        blocks = self.division.blocks(num_ranks)
        for name, size in blocks.sizes.items():
            if (found := jnp.shape(self.own[name])) != (num_ranks, size):
                raise ValueError(
                    f"ParameterShards.whole: these are a rank's shards, of shape {found} where all of {name} have "
                    f"{(num_ranks, size)}. Inside of shard_map use gather of the sharded optimizer."
                )
        return self.unpacked({name: jnp.reshape(x, -1) for name, x in on_all_devices(self.own).items()}, num_ranks)

    def unpacked(self, vectors: dict[str, jax.Array], num_ranks: int) -> Any:
        """The parameters, from the vectors of all ranks."""
        leaves = self.division.blocks(num_ranks).unpack_all(vectors)
        return jax.tree.unflatten(self.division.shapes.structure, [leaves[i] for i in range(len(leaves))])


def check_shards(shards: Any) -> None:
    """Raises ValueError for parameters that are not divided so."""
    if not isinstance(shards, ParameterShards):
        raise ValueError(
            "sharded_optimizer: with stage=3 and layout='parameter' parameters are a ParameterShards, got a "
            f"{type(shards).__name__}. Make it by optimizer.shard(params), once, under shard_map, and keep it."
        )
