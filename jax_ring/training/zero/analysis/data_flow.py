"""Data flow of a traced function: what each result is made of, in whatever terms one asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from jax_ring import _compat

# Equations that call their one jaxpr once, with their own operands and results.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}

# Equations whose results at an index depend on the operands at that index only, or on scalars.
ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt",
    "max", "min", "mul", "ne", "neg", "nextafter", "not", "optimization_barrier", "or", "pcast", "population_count",
    "pow", "pvary", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip

# (equation, values of its operands, values of its results), for each that is not within a call.
_Visit = Callable[[core.JaxprEqn, list, list], None]


class Domain(NamedTuple):
    """What is known of a variable, its value, and how equations pass it on.

    Attributes:
      constant: (a literal or a constant) -> value.
      equation: (equation, values of its operands) -> values of its results. Not for calls, `cond` and loops.
      chosen: (value of what decides, or None; values to choose from) -> value of a result of `cond`, or of a loop.
      slices: (type of an array, value of it or of its slices) -> value of its slices, or of it: for `scan`.
      rounds: of a loop that are followed, unless its state stays the same before; 0 if loops are equations as others.
    """

    constant: Callable[[Any], Any]
    equation: Callable[[core.JaxprEqn, list], list]
    chosen: Callable[[Any, Sequence], Any]
    slices: Callable[[Any, Any], Any] = lambda array, value: value
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
            # JAX caches what it traced for a call, so equations inside may name the place of another call.
            results = flow(inner, operands, domain)
        elif name == "cond":
            branches = [flow(branch, operands[1:], domain, visit) for branch in eqn.params["branches"]]
            results = [domain.chosen(operands[0], values) for values in zip(*branches, strict=True)]
        elif name == "scan" and domain.rounds:
            results = _scan(eqn, operands, domain)
        elif name == "while" and domain.rounds:
            results = _while(eqn.params, operands, domain)
        else:
            results = domain.equation(eqn, operands)
        if visit is not None:
            visit(eqn, operands, results)
        known.update(zip(eqn.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def called(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """The function of an equation that is nothing but a call."""
    if eqn.primitive.name not in _CALLS:
        return None
    function: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return function if isinstance(function, core.ClosedJaxpr) else core.ClosedJaxpr(function, ())


def dependences(jaxpr: core.Jaxpr, masks: Sequence[int], visit: _Visit | None = None) -> list[int]:
    """For each output the union of the masks of the inputs that it may depend on. Masks are sets of bits.

    Loops are seen as a whole.
    """

    def equation(eqn, operands):
        return [_union(operands)] * len(eqn.outvars)

    domain = Domain(lambda constant: 0, equation, lambda index, masks: _union([index, *masks]))
    return flow(core.ClosedJaxpr(jaxpr, [0] * len(jaxpr.constvars)), masks, domain, visit)


def place_of(eqn: core.JaxprEqn) -> tuple[str, str]:
    """The transformation that an equation comes from, by the name of its factory, and the file and line."""
    frames = [frame for frame in _compat.frames(eqn) if "/jax/" not in frame.file_name]
    if not frames:
        return "", ""
    inside = [f.function_name.split(".<locals>.") for f in frames]
    names = [names[0] for names in inside if len(names) > 1 and "update" in names[-1]]
    name, frame = names[0] if names else "", frames[0]
    return name, f"{'/'.join(frame.file_name.split('/')[-3:])}:{frame.line_num}"


def _union(masks: Sequence[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _scan(eqn: core.JaxprEqn, operands: list, domain: Domain) -> list:
    num_consts, num_carry = _compat.scan_counts(eqn.params)
    first = num_consts + num_carry
    fixed, state = operands[:num_consts], operands[num_consts:first]
    slices = [domain.slices(atom.aval, x) for atom, x in zip(eqn.invars[first:], operands[first:], strict=True)]
    stacked: list = []
    for _ in range(domain.rounds):
        before, results = state, flow(eqn.params["jaxpr"], [*fixed, *state, *slices], domain)
        state = [domain.chosen(None, values) for values in zip(before, results[:num_carry], strict=True)]
        stacked = [
            domain.slices(atom.aval, x) for atom, x in zip(eqn.outvars[num_carry:], results[num_carry:], strict=True)
        ]
        if state == before:
            break
    return [*state, *stacked]


def _while(params: dict[str, Any], operands: list, domain: Domain) -> list:
    first, end = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_cond, of_body, state = operands[:first], operands[first:end], operands[end:]
    for _ in range(domain.rounds):
        before = state
        (goes_on,) = flow(params["cond_jaxpr"], [*of_cond, *state], domain)
        after = flow(params["body_jaxpr"], [*of_body, *state], domain)
        state = [domain.chosen(goes_on, values) for values in zip(before, after, strict=True)]
        if state == before:
            break
    return state
