"""Types of options, by which a wrong value is an error of the command line."""

import argparse
import contextlib
import pathlib
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _type(what: str, parse: Callable[[str], Any], is_valid: Callable[[Any], bool]) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            if is_valid(found := parse(text)):
                return found
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return value


def _bytes(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if unit > 1 else text) * unit)


def _is_of_whole_bytes(dtype: str) -> bool:
    limits = (jnp.finfo if jnp.issubdtype(dtype, np.inexact) else jnp.iinfo)(dtype)
    return limits.bits % 8 == 0 and not jnp.issubdtype(dtype, np.complexfloating)


count = _type("a whole number from 1 on", int, lambda number: number > 0)
size = _type("a number of bytes, as 64, 4K, 1.5M or 1G", _bytes, lambda number: number > 0)
positive = _type("a number above 0", float, lambda number: 0 < number < float("inf"))
seconds = _type("a number of seconds above 0", float, lambda number: 0 < number < 1e6)
dtype = _type("a dtype of real numbers, as float32, bfloat16 or int32", str, _is_of_whole_bytes)
file = _type("a file in a folder that is there", str, lambda path: pathlib.Path(path).parent.is_dir())


def one_of(names: Collection[str]) -> Callable[[str], str]:
    return _type(f"one of {', '.join(names)}", str, lambda name: name in names)


def several(of: Callable[[str], Any]) -> Callable[[str], list]:
    """Values that are separated by commas."""
    return lambda text: [of(each) for each in text.split(",")]


def size_text(number: int) -> str:
    names = (f"{number // unit}{name}" for name, unit in reversed(_UNITS.items()) if number % unit == 0)
    return next(names, str(number))
