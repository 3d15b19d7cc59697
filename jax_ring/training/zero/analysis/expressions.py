"""What an optimizer computes, apart from names and shapes of parameters: to see whether it depends on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jax_ring.training.zero.analysis.data_flow import Domain, flow, number_of
from jax_ring.training.zero.analysis.traced import Traced

# Change shapes, not values. The number of dimensions decides which of them are needed.
_SHAPE_ONLY = {"broadcast_in_dim", "copy", "copy_p", "expand_dims", "reshape", "squeeze"}


class Expressions(NamedTuple):
    """Hashes of an optimizer's results after the first step, of operations, constants and arguments, without shapes.

    Of updates there is one for all parameters of a dtype if the same happens to them.
    """

    updates: set[Any]
    state: set[Any]
    constants: set[str]

    @classmethod
    def of(cls, traced: Traced) -> Expressions:
        """Those of an optimizer for the parameters that it has been traced for."""
        constants = set()

        def constant(value):
            """A scalar's value; of larger constants only the dtype, because their shape is that of a leaf."""
            number = number_of(value)
            constants.add(str(number))
            return str(getattr(value, "dtype", None)) if number is None else str(number)

        domain = Domain(constant, _equation, lambda decides, values: hash((decides, *values)), rounds=3)
        params, gradients = ([hash((role, x.dtype)) for x in traced.init.in_avals] for role in ("params", "gradients"))
        state = flow(traced.init, params, domain)
        updates, state = traced.split(flow(traced.update, [*gradients, *state, *params], domain))
        dtypes = (x.dtype for x in traced.init.in_avals)
        return cls(set(zip(dtypes, updates, strict=True)), set(state), constants)


def _equation(eqn: Any, operands: list) -> list:
    name, num_results = eqn.primitive.name, len(eqn.outvars)
    if name in _SHAPE_ONLY:
        return operands[:1]
    scalars = [(k, str(v)) for k, v in sorted(eqn.params.items()) if isinstance(v, bool | int | float | str | np.dtype)]
    if len(operands) == num_results:
        # Treat a collective over many leaves as one per leaf: the leaves' sizes decide how they share calls.
        return [hash((name, operand, *scalars)) for operand in operands]
    return [hash((name, *operands, *scalars, i)) for i in range(num_results)]
