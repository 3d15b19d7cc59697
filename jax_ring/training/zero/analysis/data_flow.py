"""Data flow of a traced function: what each result is made of, in whatever terms one asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from jax_ring import _compat
from jax_ring.training.same_bits.evaluation import called

# Equations whose result at an index depends only on the operands at that index, or on scalars.
ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt",
    "max", "min", "mul", "ne", "neg", "nextafter", "not", "optimization_barrier", "or", "pcast", "population_count",
    "pow", "pvary", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip

# (equation, values of its operands, values of its results), for each equation outside of calls.
_Visit = Callable[[core.JaxprEqn, list, list], None]


class Domain(NamedTuple):
    """What is known of a variable, its value, and how equations pass it on.

    Attributes:
      constant: (a literal or a constant) -> value.
      equation: (equation, values of its operands) -> values of its results. Not for calls, `cond` and loops.
      chosen: (value of what decides, or None; values to choose from) -> value of a result of `cond`, or of a loop.
      rounds: of a loop that are followed, unless its state stays the same before; 0 if loops are equations as others.
    """

    constant: Callable[[Any], Any]
    equation: Callable[[core.JaxprEqn, list], list]
    chosen: Callable[[Any, Sequence], Any]
    rounds: int = 0


def flow(closed: core.ClosedJaxpr, values: Sequence, domain: Domain, visit: _Visit | None = None) -> list:
    """The values of a traced function's results, from those of its arguments."""
    jaxpr = closed.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(domain.constant, closed.consts), *values], strict=True))

    def value_of(atom):
        return domain.constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [value_of(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if (inner := called(eqn)) is not None:
            # JAX caches the traced body of a call, so equations inside may name the place of another call.
            results = flow(inner, operands, domain)
        elif name == "cond":
            branches = [flow(branch, operands[1:], domain, visit) for branch in eqn.params["branches"]]
            results = [domain.chosen(operands[0], values) for values in zip(*branches, strict=True)]
        elif name in ("scan", "while") and domain.rounds:
            results = _loop(eqn.params, operands, domain)
        else:
            results = domain.equation(eqn, operands)
        if visit is not None:
            visit(eqn, operands, results)
        known.update(zip(eqn.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def dependences(jaxpr: core.Jaxpr, masks: Sequence[int], visit: _Visit | None = None) -> list[int]:
    """For each output the union of the masks of the inputs that it may depend on. Masks are sets of bits.

    Loops are seen as a whole.
    """

    def equation(eqn, operands):
        return [reduce(or_, operands, 0)] * len(eqn.outvars)

    domain = Domain(lambda constant: 0, equation, lambda index, masks: reduce(or_, masks, index))
    return flow(core.ClosedJaxpr(jaxpr, [0] * len(jaxpr.constvars)), masks, domain, visit)


def number_of(value: Any) -> Any:
    """The number that a constant is, or that it has everywhere if it is an array of one element; or else None."""
    dtype = getattr(value, "dtype", np.dtype(float))
    is_number = not isinstance(value, jax.core.Tracer) and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return np.asarray(value).item() if is_number and np.size(value) == 1 else None


def place_of(eqn: core.JaxprEqn) -> tuple[str, str]:
    """The transformation that an equation comes from, by the name of its factory, and the file and line."""
    frames = [frame for frame in _compat.frames(eqn) if "/jax/" not in frame.file_name]
    if not frames:
        return "", ""
    inside = [f.function_name.split(".<locals>.") for f in frames]
    names = [names[0] for names in inside if len(names) > 1 and "update" in names[-1]]
    name, frame = names[0] if names else "", frames[0]
    return name, f"{'/'.join(frame.file_name.split('/')[-3:])}:{frame.line_num}"


def _loop(params: dict[str, Any], operands: list, domain: Domain) -> list:
    """What is known after any number of rounds of a `scan` or a `while`."""
    condition, body = params.get("cond_jaxpr"), params["jaxpr" if "jaxpr" in params else "body_jaxpr"]
    first, (num_consts, num_carry) = 0, (0, 0)
    if condition is None:
        num_consts, num_carry = _compat.scan_counts(params)
    else:
        first, num_consts, num_carry = params["cond_nconsts"], params["body_nconsts"], len(operands)
    of_condition, fixed, rest = operands[:first], operands[first:][:num_consts], operands[first + num_consts :]
    # Of slices of an array, or a stack of them, it is only known that they depend on the array.
    state, slices = rest[:num_carry], [domain.chosen(x, [x]) for x in rest[num_carry:]]
    results: list = []
    for _ in range(domain.rounds):
        goes_on = None if condition is None else flow(condition, [*of_condition, *state], domain)[0]
        results = flow(body, [*fixed, *state, *slices], domain)
        before, state = state, [domain.chosen(goes_on, values) for values in zip(state, results, strict=False)]
        if state == before:
            break
    return [*state, *(domain.chosen(x, [x]) for x in results[len(state) :])]
