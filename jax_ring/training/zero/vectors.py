"""Parameters as one vector for each dtype, divided equally over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring.collectives.axes import AxisName, axes_of, num_ranks
from jax_ring.options import check_arrays, promoted
from jax_ring.training.zero.interface import by_dtype, on_all_devices, padded


class Shapes(NamedTuple):
    """Structure, shapes and dtypes of the parameters, which can be compared and be a key."""

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, params: Any) -> Shapes:
        """From a tree of arrays or of their types."""
        check_arrays("sharded_optimizer", "the parameters", params)
        leaves, structure = jax.tree.flatten(params)
        return cls(structure, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves))

    @property
    def params(self) -> Any:
        """The parameters' types."""
        return jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(*leaf) for leaf in self.leaves])


@partial(jax.tree_util.register_dataclass, data_fields=["vectors"], meta_fields=["shapes"])
@dataclass(frozen=True)
class ShardedParams:
    """Parameters that are divided over the ranks, with `stage=3`. A pytree, of one array for each dtype.

        optimizer = zero.sharded_optimizer(optax.adam(1e-3), "data", stage=3)
        shards = optimizer.shard(params)  # under shard_map, with out_specs=P("data")

    Attributes:
      vectors: by the name of a dtype, its parameters one after the other, with zeros up to the padded size. Inside of
        `shard_map` the rank's part; outside all of it. Several of equal shapes can be stacked, as `jax.vmap` does it.
      shapes: the structure, shapes and dtypes of the parameters.
    """

    vectors: dict[str, jax.Array]
    shapes: Shapes = field(metadata={"static": True})

    @property
    def like(self) -> Any:
        """The parameters' types: a tree of `jax.ShapeDtypeStruct`."""
        return self.shapes.params

    def whole(self) -> Any:
        """The parameters, outside of `shard_map`; inside of it `ShardedOptimizer.gather` returns them.

        Raises:
          ValueError: if these are the shards of one rank.
        """
        sizes = {name: size_of(self.like, places) for name, places in by_dtype(self.like).items()}
        for name, size in sizes.items():
            if (own := jnp.shape(self.vectors[name])[-1]) < size:
                raise ValueError(
                    f"ShardedParams.whole: these are a rank's shards, {own} of {size} elements of {name}. Inside of "
                    "shard_map use gather of the sharded optimizer."
                )
        return unflat(on_all_devices(self.vectors), self.like)


def is_sharded(x: Any) -> bool:
    """Whether x is a `ShardedParams`, for `is_leaf` of jax.tree."""
    return isinstance(x, ShardedParams)


def is_single(x: Any) -> bool:
    """Whether x is a `ShardedParams` that is not stacked."""
    return is_sharded(x) and all(jnp.ndim(vector) == 1 for vector in x.vectors.values())


def has_shards(tree: Any) -> bool:
    """Whether there is a `ShardedParams` in a tree."""
    return any(map(is_sharded, jax.tree.leaves(tree, is_leaf=is_sharded)))


def map_sharded(f: Callable[[ShardedParams], Any], tree: Any) -> Any:
    """A tree with `f` of each `ShardedParams` in its place; other leaves stay."""
    return jax.tree.map(lambda x: f(x) if is_sharded(x) else x, tree, is_leaf=is_sharded)


def size_of(like: Any, places: list[int]) -> int:
    """The number of elements of some leaves."""
    leaves = jax.tree.leaves(like)
    return sum(int(np.prod(jnp.shape(leaves[i]))) for i in places)


def flat(leaves: list[jax.Array], params: Any, multiple: int) -> dict[str, jax.Array]:
    """One vector of the leaves for each dtype of the parameters. Leaves of several dtypes are promoted to one."""

    def joined(places):
        own = [jnp.ravel(leaves[i]) for i in places]
        return jnp.concatenate(own, dtype=promoted(*(x.dtype for x in own)))

    return {dtype: padded(joined(places), multiple) for dtype, places in by_dtype(params).items()}


def unflat(vectors: dict[str, jax.Array], params: Any) -> Any:
    """A tree like the parameters, from vectors as `flat` makes them; with their further dimensions before."""
    leaves, structure = jax.tree.flatten(params)
    shapes = [jnp.shape(x) for x in leaves]
    for dtype, places in by_dtype(params).items():
        ends = np.cumsum([int(np.prod(shapes[i])) for i in places])
        vector = vectors[dtype]
        for i, end in zip(places, ends, strict=True):
            part = vector[..., end - int(np.prod(shapes[i])) : end]
            leaves[i] = part.reshape((*jnp.shape(vector)[:-1], *shapes[i]))
    return jax.tree.unflatten(structure, leaves)


def own_part(vectors: dict[str, jax.Array], axis_name: AxisName) -> dict[str, jax.Array]:
    """The rank's part of vectors that it has whole."""
    rank, p = lax.axis_index(axis_name), num_ranks(axes_of(axis_name))
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rank * (x.size // p), x.size // p), vectors)
