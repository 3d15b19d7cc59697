"""What the layouts of a sharded optimizer have in common: its interface, and how leaves are grouped and padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.collectives.axes import AxisName
from jax_ring.collectives.leaves import own_copy

Stage = Literal[1, 2]


class ShardedOptimizer(NamedTuple):
    """The result of `sharded_optimizer`. Call `init` and `update` inside `shard_map`, the others outside.

    Attributes:
      init: (params) -> this rank's state.
      update: (gradients, state, params) -> (updates of all parameters, the same on all ranks; this rank's state).
      specs: (params) -> the PartitionSpecs of the state, for `in_specs` and `out_specs`.
      repartition: (state, params, num_ranks) -> the state, sharded over that many ranks.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    specs: Callable[[Any], Any]
    repartition: Callable[[Any, Any, int], Any]


def by_dtype(tree: Any) -> dict[str, list[int]]:
    """For each dtype, the positions of its leaves in jax.tree.leaves."""
    places: dict[str, list[int]] = {}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        places.setdefault(np.dtype(leaf.dtype).name, []).append(i)
    return places


def padded(vector: jax.Array, num_ranks: int) -> jax.Array:
    """The vector, with zeros up to a multiple of the number of ranks."""
    return jnp.pad(vector, (0, -vector.size % num_ranks))


def vary(state: Any, axis_name: AxisName) -> Any:
    """Casts the state's vectors to varying over the axis. Zeros are invariant otherwise, and the type would change."""
    return jax.tree.map(lambda x: own_copy(x, axis_name) if x.ndim else x, state)
