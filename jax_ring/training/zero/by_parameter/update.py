"""What one rank computes of a traced update: for its parameters or pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring.collectives.axes import AxisName
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.rounding import each_rounded
from jax_ring.training.zero.analysis import slicing
from jax_ring.training.zero.block_sums import up_to_blocks
from jax_ring.training.zero.by_parameter.plan import Piece
from jax_ring.training.zero.by_parameter.state import Plan
from jax_ring.training.zero.by_parameter.traced_update import TracedUpdate


@dataclass(frozen=True)
class OwnInputs:
    """What a rank knows of a traced update's inputs.

    Attributes:
      pieces: of its parameters.
      gradients: by piece, flat.
      states: by piece, its parameter's leaves, flat, in one list.
      shared: other leaves, by index.
      params: all; none if they are divided.
      norms: known ones.
      in_blocks: parameters computed as vectors of whole blocks, even if whole: the last elements of other vectors can
        have other bits.
      scalars: of `TracedUpdate.shared_scalars`.
      own_params: by piece, flat, if parameters are divided.
    """

    traced: TracedUpdate
    pieces: Sequence[Piece]
    gradients: Sequence[jax.Array]
    states: Sequence[jax.Array]
    shared: dict[int, Any]
    params: Any
    norms: Sequence[jax.Array]
    in_blocks: frozenset[int] = frozenset()
    scalars: Sequence[jax.Array] = ()
    own_params: Sequence[jax.Array] | None = None

    def states_by_piece(self) -> list[list[jax.Array]]:
        rest = iter(self.states)
        return [[next(rest) for _ in self._states_of(piece.leaf)] for piece in self.pieces]

    def updates(self, has_gradient: Sequence[bool]) -> tuple[list[jax.Array], list[jax.Array]]:
        """By piece its update, and all pieces' states in one list. Without a gradient a parameter keeps both."""
        num_leaves = self.traced.num_leaves

        def wanted(leaf):
            return [leaf, *(num_leaves + k for k in self._states_of(leaf))] if has_gradient[leaf] else []

        updates, states = [], []
        for piece, kept, values in zip(self.pieces, self.states_by_piece(), self.compute(wanted), strict=True):
            nothing = [jnp.zeros(piece.stop - piece.start, self.traced.update_types[piece.leaf].dtype), *kept]
            update, *new = values or nothing
            updates.append(update)
            states += new
        return updates, states

    def compute_shared(self, outputs: Sequence[int]) -> list[jax.Array]:
        """Outputs that need no gradient."""
        return slicing.compute(self.traced.closed, outputs, self._inputs({}))

    def compute(self, wanted: Callable[[int], list[int]]) -> list[list[jax.Array]]:
        """By piece, its parameter's outputs `wanted`, flat unless whole."""
        traced, avals = self.traced, self.traced.closed.in_avals
        results: dict[int, list] = {}
        together: dict[int, Any] = {}
        for i, (piece, gradient, states) in enumerate(
            zip(self.pieces, self.gradients, self.states_by_piece(), strict=True)
        ):
            indices = [piece.leaf, *(traced.num_leaves + k for k in self._states_of(piece.leaf))]
            known = {j: x.astype(avals[j].dtype) for j, x in zip(indices, [gradient, *states], strict=True)}
            outputs, of_params = wanted(piece.leaf), traced.num_leaves + traced.num_states + piece.leaf
            if self.own_params is not None:
                known[of_params] = self.own_params[i]
            if gradient.size == avals[piece.leaf].size and piece.leaf not in self.in_blocks:
                whole = {j: jnp.reshape(x, avals[j].shape) for j, x in known.items()}
                if traced.scalars is None:
                    together |= whole
                else:
                    inputs = self._inputs(*fence((whole, self.scalars)))
                    results[i] = fence(each_rounded(partial(slicing.compute, traced.closed, outputs), inputs))
                continue
            if self.own_params is None:
                known[of_params] = jnp.reshape(jax.tree.leaves(self.params)[piece.leaf], -1)[piece.start : piece.stop]
            shape = avals[piece.leaf].shape
            if traced.scalars is None:
                bounds = slicing.Bounds(shape, piece.start, piece.stop, gradient.size)
                inputs = self._inputs({j: slicing.Piece(x) for j, x in known.items()})
                results[i] = slicing.compute_piece(traced.closed, outputs, inputs, bounds)
            else:
                bounds = slicing.Bounds(shape, piece.start, piece.stop, up_to_blocks(gradient.size))
                # Keep padding and cutting out of the loops that compute the update. Fence the scalars for each piece,
                # because XLA divides by a scalar in another way if several loops of one size use it.
                vectors, scalars = fence(({j: bounds.filled(x) for j, x in known.items()}, self.scalars))
                inputs = self._inputs({j: slicing.Piece(x) for j, x in vectors.items()}, scalars)
                of_piece = partial(slicing.compute_piece, traced.closed, outputs, bounds=bounds)
                filled = fence(each_rounded(of_piece, inputs))
                results[i] = [x[: gradient.size] for x in filled]
        # One call for all other parameters computes their common terms once.
        rest = [i for i in range(len(self.pieces)) if i not in results]
        of_rest = [wanted(self.pieces[i].leaf) for i in rest]
        values = iter(
            slicing.compute(traced.closed, [i for of_piece in of_rest for i in of_piece], self._inputs(together))
        )
        results |= {i: [next(values) for _ in of_piece] for i, of_piece in zip(rest, of_rest, strict=True)}
        return [results[i] for i in range(len(self.pieces))]

    def _states_of(self, leaf: int) -> list[int]:
        return [k for k, owner in enumerate(self.traced.state_owners()) if owner == leaf]

    def _inputs(self, known: dict[int, Any], scalars: Sequence[jax.Array] | None = None) -> list:
        """The jaxpr's inputs; None if unknown here."""
        scalars = self.scalars if scalars is None else scalars
        first_param = self.traced.num_leaves + self.traced.num_states
        params = jax.tree.leaves(self.params)
        num_inputs = len(self.traced.closed.in_avals)
        known = (
            {self.traced.num_leaves + k: x for k, x in self.shared.items()}
            | {first_param + i: x for i, x in enumerate(params)}
            | {first_param + self.traced.num_leaves + i: x for i, x in enumerate(self.norms)}
            | {num_inputs - len(scalars) + i: x for i, x in enumerate(scalars)}
            | known
        )
        return [known.get(i) for i in range(num_inputs)]


def on_each_rank(function: Callable[[int], Any], plan: Plan, axis_name: AxisName) -> Any:
    """`function(rank)` in a branch per owner; other ranks share one."""

    def branch(rank):
        return jax.tree.map(lambda x: own_copy(x, axis_name), function(rank))

    ranks = range(min(plan.num_busy + 1, len(plan.pieces)))
    if len(ranks) == 1:
        return branch(0)
    index = jnp.minimum(lax.axis_index(axis_name), len(ranks) - 1)
    return lax.switch(index, [partial(branch, rank) for rank in ranks])
