"""What an optimizer computes, apart from names, numbers and shapes of parameters: to see whether it depends on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ring.training.zero.analysis.data_flow import Domain, flow
from jax_ring.training.zero.analysis.traced import Traced
from jax_ring.training.zero.given_norms import NORM

# They change shapes, or the places of elements, but no values. Which are needed depends on shapes and their number.
_SAME_VALUES = {"broadcast_in_dim", "copy", "copy_p", "expand_dims", "reshape", "slice", "split", "squeeze"}

# What puts together the reductions of several parameters, in an order and a number that do not matter.
_REDUCTIONS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_or": "or", "reduce_and": "and"}
_TERM_BY_TERM = {"convert_element_type", "div", "mul", "neg"}


class _Reduction(NamedTuple):
    """What a rank has reduced: the name of the operation of two operands, and the arrays."""

    name: str
    terms: frozenset


def expressions_of(traced: Traced) -> set:
    """Hashes of the expressions that updates and the state are after the first step, without shapes.

    They are equal for two trees of parameters if the same operations are applied to each leaf of either.
    """
    params, gradients = (
        [hash((role, str(x.dtype))) for x in traced.init.in_avals] for role in ("parameter", "gradient")
    )
    state = flow(traced.init, params, _DOMAIN)
    return set(flow(traced.update, [*gradients, *state, *params], _DOMAIN))


def _equation(eqn: Any, operands: list) -> list:
    name, num_results = eqn.primitive.name, len(eqn.outvars)
    scalars = [(k, str(v)) for k, v in sorted(eqn.params.items()) if isinstance(v, bool | int | float | str | np.dtype)]
    first, *others = operands or [None]
    reductions = [x for x in operands if isinstance(x, _Reduction)]
    if name in _SAME_VALUES or (name in ("concatenate", "stack") and len(set(operands)) == 1):
        return [first] * num_results
    if eqn.primitive is NORM:
        return [hash((name, frozenset(operands)))]
    if name in _REDUCTIONS:
        return [first if reductions else _Reduction(_REDUCTIONS[name], frozenset([first]))]
    if reductions and name in (reductions[0].name, "concatenate", "stack"):
        terms = [x.terms if isinstance(x, _Reduction) else {x} for x in operands if x not in ("0", "0.0")]
        return [_Reduction(reductions[0].name, frozenset().union(*terms))]
    if isinstance(first, _Reduction) and name in _TERM_BY_TERM:
        return [first._replace(terms=frozenset(hash((name, x, *others, *scalars)) for x in first.terms))]
    if len(operands) == num_results:
        # A collective over many leaves is one for each: how leaves share calls depends on their sizes.
        return [hash((name, operand, *scalars)) for operand in operands]
    return [hash((name, *operands, *scalars, i)) for i in range(num_results)]


def _constant(value: Any) -> Any:
    """A scalar's value; of larger constants only the dtype, because their shape is that of a leaf."""
    dtype = getattr(value, "dtype", None) or np.result_type(value)
    is_plain = not isinstance(value, jax.core.Tracer) and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return str(np.asarray(value).item()) if is_plain and np.size(value) == 1 else f"constant {dtype}"


_DOMAIN = Domain(_constant, _equation, lambda decides, values: hash((decides, *values)), rounds=3)
