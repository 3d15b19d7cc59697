"""Evaluates a jaxpr so that XLA finds no expression twice.

For several devices XLA merges equal expressions before it rewrites them, for one after. Rewriting depends on the number
of uses, and so would the last bits.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend import core

from jax_ring import _compat
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.same_bits.fence import behind_barriers
from jax_ring.training.trees import is_inexact

# Equations that call their only jaxpr once, with their own operands and results. JAX 0.12 renamed closed_call.
_CALLS = {"jit", "closed_call", "eval_jaxpr", "remat2", "custom_jvp_call", "custom_vjp_call"}

# Operations that may have operands with fewer elements than the result. XLA broadcasts such operands, once per
# operation.
_ELEMENTWISE = {
    "add", "add_any", "sub", "mul", "div", "rem", "pow", "max", "min", "atan2", "nextafter", "and", "or", "xor",
    "shift_left", "shift_right_logical", "shift_right_arithmetic", "eq", "ne", "lt", "le", "gt", "ge", "select_n",
    "clamp", "complex",
}  # fmt: skip


class Known(dict[tuple, tuple[list, Sequence]]):
    """The results of a computation so far, by equation and operands, and the operands, so that they live on.

    rounding: None, or how elementwise operations are computed: a `rounding.Rounding`.
    """

    def __init__(self, rounding: Any = None):
        super().__init__()
        self.rounding = rounding

    def once(self, key: tuple, bind: Callable[[list], list], operands: Sequence) -> list:
        """The results of `bind`, computed once per key, which tells all but the operands."""
        key = (*key, *map(_identity, operands))
        if key not in self:
            self[key] = (bind(list(operands)), operands)
        return self[key][0]

    def rounded(self, name: str, bind: Callable[[list], list]) -> Callable[[list], list]:
        return bind if self.rounding is None else partial(self.rounding.results, name, bind)


def evaluate(closed: Any, operands: Sequence, known: Known | None = None) -> list:
    """A ClosedJaxpr's results.

    Unlike in `jax.core.eval_jaxpr`, equal equations are bound once, broadcasts and powers are equations of their own,
    and calls are inlined.

    known: results of equations so far, where this is part of another jaxpr.
    """
    jaxpr, results = closed.jaxpr, Known() if known is None else known
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *operands], strict=True))

    def value_of(atom):
        return _constant(atom) if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, _equation(eqn, [value_of(x) for x in eqn.invars], results), strict=True))
    return [value_of(x) for x in jaxpr.outvars]


def called(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """The function of an equation that is nothing but a call."""
    if eqn.primitive.name not in _CALLS:
        return None
    function: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return function if isinstance(function, core.ClosedJaxpr) else core.ClosedJaxpr(function, ())


def _constant(literal: Any) -> Any:
    dtype = literal.aval.dtype
    return literal.val if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.asarray(literal.val, dtype)


def _equation(eqn: Any, operands: list, known: Known) -> list:
    name, params = eqn.primitive.name, eqn.params
    if (inner := called(eqn)) is not None:
        # A barrier separates recomputed values, as in JAX's own lowering, so they differ from the first computation.
        is_again = name == "remat2" and params["differentiated"] and params["prevent_cse"]
        return evaluate(inner, behind_barriers(operands) if is_again else operands, known)
    if name in _LOOPS and not eqn.effects:
        return _LOOPS[name](
            lambda jaxpr, operands: evaluate(jaxpr, operands, Known(known.rounding)), operands, **params
        )
    if name in ("integer_pow", "square"):
        return [_power(operands[0], params.get("y", 2), known)]
    if name == "broadcast_in_dim" and len(operands) == 1 and params["sharding"] is None:
        return [_broadcast(operands[0], params["shape"], params["broadcast_dimensions"], known)]
    if name in _ELEMENTWISE:
        shape = eqn.outvars[0].aval.shape
        operands = [_broadcast(x, shape, range(np.ndim(x)), known) for x in operands]
    if eqn.effects:
        return _compat.bind_equation(eqn, operands)
    bind = known.rounded(name, partial(_compat.bind_equation, eqn))
    key = (eqn.primitive, *((name, type(value), value) for name, value in params.items()), repr(eqn.ctx))
    try:
        hash(key)
    except TypeError:  # not every parameter can be compared
        return bind(operands)
    return bind(operands) if name == "optimization_barrier" else known.once(key, bind, operands)


def _identity(x: Any) -> Any:
    if isinstance(x, jax.core.Tracer) or np.ndim(x) or not isinstance(x, np.ndarray):
        return id(x)
    return (x.tobytes(), x.dtype)


def _broadcast(x: Any, shape: Sequence[int], dimensions: Sequence[int], known: Known) -> Any:
    """`lax.broadcast_in_dim` in XLA's two steps: dimensions of size 1 are dropped first."""
    shape, old = tuple(shape), np.shape(x)
    if old == shape and tuple(dimensions) == tuple(range(len(shape))):
        return x
    kept = tuple(i for i, dimension in enumerate(dimensions) if old[i] == shape[dimension])
    if len(kept) < len(old):
        sizes = tuple(old[i] for i in kept)
        (x,) = known.once(("reshape", sizes), lambda x: [lax.reshape(x[0], sizes)], [x])
    targets = tuple(dimensions[i] for i in kept)
    (x,) = known.once(("broadcast", shape, targets), lambda x: [lax.broadcast_in_dim(x[0], shape, targets)], [x])
    return x


def _power(x: Any, exponent: int, known: Known) -> Any:
    """An integer power, by the multiplications of `lax.integer_pow`."""
    if exponent <= 0:
        one = _broadcast(np.ones((), x.dtype), x.shape, (), known)
        if exponent == 0:
            return one
        return _computed("div", lax.div, [one, _power(x, -exponent, known)], known)
    result = None
    while exponent:
        if exponent & 1:
            result = x if result is None else _computed("mul", lax.mul, [result, x], known)
        exponent >>= 1
        if exponent:
            x = _computed("mul", lax.mul, [x, x], known)
    return result


def _computed(name: str, fun: Callable, operands: list, known: Known) -> Any:
    return known.once((name,), known.rounded(name, lambda operands: [fun(*operands)]), operands)[0]


# ---- Control flow, whose bodies are evaluated likewise --------------------------------------------------------------


def _scan(run: Callable, operands: list, *, jaxpr, length, reverse, unroll, **structure) -> list:
    num_consts, num_carry = _compat.scan_counts(structure)
    end = num_consts + num_carry
    consts, carry, xs = operands[:num_consts], operands[num_consts:end], operands[end:]

    def step(carry, x):
        results = run(jaxpr, [*consts, *carry, *x])
        return results[:num_carry], results[num_carry:]

    carry, ys = lax.scan(step, carry, xs, length, reverse, unroll)
    return [*carry, *ys]


def _while(run: Callable, operands: list, *, cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts, **_) -> list:
    end = cond_nconsts + body_nconsts
    of_cond, of_body, state = operands[:cond_nconsts], operands[cond_nconsts:end], operands[end:]
    return lax.while_loop(
        lambda state: run(cond_jaxpr, [*of_cond, *state])[0],
        lambda state: run(body_jaxpr, [*of_body, *state]),
        state,
    )


def _cond(run: Callable, operands: list, *, branches, **params) -> list:
    index, *rest = operands
    functions = [lambda *x, branch=branch: run(branch, x) for branch in branches]
    platforms = _compat.platforms_of_branches(params)
    if platforms is None:
        return lax.switch(index, functions, *rest)
    pairs = [(name, f) for names, f in zip(platforms, functions, strict=True) for name in names or ("default",)]
    return lax.platform_dependent(*rest, **dict(pairs))


_LOOPS: dict[str, Callable[..., list]] = {"scan": _scan, "while": _while, "cond": _cond}


def with_rules(
    closed: Any, operands: Sequence, evaluate: Callable[[Any, Sequence], list], *, of_derivatives: bool
) -> list:
    """`evaluate(closed, operands)`, whose derivatives are those of the ClosedJaxpr.

    of_derivatives: whether `evaluate` evaluates them, too. Then there is no reverse mode.
    """
    if not _compat.may_have_rules(closed.jaxpr):  # JAX refuses the derivatives of such effects, too
        return evaluate(closed, operands)
    # Inputs of a function with a rule count as used.
    jaxpr, used = _compat.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    given = [*closed.consts, *itertools.compress(operands, used)]
    # It must not close over tracers, and constants are to stay constants.
    places = [i for i, x in enumerate(given) if isinstance(x, jax.core.Tracer)]
    constants = _replaced(given, places, [None] * len(places))

    def call(how, tracers):
        values, count = _replaced(constants, places, tracers), len(jaxpr.constvars)
        return how(core.ClosedJaxpr(jaxpr, values[:count]), values[count:])

    @jax.custom_jvp
    def results(*tracers):
        return call(evaluate, tracers)

    def rule(primals, tangents):
        moved = [i for i, x in enumerate(tangents) if not isinstance(x, SymbolicZero)]

        def pushed(primals, tangents):
            def of_moved(xs):
                return call(_as_written, _replaced(primals, moved, xs))

            pairs = zip(*jax.jvp(of_moved, ([primals[i] for i in moved],), (tangents,)), strict=True)
            return [own_copy(t, tuple(_compat.varying_axes(x))) for x, t in pairs if is_inexact(x)]

        both = (list(primals), [tangents[i] for i in moved])
        if of_derivatives:
            # The results by themselves, or JAX would not get as far in reverse mode as where it is refused.
            leaves = behind_barriers(jax.tree.leaves(both))
            of_floats = iter(with_rules(jax.make_jaxpr(pushed)(*both), leaves, evaluate, of_derivatives=True))
        else:
            of_floats = iter(pushed(*both))
        out = results(*primals)
        return out, [next(of_floats) if is_inexact(x) else zero_from_primal(x, symbolic_zeros=True) for x in out]

    results.defjvp(rule, symbolic_zeros=True)
    return results(*[given[i] for i in places])


def _as_written(closed: Any, operands: Sequence) -> list:
    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *operands)


def _replaced(values: Sequence, places: Sequence[int], others: Sequence) -> list:
    found = dict(zip(places, others, strict=True))
    return [found.get(i, x) for i, x in enumerate(values)]
