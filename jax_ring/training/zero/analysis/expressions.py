"""What a function computes, apart from the shapes: to see whether it treats other shapes or names in another way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# They change shapes, not values. Which of them are needed depends on the number of dimensions.
_SHAPE_ONLY = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "copy_p"}
_CALLS = {"jit", "pjit"}


def expressions_of(function: Any, *args: Any, axis_env: list[tuple[Any, int]]) -> list:
    """For each result, a hash of the expression of operations, scalars and arguments that it is, without shapes.

    They are equal for two calls that apply the same operations to the corresponding leaves of their arguments.
    """
    closed: Any = jax.make_jaxpr(function, axis_env=axis_env)(*args)
    return _results(closed.jaxpr, list(map(_constant, closed.consts)), list(range(len(closed.jaxpr.invars))))


def primitives_of(function: Any, *args: Any, axis_env: list[tuple[Any, int]]) -> set[str]:
    """The names of the operations of a function, also of those in branches and loops."""
    closed: Any = jax.make_jaxpr(function, axis_env=axis_env)(*args)
    return set(_primitives(closed.jaxpr))


def _results(jaxpr: Any, consts: list, arguments: list) -> list:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def expression(x: Any) -> Any:
        return _constant(x.val) if isinstance(x, Literal) else known[x]

    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, tuple(map(expression, equation.invars))
        inner = _inner(equation.params)
        if name in _SHAPE_ONLY:
            results = [operands[0]]
        elif name in _CALLS:
            results = _results(inner[0][0], inner[0][1], list(operands))
        elif len(operands) == len(equation.outvars) and not inner:
            # A collective over many leaves is one for each: how leaves share calls depends on their sizes.
            results = [hash((name, operand, _scalars(equation.params))) for operand in operands]
        else:
            bodies = tuple(tuple(_results(j, c, list(range(len(j.invars))))) for j, c in inner)
            whole = hash((name, operands, bodies, _scalars(equation.params)))
            results = [hash((whole, i)) for i in range(len(equation.outvars))]
        known.update(zip(equation.outvars, results, strict=True))
    return list(map(expression, jaxpr.outvars))


def _primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner, _ in _inner(equation.params):
            yield from _primitives(inner)


def _inner(params: dict[str, Any]) -> list[tuple[Any, list]]:
    """The programs within an operation, each with its constants."""
    values = [x for v in params.values() for x in (v if isinstance(v, list | tuple) else [v])]
    closed = [(x.jaxpr, list(map(_constant, x.consts))) for x in values if isinstance(x, ClosedJaxpr)]
    return closed + [(x, list(map(str, x.constvars))) for x in values if isinstance(x, Jaxpr)]


def _scalars(params: dict[str, Any]) -> tuple:
    return tuple((k, str(v)) for k, v in sorted(params.items()) if isinstance(v, bool | int | float | str | np.dtype))


def _constant(value: Any) -> Any:
    """A scalar's value; of larger constants only the dtype, because their shape is that of a leaf."""
    dtype = getattr(value, "dtype", None) or np.result_type(value)
    is_plain = not isinstance(value, jax.core.Tracer) and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return str(np.asarray(value).item()) if is_plain and np.size(value) == 1 else f"constant {dtype}"
