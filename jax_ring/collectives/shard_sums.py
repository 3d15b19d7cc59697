"""`ShardSums`: what a rank with several shards contributes to a sum along the tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat, shard_tree
from jax_ring.collectives.axes import AxisName, Groups, axes_of, check_divisible, check_named, num_ranks
from jax_ring.collectives.leaves import counted, own_copy
from jax_ring.lowering.custom_transpose import without_reverse_mode
from jax_ring.lowering.trees import accumulator
from jax_ring.lowering.xla.fallback import rank_in_group
from jax_ring.options import Options, integer


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
        """This stack, made to need `other`, integers: what reads values of a shard ends before `push` adds to them.

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
    """The number of partial sums that are added after each shard, by rank and shard."""
    each = num_shards // num_ranks
    nodes = [[shard_tree.Node(rank * each + i, 1) for i in range(each)] for rank in range(num_ranks)]
    return np.array([shard_tree.merges_of(num_shards, own) for own in nodes], np.int32)


def _stack_size(num_shards: int, num_ranks: int) -> int:
    return int((1 - _merges(num_shards, num_ranks)).cumsum(axis=1).max())


# ---- As operands of a sum -------------------------------------------------------------------------------------------


def prepare(
    function: str, x: Any, options: Options, num_shards: int | None, axes: tuple, groups: Groups | None
) -> tuple[Any, Options, Callable]:
    """What a sum of `x`, a pytree or `ShardSums`, adds in these groups of the ranks of some axes.

    Returns:
      The operands, with a first dimension for terms if `options.num_shards` is set (without axes: the sums), the
      primitive's options, and a function from the sum to the call's result.
    """
    has_shards = isinstance(x, ShardSums)
    if num_shards is None and not has_shards:
        return x, options, lambda total: total
    if num_shards is not None:
        num_shards = integer(function, "num_shards", num_shards)
    if options.order != "tree":
        given = "a ShardSums" if has_shards else f"num_shards={num_shards}"
        raise ValueError(f"{function}: {given} needs order='tree', got order={options.order!r}")
    sizes = {num_ranks(axes)} if groups is None else {len(group) for group in groups}
    if not has_shards:
        if sizes != {num_shards}:
            raise ValueError(
                f"{function}: each rank gives one value, so num_shards can only be the number of ranks, "
                f"{_listed(sizes)}; got num_shards={num_shards}. For several shards on each rank pass a "
                "jax_ring.ShardSums."
            )
        return x, options, lambda total: total
    if num_shards not in (None, x.num_shards):
        raise ValueError(
            f"{function}: got num_shards={num_shards} and a ShardSums of {x.num_shards} shards; leave num_shards out"
        )
    if len(sizes) > 1:
        raise ValueError(
            f"{function}: the groups of a ShardSums must all be of one size, so that the ranks hold equally many of "
            f"its {x.num_shards} shards; got groups of {_listed(sizes)} ranks"
        )
    (size,) = sizes
    check_divisible(function, x.num_shards, size)
    slots = shard_tree.num_slots(x.num_shards, size)

    def operand(term):
        term = jnp.asarray(term)
        if term.ndim == 0 or term.shape[0] != slots:
            raise ValueError(
                f"{function}: {x.num_shards} shards on {size} ranks have {slots} terms on each, as the first "
                f"dimension of every leaf of ShardSums.terms; got one of shape {term.shape}. Make the terms with "
                "jax_ring.ShardSums.of over the same axes."
            )
        return term.astype(accumulator(term.dtype))

    def finish(total):
        leaves, structure = jax.tree.flatten(total)
        dtypes = [np.int32 if dtype == np.bool_ else dtype for dtype in x.dtypes]
        return jax.tree.unflatten(structure, [leaf.astype(d) for leaf, d in zip(leaves, dtypes, strict=True)])

    leaves = jax.tree.map(operand, x.terms)
    if not axes:  # a rank alone has one term, its sum
        leaves = jax.tree.map(lambda terms: terms[0], leaves)
    return leaves, replace(options, num_shards=x.num_shards), finish


def spread(cotangents: Sequence[jax.Array], num_shards: int, axes: tuple, groups: Groups | None) -> list[jax.Array]:
    """The cotangents of operands with slots: the sum's cotangent in each used slot, zeros elsewhere."""
    size = num_ranks(axes) if groups is None else len(groups[0])
    counts = np.array([len(shard_tree.terms_of(num_shards, size, rank)) for rank in range(size)], np.int32)
    slots = int(counts.max())
    in_every_slot = [jnp.broadcast_to(own_copy(ct, axes), (slots, *ct.shape)) for ct in cotangents]
    if counts.min() == slots:
        return in_every_slot
    used = lax.iota(np.int32, slots) < jnp.asarray(counts)[rank_in_group(axes, groups)]
    return [jnp.where(jnp.expand_dims(used, range(1, ct.ndim)), ct, jnp.zeros_like(ct)) for ct in in_every_slot]


def _listed(sizes: set[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))
