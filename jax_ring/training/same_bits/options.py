"""What `value_and_grad` is told about shards, and what follows from their sums."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from jax_ring.collectives.axes import AxisName, axes_of, num_ranks
from jax_ring.collectives.shard_sums import ShardSums
from jax_ring.training.same_bits.audit import Audit, Findings
from jax_ring.training.same_bits.cuts import check_in_axes
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.sentinel import Digests, after, reduced_with, verdict
from jax_ring.training.sync import Reduction, ReductionOptions
from jax_ring.training.wire import UNCHANGED


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
        audit: Audit | None,
        options: ReductionOptions,
    ) -> Self | None:
        """None without num_shards. With it, the order in the options is set, if it is not there."""
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
        return cls(function, int(num_shards), in_axes, reduce_gradients, audit)

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

    def reduced(
        self, reduction: Reduction, sums: ShardSums, axis_name: AxisName, own: Digests | None, findings: Findings | None
    ) -> tuple[Any, Any]:
        """The value and the gradients for their sums over the rank's shards.

        own: the rank's digests, if replicas are compared.
        findings: those of an audit.
        """
        value_terms, grad_terms = sums.terms
        wanted, grads = sums, ShardSums(grad_terms, self.num_shards, sums.dtypes[1:])
        has_wire = reduction.wire != UNCHANGED
        if has_wire:
            reduction.refuse_rounding(self.num_shards, axis_name)
        if has_wire or not self.reduce_gradients:
            wanted = ShardSums(value_terms, self.num_shards, sums.dtypes[:1])
        exact = replace(reduction, wire=UNCHANGED)  # the value is never rounded
        reduce = partial(Reduction.reduce, axis_name=axis_name, divisor=self.num_shards)
        tables = tuple(x.table for x in (own, findings) if x is not None)
        if tables:
            reduced, tables = reduced_with(exact, reduce, wanted, tables)
        else:
            reduced = reduce(exact, wanted)
        value, grads = reduced.tree if wanted is sums else (reduced.tree, grads)
        if has_wire and self.reduce_gradients:
            grads = reduction.reduce(grads, axis_name, self.num_shards).tree
        if own is not None:
            ok = verdict(self.function, own, tables[0], axis_name)
            value, grads = after(value, ok), after(grads, ok)
        if findings is not None:
            # Fence all of them behind the verdict: if the update could overwrite parameters before it, XLA would copy
            # them.
            value, grads = fence((value, grads), findings.verdict(tables[-1]))
        return value, grads
