"""The shards of a rank: a loss differentiated one shard at a time, so that no bit depends on the number of ranks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, num_ranks
from jax_ring.collectives.leaves import bits_of_keys
from jax_ring.collectives.shard_sums import ShardSums, TermStack
from jax_ring.options import check_arrays
from jax_ring.training.parameters import is_float0
from jax_ring.training.same_bits.audit import Audited, Findings
from jax_ring.training.same_bits.cuts import dimensions_of_cuts
from jax_ring.training.same_bits.indices import SHARD
from jax_ring.training.same_bits.options import Shards
from jax_ring.training.same_bits.parts import in_turn
from jax_ring.training.same_bits.sealed import hidden_one, sealed


def first_shard(axis_name: AxisName, num_shards: int) -> jax.Array:
    """The index of this rank's first shard."""
    axes = axes_of(axis_name)
    return lax.axis_index(axes) * (num_shards // num_ranks(axes))


def differentiate_shards(
    shards: Shards,
    local: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    parameters: Sequence[int],
    axis_name: AxisName,
) -> tuple[ShardSums, Any, Findings | None]:
    """The sums over this rank's shards of the values and gradients that `local` returns.

    Every shard is computed by the same program, whatever the number of ranks: see `sealed`.

    Args:
      shards: what `value_and_grad` is told about them.
      local: as `jax.value_and_grad` of a function with auxiliary results: returns ((value, aux), gradients).
      parameters: the positions of the arguments that are not cut. The others are, as `shards.in_axes` says.

    Returns:
      The sums of (value, gradients). Gradients of integers, of dtype float0, are in it as they are, without slots.
      The auxiliary results, stacked over the rank's shards.
      What an audit has found.

    Raises:
      ValueError: if the arguments cannot be cut so, if the loss asks for the axis, or if there is no rank to audit.
    """
    axes, function, num_shards = axes_of(axis_name), shards.function, shards.num_shards
    each, first = num_shards // num_ranks(axes), first_shard(axis_name, num_shards)
    data = _Data.of(shards, args, kwargs, parameters, each)
    body = _Body.traced(function, local, data, kwargs, first, axes)
    condition = hidden_one([*args, *kwargs.values()], axes)

    def results(parts, index):
        return body.split(sealed(condition, body.closed, [*parts, index]))

    types = body.split(body.closed.out_avals)[0]
    audited: Audited | None = None
    if shards.audit is not None:
        drawn = shards.audit.draw(axis_name, num_shards)
        others = tuple(axis for axis in _compat.bound_axis_sizes() if axis not in axes)
        audited = Audited(
            function, axes, drawn, body.names(), others, lambda: data.shard(drawn.shard % each),
            lambda parts, index: results(parts, index)[0],
        )  # fmt: skip

    def step(state, shard, _):
        stack, digests = state
        sums, aux = results(data.shard(shard), first + shard)
        if audited is not None:
            digests = audited.noted(digests, sums, first + shard)
            stack = stack.after(digests)
        return (stack.push(sums, axis_name, num_shards, shard), digests), aux

    state = TermStack.empty(types, axis_name, num_shards), None if audited is None else audited.none()
    (stack, digests), aux = in_turn(step, state, each)
    aux = jax.tree.unflatten(body.aux, [from_bits(x) for from_bits, x in zip(body.from_bits, aux, strict=True)])
    findings = None if audited is None else audited.finished(digests, types)
    return body.shard_sums(stack.terms(axis_name, num_shards), num_shards), aux, findings


class _Data(NamedTuple):
    """The arguments of a loss, and how they are cut into shards.

    Attributes:
      args: all positional arguments.
      parameters: the positions of those that are not cut.
      leaves: those of the others.
      dimensions: by position among the leaves, the dimension that is cut. Every shard gets other leaves whole.
      each: the number of shards.
    """

    args: Sequence[Any]
    parameters: Sequence[int]
    leaves: list
    dimensions: dict[int, int]
    each: int

    @classmethod
    def of(cls, shards: Shards, args: Sequence, kwargs: dict, parameters: Sequence[int], each: int) -> "_Data":
        function, num_shards = shards.function, shards.num_shards
        others = tuple(x for i, x in enumerate(args) if i not in parameters)
        dimensions = dimensions_of_cuts(
            function, shards.in_axes, others, each, f"shards of a rank ({num_shards} in all)", "every shard"
        )
        if (others or kwargs) and not dimensions:
            raise ValueError(
                f"{function}: in_axes cuts no argument into shards, so that all {num_shards} would be equal. Pass data "
                "as positional arguments after the parameters; keyword arguments are passed whole."
            )
        return cls(args, parameters, jax.tree.leaves(others), dimensions, each)

    def shard(self, shard: Any) -> list:
        """The parts of the leaves that are cut."""

        def part(leaf, dimension):
            if self.each == 1:
                return leaf
            size = leaf.shape[dimension] // self.each
            return lax.dynamic_slice_in_dim(leaf, shard * size, size, dimension)

        return [part(jnp.asarray(self.leaves[i]), dimension) for i, dimension in self.dimensions.items()]

    def arguments(self, parts: Sequence) -> list:
        """The positional arguments for a shard."""
        leaves = list(self.leaves)
        for i, part in zip(self.dimensions, parts, strict=True):
            leaves[i] = part
        others = [x for i, x in enumerate(self.args) if i not in self.parameters]
        own = iter(jax.tree.unflatten(jax.tree.structure(others), leaves))
        return [x if i in self.parameters else next(own) for i, x in enumerate(self.args)]


class _Body(NamedTuple):
    """The computation for a shard, as a jaxpr of its parts and its index.

    Attributes:
      closed: its results are the leaves of (value, gradients) but for those of dtype float0, and of the auxiliary data.
      sums: the structure of (value, gradients).
      float0: by position among the leaves of (value, gradients), those of dtype float0.
      aux: the structure of the auxiliary data.
      from_bits: for each leaf of it a function from what the jaxpr returns; random keys are returned as their bits.
    """

    closed: Any
    sums: Any
    float0: dict[int, np.ndarray]
    aux: Any
    from_bits: list[Callable]

    @classmethod
    def traced(cls, function, local, data: _Data, kwargs, index, axes) -> "_Body":
        found: dict[str, Any] = {}

        def results(parts, index):
            with SHARD.set(index):
                (value, aux), grads = local(*data.arguments(parts), **kwargs)
            leaves, found["sums"] = jax.tree.flatten((value, grads))
            found["float0"] = {i: x for i, x in enumerate(leaves) if is_float0(x)}
            check_arrays(function, "the auxiliary data", aux)
            aux_leaves, found["aux"] = jax.tree.flatten(aux)
            pairs = [bits_of_keys(jnp.asarray(x)) for x in aux_leaves]
            found["from_bits"] = [from_bits for _, from_bits in pairs]
            return [x for x in leaves if not is_float0(x)], [bits for bits, _ in pairs]

        closed: Any = jax.make_jaxpr(results)(data.shard(np.int32(0)), index)
        used = sorted(map(str, _compat.rank_dependent_axes(closed.jaxpr) & {*axes}))
        if used:
            raise ValueError(
                f"{function}: with num_shards a loss is computed for each shard alone, and this one communicates over, "
                f"or asks for its index in, the axis {', '.join(used)}, so that it would depend on the number of "
                "ranks. For a random key, use jax_ring.shard_index(); value and gradients are averaged over the shards "
                "without a pmean in the loss, and parameters are not to be passed through reduce_in_backward."
            )
        return cls(closed, **found)

    def split(self, results: Sequence) -> tuple[list, list]:
        """The leaves to be added, and those of the auxiliary data."""
        count = self.sums.num_leaves - len(self.float0)
        return list(results[:count]), list(results[count:])

    def names(self) -> tuple[str, ...]:
        """Of the leaves to be added, for errors."""
        tree = jax.tree.unflatten(self.sums, range(self.sums.num_leaves))
        return tuple(
            f"the gradient of {jax.tree_util.keystr(path[1:]) or 'the parameter'}" if path[0].idx else "the value"
            for path, i in jax.tree_util.tree_leaves_with_path(tree) if i not in self.float0
        )  # fmt: skip

    def shard_sums(self, terms: list, num_shards: int) -> ShardSums:
        rest, dtypes = iter(terms), iter(self.closed.out_avals)
        places = range(self.sums.num_leaves)
        leaves = [self.float0[i] if i in self.float0 else next(rest) for i in places]
        kinds = tuple(np.dtype(self.float0[i].dtype if i in self.float0 else next(dtypes).dtype) for i in places)
        return ShardSums(jax.tree.unflatten(self.sums, leaves), num_shards, kinds)
