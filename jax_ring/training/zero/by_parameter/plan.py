"""The plan where ranks own parameters: who owns which of them and of the state, whose form is `ParameterState`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jax_ring.collectives.axes import AxisName
from jax_ring.options import path_texts
from jax_ring.training.zero.by_parameter.pieces import Division, Packing, Piece, balance
from jax_ring.training.zero.by_parameter.traced_update import refuse_other_parameters, trace_update
from jax_ring.training.zero.interface import Shapes, check_same_tree, varying_type

if TYPE_CHECKING:
    import optax


class ParameterState(NamedTuple):
    """The state with `layout="parameter"`.

        optimizer = zero.sharded_optimizer(optax.lamb(1e-3), "data", layout="parameter")
        own = optimizer.init(params).own  # under shard_map

    Attributes:
      shared: what belongs to no parameter, such as step counts, the same on all ranks; None elsewhere.
      own: what belongs to the rank's parameters, by dtype as an array of shape (1, size), divided along the first
        dimension, as large as the fullest rank's.
    """

    shared: Any
    own: dict[str, jax.Array]


@dataclass(frozen=True)
class Shares:
    """What each rank owns with `layout="parameter"`; prints as a table.

        print(zero.sharded_optimizer(optax.lamb(1e-3), "data", layout="parameter").shares(params, 8))

    Attributes:
      parameters: by rank, the paths, with the elements of those that are cut.
      elements: by rank, of its parameters.
      state_bytes: by rank, of its own state.
      shared_bytes: of what all ranks copy.
      allocated_bytes: of each rank's state: `shared_bytes` and the fullest rank's need.
      parameter_bytes: of each rank's parameters: those of all, or with stage=3 the fullest rank's.
      padding: the elements of all vectors by those of the parameters: 1 if all ranks own the same number of each dtype.
    """

    parameters: tuple[tuple[str, ...], ...]
    elements: tuple[int, ...]
    state_bytes: tuple[int, ...]
    shared_bytes: int
    allocated_bytes: int
    parameter_bytes: int
    padding: float

    def __str__(self) -> str:
        rows = zip(self.elements, self.state_bytes, self.parameters, strict=True)
        lines = [f"{rank:4} {own:12,} {size:15,}  {', '.join(paths)}" for rank, (own, size, paths) in enumerate(rows)]
        return "\n".join(
            [
                "rank     elements  bytes of state  parameters",
                *lines,
                f"each rank allocates {self.allocated_bytes:,} bytes of state and {self.parameter_bytes:,} of "
                f"parameters; gradients and updates are sent with {self.padding:.3f} times their elements",
            ]
        )


@dataclass(frozen=True)
class Plan:
    """Who owns what.

    Attributes:
      params: the parameters, and each rank's pieces.
      state: the state's leaves, and each rank's pieces: for each of its parameters' pieces those of its state, in
        order.
      structure: of the state.
      owners: by leaf of the state, its parameter; None if shared.
      in_tiles: parameters computed as vectors of whole tiles, even if whole: the last elements of other vectors can
        have other bits.
      division: of the parameters, if they are divided.
    """

    params: Packing
    state: Packing
    structure: Any
    owners: tuple[int | None, ...]
    in_tiles: frozenset[int]
    division: Division | None

    @property
    def num_busy(self) -> int:
        """The ranks that own anything, the first ones."""
        return sum(map(bool, self.params.ranks))

    @property
    def shared(self) -> list[int]:
        return [k for k, owner in enumerate(self.owners) if owner is None]

    def pack_state(self, shared: Sequence, own: dict[str, jax.Array]) -> ParameterState:
        values = dict(zip(self.shared, shared, strict=True))
        tree = jax.tree.unflatten(self.structure, [values.get(k) for k in range(len(self.owners))])
        return ParameterState(tree, {name: x[None] for name, x in own.items()})

    def unpack_state(self, state: ParameterState) -> tuple[dict[int, Any], dict[str, jax.Array]]:
        """Shared leaves by index, and vectors. ValueError if not of this plan."""
        self.check(state, 1)
        shared = dict(zip(self.shared, jax.tree.leaves(state.shared), strict=True))
        return shared, {name: x[0] for name, x in state.own.items()}

    def check(self, state: ParameterState, num_ranks: int) -> None:
        """Raises ValueError unless a state, of one or all ranks, is of this plan."""
        own: Any = {name: jax.ShapeDtypeStruct((num_ranks, size), name) for name, size in self.state.sizes.items()}
        expected = self.pack_state([self.state.arrays[k] for k in self.shared], {})._replace(own=own)
        remedy = " A state that was made for another number of ranks has to pass through `repartition` first."
        check_same_tree("state", state, expected, likes="state that init makes here", remedy=remedy)

    def types(self, axis_name: AxisName, shared: dict[int, Any]) -> Any:
        """The whole state as types varying over the ranks; shared leaves unchanged."""

        leaves = [shared[k] if k in shared else varying_type(x, axis_name) for k, x in enumerate(self.state.arrays)]
        return jax.tree.unflatten(self.structure, leaves)

    def shares(self, params: Any) -> Shares:
        paths = path_texts(params)
        leaves, ranks = self.params.arrays, self.params.ranks

        def name(piece):
            cut = piece.stop - piece.start < leaves[piece.leaf].size
            return paths[piece.leaf] + (f"[{piece.start}:{piece.stop} of {leaves[piece.leaf].size}]" if cut else "")

        def num_bytes(arrays):  # random keys among them
            return sum(x.size * x.dtype.itemsize for x in arrays)

        def vectors(sizes):
            return [jax.ShapeDtypeStruct((size,), dtype) for dtype, size in sizes.items()]

        shared_bytes = num_bytes(self.state.arrays[k] for k in self.shared)
        return Shares(
            parameters=tuple(tuple(map(name, pieces)) for pieces in ranks),
            elements=tuple(sum(piece.stop - piece.start for piece in pieces) for pieces in ranks),
            state_bytes=tuple(num_bytes(vectors(sizes)) for sizes in self.state.used),
            shared_bytes=shared_bytes,
            allocated_bytes=shared_bytes + num_bytes(vectors(self.state.sizes)),
            parameter_bytes=num_bytes(leaves if self.division is None else vectors(self.params.sizes)),
            padding=len(ranks) * sum(self.params.sizes.values()) / max(1, sum(x.size for x in leaves)),
        )


def plan_state(
    tx: optax.GradientTransformation, shapes: Shapes, num_ranks: int, axis_name: AxisName, multiple: int, divided: bool
) -> Plan:
    """Finds the parameter of each leaf of the state, and divides both among the ranks.

    multiple: the number of elements of which those of a piece are a multiple. If it is more than one, what may be cut
      is computed in tiles on any number of ranks.
    divided: whether ranks have only the parameters that they own.
    """
    params = shapes.params
    leaves = jax.tree.leaves(params)
    state = jax.eval_shape(tx.init, params)
    while True:
        traced = trace_update(tx, params, state, params, axis_name)
        # The first step may widen a state, e.g. for bfloat16 parameters with float32 hyperparameters.
        wider = traced.state_after(state)
        if jax.tree.map(_type, wider) == jax.tree.map(_type, state):
            break
        state = wider
    if divided:
        refuse_other_parameters(traced, params)
    may_cut = cache(traced.may_cut)
    of_params = Packing(leaves, balance(leaves, num_ranks, may_cut, multiple))
    division = None
    if divided:
        division = Division(
            shapes, tuple(leaf.size > multiple and may_cut(i) for i, leaf in enumerate(leaves)), multiple
        )
    in_tiles = frozenset(i for i, leaf in enumerate(leaves) if multiple > 1 and leaf.size and may_cut(i))
    owners = traced.state_owners()
    arrays = jax.tree.leaves(state)

    def states_of(piece):
        cut = piece.stop - piece.start < leaves[piece.leaf].size
        for k, owner in enumerate(owners):
            if owner == piece.leaf:
                yield Piece(k, *piece[1:]) if cut else Piece(k, 0, arrays[k].size)

    ranks = [[part for piece in pieces for part in states_of(piece)] for pieces in of_params.ranks]
    return Plan(of_params, Packing(arrays, ranks), jax.tree.structure(state), owners, in_tiles, division)


def _type(x) -> tuple:
    return x.shape, x.dtype
