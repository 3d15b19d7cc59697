"""The part of a traced update that one rank computes: for the parameters, or pieces of them, that it owns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring.collectives.axes import AxisName
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.zero import data_flow
from jax_ring.training.zero.block_sums import up_to_blocks
from jax_ring.training.zero.parameter_plan import Piece
from jax_ring.training.zero.parameter_state import Plan
from jax_ring.training.zero.traced_update import TracedUpdate


@dataclass(frozen=True)
class OwnInputs:
    """What a rank knows when it computes its outputs of a traced update.

    Attributes:
      traced: the update.
      pieces: of the parameters that the rank owns.
      gradients: for each piece, flat.
      states: for each piece those of the leaves of the state that belong to its parameter, flat, in one list.
      shared: the other leaves of the state, by index.
      params: all parameters.
      norms: those that are known.
      in_blocks: the parameters whose pieces are computed as vectors, filled up to whole blocks, also if a rank has one
        of them whole: the last elements of a vector that is not a multiple of the processor's can have other bits.
    """

    traced: TracedUpdate
    pieces: Sequence[Piece]
    gradients: Sequence[jax.Array]
    states: Sequence[jax.Array]
    shared: dict[int, Any]
    params: Any
    norms: Sequence[jax.Array]
    in_blocks: frozenset[int] = frozenset()

    def states_by_piece(self) -> list[list[jax.Array]]:
        """The states of each piece."""
        rest = iter(self.states)
        return [[next(rest) for _ in self._states_of(piece.leaf)] for piece in self.pieces]

    def compute_shared(self, outputs: Sequence[int]) -> list[jax.Array]:
        """Outputs that need nobody's gradient."""
        return data_flow.compute(self.traced.closed, outputs, self._inputs({}))

    def compute(self, wanted: Callable[[int], list[int]]) -> list[list[jax.Array]]:
        """For each piece the outputs `wanted` of its parameter; those of a piece that is not the whole are flat."""
        traced, avals = self.traced, self.traced.closed.in_avals
        results: dict[int, list] = {}
        together: dict[int, Any] = {}
        for i, (piece, gradient, states) in enumerate(
            zip(self.pieces, self.gradients, self.states_by_piece(), strict=True)
        ):
            indices = [piece.leaf, *(traced.num_leaves + k for k in self._states_of(piece.leaf))]
            known = {j: x.astype(avals[j].dtype) for j, x in zip(indices, [gradient, *states], strict=True)}
            shape = avals[piece.leaf].shape
            if gradient.size == avals[piece.leaf].size and piece.leaf not in self.in_blocks:
                together |= {j: jnp.reshape(x, avals[j].shape) for j, x in known.items()}
                continue
            of_params = traced.num_leaves + traced.num_states + piece.leaf
            known[of_params] = jnp.reshape(jax.tree.leaves(self.params)[piece.leaf], -1)[piece.start : piece.stop]
            size = up_to_blocks(gradient.size) if piece.leaf in self.in_blocks else gradient.size
            bounds = data_flow.Bounds(shape, piece.start, piece.stop, size)
            inputs = self._inputs({j: data_flow.Piece(bounds.filled(x)) for j, x in known.items()})
            results[i] = data_flow.compute_piece(traced.closed, wanted(piece.leaf), inputs, bounds)
        # One call for all whole parameters, so that what they have in common is computed once.
        whole = [i for i in range(len(self.pieces)) if i not in results]
        outputs = [wanted(self.pieces[i].leaf) for i in whole]
        values = iter(
            data_flow.compute(traced.closed, [i for of_piece in outputs for i in of_piece], self._inputs(together))
        )
        results |= {i: [next(values) for _ in of_piece] for i, of_piece in zip(whole, outputs, strict=True)}
        return [results[i] for i in range(len(self.pieces))]

    def _states_of(self, leaf: int) -> list[int]:
        return [k for k, owner in enumerate(self.traced.state_owners()) if owner == leaf]

    def _inputs(self, known: dict[int, Any]) -> list:
        """The inputs of the jaxpr; None for those that are not known here."""
        first_param = self.traced.num_leaves + self.traced.num_states
        params = jax.tree.leaves(self.params)
        known = (
            {self.traced.num_leaves + k: x for k, x in self.shared.items()}
            | {first_param + i: x for i, x in enumerate(params)}
            | {first_param + len(params) + i: x for i, x in enumerate(self.norms)}
            | known
        )
        return [known.get(i) for i in range(len(self.traced.closed.in_avals))]


def on_each_rank(function: Callable[[int], Any], plan: Plan, axis_name: AxisName) -> Any:
    """`function(rank)` in a branch per rank that owns anything. All other ranks share one branch."""

    def branch(rank):
        return jax.tree.map(lambda x: own_copy(x, axis_name), function(rank))

    ranks = range(min(plan.num_busy + 1, len(plan.pieces)))
    if len(ranks) == 1:
        return branch(0)
    index = jnp.minimum(lax.axis_index(axis_name), len(ranks) - 1)
    return lax.switch(index, [functools.partial(branch, rank) for rank in ranks])
