"""Evaluation of a jaxpr that computes no expression twice.

XLA looks for equal expressions at other points of its pipeline if a program is for one device. What it makes of the rest
would differ, and with it the last bits, if there were any to find.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax import lax

from jax_ring import _compat

# Calls that are replaced by what they call, by the name of the primitive, with the parameter that holds the jaxpr.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
          "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}  # fmt: skip


def evaluate(closed: Any, operands: Sequence, known: dict | None = None) -> list:
    """The results of a ClosedJaxpr. Equal equations, in what it calls as well, are bound once."""
    jaxpr, known = closed.jaxpr, {} if known is None else known
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *operands], strict=True))

    def value_of(atom):
        return atom.val if isinstance(atom, jax.extend.core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        results = _results(eqn, [value_of(x) for x in eqn.invars], known)
        values.update(zip(eqn.outvars, results, strict=True))
    return [value_of(x) for x in jaxpr.outvars]


def _results(eqn: Any, operands: list, known: dict) -> list:
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        return evaluate(_closed(params[_CALLS[name]]), operands, known)
    if name == "scan":
        return _scan(operands, **params)
    if eqn.effects or name == "optimization_barrier":
        return _compat.bind_equation(eqn, operands)
    if name in ("integer_pow", "square"):
        return [_power(operands[0], params.get("y", 2), known)]
    if name == "broadcast_in_dim" and len(operands) == 1:
        dims, shape = params["broadcast_dimensions"], params["shape"]
        kept = [i for i, d in enumerate(dims) if np.shape(operands[0])[i] == shape[d]]
        if len(kept) < len(dims) and params["sharding"] is None:
            operands = [_reshaped(operands[0], kept, known)]
            fun = partial(lax.broadcast_in_dim, shape=shape, broadcast_dimensions=tuple(dims[i] for i in kept))
            return [_once(("broadcast", shape, tuple(dims[i] for i in kept)), fun, operands, known)]
    if len(operands) > 1 and len(eqn.outvars) == 1 and name in _ELEMENTWISE:
        shape = eqn.outvars[0].aval.shape
        operands = [_broadcast(x, shape, known) for x in operands]
    return _once((eqn.primitive, str(params)), lambda *x: _compat.bind_equation(eqn, list(x)), operands, known)


_ELEMENTWISE = {
    "add",
    "add_any",
    "sub",
    "mul",
    "div",
    "max",
    "min",
    "pow",
    "rem",
    "atan2",
    "and",
    "or",
    "xor",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "nextafter",
    "shift_left",
    "shift_right_logical",
    "shift_right_arithmetic",
    "select_n",
    "clamp",
}


def _once(key, fun, operands, known):
    key = (*key, tuple(map(_identity, operands)))
    if key not in known:
        known[key] = (fun(*operands), operands)  # the operands are kept, so that ids stay theirs
    return known[key][0]


def _broadcast(x, shape, known):
    if np.shape(x) == shape:
        return x
    if not np.ndim(x):
        return _once(("full", shape), lambda x: lax.broadcast(x, shape), [x], known)
    kept = [i for i, n in enumerate(np.shape(x)) if n == shape[i]]
    y = _reshaped(x, kept, known)
    return _once(("broadcast", shape, tuple(kept)), lambda y: lax.broadcast_in_dim(y, shape, tuple(kept)), [y], known)


def _reshaped(x, kept, known):
    new = tuple(np.shape(x)[i] for i in kept)
    return _once(("reshape", new), lambda x: lax.reshape(x, new), [x], known)


def _power(x, y, known):
    if y < 0:
        one = _broadcast(np.ones((), x.dtype), x.shape, known)
        return _once(("div",), lax.div, [one, _power(x, -y, known)], known)
    result = None
    while y:
        if y & 1:
            result = x if result is None else _once(("mul",), lax.mul, [result, x], known)
        y >>= 1
        if y:
            x = _once(("mul",), lax.mul, [x, x], known)
    return _broadcast(np.ones((), x.dtype), x.shape, known) if result is None else result


def _closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else jax.extend.core.ClosedJaxpr(jaxpr, ())


def _identity(x: Any) -> Any:
    if isinstance(x, jax.core.Tracer) or np.ndim(x):
        return id(x)
    return (np.asarray(x).tobytes(), str(jax.typeof(x)))


def _scan(operands: list, *, jaxpr, num_consts, num_carry, length, reverse, unroll, **_) -> list:
    end = num_consts + num_carry
    consts, init, xs = operands[:num_consts], operands[num_consts:end], operands[end:]

    def step(carry, x):
        out = evaluate(jaxpr, [*consts, *carry, *x])
        return out[:num_carry], out[num_carry:]

    carry, ys = lax.scan(step, init, xs, length, reverse, unroll)
    return [*carry, *ys]
