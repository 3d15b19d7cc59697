"""What one rank computes of a traced update: for its parameters or pieces, and its part of norms over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring.collectives import ring_all_gather
from jax_ring.collectives.axes import AxisName
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.rounding import each_rounded
from jax_ring.training.zero.by_parameter import slicing
from jax_ring.training.zero.by_parameter.pieces import Packing, Piece
from jax_ring.training.zero.by_parameter.plan import Plan
from jax_ring.training.zero.by_parameter.traced_update import NormRequest, TracedUpdate
from jax_ring.training.zero.clip import TILE, sum_of_squares, sum_of_tiles, sum_over_ranks, tile_sums, up_to_tiles
from jax_ring.training.zero.interface import padded


@dataclass(frozen=True)
class OwnInputs:
    """What a rank knows of a traced update's inputs.

    Attributes:
      shared: leaves of the state that belong to no parameter, by index.
      params: all; none if they are divided.
      in_tiles: `Plan.in_tiles`.
      norms: known ones.
      scalars: of `TracedUpdate.shared_scalars`.
      pieces: of its parameters.
      gradients: by piece, flat.
      states: by piece, its parameter's leaves, flat, in one list.
      own_params: by piece, flat, if parameters are divided.
    """

    traced: TracedUpdate
    shared: dict[int, Any]
    params: Sequence[jax.Array]
    in_tiles: frozenset[int]
    norms: Sequence[jax.Array] = ()
    scalars: Sequence[jax.Array] = ()
    pieces: Sequence[Piece] = ()
    gradients: Sequence[jax.Array] = ()
    states: Sequence[jax.Array] = ()
    own_params: Sequence[jax.Array] | None = None

    def states_by_piece(self) -> list[list[jax.Array]]:
        rest = iter(self.states)
        return [[next(rest) for _ in self.traced.indices_of(piece.leaf)[1:]] for piece in self.pieces]

    def updates(self, has_gradient: Sequence[bool]) -> tuple[list[jax.Array], list[jax.Array]]:
        """The update of each piece, and all pieces' states in one list. Without a gradient a parameter keeps both."""

        def wanted(leaf):
            return self.traced.indices_of(leaf) if has_gradient[leaf] else []

        updates, states = [], []
        for piece, kept, values in zip(self.pieces, self.states_by_piece(), self.compute(wanted), strict=True):
            nothing = [jnp.zeros(piece.stop - piece.start, self.traced.update_types[piece.leaf].dtype), *kept]
            update, *new = values or nothing
            updates.append(update)
            states += new
        return updates, states

    def compute_shared(self, outputs: Sequence[int]) -> list[jax.Array]:
        """Outputs that need no gradient."""
        return slicing.compute(self.traced.closed, outputs, self._inputs({}, self.scalars))

    def compute(self, wanted: Callable[[int], list[int]]) -> list[list[jax.Array]]:
        """The outputs `wanted` of each piece's parameter, flat unless the piece is whole."""
        closed, avals, in_loops = self.traced.closed, self.traced.closed.in_avals, self.traced.scalars is not None
        results: dict[int, list] = {}
        together: dict[int, Any] = {}

        def alone(compute, known):
            # Scalars are fenced each time: XLA divides by one in another way if several loops of one size use it.
            return fence(each_rounded(compute, self._inputs(*fence((known, self.scalars)))))

        for i, (piece, gradient, states) in enumerate(
            zip(self.pieces, self.gradients, self.states_by_piece(), strict=True)
        ):
            leaf, start, stop = piece
            indices, of_param, outputs = self.traced.indices_of(leaf), self.traced.first_param + leaf, wanted(leaf)
            known = {j: x.astype(avals[j].dtype) for j, x in zip(indices, [gradient, *states], strict=True)}
            if self.own_params is not None:
                known[of_param] = self.own_params[i]
            if gradient.size == avals[leaf].size and leaf not in self.in_tiles:
                whole = {j: jnp.reshape(x, avals[j].shape) for j, x in known.items()}
                if in_loops:
                    results[i] = alone(partial(slicing.compute, closed, outputs), whole)
                else:
                    together |= whole
                continue
            if self.own_params is None:
                known[of_param] = jnp.reshape(self.params[leaf], -1)[start:stop]
            size = up_to_tiles(gradient.size) if in_loops else gradient.size
            bounds = slicing.Bounds(avals[leaf].shape, start, stop, size)
            of_piece = partial(slicing.compute_piece, closed, outputs, bounds=bounds)
            if in_loops:  # padding and cutting stay out of the loops
                filled = alone(of_piece, {j: slicing.Elements(bounds.filled(x)) for j, x in known.items()})
                results[i] = [x[: gradient.size] for x in filled]
            else:
                results[i] = of_piece(self._inputs({j: slicing.Elements(x) for j, x in known.items()}, self.scalars))
        # One call for all other parameters computes their common terms once.
        rest = [i for i in range(len(self.pieces)) if i not in results]
        of_rest = [wanted(self.pieces[i].leaf) for i in rest]
        inputs = self._inputs(together, self.scalars)
        values = iter(slicing.compute(closed, [j for of_piece in of_rest for j in of_piece], inputs))
        results |= {i: [next(values) for _ in of_piece] for i, of_piece in zip(rest, of_rest, strict=True)}
        return [results[i] for i in range(len(self.pieces))]

    def _inputs(self, known: dict[int, Any], scalars: Sequence[jax.Array]) -> list:
        return self.traced.inputs(known, self.shared, params=self.params, norms=self.norms, scalars=scalars)


def on_each_rank(function: Callable[[int], Any], plan: Plan, axis_name: AxisName) -> Any:
    """`function(rank)` in a branch per owner; other ranks share one."""

    def branch(rank):
        return jax.tree.map(lambda x: own_copy(x, axis_name), function(rank))

    ranks = range(min(plan.num_busy + 1, len(plan.params.ranks)))
    if len(ranks) == 1:
        return branch(0)
    index = jnp.minimum(lax.axis_index(axis_name), len(ranks) - 1)
    return lax.switch(index, [partial(branch, rank) for rank in ranks])


def norm_over_ranks(
    request: NormRequest, traced: TracedUpdate, plan: Plan, inputs_of: Callable[[int], OwnInputs], axis_name: AxisName
) -> jax.Array:
    """The norm that a transformation asked for, of outputs of the traced update."""

    def values_of(rank):
        inputs = inputs_of(rank)
        values = [x for of_piece in inputs.compute(lambda leaf: _outputs(request, traced, leaf)) for x in of_piece]
        if rank == 0:  # what has no gradient has no owner, so rank 0 adds it
            values += inputs.compute_shared(_outputs(request, traced, None))
        return values

    if request.order == "tree":
        return jnp.sqrt(_sum_in_tiles(_summands(request, traced, plan), values_of, plan, axis_name, request.dtype))

    def squares(rank):
        return sum_of_squares([jnp.zeros((), request.dtype), *values_of(rank)])

    own = on_each_rank(squares, plan, axis_name)
    return jnp.sqrt(sum_over_ranks(own, axis_name, request.order))


def _outputs(request: NormRequest, traced: TracedUpdate, owner: int | None) -> list[int]:
    """The request's leaves that belong to a parameter, or to none."""
    return [i for i in request.leaves if traced.owners[i] == owner]


def _summands(request: NormRequest, traced: TracedUpdate, plan: Plan) -> Packing:
    """What each rank adds, in order: elements of outputs, filled up to whole tiles."""
    outputs = traced.closed.out_avals

    def of_piece(leaf, start, stop):
        is_cut = stop - start < traced.closed.in_avals[leaf].size
        for i in _outputs(request, traced, leaf):
            yield Piece(i, start, start + up_to_tiles(stop - start)) if is_cut else whole(i)

    def whole(i):
        return Piece(i, 0, up_to_tiles(outputs[i].size))

    ranks = [[summand for piece in pieces for summand in of_piece(*piece)] for pieces in plan.params.ranks]
    ranks[0] += map(whole, _outputs(request, traced, None))
    return Packing(outputs, ranks)


def _sum_in_tiles(
    summands: Packing, values_of: Callable[[int], list], plan: Plan, axis_name: AxisName, dtype: Any
) -> jax.Array:
    """The sum of all summands' squares: by dtype, along the tree of all outputs' tiles."""

    def filled(rank):
        return summands.pack(rank, [padded(jnp.ravel(x), TILE) for x in values_of(rank)])

    own = {name: each_rounded(tile_sums, x) for name, x in on_each_rank(filled, plan, axis_name).items() if x.size}
    everyones = fence(ring_all_gather(own, axis_name, tiled=True, to="invarying"))
    # The pieces in units of tiles, to put the sums in the order of the outputs.
    ranks = [[Piece(i, start // TILE, stop // TILE) for i, start, stop in pieces if stop] for pieces in summands.ranks]
    types = [jax.ShapeDtypeStruct((up_to_tiles(x.size) // TILE,), x.dtype) for x in summands.arrays]
    found = Packing(types, ranks).unpack_all(everyones)
    total = jnp.zeros((), dtype)
    for name in everyones:
        total = total + sum_of_tiles(jnp.concatenate([found[i] for i in sorted(found) if types[i].dtype.name == name]))
    return total
