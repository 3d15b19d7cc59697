"""Audits: in some steps another rank computes a shard again, and the step fails if a bit of it differs.

A shard has the same bits wherever it is computed. Digests of both computations go with a sum that the step makes
anyway. Only after a difference all ranks compute the shard once more, to tell who was wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring.collectives import ring_pbroadcast
from jax_ring.collectives.axes import AxisName, axes_of, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.collectives.reductions import ring_psum
from jax_ring.options import array_or_none, integer
from jax_ring.training.sentinel import check_callbacks, digest, failure, row_of_table


@dataclass(frozen=True)
class Audit:
    """What `value_and_grad` is told about audits.

    Attributes:
      every: the number of steps from one audit to the next.
      step: the number of the step, an integer scalar, the same on all ranks.
    """

    function: str
    every: int
    step: Any

    @classmethod
    def of(cls, function: str, every: Any, step: Any, num_shards: Any) -> Self | None:
        """None without audits. Raises ValueError or TypeError for what cannot be audited."""
        if every is None:
            if step is not None:
                raise ValueError(f"{function}: step={step!r} is for audits; pass audit as well")
            return None
        if num_shards is None:
            raise ValueError(f"{function}: audit={every!r} has a shard computed again; pass num_shards as well")
        every = integer(function, "audit", every)
        if every < 1:
            raise ValueError(f"{function}: audit must be a positive number of steps, got {every}")
        array = array_or_none(step)
        if array is None or array.shape or not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(
                f"{function}: with audit={every} step must be the number of the step, an integer scalar that is the "
                f"same on all ranks; got {step!r}"
            )
        return cls(function, every, step)

    def draw(self, axis_name: AxisName, num_shards: int) -> Drawn:
        """What is audited in this step, if anything is."""
        check_callbacks(self.function)
        count = num_ranks(axes_of(axis_name))
        if count == 1:
            raise ValueError(
                f"{self.function}: audit={self.every} has a shard computed again by another rank, and "
                f"{axis_name!r} has only one. Leave audit out there."
            )
        step = jnp.asarray(self.step).astype(jnp.int32)
        number = step // self.every
        # Successive audits visit all shards, because the stride and the number of shards are coprime.
        stride = next(
            i for i in range(max(1, round(num_shards * 0.618)), 2 * num_shards) if math.gcd(i, num_shards) == 1
        )
        shard = number % num_shards * stride % num_shards
        owner = shard // (num_shards // count)
        auditor = (owner + 1 + number // num_shards % (count - 1)) % count
        return Drawn(step % self.every == 0, step, shard, owner, auditor)


class Drawn(NamedTuple):
    """What a step audits, as scalars: whether it does, its number, the shard, its rank, and the one that audits."""

    due: jax.Array
    step: jax.Array
    shard: jax.Array
    owner: jax.Array
    auditor: jax.Array


@dataclass(frozen=True)
class Audited:
    """The audit of a call, while it is traced.

    Attributes:
      names: of the arrays that a shard has.
      others: the other axes of the mesh, whose ranks have parts of the arrays.
      own_parts: () -> the data of this rank's shard that would be audited if the rank were its owner.
      compute: (data, index) -> the shard's arrays.
    """

    function: str
    axes: tuple
    drawn: Drawn
    names: tuple[str, ...]
    others: tuple
    own_parts: Callable[[], list]
    compute: Callable[[list, jax.Array], list]

    def none(self) -> jax.Array:
        """Digests before any is computed, uint32 [arrays, 2]."""
        return own_copy(jnp.zeros((len(self.names), 2), jnp.uint32), (*self.axes, *self.others))

    def digests(self, arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([digest(own_copy(x, (*self.axes, *self.others))) for x in arrays])

    def noted(self, own: jax.Array, arrays: Sequence[jax.Array], index: jax.Array) -> jax.Array:
        """`own`, or the digests of the arrays of this shard if it is the one that is audited."""
        is_audited = self.drawn.due & (index == self.drawn.shard)
        return lax.cond(is_audited, lambda: self.digests(arrays), lambda: own)

    def again(self, *, on_all: bool = False) -> jax.Array:
        """The digests of the auditor's computation, or of every rank's. For a branch that all ranks take."""
        parts = ring_pbroadcast(self.own_parts(), self.axes, self.drawn.owner)

        def compute():
            return self.digests(self.compute(parts, own_copy(self.drawn.shard, self.axes)))

        if on_all:
            return compute()
        return lax.cond(lax.axis_index(self.axes) == self.drawn.auditor, compute, self.none)

    def of_all_parts(self, digests: jax.Array) -> jax.Array:
        """The sum over the other axes, so that all of their ranks fail if one part differs."""
        return ring_psum(digests, self.others) if self.others else digests

    def finished(self, own: jax.Array, like: Sequence) -> Findings:
        """What this rank has found after its last shard, of which `noted` returned `own`. Arrays are like `like`."""

        def both():
            return self.of_all_parts(jnp.stack([own, self.again()]))

        def neither():
            return own_copy(jnp.zeros((2, len(self.names), 2), jnp.uint32), self.axes)

        digests = lax.cond(self.drawn.due, both, neither)
        rank = lax.axis_index(self.axes)
        rows = [
            jnp.where(rank == one, row_of_table(of_one, like), 0)
            for one, of_one in zip((self.drawn.owner, self.drawn.auditor), digests, strict=True)
        ]
        return Findings(self, digests, jnp.stack(rows))


class Findings(NamedTuple):
    """What a rank has found.

    Attributes:
      digests: uint32 [2, arrays, 2]: the first if the rank is the owner, the second if it is the auditor.
      table: what has to be summed over the ranks, [2, 4] or [2, 16]: the owner's and the auditor's digest of digests.
    """

    audited: Audited
    digests: jax.Array
    table: jax.Array

    def verdict(self, sums: jax.Array) -> jax.Array:
        """Fails the step on all ranks if the computations differ; else an int32 zero, on which the step has to depend.

        sums: the sum of `table` over the ranks.
        """
        audited = self.audited

        def fail():
            third = audited.of_all_parts(audited.again(on_all=True))
            text = partial(report, audited.function, audited.names)
            return failure(text, jnp.stack([*self.digests, third]), audited.axes, *audited.drawn[1:])

        return lax.cond((sums[0] != sums[1]).any(), fail, lambda: jnp.zeros((), jnp.int32))


def report(
    function: str,
    names: tuple[str, ...],
    by_rank: np.ndarray,
    step: int,
    shard: int,
    owner: int,
    auditor: int,
) -> str:
    """The error for digests by rank, computation (first, second, on all ranks) and array, uint32 [p, 3, arrays, 2]."""
    first, second = by_rank[owner, 0], by_rank[auditor, 1]
    different = [name for name, x, y in zip(names, first, second, strict=True) if (x != y).any()]
    different = different or ["the sum itself"]
    computed = [(owner, first), (auditor, second), *enumerate(by_rank[:, 2])]
    bits, votes = Counter(digests.tobytes() for _, digests in computed).most_common(1)[0]
    wrong = sorted({rank for rank, digests in computed if digests.tobytes() != bits})
    if votes * 2 <= len(computed):
        cause = f"Which is wrong cannot be told: of {len(computed)} computations no more than {votes} agree"
    else:
        ranks = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))}"
        cause = f"Of {len(computed)} computations {votes} agree, unlike others of {ranks}: suspect hardware"
    more = f" and {len(different) - 1} more arrays" if len(different) > 1 else ""
    return (
        f"{function}: in step {step} shard {shard} has other bits on rank {owner}, which has it, than on rank "
        f"{auditor}, which computed it again: {different[0]} differs{more}. {cause}. The step is not applied. Go on "
        "from a checkpoint. If every audit fails, arguments of the loss that are not cut may differ between ranks."
    )
