"""The rules of a function for its derivatives, which an evaluation without calls has lost."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend import core

from jax_ring import _compat
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.parameters import is_inexact
from jax_ring.training.same_bits.fence import behind_barriers


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
