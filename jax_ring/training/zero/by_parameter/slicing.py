"""Computes some outputs of a traced function, or some of their elements."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jax_ring import _compat
from jax_ring.training.same_bits.evaluation import called
from jax_ring.training.zero.data_flow import ELEMENTWISE


class NotElementwise(Exception):
    """An equation mixes elements of an array to be cut."""


class Elements(NamedTuple):
    """Stands for elements `start` to `stop` of a flattened array."""

    value: Any


class Uniform(NamedTuple):
    """Stands for an array filled with this scalar."""

    value: Any


class Bounds(NamedTuple):
    """Some elements of a flattened array.

    Attributes:
      start, stop: half open.
      size: of their vector, filled with zeros.
    """

    shape: tuple
    start: int
    stop: int
    size: int

    def of(self, x: Any) -> jax.Array:
        if isinstance(x, Uniform) or not self.shape:  # no padding with zeros: that would be another computation
            return jnp.broadcast_to(x.value if isinstance(x, Uniform) else x, (self.size,))
        return self.filled(jnp.reshape(x, -1)[self.start : self.stop])

    def filled(self, elements: jax.Array) -> jax.Array:
        return jnp.pad(elements, (0, self.size - elements.size))


def compute(closed: core.ClosedJaxpr, outputs: Sequence[int], inputs: Sequence[Any]) -> list:
    """Some outputs, by the equations that they need. Inputs on which these do not depend may be None."""
    if not outputs:
        return []
    thin, operands = _thinned(closed, outputs, inputs)
    return _in_order(outputs, jax.core.eval_jaxpr(thin, closed.consts, *operands))


def compute_piece(closed: core.ClosedJaxpr, outputs: Sequence[int], inputs: Sequence[Any], bounds: Bounds) -> list:
    """Some elements of flattened outputs of one shape, filled up to a size; the filling has no meaning.

    Inputs may be filled `Elements`. Raises NotElementwise if an equation needs more than a piece.
    """
    thin, operands = _thinned(closed, outputs, inputs)

    def cut(x):
        return x if isinstance(x, Elements) else Elements(bounds.of(x))

    results = _evaluate(thin, closed.consts, operands, bounds.shape, cut)
    return _in_order(outputs, [cut(x).value for x in results])


def without_scalars(closed: core.ClosedJaxpr, known: Sequence[bool]) -> tuple[core.ClosedJaxpr, core.ClosedJaxpr]:
    """Splits a function into one from inputs to scalars, and one from inputs and scalars to results.

    known: by input, whether scalars may depend on it. Calls are equations of the rest.
    """
    jaxpr = closed.jaxpr
    found = {x for x, is_known in zip(jaxpr.invars, known, strict=True) if is_known} | set(jaxpr.constvars)
    scalars, rest = [], []
    for eqn in jaxpr.eqns:
        operands = [x for x in eqn.invars if not isinstance(x, core.Literal)]
        if all(x in found for x in operands) and not any(x.aval.shape for x in eqn.outvars):
            found.update(eqn.outvars)
            scalars.append(eqn)
        else:
            rest.append(eqn)
    made = [x for eqn in scalars for x in eqn.outvars]
    used = {x for eqn in rest for x in eqn.invars if not isinstance(x, core.Literal)}
    used |= {x for x in jaxpr.outvars if not isinstance(x, core.Literal)}
    crossing = [x for x in made if x in used]
    of_scalars = jaxpr.replace(eqns=scalars, outvars=crossing)
    of_rest = jaxpr.replace(eqns=rest, invars=[*jaxpr.invars, *crossing])
    return core.ClosedJaxpr(of_scalars, closed.consts), core.ClosedJaxpr(of_rest, closed.consts)


def _thinned(closed, outputs, inputs):
    thin, used = _compat.dce_jaxpr(closed.jaxpr, [i in outputs for i in range(len(closed.out_avals))])
    operands = [
        jnp.zeros(aval.shape, aval.dtype) if x is None else x
        for x, aval, needed in zip(inputs, closed.in_avals, used, strict=True)
        if needed
    ]
    return thin, operands


def _in_order(outputs, results) -> list:
    by_output = dict(zip(sorted(set(outputs)), results, strict=True))
    return [by_output[i] for i in outputs]


def _evaluate(jaxpr, consts, operands, shape, cut) -> list:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
    for eqn in jaxpr.eqns:
        values = [x.val if isinstance(x, core.Literal) else known[x] for x in eqn.invars]
        known.update(zip(eqn.outvars, _evaluate_equation(eqn, values, shape, cut), strict=True))
    return [x.val if isinstance(x, core.Literal) else known[x] for x in jaxpr.outvars]


def _evaluate_equation(eqn, values, shape, cut) -> list:
    if not any(isinstance(x, Elements) for x in values):
        if eqn.primitive.name == "broadcast_in_dim" and len(values) == 1 and not jnp.ndim(values[0]):
            (result,) = eqn.outvars
            if shape and result.aval.shape == shape:
                return [Uniform(values[0])]
        return _compat.bind_equation(eqn, [_whole(x, shape) for x in values])
    if (inner := called(eqn)) is not None:
        return _evaluate(inner.jaxpr, inner.consts, values, shape, cut)
    if eqn.primitive.name == "cond" and not isinstance(values[0], Elements):
        return _evaluate_cond(eqn, values, shape, cut)
    if eqn.primitive.name in ELEMENTWISE and all(x.aval.shape == shape for x in eqn.outvars):
        pieces = [cut(x).value if isinstance(x, Elements | Uniform) or jnp.ndim(x) or not shape else x for x in values]
        return [Elements(x) for x in _compat.bind_equation(eqn, pieces)]
    raise NotElementwise(eqn.primitive.name)


def _whole(x, shape):
    return jnp.broadcast_to(x.value, shape) if isinstance(x, Uniform) else x


def _evaluate_cond(eqn, values, shape, cut) -> list:
    """A `cond` on a whole value; results of the pieces' shape become pieces."""
    index, *operands = (_whole(x, shape) for x in values)
    are_pieces = [x.aval.shape == shape for x in eqn.outvars]
    were_pieces = [isinstance(x, Elements) for x in operands]

    def run(branch, *operands):
        operands = [Elements(x) if piece else x for x, piece in zip(operands, were_pieces, strict=True)]
        results = _evaluate(branch.jaxpr, branch.consts, operands, shape, cut)
        if any(isinstance(x, Elements) and not piece for x, piece in zip(results, are_pieces, strict=True)):
            raise NotElementwise("cond")
        return [cut(x).value if piece else _whole(x, shape) for x, piece in zip(results, are_pieces, strict=True)]

    branches = [partial(run, branch) for branch in eqn.params["branches"]]
    results = lax.switch(index, branches, *(x.value if isinstance(x, Elements) else x for x in operands))
    return [Elements(x) if piece else x for x, piece in zip(results, are_pieces, strict=True)]
