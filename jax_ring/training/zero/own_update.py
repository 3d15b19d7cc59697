"""The part of a traced update that one rank computes: for the parameters, or pieces of them, that it owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_ring.training.zero import data_flow
from jax_ring.training.zero.parameter_plan import Piece
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
    """

    traced: TracedUpdate
    pieces: Sequence[Piece]
    gradients: Sequence[jax.Array]
    states: Sequence[jax.Array]
    shared: dict[int, Any]
    params: Any
    norms: Sequence[jax.Array]

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
            if gradient.size == avals[piece.leaf].size:
                together |= {j: jnp.reshape(x, avals[j].shape) for j, x in known.items()}
                continue
            of_params = traced.num_leaves + traced.num_states + piece.leaf
            known[of_params] = jnp.reshape(jax.tree.leaves(self.params)[piece.leaf], -1)[piece.start : piece.stop]
            inputs = self._inputs({j: data_flow.Piece(x) for j, x in known.items()})
            results[i] = data_flow.compute_piece(
                traced.closed, wanted(piece.leaf), inputs, shape, piece.start, piece.stop
            )
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
