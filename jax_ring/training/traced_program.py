"""What a function computes, apart from the shapes: to see whether it treats other shapes or names in another way."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# They change shapes, not values. Which of them are needed depends on the number of dimensions.
_SHAPE_ONLY = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "copy_p"}


def program_of(function: Any, *args: Any, axis_env: list[tuple[Any, int]]) -> tuple:
    """The operations of a function, in order, with their operands, scalar parameters and constants, without shapes.

    It is equal for two calls that apply the same operations to the corresponding leaves of their arguments.
    """
    closed: Any = jax.make_jaxpr(function, axis_env=axis_env)(*args)
    return _program(closed.jaxpr, closed.consts)


def contains(program: Any, primitive: str) -> bool:
    """Whether a program, or one within it, has an operation of that name."""
    return isinstance(program, tuple) and (
        program[:1] == (primitive,) or any(contains(item, primitive) for item in program)
    )


def _program(jaxpr: Jaxpr, consts: Any = ()) -> tuple:
    names: dict[Any, Any] = {}
    for i, var in enumerate(jaxpr.invars):
        names[var] = ("argument", i)
    for i, var in enumerate(jaxpr.constvars):
        names[var] = _constant(consts[i]) if i < len(consts) else ("constant", i)

    def name(x: Any) -> Any:
        return _constant(x.val) if isinstance(x, Literal) else names[x]

    operations: list[tuple] = []
    for equation in jaxpr.eqns:
        operands = tuple(map(name, equation.invars))
        if equation.primitive.name in _SHAPE_ONLY:
            names[equation.outvars[0]] = operands[0]
            continue
        for i, var in enumerate(equation.outvars):
            names[var] = (len(operations), i)
        operations.append((equation.primitive.name, operands, _parameters(equation.params)))
    return (*operations, tuple(map(name, jaxpr.outvars)))


def _parameters(params: dict[str, Any]) -> tuple:
    found: list[tuple] = []
    for key, value in sorted(params.items()):
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, ClosedJaxpr):
                found.append((key, _program(item.jaxpr, item.consts)))
            elif isinstance(item, Jaxpr):
                found.append((key, _program(item)))
        if isinstance(value, bool | int | float | str | np.dtype):
            found.append((key, str(value)))
    return tuple(found)


def _constant(value: Any) -> Any:
    """A scalar's value; of larger constants only the dtype, because their shape is that of a leaf."""
    dtype = getattr(value, "dtype", None) or np.result_type(value)
    is_plain = not isinstance(value, jax.core.Tracer) and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return str(np.asarray(value).item()) if is_plain and np.size(value) == 1 else ("constant", str(dtype))
