"""`ShardSums`: what a rank with several shards contributes to a sum along the tree."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat, shard_tree
from jax_ring.collectives.axes import AxisName, axes_of, check_divisible, check_named, num_ranks
from jax_ring.collectives.leaves import counted, own_copy
from jax_ring.lowering.transposed import without_reverse_mode
from jax_ring.lowering.trees import accumulator


@partial(jax.tree_util.register_dataclass, data_fields=["terms"], meta_fields=["num_shards", "dtypes"])
@dataclass(frozen=True)
class ShardSums:
    """Partial sums of a rank's shards, for `ring_psum(..., order="tree")` and the training layer.

        sums = ShardSums(x[None], num_shards=8, dtypes=(x.dtype,))  # on 8 ranks: one term each
        total = ring_psum(sums, "data", order="tree")

    Attributes:
      terms: a pytree like the sum, with an additional first dimension for the rank's terms (`shard_tree.terms_of`), in
        the accumulator's dtype. Slots beyond the rank's last term have no meaning.
      num_shards: the number of shards of all ranks, V.
      dtypes: the dtypes of the sum, in the order of `jax.tree.leaves(terms)`.
    """

    terms: Any
    num_shards: int = field(metadata={"static": True})
    dtypes: tuple[np.dtype, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, values: Any, axis_name: AxisName, num_shards: int) -> Self:
        """Partial sums of a pytree whose leaves have a first dimension for the rank's V/p shards, in order.

        Rank r holds the shards from r * V/p on. Booleans are summed as int32.

        Raises:
          ValueError: if p does not divide V, or a leaf's first dimension is not V/p.
          TypeError: if V is no integer.
          NameError: if no axis of that name is bound.
        """
        axes = axes_of(axis_name)
        check_named("ShardSums.of", axes)
        num_shards = check_divisible("ShardSums.of", num_shards, num_ranks(axes))
        each = num_shards // num_ranks(axes)
        leaves, structure = jax.tree.flatten(values)
        leaves = [counted(jnp.asarray(leaf)) for leaf in leaves]
        for leaf in leaves:
            if leaf.shape[:1] != (each,):
                raise ValueError(
                    f"ShardSums.of: each rank holds {each} of {num_shards} shards, the first dimension of every leaf; "
                    f"got one of shape {leaf.shape}"
                )
        each_type = [_compat.without_first_dimension(jax.typeof(x)) for x in leaves]
        stack = TermStack.empty(each_type, axis_name, num_shards)

        def step(stack, own):
            shard, values = own
            return stack.push(values, axis_name, num_shards, shard), None

        stack, _ = lax.scan(step, stack, (jnp.arange(each, dtype=jnp.int32), leaves))
        terms = without_reverse_mode(
            stack.terms(axis_name, num_shards),
            "ShardSums.of has no reverse mode, because loops add the shards. To differentiate a loss whose shards are "
            "added along the tree, use jax_ring.value_and_grad(loss, axis_name, num_shards=V), or differentiate by "
            "jax.jvp.",
        )
        terms = jax.tree.unflatten(structure, terms)
        return cls(terms, num_shards, tuple(x.dtype for x in leaves))


class TermStack(NamedTuple):
    """A stack of partial sums, to which a rank adds its shards in turn.

    It holds log2(V/p) + 1 values if V/p is a power of two, and at most twice as many if not.

    Attributes:
      slots: arrays with a first dimension for the places of the stack.
      depth: the number of places in use.
    """

    slots: list[jax.Array]
    depth: jax.Array

    @classmethod
    def empty(cls, likes: list, axis_name: AxisName, num_shards: int) -> Self:
        axes = axes_of(axis_name)
        size = _stack_size(num_shards, num_ranks(axes))

        def slots(x):
            others = sorted(_compat.varying_axes(x) - {*axes}, key=str)
            zero = jnp.zeros((), accumulator(x.dtype))
            zeros = lax.broadcast(zero, (size, *x.shape), out_sharding=_compat.stacked_sharding(x))
            return own_copy(zeros, (*axes, *others))

        return cls([slots(x) for x in likes], own_copy(jnp.zeros((), jnp.int32), axis_name))

    def after(self, other: jax.Array) -> Self:
        """The same stack, which needs `other`, integers: what reads values of a shard ends before `push` adds to them.

        Otherwise XLA would copy them. No-op if `other` differs along axes over which the stack's depth is the same.
        """
        if not _compat.varying_axes(other) <= _compat.varying_axes(self.depth):
            return self
        # Always zero, but the compiler cannot tell.
        zero = jnp.minimum(lax.population_count(other.ravel()[0]).astype(jnp.int32), 0)
        return self._replace(depth=self.depth + zero)

    def push(self, leaves: list, axis_name: AxisName, num_shards: int, shard: Any) -> Self:
        """The stack after the rank's shard number `shard`."""
        merges = _merges(num_shards, num_ranks(axes_of(axis_name)))
        count = jnp.asarray(merges)[lax.axis_index(axes_of(axis_name)), shard]
        wide = [own_copy(x.astype(s.dtype), axis_name) for x, s in zip(leaves, self.slots, strict=True)]

        def merge(_, state):
            depth, sums = state
            top = [lax.dynamic_index_in_dim(s, depth - 1, keepdims=False) for s in self.slots]
            return depth - 1, [left + right for left, right in zip(top, sums, strict=True)]

        depth, sums = lax.fori_loop(0, count, merge, (self.depth, wide))
        slots = [lax.dynamic_update_index_in_dim(s, x, depth, 0) for s, x in zip(self.slots, sums, strict=True)]
        return type(self)(slots, depth + 1)

    def terms(self, axis_name: AxisName, num_shards: int) -> list[jax.Array]:
        count = shard_tree.num_slots(num_shards, num_ranks(axes_of(axis_name)))
        return [s[:count] for s in self.slots]


def _merges(num_shards: int, num_ranks: int) -> np.ndarray:
    """By rank and shard: how many partial sums are added after it."""
    each = num_shards // num_ranks
    nodes = [[shard_tree.Node(rank * each + i, 1) for i in range(each)] for rank in range(num_ranks)]
    return np.array([shard_tree.merges_of(num_shards, own) for own in nodes], np.int32)


def _stack_size(num_shards: int, num_ranks: int) -> int:
    return int((1 - _merges(num_shards, num_ranks)).cumsum(axis=1).max())
