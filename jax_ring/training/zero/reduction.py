"""What a sharded optimizer sends: gradients to be added over the ranks, and parameters to be gathered.

Scale groups of 8 bits follow ZeRO++ (Wang et al., 2023). Gradients are rounded once, by their rank: the partition
that a rank gets is a sum in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.collectives import scale_groups as int8
from jax_ring.collectives.axes import AxisName, axes_of, check_divisible, check_named, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.collectives.shard_sums import ShardSums
from jax_ring.options import promoted
from jax_ring.training import sync
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.rounding import each_rounded
from jax_ring.training.trees import is_float0
from jax_ring.training.wire import UNCHANGED, Collectives, FloatWire, Int8Wire, collectives_here
from jax_ring.training.zero.clip import TILE
from jax_ring.training.zero.interface import Stage, by_dtype, check_same_tree, flat, own_partition, padded


@dataclass(frozen=True, kw_only=True)
class Reduction(sync.Reduction):
    """How a sharded optimizer adds gradients: its arguments of these names."""

    function: str = "sharded_optimizer"
    axis_name: AxisName
    num_shards: int | None = None
    param_wire: FloatWire | Int8Wire = UNCHANGED

    @property
    def is_tree(self) -> bool:
        """Whether results do not depend on the number of ranks."""
        return self.order == "tree"

    @property
    def num_ranks(self) -> int:
        """The number of ranks. Raises NameError unless the axes are bound."""
        check_named("sharded_optimizer", axes_of(self.axis_name))
        return num_ranks(axes_of(self.axis_name))

    @property
    def collectives(self) -> Collectives:
        return collectives_here(self.overlap, self.order)

    def cut(self, num_ranks: int | None = None) -> int:
        """The number of elements of which a flat vector's size is a multiple; by default for the ranks here.

        Raises ValueError if V ranks cannot be so many.
        """
        num_ranks = self.num_ranks if num_ranks is None else num_ranks
        if self.num_shards is not None:
            num_ranks = check_divisible("sharded_optimizer", self.num_shards, num_ranks)
        return num_ranks * TILE if self.is_tree else num_ranks

    def scattered(self, vectors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """This rank's partition of the sums of vectors over the ranks, rounded to `wire`; in the vectors' dtypes."""
        wire, count = self.wire, self.num_ranks

        def in_groups(x):
            packets = int8.encode(_in_groups(x.reshape(count, -1)))
            total = int8.fold(self.collectives.all_to_all(packets, self.axis_name, 0, 0))
            return total.reshape(-1)[: x.size // count].astype(x.dtype)

        chosen = {name: in_groups(x) for name, x in vectors.items() if _takes(wire, x)}
        rest = {name: x for name, x in vectors.items() if name not in chosen}
        floats = UNCHANGED if isinstance(wire, Int8Wire) else wire
        scales = {name: floats.scale_of(x, count, count) for name, x in rest.items()}
        sent = {name: floats.sent(x, scales[name]) for name, x in rest.items()}
        sums = self.collectives.psum_scatter(sent, self.axis_name)
        return chosen | {name: floats.received(sums[name], x, scales[name], 1) for name, x in rest.items()}

    def gathered(self, vectors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The partitions of all ranks, one after the other along the last dimension, as `param_wire` brings them."""
        wire, axis_name, gather = self.param_wire, self.axis_name, self.collectives.all_gather

        def floats(x):
            sent = x if isinstance(wire, Int8Wire) else wire.sent(x, 1)
            # Without a fence the compiler may leave out a rounding on one rank, where nothing is sent.
            sent = fence(sent) if self.is_tree and sent.dtype != x.dtype else sent
            return gather(sent, axis_name, axis=x.ndim - 1).astype(x.dtype)

        def in_groups(x):
            packets = each_rounded(int8.encode, _in_groups(x)) if self.is_tree else int8.encode(_in_groups(x))
            everyones = gather(packets, axis_name, axis=x.ndim - 1)
            partitions = int8.decode(everyones).reshape(*x.shape[:-1], self.num_ranks, -1)
            return partitions[..., : x.shape[-1]].reshape(*x.shape[:-1], -1).astype(x.dtype)

        return {name: in_groups(x) if _takes(wire, x) else floats(x) for name, x in vectors.items()}


def _takes(wire: FloatWire | Int8Wire, x: jax.Array) -> bool:
    return isinstance(wire, Int8Wire) and wire.takes(x)


def _in_groups(x: jax.Array) -> jax.Array:
    """float32[..., scale groups, 256], from the last dimension."""
    return padded(x.astype(jnp.float32), int8.GROUP).reshape(*x.shape[:-1], -1, int8.GROUP)


class LocalGradients(NamedTuple):
    """A rank's gradients, in the order of the parameters' leaves.

    Attributes:
      leaves: with a first dimension for the rank's terms if `num_shards` is set. Zeros for a parameter without one.
      types: shapes and dtypes of their sums.
      has_gradient: false for gradients of integers, of dtype float0.
      num_shards: of all ranks if the gradients are a `ShardSums`; else None.
    """

    leaves: list[jax.Array]
    types: list[jax.ShapeDtypeStruct]
    has_gradient: list[bool]
    num_shards: int | None
    reduction: Reduction

    @classmethod
    def of(cls, gradients: Any, params: Any, reduction: Reduction) -> LocalGradients:
        """The gradients that `update` gets. Raises ValueError for others."""
        num_shards, tree = None, gradients
        if isinstance(gradients, ShardSums):
            if not reduction.is_tree:
                raise ValueError(
                    f"sharded_optimizer: the gradients are a ShardSums of {gradients.num_shards} shards, which are "
                    f"added along a tree, and order is {reduction.order!r}. Pass order='tree' to sharded_optimizer, "
                    "which also divides the state such that its bits do not depend on the number of ranks."
                )
            num_shards, tree = gradients.num_shards, gradients.terms
        sync.check_local("sharded_optimizer", tree, reduction.axis_name)
        leaves = jax.tree.leaves(tree)
        has_gradient = [not is_float0(x) for x in leaves]
        dtypes = [jnp.result_type(x) for x in leaves] if num_shards is None else gradients.dtypes
        types = [
            jax.ShapeDtypeStruct(jnp.shape(x)[has and num_shards is not None :], dtype)
            for x, has, dtype in zip(leaves, has_gradient, dtypes, strict=True)
        ]
        structure = jax.tree.structure(tree)
        check_same_tree("gradients", jax.tree.unflatten(structure, types), params)
        terms = [len(x) for x in leaves if num_shards is not None and not is_float0(x)][:1]
        for i, like in enumerate(jax.tree.leaves(params)):
            if not has_gradient[i]:
                types[i] = jax.ShapeDtypeStruct(jnp.shape(like), jnp.result_type(like))
                leaves[i] = own_copy(jnp.zeros((*terms, *types[i].shape), types[i].dtype), reduction.axis_name)
        return cls([*map(jnp.asarray, leaves)], types, has_gradient, num_shards, reduction)

    @property
    def sent_types(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the sums, and the dtypes of the leaves: those of partial sums can be wider."""
        return [jax.ShapeDtypeStruct(x.shape, leaf.dtype) for x, leaf in zip(self.types, self.leaves, strict=True)]

    def scattered_sums(self, pack: Callable[[list[jax.Array]], dict[str, jax.Array]]) -> dict[str, jax.Array]:
        """This rank's partition of the sums over the ranks of what `pack` makes of leaves, in its dtypes."""
        # Leaves of a ShardSums have a first dimension for terms.
        vectors = pack(self.leaves) if self.num_shards is None else jax.vmap(pack)(self.leaves)
        if self.reduction.wire != UNCHANGED:
            return self.reduction.scattered(vectors)
        sums = self._sums(vectors, jax.tree.map(lambda x: x.dtype, vectors))
        return self.reduction.collectives.psum_scatter(sums, self.reduction.axis_name)

    def partition(self, params: Any, *, stage: Stage = 2, mean: bool = True) -> dict[str, Any]:
        """This rank's partition of the means, or of the sums, as a vector for each dtype of the parameters.

        Of dtype float0 where no parameter of a dtype has a gradient.
        """
        multiple, by_name = self.reduction.cut(), by_dtype(params)
        dtypes = {name: promoted(*(self.types[i].dtype for i in places)) for name, places in by_name.items()}
        if stage == 1:
            # Use the dtypes of the vectors, so that the sums have the bits of stage 2.
            of_leaves = {i: dtypes[name] for name, places in by_name.items() for i in places}
            synced = self.synced([of_leaves[i] for i in range(len(self.leaves))])
            own: dict[str, Any] = own_partition(flat(synced, params, multiple), self.reduction.axis_name)
        else:
            sums = self.scattered_sums(lambda leaves: flat(leaves, params, multiple))
            own = jax.tree.map(self.mean if mean else lambda x, dtype: x.astype(dtype), sums, dtypes)
        for name, places in by_name.items():
            if not any(self.has_gradient[i] for i in places):
                own[name] = np.zeros(own[name].shape, jax.dtypes.float0)
        return own

    def synced(self, dtypes: list) -> list[jax.Array]:
        """The means over all ranks, each summed in one of these dtypes."""
        leaves: Any = self.leaves
        if self.num_shards is None:
            leaves = [x.astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
        return self.reduction.synced(self._sums(leaves, dtypes), self.reduction.axis_name, mean=True).tree

    def mean(self, total: jax.Array, dtype: Any) -> jax.Array:
        """A sum over all ranks, divided by the number of ranks or shards, and then rounded."""
        if self.num_shards is None:
            return total / self.reduction.num_ranks
        return (total / self.num_shards).astype(dtype)

    def _sums(self, values: Any, dtypes: Any) -> Any:
        if self.num_shards is None:
            return values
        return ShardSums(values, self.num_shards, tuple(map(np.dtype, jax.tree.leaves(dtypes))))
