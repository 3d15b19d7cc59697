"""An optimizer's traced update: whose gradients each result needs, and who may compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import get_opaque_trace_state

from jax_ring import _compat, foreign_errors
from jax_ring.collectives.axes import AxisName, axes_of
from jax_ring.options import Order, path_texts
from jax_ring.training.same_bits.evaluation import evaluate
from jax_ring.training.same_bits.rounding import each_rounded
from jax_ring.training.zero.by_parameter import slicing
from jax_ring.training.zero.clip import NORM, as_equation, norm_given_by
from jax_ring.training.zero.data_flow import dependences, place_of
from jax_ring.training.zero.interface import refuse_further_arguments

if TYPE_CHECKING:
    import optax

_REMEDY = (
    "For the norm of the whole gradient use zero.clip_by_global_norm. What else needs several parameters at once "
    "cannot be sharded: use optax.chain(allreduce_gradients(...), ...), with the whole state on every rank."
)


class NormRequest(NamedTuple):
    """A norm that `zero.clip_by_global_norm` asks for, of which outputs of the traced update, and how to add."""

    leaves: range
    order: Order
    dtype: Any


@dataclass(frozen=True)
class TracedUpdate:
    """`tx.update` as a jaxpr from gradients, state, parameters and norms to updates and state.

    Attributes:
      closed: the jaxpr; further outputs are what norms are taken of.
      num_leaves: of the parameters.
      num_states: leaves of the state.
      owners: by output, the parameter whose gradient it needs, directly or through the state. An update belongs to its
        parameter, and the state of one without a gradient to that. None for what all need, such as step counts.
      norms: in the order of their inputs.
      scalars: a jaxpr of the same inputs, to further inputs of `closed`; or None.
    """

    closed: core.ClosedJaxpr
    num_leaves: int
    num_states: int
    owners: tuple[int | None, ...]
    norms: tuple[NormRequest, ...]
    scalars: core.ClosedJaxpr | None = None

    def with_scalars_apart(self) -> TracedUpdate:
        """This update, with inputs for shared scalars, such as a learning rate.

        Compiled within an update, they might be part of its loops, depending on the rank's other parameters, and so on
        the number of ranks.
        """
        flat = jax.make_jaxpr(lambda *inputs: evaluate(self.closed, inputs))(*self.closed.in_avals)
        shared = {k: True for k, owner in enumerate(self.state_owners()) if owner is None}
        known = self.inputs({}, shared, norms=[True] * len(self.norms))
        scalars, closed = slicing.without_scalars(flat, known)
        return replace(self, closed=closed, scalars=scalars)

    def shared_scalars(self, shared: dict[int, Any], norms: Sequence[jax.Array]) -> list[jax.Array]:
        """The further inputs, where some norms are known; others have no meaning."""
        if self.scalars is None:
            return []
        outputs = range(len(self.scalars.out_avals))
        return each_rounded(partial(slicing.compute, self.scalars, outputs), self.inputs({}, shared, norms=norms))

    def inputs(
        self,
        known: dict[int, Any],
        shared: dict[int, Any],
        *,
        params: Sequence = (),
        norms: Sequence = (),
        scalars: Sequence = (),
    ) -> list:
        """The jaxpr's inputs, those `known` by index, `shared` ones by that of the state's leaf; None if unknown."""
        first_norm = self.first_param + self.num_leaves
        first_scalar = first_norm + len(self.norms)
        known = (
            {self.num_leaves + k: x for k, x in shared.items()}
            | dict(enumerate(params, self.first_param))
            | dict(enumerate(norms, first_norm))
            | dict(enumerate(scalars, first_scalar))
            | known
        )
        return [known.get(i) for i in range(first_scalar + len(scalars))]

    @property
    def first_param(self) -> int:
        """The index of the first parameter among the inputs."""
        return self.num_leaves + self.num_states

    def indices_of(self, leaf: int) -> list[int]:
        """Places of a parameter's gradient and state among the inputs, of its update and state among the outputs."""
        return [i for i, owner in enumerate(self.owners[: self.first_param]) if owner == leaf]

    def state_owners(self) -> tuple[int | None, ...]:
        """The parameter of each leaf of the state; None if shared."""
        return self.owners[self.num_leaves : self.first_param]

    @property
    def update_types(self) -> list:
        return self.closed.out_avals[: self.num_leaves]

    def state_after(self, state: Any) -> Any:
        """The state's types after the update; shared ones keep those of `state`."""
        after = self.closed.out_avals[self.num_leaves : self.first_param]
        leaves = [
            x if owner is None or x.shape != new.shape else jax.ShapeDtypeStruct(new.shape, new.dtype)
            for x, new, owner in zip(jax.tree.leaves(state), after, self.state_owners(), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    def check_state(self, owners: tuple[int | None, ...], params: Any, has_gradient: Sequence[bool]) -> None:
        """Raises unless the state keeps owners, shapes and dtypes."""
        if self.state_owners() != owners:
            raise ValueError(
                "sharded_optimizer: what tx.update does with the state depends on the dtypes of the gradients: with "
                "those of the parameters other leaves of the state need them. Cast the gradients to them."
            )
        places = path_texts(params)
        for k, owner in enumerate(owners):
            before, after = (avals[self.num_leaves + k] for avals in (self.closed.in_avals, self.closed.out_avals))
            if owner is None or not has_gradient[owner]:
                continue
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise TypeError(
                    f"sharded_optimizer: tx changes the state of {places[owner]} from "
                    f"{before.str_short()} to {after.str_short()}, and layout='parameter' keeps types. Cast the "
                    "gradients to the dtype of the parameters, or give tx the dtype of its state (mu_dtype)."
                )

    def may_cut(self, leaf: int) -> bool:
        """Whether a parameter's results can be computed in pieces."""
        shape, indices = self.closed.in_avals[leaf].shape, self.indices_of(leaf)
        if any(self.closed.in_avals[i].shape != shape for i in indices):
            return False
        cut = {*indices, self.first_param + leaf}
        outputs = [i for i, owner in enumerate(self.owners) if owner == leaf]

        def one_element(*inputs):
            inputs = [slicing.Elements(jnp.reshape(x, -1)[:1]) if i in cut else x for i, x in enumerate(inputs)]
            return slicing.compute_piece(self.closed, outputs, inputs, slicing.Bounds(shape, 0, 1, 1))

        try:
            jax.eval_shape(one_element, *self.closed.in_avals)
        except slicing.NotElementwise:
            return False
        return True


def trace_update(
    tx: optax.GradientTransformation, gradients: Any, state: Any, params: Any, axis_name: AxisName
) -> TracedUpdate:
    """Traces `tx.update`, and finds what each result needs.

    Raises ValueError if one needs several parameters' gradients, or a collective not of `zero.clip_by_global_norm`.
    """

    def update(gradients, state, params):
        trace = get_opaque_trace_state()

        def norm(leaves, over, *how):
            if axes_of(over) != axes_of(axis_name):
                raise ValueError(
                    f"clip_by_global_norm is over {over!r}, within a sharded_optimizer over {axis_name!r}: with "
                    "layout='parameter' both must name the same axes"
                )
            if get_opaque_trace_state() != trace:
                raise ValueError(
                    "clip_by_global_norm: with layout='parameter' it cannot be within a transformation that applies "
                    "another one under a condition, as optax.MultiSteps does, or under jit. Chain it outside of that; "
                    "to accumulate gradients use jax_ring.accumulate_gradients."
                )
            return as_equation(leaves, over, *how)

        with norm_given_by(norm):
            return tx.update(gradients, state, params)

    closed, results = _traced(update, gradients, state, params)
    expected: Any = jax.tree.structure((params, state))
    if expected != jax.tree.structure(results):
        raise ValueError(
            "sharded_optimizer: tx.update returned updates and a state of other structures than the parameters "
            f"and the state: {jax.tree.structure(results)} instead of {expected}"
        )
    _refuse_collectives(closed.jaxpr)
    closed, norms = _with_norms_apart(closed)
    owners = _owners(closed.jaxpr, params, state)
    num_leaves, num_states = (len(jax.tree.leaves(tree)) for tree in (params, state))
    return TracedUpdate(closed, num_leaves, num_states, owners, norms)


def _traced(update: Callable, *trees: Any) -> tuple[core.ClosedJaxpr, Any]:
    try:
        return jax.make_jaxpr(update, return_shape=True)(*trees)
    except (TypeError, ValueError) as error:
        refuse_further_arguments(error)
        raise
    except NameError as error:
        if not foreign_errors.UNBOUND_AXIS.search(str(error)):
            raise
        raise ValueError(_collective_text(str(error), "")) from error


def _with_norms_apart(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, tuple[NormRequest, ...]]:
    """The function with its norms as further inputs, and what they are taken of as further outputs."""
    jaxpr = closed.jaxpr
    norms = [eqn for eqn in jaxpr.eqns if eqn.primitive is NORM]
    outputs, requests = [*jaxpr.outvars], []
    for eqn in norms:
        leaves = range(len(outputs), len(outputs) + len(eqn.invars))
        requests.append(NormRequest(leaves, eqn.params["order"], eqn.params["dtype"]))
        outputs += eqn.invars
    rest = [eqn for eqn in jaxpr.eqns if eqn.primitive is not NORM]
    jaxpr = jaxpr.replace(eqns=rest, invars=[*jaxpr.invars, *(eqn.outvars[0] for eqn in norms)], outvars=outputs)
    return core.ClosedJaxpr(jaxpr, closed.consts), tuple(requests)


def _refuse_collectives(jaxpr) -> None:
    axes = _compat.rank_dependent_axes(jaxpr)
    if axes:
        place = next(place_of(eqn) for eqn in jaxpr.eqns if _compat.rank_dependent_axes(eqn))
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


def _owners(jaxpr, params, state) -> tuple[int | None, ...]:
    paths = path_texts(params)
    n, num_states = len(paths), len(jax.tree.leaves(state))
    # Bits for the gradients, then for the leaves of the state. A leaf may receive its inputs through another leaf, some
    # steps later.
    states, before = [1 << n + k for k in range(num_states)], None
    masks: list[int] = []
    while states != before:
        masks = dependences(jaxpr, [*(1 << i for i in range(n)), *states, *[0] * (len(jaxpr.invars) - n - num_states)])
        before, states = states, [a | b for a, b in zip(states, masks[n:], strict=False)]
    owners: list[int | None] = []
    for i, mask in enumerate(masks):
        leaves = mask & (1 << n) - 1
        if i < n:
            leaves |= 1 << i
        if leaves.bit_count() > 1:
            named = [path for j, path in enumerate(paths) if leaves >> j & 1]
            what = f"the update of {paths[i]}" if i < n else "its state" if i < n + num_states else "a norm"
            more = f" and {len(named) - 4} more" if len(named) > 4 else ""
            place = _text(_where_leaves_meet(jaxpr, i, n))
            raise ValueError(
                "sharded_optimizer: with layout='parameter' each parameter is updated by the rank that owns it, but "
                f"{what} needs the gradients of {', '.join(named[:4])}{more}{place}. {_REMEDY}"
            )
        owners.append(leaves.bit_length() - 1 if leaves else None)
    places = {k: i for k, i in _places(params, state).items() if owners[n + k] is None}
    while places:
        for k, i in places.items():
            owners[n + k] = i
        others = {k for k, i in places.items() if any(m >> n + k & 1 and owners[o] != i for o, m in enumerate(masks))}
        for k in others:
            del places[k]
            owners[n + k] = None
        if not others:
            break
    return tuple(owners)


def refuse_other_parameters(traced: TracedUpdate, params: Any) -> None:
    """Raises ValueError if a result needs another parameter than that whose rank computes it."""
    paths, n = path_texts(params), traced.num_leaves
    seeds = [seed or 0 for seed in traced.inputs({}, {}, params=[1 << i for i in range(n)])]
    for i, (mask, owner) in enumerate(zip(dependences(traced.closed.jaxpr, seeds), traced.owners, strict=True)):
        others = [path for j, path in enumerate(paths) if mask >> j & 1 and j != owner]
        if others:
            what = f"the update of {paths[i]}" if i < n else "the state" if i < traced.first_param else "a norm"
            raise ValueError(
                "sharded_optimizer: with stage=3 and layout='parameter' a rank has only the parameters that it "
                f"updates, but {what} needs {', '.join(others[:4])} on ranks that have not. Pass stage=2, with which "
                "every rank has all parameters."
            )


def _places(params, state) -> dict[int, int]:
    """Leaves of the state whose path ends with a parameter's."""
    of_params = [(path, i, x.shape) for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(params))]
    places = {}
    for k, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        # Skip scalars that merely share a parameter's name, and scalars of states without parameter names.
        fits = [
            (len(end), i)
            for end, i, shape in of_params
            if path[len(path) - len(end) :] == end
            and (leaf.shape == shape != () if not end else leaf.ndim or not shape)
        ]
        if fits:
            places[k] = max(fits)[1]
    return places


def _where_leaves_meet(jaxpr, output: int, n: int) -> tuple[str, str]:
    """The first equation that needs several of n gradients: on the way to an output, or anywhere."""
    for used_outputs in ([i == output for i in range(len(jaxpr.outvars))], [True] * len(jaxpr.outvars)):
        thin, used = _compat.dce_jaxpr(jaxpr, used_outputs)
        found: list = []

        def visit(eqn, operands, results, found=found):
            if max(map(int.bit_count, results), default=0) > 1 >= max(map(int.bit_count, operands), default=0):
                found.append(eqn)

        seeds = [1 << i if i < n else 0 for i in range(len(jaxpr.invars))]
        dependences(thin, [seed for seed, kept in zip(seeds, used, strict=True) if kept], visit)
        if found:
            return place_of(found[0])
    return "", ""
