"""The update of an optimizer, traced for all parameters: whose gradient each result needs, and who may compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName
from jax_ring.training import data_flow
from jax_ring.training.global_norm import NormRequest, norms_given
from jax_ring.training.parameter_plan import Piece

if TYPE_CHECKING:
    import optax

_REMEDY = (
    "For the norm of the whole gradient use zero.clip_by_global_norm. What else needs several parameters at once cannot "
    "be sharded: use optax.chain(allreduce_gradients(...), ...), with the whole state on every rank."
)


@dataclass(frozen=True)
class TracedUpdate:
    """`tx.update` as a jaxpr. Its inputs are gradients, state, parameters and norms; its outputs updates and state.

    Attributes:
      closed: the jaxpr. Further outputs are what the norms are taken of.
      num_leaves: the number of parameters.
      num_states: the number of leaves of the state.
      owners: for each output the parameter whose gradient it needs, directly or through the state. None for one that
        needs no gradient, such as a step count; an update belongs to its parameter in any case.
      norms: what `zero.clip_by_global_norm` has asked for; the leaves are indices of outputs.
    """

    closed: core.ClosedJaxpr
    num_leaves: int
    num_states: int
    owners: tuple[int | None, ...]
    norms: tuple[NormRequest, ...]

    def state_owners(self) -> tuple[int | None, ...]:
        """For each leaf of the state the parameter that it belongs to; None if it is shared by all."""
        return self.owners[self.num_leaves : self.num_leaves + self.num_states]

    @property
    def update_types(self) -> list:
        """Shapes and dtypes of the updates."""
        return self.closed.out_avals[: self.num_leaves]

    def state_after(self, state: Any) -> Any:
        """The types of the state after the update; those that all parameters share are as in `state`."""
        after = self.closed.out_avals[self.num_leaves : self.num_leaves + self.num_states]
        leaves = [
            x if owner is None or x.shape != new.shape else jax.ShapeDtypeStruct(new.shape, new.dtype)
            for x, new, owner in zip(jax.tree.leaves(state), after, self.state_owners(), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    def check_state(self, owners: tuple[int | None, ...], params: Any, has_gradient: Sequence[bool]) -> None:
        """Raises unless the state has the owners of the plan, and keeps its shapes and dtypes."""
        if self.state_owners() != owners:
            raise ValueError(
                "sharded_optimizer: what tx.update does with the state depends on the dtypes of the gradients: with "
                "those of the parameters other leaves of the state need them. Cast the gradients to them."
            )
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        for k, owner in enumerate(owners):
            before, after = (avals[self.num_leaves + k] for avals in (self.closed.in_avals, self.closed.out_avals))
            if owner is None or not has_gradient[owner]:
                continue
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise TypeError(
                    f"sharded_optimizer: tx changes the state of {paths[owner] or 'the root'} from "
                    f"{before.str_short()} to {after.str_short()}, and layout='parameter' keeps types. Cast the "
                    "gradients to the dtype of the parameters, or give tx the dtype of its state (mu_dtype)."
                )

    def may_cut(self, leaf: int) -> bool:
        """Whether all that belongs to a parameter can be computed for pieces of it."""
        shape = self.closed.in_avals[leaf].shape
        outputs = [i for i, owner in enumerate(self.owners) if owner == leaf]
        states = [k for k, owner in enumerate(self.state_owners()) if owner == leaf]
        if any(self.closed.in_avals[self.num_leaves + k].shape != shape for k in states):
            return False
        cut = {leaf, self.num_leaves + self.num_states + leaf} | {self.num_leaves + k for k in states}

        def one_element(*inputs):
            inputs = [data_flow.Piece(jnp.reshape(x, -1)[:1]) if i in cut else x for i, x in enumerate(inputs)]
            return data_flow.compute_piece(self.closed, outputs, inputs, shape, 0, 1)

        try:
            jax.eval_shape(one_element, *self.closed.in_avals)
        except data_flow.NotElementwise:
            return False
        return True


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
        values = iter(data_flow.compute(traced.closed, sum(outputs, []), self._inputs(together)))
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


def trace_update(
    tx: optax.GradientTransformation, gradients: Sequence, state: Any, params: Any, axis_name: AxisName
) -> TracedUpdate:
    """Traces `tx.update` and finds out what each result needs.

    Args:
      tx: the optimizer.
      gradients: one per leaf of `params`. Like the leaves of the two other trees, arrays or their types.
      state: of the whole optimizer.
      params: all parameters.
      axis_name: of the sharded optimizer.

    Raises:
      ValueError: if a result needs the gradients of several parameters, or a collective other than those of
        `zero.clip_by_global_norm`.
    """
    structure, leaves = jax.tree.structure(params), jax.tree.leaves(params)
    state_structure, states = jax.tree.structure(state), jax.tree.leaves(state)
    num_norms = 1  # inputs for those that tx asks for: most often one, or it is traced again
    while True:
        requests: list[NormRequest] = []

        def update(*inputs, num_norms=num_norms, requests=requests):
            ends = [len(leaves), len(leaves) + len(states), len(inputs) - num_norms]
            gradients, state, params = (
                jax.tree.unflatten(structure, inputs[: ends[0]]),
                jax.tree.unflatten(state_structure, inputs[ends[0] : ends[1]]),
                jax.tree.unflatten(structure, inputs[ends[1] : ends[2]]),
            )
            with norms_given(axis_name, inputs[ends[2] :]) as asked:
                updates, new_state = tx.update(gradients, state, params)
            if jax.tree.structure(updates) != structure or jax.tree.structure(new_state) != state_structure:
                raise ValueError(
                    "sharded_optimizer: tx.update returned trees of other structures than its arguments: updates "
                    f"{jax.tree.structure(updates)} and state {jax.tree.structure(new_state)}, instead of {structure} "
                    f"and {state_structure}"
                )
            outputs = [*jax.tree.leaves(updates), *jax.tree.leaves(new_state)]
            for request in asked:
                requests.append(request._replace(leaves=range(len(outputs), len(outputs) + len(request.leaves))))
                outputs += request.leaves
            return outputs

        norms = [jax.ShapeDtypeStruct((), jnp.float32)] * num_norms
        closed = _traced(update, [*gradients, *states, *leaves, *norms])
        if len(requests) <= num_norms:
            break
        num_norms = len(requests)
    _refuse_collectives(closed.jaxpr)
    owners = _owners(closed.jaxpr, params, len(states))
    return TracedUpdate(closed, len(leaves), len(states), owners, tuple(requests))


def _traced(update, inputs) -> core.ClosedJaxpr:
    try:
        return jax.make_jaxpr(update)(*inputs)
    except NameError as error:
        if "unbound axis" not in str(error):
            raise
        raise ValueError(_collective_text(str(error), "")) from error


def _refuse_collectives(jaxpr) -> None:
    axes = _compat.rank_dependent_axes(jaxpr)
    if axes:
        place = next(data_flow.place_of(eqn) for eqn in jaxpr.eqns if _compat.rank_dependent_axes(eqn))
        raise ValueError(_collective_text(f"over {', '.join(map(repr, sorted(axes, key=repr)))}", _text(place)))


def _collective_text(which: str, place: str) -> str:
    return (
        f"sharded_optimizer: tx.update has a collective or axis_index ({which}){place}. With layout='parameter' ranks "
        "that own unlike parameters take different branches, in which a collective would wait forever. Only "
        "zero.clip_by_global_norm may be in tx; gradients must not be reduced in it, because sharded_optimizer does so."
    )


def _text(place: tuple[str, str]) -> str:
    name, line = place
    return f", in {name} ({line})" if name else f", at {line}" if line else ""


def _owners(jaxpr, params, num_states: int) -> tuple[int | None, ...]:
    paths = [jax.tree_util.keystr(path) or "the root" for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    n = len(paths)
    all_leaves = (1 << n) - 1

    def seeds(states):
        rest = len(jaxpr.invars) - n - num_states
        return [1 << i for i in range(n)] + states + [0] * rest

    masks = data_flow.dependences(jaxpr, seeds([1 << n + k for k in range(num_states)]))
    # What a leaf of the state needs may have come into it through another one, some steps ago.
    needs = masks[n : n + num_states]
    while True:
        through = [mask | _through_states(mask, needs, n) for mask in needs]
        if through == needs:
            break
        needs = through
    states = [mask & all_leaves for mask in needs]
    owners = []
    for i, mask in enumerate(masks):
        leaves = (mask | _through_states(mask, needs, n)) & all_leaves
        if i < n:
            leaves |= 1 << i
        if leaves.bit_count() > 1:
            named = [path for j, path in enumerate(paths) if leaves >> j & 1]
            what = f"the update of {paths[i]}" if i < n else "its state" if i < n + num_states else "a norm"
            more = f" and {len(named) - 4} more" if len(named) > 4 else ""
            place = _text(_where_leaves_meet(jaxpr, i, seeds(states)))
            raise ValueError(
                "sharded_optimizer: with layout='parameter' each parameter is updated by the rank that owns it, but "
                f"{what} needs the gradients of {', '.join(named[:4])}{more}{place}. {_REMEDY}"
            )
        owners.append(leaves.bit_length() - 1 if leaves else None)
    return tuple(owners)


def _through_states(mask: int, needs: list[int], n: int) -> int:
    """What the leaves of the state in a mask need."""
    found, rest = 0, mask >> n
    while rest:
        lowest = rest & -rest
        found |= needs[lowest.bit_length() - 1]
        rest ^= lowest
    return found


def _where_leaves_meet(jaxpr, output: int, seeds: list[int]) -> tuple[str, str]:
    """The place of the first equation on the way to an output that needs several parameters."""
    thin, used = _compat.dead_code_eliminated(jaxpr, [i == output for i in range(len(jaxpr.outvars))])
    found = []

    def visit(eqn, operands, results):
        if max((m.bit_count() for m in results), default=0) > 1 >= max((m.bit_count() for m in operands), default=0):
            found.append(eqn)

    data_flow.dependences(thin, [seed for seed, kept in zip(seeds, used, strict=True) if kept], visit)
    return data_flow.place_of(found[0]) if found else ("", "")
