"""Data flow of a traced optimizer: what each result is made of, in whatever terms one asks.

`dependences` asks which inputs a result needs, `Expressions` whether results depend on names and shapes of parameters,
`Cut` whether each rank can update its partition of vectors by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_ring import _compat
from jax_ring.training.same_bits.evaluation import called
from jax_ring.training.zero.clip import NORM
from jax_ring.training.zero.traced import Traced

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
    """The union of the masks of the inputs that an output may depend on, by output. Masks are sets of bits.

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
        """The hashes of an optimizer for the parameters that it has been traced for."""
        constants = set()

        def constant(value):
            """A scalar's value; of larger constants only the dtype, because their shape is that of a leaf."""
            number = number_of(value)
            constants.add(str(number))
            return str(getattr(value, "dtype", None)) if number is None else str(number)

        domain = Domain(constant, _hashes, lambda decides, values: hash((decides, *values)), rounds=3)
        params, gradients = ([hash((role, x.dtype)) for x in traced.init.in_avals] for role in ("params", "gradients"))
        state = flow(traced.init, params, domain)
        updates, state = traced.split(flow(traced.update, [*gradients, *state, *params], domain))
        dtypes = (x.dtype for x in traced.init.in_avals)
        return cls(set(zip(dtypes, updates, strict=True)), set(state), constants)


def _hashes(eqn: Any, operands: list) -> list:
    name, num_results = eqn.primitive.name, len(eqn.outvars)
    if name in _SHAPE_ONLY:
        return operands[:1]
    scalars = [(k, str(v)) for k, v in sorted(eqn.params.items()) if isinstance(v, bool | int | float | str | np.dtype)]
    if len(operands) == num_results:
        # Treat a collective over many leaves as one per leaf: the leaves' sizes decide how they share calls.
        return [hash((name, operand, *scalars)) for operand in operands]
    return [hash((name, *operands, *scalars, i)) for i in range(num_results)]


# Elements of each analyzed vector. A prime, so that no other array has the same number by chance.
SIZE = 104729

_UNCHANGED = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "reshape", "squeeze"}
_OF_ELEMENTS = ELEMENTWISE | {"complex", "conj", "imag", "real"}
_COLLECTIVES_OF_ELEMENTS = {"pmax", "pmin", "ppermute", "psum"}
_OF_SUMS = {"add", "concatenate", "neg", "reduce_sum", "stack", "sub"}
_RANDOM = {"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"}
_ZERO_OF_ZEROS = {
    "abs", "add", "cbrt", "ceil", "complex", "concatenate", "conj", "erf", "expm1", "floor", "gt", "imag",
    "integer_pow", "log1p", "lt", "ne", "neg", "or", "real", "reduce_sum", "round", "sign", "sin", "sqrt", "square",
    "sub", "tanh", "xor",
}  # fmt: skip
_CHOOSING: dict[str, Callable] = {"clamp": lambda numbers: sorted(numbers)[1], "max": max, "min": min}


class _Known(NamedTuple):
    """What is known of a variable on a rank that has a partition of each vector.

    Attributes:
      kind: "same" if it does not depend on the partitions; "own" if it belongs to a vector, element by element; "sum"
        if its sum over ranks does not depend on the partitions; "mixed" if it may be anything else.
      detail: of "own" the index of the vector, None if all elements are alike; of "sum" the axes; of "mixed" the
        operation that mixes.
      number: the value of a scalar, or of the elements where zeros fill up the parameters; None if it is not known.
    """

    kind: str
    detail: Any = None
    number: Any = None


class Cut(NamedTuple):
    """What is wrong with an optimizer if each rank has a partition of every parameter; None if nothing is.

    Attributes:
      elements: with its updates, and the scalars of its state.
      division: with the vectors of its state, which are to be cut as the parameters are.
    """

    elements: str | None
    division: str | None

    @classmethod
    def of(cls, traced: Traced, axes: Sequence) -> Cut:
        """Follows an optimizer, traced for parameters of `SIZE` elements that are cut over these axes."""
        domain = Domain(_constant, partial(_flow_of_partitions, frozenset(axes)), _chosen, rounds=sys.maxsize)
        params = [_Known("own", i, 0) for i in range(len(traced.init.in_avals))]
        state, before = flow(traced.init, params, domain), None
        while state != before:
            updates, after = traced.split(flow(traced.update, [*params, *state, *params], domain))
            before, state = state, [_kept(joined) for joined in map(_joined, zip(state, after, strict=True))]
        elements = division = None
        for i, x in enumerate(updates):
            if x.kind != "own" or x.detail not in (i, None):
                why = x.detail if x.kind == "mixed" else "sum" if x.kind == "sum" else "choice of parameters"
                elements = elements or f"is not elementwise: its {why} may give other results for parts of parameters"
        for path, like, x in zip(traced.paths, traced.state, state, strict=True):
            if not like.shape and x.kind != "same":
                elements = elements or f"keeps a scalar that differs between ranks, in its state at {path}"
            # optax uses an array of one zero as an unused placeholder.
            elif like.shape and (like.shape, x.kind) != ((SIZE,), "own") and (like.shape, x.number) != ((1,), 0):
                division = division or f"has state that is not divided as the parameters are, at {path}"
        return cls(elements, division)


def _constant(value: Any) -> _Known:
    return _Known("mixed", "constant") if _is_vector(np.shape(value)) else _Known("same", number=number_of(value))


def _joined(values: Sequence[_Known], mixing: str = "condition") -> _Known:
    """What is known of one of several values, or of what is made of their elements."""
    first, *others = values
    for x in others:
        number = first.number if first.number == x.number else None
        is_alike = first.kind == x.kind == "own" and None in (first.detail, x.detail)
        if not is_alike and (first.kind, first.detail) != (x.kind, x.detail):
            return next((y for y in values if y.kind == "mixed"), _Known("mixed", mixing))
        first = _Known(first.kind, x.detail if first.detail is None else first.detail, number)
    return first


def _kept(x: _Known) -> _Known:
    """What is kept of a value in the state: when that is repartitioned, zeros fill up its vectors."""
    return x if x.kind != "own" or x.number == 0 else x._replace(number=None)


def _chosen(decides: _Known | None, values: Sequence[_Known]) -> _Known:
    if decides is None or decides.kind == "same":
        return _joined(values)
    return decides if decides.kind == "mixed" else _Known("mixed", "condition")


def _is_vector(shape: tuple) -> bool:
    """Whether an array has as many elements as some vectors."""
    return np.prod(shape) % SIZE == 0


def _flow_of_partitions(axes: frozenset, eqn: Any, operands: list[_Known]) -> list[_Known]:
    name, results = eqn.primitive.name, [x.aval for x in eqn.outvars]
    kinds = {x.kind for x in operands}
    mixed = next((x for x in operands if x.kind == "mixed"), _Known("mixed", "sum" if "sum" in kinds else name))
    keeps_sizes = [x.aval.size for x in eqn.invars] == [x.size for x in results]
    known: list[_Known | None] = [None]
    if over := _compat.rank_dependent_axes(eqn):
        collective = name.removeprefix("ring_").removesuffix("_invariant")
        if over & axes:
            known = [_summed(x, collective, eqn.params, over) for x in operands] or [None]
        elif collective in _COLLECTIVES_OF_ELEMENTS and keeps_sizes:
            known = [x._replace(number=0 if x.number == 0 else None) for x in operands]
        elif kinds <= {"same"}:
            known = [_Known("same")]
    elif eqn.primitive is NORM:
        known = [_Known("same") if axes <= set(eqn.params["axes"]) and all(x.number == 0 for x in operands) else None]
    elif name in _UNCHANGED and keeps_sizes:
        is_rounded = "sum" in kinds and not jnp.issubdtype(results[0].dtype, jnp.inexact)
        known = [None if is_rounded else operands[0]]
    elif name in _RANDOM:
        pass
    elif kinds <= {"same"}:
        if not any(_is_vector(x.shape) for x in results):
            known = [_Known("same", number=_number(name, operands))]
        elif name == "broadcast_in_dim" and eqn.invars[0].aval.size == 1:
            known = [operands[0]._replace(kind="own")]
    elif kinds <= {"same", "sum"}:
        known = [_of_sums(name, operands)]
    elif name in _OF_ELEMENTS and kinds <= {"same", "own"}:
        own = [x for x in operands if x.kind == "own"]
        if all(x in own or atom.aval.size == 1 for x, atom in zip(operands, eqn.invars, strict=True)):
            known = [_joined(own, "choice of parameters")._replace(number=_number(name, operands))]
    elif name == "reduce_sum" and results[0].size == 1 and operands[0].number == 0:
        known = [_Known("sum", axes)]
    known = known * len(results) if len(known) == 1 else known
    return [mixed if x is None or mixed in operands else x for x in known]


def _summed(x: _Known, collective: str, params: dict[str, Any], over: set) -> _Known | None:
    """After a collective over axes that cut."""
    if x.kind == "same" and collective in ("pmax", "pmin"):
        return x
    if x.kind != "sum" or collective != "psum" or params.get("axis_index_groups") is not None:
        return None
    return _Known("sum", x.detail - over) if x.detail - over else _Known("same")


def _of_sums(name: str, operands: list[_Known]) -> _Known | None:
    """What is linear in sums."""
    sums = [x for x in operands if x.kind == "sum"]
    is_scaled = len(sums) == 1 and (name == "mul" or (name == "div" and operands[0] in sums))
    is_added = name in _OF_SUMS and all(x.kind == "sum" or x.number == 0 for x in operands)
    return _joined(sums)._replace(number=None) if is_scaled or is_added else None


def _number(name: str, operands: list[_Known]) -> int | None:
    """0 if an elementwise equation gives it. Numbers that are not known are taken to be finite, and not zero."""
    numbers = [x.number for x in operands]
    are_zero = [x == 0 for x in numbers]
    if name in _CHOOSING and None not in numbers:
        is_zero = _CHOOSING[name](numbers) == 0
    elif name in ("and", "mul"):
        is_zero = any(are_zero)
    elif name == "div":
        is_zero = are_zero == [True, False]
    elif name == "not":
        is_zero = numbers[0] is True
    elif name == "is_finite":
        return True if are_zero[0] else None
    else:
        is_zero = all(are_zero[name == "select_n" :]) and name in _ZERO_OF_ZEROS | {"select_n"}
    return 0 if is_zero else None
