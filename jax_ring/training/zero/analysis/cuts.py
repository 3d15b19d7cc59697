"""Whether parts of vectors can be updated one by one: the data flow of an optimizer whose parameters are cut."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ring import _compat
from jax_ring.training.zero.analysis.data_flow import ELEMENTWISE, Domain, flow
from jax_ring.training.zero.analysis.known import Known, constant, joined, with_numbers
from jax_ring.training.zero.analysis.traced import Traced
from jax_ring.training.zero.given_norms import NORM

# The elements of each vector that is analyzed: a prime, so that no array without a vector's elements has as many.
SIZE = 104729

_SAME_ELEMENTS = {"broadcast_in_dim", "copy", "copy_p", "expand_dims", "optimization_barrier", "reshape", "squeeze"}
_OF_COMPLEX = {"complex", "conj", "imag", "real"}
_OF_ELEMENTS = {"pmax", "pmin", "ppermute", "psum", "quantized_psum"}
_RANDOM = {"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"}

_COMBINING = "way of combining parameters"

# How a rank's own reductions may be put together before a collective.
_REDUCTIONS = {
    "sum": {"add", "concatenate", "stack", "convert_element_type", "neg", "reduce_sum", "sub"},
    "max": {"concatenate", "stack", "convert_element_type", "max", "reduce_max", "reduce_or"},
    "min": {"concatenate", "stack", "convert_element_type", "min", "reduce_and", "reduce_min"},
}


class Cut(NamedTuple):
    """What is wrong with an optimizer if each rank has a part of every parameter; None if nothing is.

    Attributes:
      elements: with its updates and the scalars of its state.
      division: with its state as something that is cut as the parameters are.
    """

    elements: str | None
    division: str | None

    @classmethod
    def of(cls, traced: Traced, axes: Sequence) -> Cut:
        """Follows an optimizer for parameters of `SIZE` elements, which are cut over these axes."""
        domain = Domain(_constant, partial(_equation, frozenset(axes)), _chosen, _slices, rounds=sys.maxsize)
        params = [Known("part", (i,), 0) for i in range(len(traced.init.in_avals))]
        state = [_kept(x) for x in flow(traced.init, params, domain)]
        while True:
            updates, after = traced.split(flow(traced.update, [*params, *state, *params], domain))
            before, state = state, [_kept(joined(values, "state")) for values in zip(state, after, strict=True)]
            if state == before:
                break
        leaves = list(zip(traced.paths, traced.state, state, strict=True))
        division = next((path for path, x, known in leaves if x.shape and not _is_divided(x.shape, known)), None)
        return cls(
            _fault_of_elements(updates, [path for path, x, known in leaves if not x.shape and known.kind != "same"]),
            division and f"has state that is not divided as the parameters are, at {division}",
        )


def _fault_of_elements(updates: list[Known], scalars: list[str]) -> str | None:
    for i, x in enumerate(updates):
        if x.kind != "part" or x.detail not in ((i,), (None,)):
            mixing = x.detail if x.kind == "mixed" else _COMBINING
            return f"is not elementwise: its {mixing} may give other results for parts of the parameters"
    return f"keeps a scalar that differs between ranks, in its state at {', '.join(scalars)}" if scalars else None


def _kept(x: Known) -> Known:
    """In a state. Where it is repartitioned, zeros fill up its vectors."""
    return x if x.kind != "part" or x.is_zero else x._replace(filling=None)


def _is_divided(shape: tuple, x: Known) -> bool:
    """Whether an array of the state is a vector as the parameters, or the zero of each rank that stands for nothing."""
    return (shape == (SIZE,) and x.kind == "part") or (shape == (1,) and x.kind == "same" and x.is_zero)


def _constant(value: Any) -> Known:
    return Known("mixed", "constant array") if _num_vectors(np.shape(value)) else constant(value)


def _chosen(decides: Known | None, values: Sequence[Known]) -> Known:
    if decides is not None and decides.kind != "same":
        return decides if decides.kind == "mixed" else Known("mixed", "condition")
    return joined(values, "condition")


def _slices(array: Any, x: Known) -> Known:
    if x.kind in ("same", "mixed") and not _num_vectors(array.shape):
        return x._replace(filling=None)
    return Known("mixed", "scan")


def _num_vectors(shape: tuple) -> int:
    """The number of vectors with as many elements as an array; 0 unless it is an integer."""
    count, rest = divmod(int(np.prod(shape)), SIZE)
    return 0 if rest else count


def _equation(axes: frozenset, eqn: Any, operands: list[Known]) -> list[Known]:
    name, results = eqn.primitive.name, [x.aval for x in eqn.outvars]
    reduction = next((x.kind for x in operands if x.kind in _REDUCTIONS), None)
    mixed = next((x for x in operands if x.kind == "mixed"), Known("mixed", reduction or name))
    over = _compat.rank_dependent_axes(eqn)
    known: list[Known] | None = None
    if mixed in operands or name in _RANDOM:
        pass
    elif eqn.primitive is NORM:
        if axes <= set(eqn.params["axes"]) and all(x.is_zero for x in operands):
            known = [Known("same")]
    elif over & axes:
        known = [_reduced(x, eqn, over) or mixed for x in operands]
    elif name in _SAME_ELEMENTS and [x.aval.size for x in eqn.invars] == [x.size for x in results]:
        known = operands
    elif (
        over and _collective(name) in _OF_ELEMENTS and [x.aval.shape for x in eqn.invars] == [x.shape for x in results]
    ):
        known = [x._replace(filling=x.filling if x.is_zero else None) for x in operands]
    elif all(x.kind == "same" for x in operands):
        known = [_of_same(x.shape, eqn, operands) or mixed for x in results]
    elif reduction:
        known = _of_reductions(eqn, operands)
    else:
        known = _of_parts(axes, eqn, operands)
    return known if known and len(known) == len(results) else [mixed] * len(results)


def _collective(name: str) -> str:
    return name.removeprefix("ring_").removesuffix("_invariant")


def _reduced(x: Known, eqn: Any, over: set) -> Known | None:
    """After a collective over axes that cut."""
    reduction = _collective(eqn.primitive.name).removeprefix("p")
    if eqn.params.get("axis_index_groups") is not None:
        return None
    if x.kind == "same" and reduction in ("max", "min"):
        return x
    if x.kind != reduction:
        return None
    left = x.detail - over
    return x._replace(kind=x.kind if left else "same", detail=left or None)


def _of_same(shape: tuple, eqn: Any, operands: list[Known]) -> Known | None:
    """Of what does not depend on the parts. A vector of it is one by elements only if they are equal."""
    if eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.size == 1:
        count = _num_vectors(shape)
        return operands[0]._replace(kind="part", detail=(None,) * count) if count else operands[0]
    if _num_vectors(shape):
        return None
    return with_numbers(Known("same"), eqn, operands) if shape == () else Known("same")


def _of_reductions(eqn: Any, operands: list[Known]) -> list[Known] | None:
    """Of what each rank has reduced for itself."""
    name = eqn.primitive.name
    reductions = [x for x in operands if x.kind != "same"]
    first, others = reductions[0], [x for x in operands if x.kind == "same"]
    if any((x.kind, x.detail) != first[:2] for x in reductions):
        return None
    known = [Known(*first[:2], is_positive=all(x.is_positive for x in operands) and name != "sub")]
    if first.kind != "sum":
        return known if name in _REDUCTIONS[first.kind] else None
    if name in ("mul", "div") and len(reductions) == 1:
        return known if name == "mul" or operands[0] is first else None
    dtypes = [x.aval.dtype for x in (*eqn.invars, *eqn.outvars)]
    truncates = name == "convert_element_type" and not jnp.issubdtype(dtypes[-1], jnp.inexact)
    if truncates and jnp.issubdtype(dtypes[0], jnp.inexact):
        return None
    return known if name in _REDUCTIONS["sum"] and all(x.is_zero for x in others) else None


def _of_parts(axes: frozenset, eqn: Any, operands: list[Known]) -> list[Known] | None:
    name, first, result = eqn.primitive.name, operands[0], eqn.outvars[0].aval
    parts = [x for x in operands if x.kind == "part"]
    if name in ELEMENTWISE | _OF_COMPLEX:
        if any(x.kind == "same" and atom.aval.size != 1 for x, atom in zip(operands, eqn.invars, strict=True)):
            return None
        known = joined(parts, _COMBINING)
        return [known if known.kind == "mixed" else with_numbers(known, eqn, operands)]
    if len(parts) < len(operands):
        return None
    if name == "concatenate" and all(len(x.aval.shape) == 1 for x in eqn.invars):
        fillings = {x.filling for x in parts}
        detail = tuple(number for x in parts for number in x.detail)
        return [
            Known("part", detail, fillings.pop() if len(fillings) == 1 else None, all(x.is_positive for x in parts))
        ]
    if name in ("slice", "split") and len(eqn.invars[0].aval.shape) == 1:
        if name == "slice":
            bounds = [(eqn.params["start_indices"][0], eqn.params["limit_indices"][0])]
        else:
            ends = np.cumsum(eqn.params["sizes"])
            bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        if eqn.params.get("strides") not in (None, (1,)) or any(i % SIZE for ends in bounds for i in ends):
            return None
        return [first._replace(detail=first.detail[start // SIZE : stop // SIZE]) for start, stop in bounds]
    if result.size == eqn.invars[0].aval.size and name.startswith("reduce_"):  # over dimensions of one element
        return [first]
    if result.size == 1:
        neutral = {
            "reduce_sum": first.is_zero,
            "reduce_max": first.is_zero and first.is_positive,
            "reduce_or": first.is_zero,
            "reduce_and": first.filling is not None and not first.is_zero,
        }
        kind = {"reduce_sum": "sum", "reduce_max": "max", "reduce_or": "max", "reduce_and": "min"}
        if neutral.get(name):
            return [Known(kind[name], axes, is_positive=first.is_positive)]
    return None
