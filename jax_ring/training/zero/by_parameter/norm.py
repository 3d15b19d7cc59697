"""The norm of all gradients for `clip_by_global_norm`, where ranks own parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.collectives import ring_all_gather
from jax_ring.collectives.axes import AxisName
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.rounding import each_rounded
from jax_ring.training.zero.block_sums import BLOCK, block_sums, sum_of_blocks, up_to_blocks
from jax_ring.training.zero.by_parameter.state import Plan
from jax_ring.training.zero.by_parameter.traced_update import NormRequest, TracedUpdate
from jax_ring.training.zero.by_parameter.update import OwnInputs, on_each_rank
from jax_ring.training.zero.clip import sum_of_squares, sum_over_ranks


class Summand(NamedTuple):
    """Elements of an output whose squares are added.

    Attributes:
      output: its index.
      start: the first element.
      size: their number.
      dtype: its name.
    """

    output: int
    start: int
    size: int
    dtype: str

    @property
    def size_in_blocks(self) -> int:
        return up_to_blocks(self.size)


def norm_over_ranks(
    request: NormRequest, traced: TracedUpdate, plan: Plan, inputs_of: Callable[[int], OwnInputs], axis_name: AxisName
) -> jax.Array:
    """The norm that a transformation asked for, of outputs of the traced update.

    Args:
      request: the leaves, and how to add.
      traced: the update.
      plan: who owns what.
      inputs_of: (rank) -> what it knows.
    """

    def values_of(rank):
        inputs = inputs_of(rank)
        parts = [x for of_piece in inputs.compute(lambda leaf: _outputs(request, traced, leaf)) for x in of_piece]
        if rank == 0:  # parts without a gradient have no owner, so rank 0 adds them
            parts += inputs.compute_shared(_outputs(request, traced, None))
        return parts

    if request.order == "tree":
        ranks = [_summands(request, traced, plan, rank) for rank in range(len(plan.pieces))]
        return jnp.sqrt(_sum_in_blocks(ranks, values_of, plan, axis_name, request.dtype))

    def squares(rank):
        return sum_of_squares([jnp.zeros((), request.dtype), *values_of(rank)])

    own = on_each_rank(squares, plan, axis_name)
    return jnp.sqrt(sum_over_ranks(own, axis_name, request.impl, request.order))


def _outputs(request: NormRequest, traced: TracedUpdate, owner: int | None) -> list[int]:
    """The request's leaves that belong to a parameter, or to none."""
    return [i for i in request.leaves if traced.owners[i] == owner]


def _summands(request: NormRequest, traced: TracedUpdate, plan: Plan, rank: int) -> list[Summand]:
    """What a rank adds, in order."""
    found = []
    for piece in plan.pieces[rank]:
        is_cut = piece.stop - piece.start < traced.closed.in_avals[piece.leaf].size
        for i in _outputs(request, traced, piece.leaf):
            aval = traced.closed.out_avals[i]
            start, size = (piece.start, piece.stop - piece.start) if is_cut else (0, aval.size)
            found.append(Summand(i, start, size, np.dtype(aval.dtype).name))
    if rank == 0:
        avals = [(i, traced.closed.out_avals[i]) for i in _outputs(request, traced, None)]
        found += [Summand(i, 0, aval.size, np.dtype(aval.dtype).name) for i, aval in avals]
    return found


def _sum_in_blocks(
    ranks: Sequence[Sequence[Summand]], values_of: Callable[[int], list], plan: Plan, axis_name: AxisName, dtype: Any
) -> jax.Array:
    """The sum of all summands' squares: by dtype, along the tree of all outputs' blocks."""
    names = sorted({x.dtype for own in ranks for x in own if x.size})
    used = {name: [sum(x.size_in_blocks for x in own if x.dtype == name) for own in ranks] for name in names}

    def blocks(rank):
        parts: dict[str, list] = defaultdict(list)
        for summand, value in zip(ranks[rank], values_of(rank), strict=True):
            parts[summand.dtype].append(jnp.pad(jnp.ravel(value), (0, summand.size_in_blocks - summand.size)))
        return {
            name: jnp.concatenate([*parts[name], jnp.zeros(max(used[name]) - used[name][rank], np.dtype(name))])
            for name in names
        }

    total = jnp.zeros((), dtype)
    if not names:
        return total
    own = {name: each_rounded(block_sums, x) for name, x in on_each_rank(blocks, plan, axis_name).items()}
    everyones = fence(ring_all_gather(own, axis_name, tiled=True, to="invarying"))
    for name in names:
        places = _places(ranks, name, max(used[name]) // BLOCK)
        total = total + sum_of_blocks(everyones[name][places])
    return total


def _places(ranks: Sequence[Sequence[Summand]], name: str, num_blocks: int) -> np.ndarray:
    """Where a dtype's blocks are, in order, among `num_blocks` of each rank."""
    places = []
    for rank, own in enumerate(ranks):
        first = rank * num_blocks
        for summand in own:
            if summand.dtype == name:
                count = summand.size_in_blocks // BLOCK
                places += [(summand.output, summand.start // BLOCK + i, first + i) for i in range(count)]
                first += count
    return np.array([place for *_, place in sorted(places)], np.int32)
