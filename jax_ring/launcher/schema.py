"""Data of other processes, checked against a type before anything of it is used, and escaped where it is printed."""

import contextlib
import enum
import json
import types
import typing
from typing import Any


def read(text: str | bytes, kind: Any) -> Any:
    """JSON as a value of a type; see `checked`. Raises ValueError if it is none."""
    try:
        return checked(json.loads(text), kind)
    except RecursionError as error:
        raise ValueError(f"{text[:100]!r} is nested too deeply") from error


def checked(value: Any, kind: Any) -> Any:
    """A value of JSON as one of a type: bool, int, float, str, an IntEnum, Any, T | None, tuple[...] or a NamedTuple.

        checked([1, ["a"]], tuple[int, tuple[str, ...]])  # (1, ("a",))

    A NamedTuple may have a method `validate`, which raises ValueError for what types do not say.

    Raises ValueError if it is none.
    """
    parts = typing.get_args(kind)
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):
        return None if value is None else checked(value, parts[0])
    if hasattr(kind, "_fields"):
        result = kind(*checked(value, types.GenericAlias(tuple, (*typing.get_type_hints(kind).values(),))))
        if hasattr(kind, "validate"):
            result.validate()
        return result
    if typing.get_origin(kind) is tuple:
        parts = parts[:1] * len(value) if parts[1:] == (...,) and type(value) is list else parts
        if type(value) is list and len(value) == len(parts):
            return tuple(map(checked, value, parts))
    elif issubclass(kind, float | enum.IntEnum) and type(value) is int:
        with contextlib.suppress(OverflowError):
            return kind(value)
    elif type(value) is kind and value == value:  # no NaN
        return value
    raise ValueError(f"{value!r:.100} is no {getattr(kind, '__name__', kind)}")


def escaped(text: str) -> str:
    """A text of others for a line of a terminal or a file, of which it changes nothing and begins no new one."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
