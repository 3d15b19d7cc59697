"""The shards of a rank: a loss differentiated one shard at a time, so that no bit depends on the number of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, num_ranks
from jax_ring.collectives.leaves import bits_of_keys
from jax_ring.collectives.shard_sums import ShardSums, TermStack
from jax_ring.options import check_arrays
from jax_ring.training.accumulation import check_in_axes, dimensions_of_cuts
from jax_ring.training.same_bits.audit import Audit, Audited, Findings
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.parts import SHARD, hidden_one, in_turn, sealed
from jax_ring.training.sentinel import Digests, after
from jax_ring.training.sync import Reduction, ReductionOptions
from jax_ring.training.trees import is_float0
from jax_ring.training.wire import UNCHANGED


def first_shard(axis_name: AxisName, num_shards: int) -> jax.Array:
    """The index of this rank's first shard."""
    axes = axes_of(axis_name)
    return lax.axis_index(axes) * (num_shards // num_ranks(axes))


@dataclass(frozen=True)
class Shards:
    """What `value_and_grad` is told about shards."""

    function: str
    num_shards: int
    in_axes: Any
    reduce_gradients: bool
    audit: Audit | None

    @classmethod
    def of(
        cls,
        function: str,
        num_shards: Any,
        in_axes: Any,
        reduce_gradients: bool,
        audit: Any,
        step: Any,
        options: ReductionOptions,
    ) -> Self | None:
        """None without num_shards. With it, the order in the options is set, if it is not there."""
        audits = Audit.of(function, audit, step, num_shards)
        if num_shards is None:
            for name, value, default in (("in_axes", in_axes, 0), ("reduce_gradients", reduce_gradients, True)):
                if value is not default:
                    raise ValueError(f"{function}: {name}={value!r} is for shards; pass num_shards as well")
            return None
        if isinstance(num_shards, bool) or not isinstance(num_shards, int | np.integer):
            raise TypeError(f"{function}: num_shards must be a whole number of shards, got {num_shards!r}")
        if num_shards < 1:
            raise ValueError(f"{function}: num_shards must be positive, got {num_shards}")
        if (order := options.setdefault("order", "tree")) != "tree":
            raise ValueError(
                f"{function}: with num_shards={num_shards} sums go along the tree, order='tree'; got order={order!r}"
            )
        check_in_axes(function, in_axes)
        return cls(function, int(num_shards), in_axes, reduce_gradients, audits)

    def check(self, axis_name: AxisName, reduced_in_backward: bool) -> None:
        """Raises ValueError unless the ranks of the axis can share the shards."""
        count = num_ranks(axes_of(axis_name))
        if self.num_shards % count:
            raise ValueError(
                f"{self.function}: num_shards={self.num_shards} is not a multiple of the {count} ranks of "
                f"{axis_name!r}. Take one that every number of ranks divides that the training may run on, such as 24."
            )
        if self.num_shards > count and reduced_in_backward:
            raise ValueError(
                f"{self.function}: gradients of {self.num_shards} shards on {count} ranks are added along the tree "
                "before they are reduced, which reduced_in_backward=True would do in the backward pass of each "
                f"shard. Leave it out, or take num_shards={count}."
            )
        if self.audit is not None and reduced_in_backward:
            raise ValueError(
                f"{self.function}: audit={self.audit.every} compares the gradients of a shard, which "
                "reduced_in_backward=True has already added to those of the other ranks. Leave out one of the two."
            )

    def differentiate(
        self,
        local: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        parameters: Sequence[int],
        axis_name: AxisName,
    ) -> tuple[ShardSums, Any, Findings | None]:
        """Sums of (value, gradients) over this rank's shards, auxiliary data, stacked, and what an audit has found.

        Every shard is computed by the same program, whatever the number of ranks: see `sealed`. Gradients of dtype
        float0 are in the sums as they are, without slots.

        local: returns ((value, aux), gradients).
        parameters: the positions of the arguments that are not cut.
        """
        axes, function, num_shards = axes_of(axis_name), self.function, self.num_shards
        each, first = num_shards // num_ranks(axes), first_shard(axis_name, num_shards)
        data = _Data.of(self, args, kwargs, parameters, each)
        body = _Body.traced(function, local, data, kwargs, first, axes)
        condition = hidden_one([*args, *kwargs.values()], axes)

        def results(parts, index):
            return body.split(sealed(condition, body.closed, [*parts, index]))

        types = body.split(body.closed.out_avals)[0]
        audited: Audited | None = None
        if self.audit is not None:
            drawn = self.audit.draw(axis_name, num_shards)
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

    def reduced(
        self, reduction: Reduction, sums: ShardSums, axis_name: AxisName, own: Digests | None, findings: Findings | None
    ) -> tuple[Any, Any]:
        """The value and the gradients for their sums over the rank's shards, once nothing that is compared differs."""
        value_terms, grad_terms = sums.terms
        wanted, grads = sums, ShardSums(grad_terms, self.num_shards, sums.dtypes[1:])
        has_wire = reduction.wire != UNCHANGED
        if has_wire:
            reduction.refuse_rounding(self.num_shards, axis_name)
        if has_wire or not self.reduce_gradients:
            wanted = ShardSums(value_terms, self.num_shards, sums.dtypes[:1])
        tables = tuple(x.table for x in (own, findings) if x is not None)
        exact = replace(reduction, wire=UNCHANGED, after_last=bool(tables))  # the value is never rounded
        reduced = exact.reduce(wanted, axis_name, self.num_shards, value=tables or None)
        value, grads = reduced.tree if wanted is sums else (reduced.tree, grads)
        if has_wire and self.reduce_gradients:
            grads = reduction.reduce(grads, axis_name, self.num_shards).tree
        if own is not None:
            ok = own.verdict(reduced.value[0])
            value, grads = after(value, ok), after(grads, ok)
        if findings is not None:
            # Fence all of them behind the verdict: if the update could overwrite parameters before it, XLA would copy
            # them.
            value, grads = fence((value, grads), findings.verdict(reduced.value[-1]))
        return value, grads


class _Data(NamedTuple):
    """The positional arguments of a loss, and how they are cut into the shards of a rank.

    Attributes:
      parameters: the positions of arguments that are not cut.
      leaves: of the others.
      dimensions: by position among the leaves, the dimension that is cut. Every shard gets other leaves whole.
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
        """The names that errors give the leaves to be added."""
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
