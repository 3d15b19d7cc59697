"""What is known of a variable on a rank that has a part of each vector, and of the zeros that fill up the vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

_POSITIVE = {"abs", "exp", "integer_pow", "sqrt", "square"}
_POSITIVE_OF_POSITIVE = {"add", "convert_element_type", "div", "max", "min", "mul", "select_n"}

_OF_NUMBERS: dict[str, Callable] = {
    "abs": np.abs, "add": np.add, "and": np.bitwise_and, "ceil": np.ceil, "conj": np.conj, "cos": np.cos,
    "clamp": lambda low, x, high: np.clip(x, low, high), "div": np.divide, "eq": np.equal, "exp": np.exp,
    "floor": np.floor, "ge": np.greater_equal, "gt": np.greater, "imag": np.imag, "is_finite": np.isfinite,
    "le": np.less_equal, "log1p": np.log1p, "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply,
    "ne": np.not_equal, "neg": np.negative, "not": np.invert, "or": np.bitwise_or, "pow": np.power, "real": np.real,
    "round": np.round, "select_n": lambda which, *cases: cases[int(which)], "sign": np.sign, "sin": np.sin,
    "sqrt": np.sqrt, "square": np.square, "sub": np.subtract, "tanh": np.tanh,
}  # fmt: skip


class Known(NamedTuple):
    """What is known of a variable.

    Attributes:
      kind: "same" if it does not depend on the parts; "part" if it belongs to vectors, element by element; "sum", "max"
        or "min" if it would not depend on the parts after that reduction over ranks; "mixed" if none of these is known.
      detail: of "part" the numbers of the vectors that it is made of, with None for one of equal elements; of "mixed"
        the name of the operation; of a reduction the axes that are left.
      filling: the last element, where zeros fill up the parameters, or the value of a scalar. None if it is not known.
      is_positive: whether no element is less than zero, as far as is known.
    """

    kind: str
    detail: Any = None
    filling: Any = None
    is_positive: bool = False

    @property
    def is_zero(self) -> bool:
        """Whether a scalar, or what fills up a vector, is known to be zero."""
        return self.filling is not None and self.filling == 0


def constant(value: Any) -> Known:
    """What is known of a literal or a constant of the program."""
    is_array = isinstance(value, jax.core.Tracer) or jax.dtypes.issubdtype(
        getattr(value, "dtype", np.dtype(float)), jax.dtypes.extended
    )
    if is_array or np.size(value) != 1:
        return Known("same")
    number = np.asarray(value).reshape(())[()]
    return Known("same", filling=_if_finite(number), is_positive=bool(np.real(number) >= 0))


def joined(values: Sequence[Known], mixing: str) -> Known:
    """What is known of one of several values; or of what is made of their elements at the same place.

    mixing: the name of the operation, for values that belong to different vectors.
    """
    first, *others = values
    for x in others:
        filling = first.filling if first.filling is not None and first.filling == x.filling else None
        detail = first.detail
        if first.kind == x.kind == "part" and len(first.detail) == len(x.detail):
            detail = tuple(a if b is None else b for a, b in zip(first.detail, x.detail, strict=True))
            agrees = all(b in (None, c) for y in (first, x) for b, c in zip(y.detail, detail, strict=True))
        else:
            agrees = (first.kind, first.detail) == (x.kind, x.detail)
        if not agrees:
            return next((y for y in (first, x) if y.kind == "mixed"), Known("mixed", mixing))
        first = Known(first.kind, detail, filling, first.is_positive and x.is_positive)
    return first


def with_numbers(x: Known, eqn: Any, operands: Sequence[Known]) -> Known:
    """The same, with the filling and the sign that an elementwise equation gives its result."""
    name, result = eqn.primitive.name, eqn.outvars[0].aval
    signs = [operand.is_positive for operand in operands[name == "select_n" :]]
    is_positive = (
        (name in _POSITIVE and eqn.params.get("y", 0) % 2 == 0)
        or (name in _POSITIVE_OF_POSITIVE and all(signs))
        or (name == "max" and any(signs))
        or result.dtype == bool
    )
    return x._replace(filling=_filling(eqn, operands), is_positive=is_positive)


def _filling(eqn: Any, operands: Sequence[Known]) -> Any:
    name, result = eqn.primitive.name, eqn.outvars[0].aval
    fillings, are_zero = [x.filling for x in operands], [x.is_zero for x in operands]
    # Numbers that are not known are taken to be finite, and not zero.
    if (name in ("mul", "and") and any(are_zero)) or (name == "div" and are_zero == [True, False]):
        return np.zeros((), result.dtype)[()]
    if name == "select_n" and fillings[0] is None:
        return fillings[1] if all(x is not None and x == fillings[1] for x in fillings[1:]) else None
    if None in [x if x is None else 0 for x in fillings]:
        return None
    with np.errstate(all="ignore"):
        if name == "convert_element_type":
            return _if_finite(np.asarray(fillings[0]).astype(result.dtype)[()])
        if name == "integer_pow":
            return _if_finite(np.power(np.asarray(fillings[0], float), eqn.params["y"]))
        return _if_finite(_OF_NUMBERS[name](*fillings)) if name in _OF_NUMBERS else None


def _if_finite(number: Any) -> Any:
    return number if np.isfinite(number) else None
