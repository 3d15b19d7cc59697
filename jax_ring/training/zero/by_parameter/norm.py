"""The norm of all gradients for `clip_by_global_norm`, where ranks own parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ring.collectives import ring_all_gather
from jax_ring.collectives.axes import AxisName
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.rounding import each_rounded
from jax_ring.training.zero.block_sums import BLOCK, block_sums, sum_of_blocks, up_to_blocks
from jax_ring.training.zero.by_parameter.plan import Blocks, Piece
from jax_ring.training.zero.by_parameter.state import Plan
from jax_ring.training.zero.by_parameter.traced_update import NormRequest, TracedUpdate
from jax_ring.training.zero.by_parameter.update import OwnInputs, on_each_rank
from jax_ring.training.zero.clip import sum_of_squares, sum_over_ranks
from jax_ring.training.zero.interface import padded


def norm_over_ranks(
    request: NormRequest, traced: TracedUpdate, plan: Plan, inputs_of: Callable[[int], OwnInputs], axis_name: AxisName
) -> jax.Array:
    """The norm that a transformation asked for, of outputs of the traced update."""

    def values_of(rank):
        inputs = inputs_of(rank)
        parts = [x for of_piece in inputs.compute(lambda leaf: _outputs(request, traced, leaf)) for x in of_piece]
        if rank == 0:  # parts without a gradient have no owner, so rank 0 adds them
            parts += inputs.compute_shared(_outputs(request, traced, None))
        return parts

    if request.order == "tree":
        return jnp.sqrt(_sum_in_blocks(_summands(request, traced, plan), values_of, plan, axis_name, request.dtype))

    def squares(rank):
        return sum_of_squares([jnp.zeros((), request.dtype), *values_of(rank)])

    own = on_each_rank(squares, plan, axis_name)
    return jnp.sqrt(sum_over_ranks(own, axis_name, request.order))


def _outputs(request: NormRequest, traced: TracedUpdate, owner: int | None) -> list[int]:
    """The request's leaves that belong to a parameter, or to none."""
    return [i for i in request.leaves if traced.owners[i] == owner]


def _summands(request: NormRequest, traced: TracedUpdate, plan: Plan) -> Blocks:
    """What each rank adds, in order: elements of outputs, filled up to whole blocks."""
    outputs = traced.closed.out_avals

    def of_piece(leaf, start, stop):
        is_cut = stop - start < traced.closed.in_avals[leaf].size
        for i in _outputs(request, traced, leaf):
            yield Piece(i, start, start + up_to_blocks(stop - start)) if is_cut else whole(i)

    def whole(i):
        return Piece(i, 0, up_to_blocks(outputs[i].size))

    ranks = [[summand for piece in pieces for summand in of_piece(*piece)] for pieces in plan.params.ranks]
    ranks[0] += map(whole, _outputs(request, traced, None))
    return Blocks(outputs, ranks)


def _sum_in_blocks(
    summands: Blocks, values_of: Callable[[int], list], plan: Plan, axis_name: AxisName, dtype: Any
) -> jax.Array:
    """The sum of all summands' squares: by dtype, along the tree of all outputs' blocks."""

    def filled(rank):
        return summands.pack(rank, [padded(jnp.ravel(x), BLOCK) for x in values_of(rank)])

    own = {name: each_rounded(block_sums, x) for name, x in on_each_rank(filled, plan, axis_name).items() if x.size}
    everyones = fence(ring_all_gather(own, axis_name, tiled=True, to="invarying"))
    # The same pieces in units of blocks, to put the sums in the order of the outputs.
    ranks = [
        [Piece(i, start // BLOCK, stop // BLOCK) for i, start, stop in pieces if stop] for pieces in summands.ranks
    ]
    types = [jax.ShapeDtypeStruct((up_to_blocks(x.size) // BLOCK,), x.dtype) for x in summands.arrays]
    found = Blocks(types, ranks).unpack_all(everyones)
    total = jnp.zeros((), dtype)
    for name in everyones:
        total = total + sum_of_blocks(jnp.concatenate([found[i] for i in sorted(found) if types[i].dtype.name == name]))
    return total
