"""The state of a module in lowering: its calls to engines, and what the passes over it need."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from jax.extend.mlir import ir

from jax_ring import _compat


class Numbers(dict[Any, int]):
    """Numbers for values, equal ones alike, in order of appearance."""

    def __missing__(self, value: Hashable) -> int:
        self[value] = number = len(self)
        return number


class CustomCall(NamedTuple):
    """A custom call to an engine.

    Attributes:
      target: its name in XLA.
      shared: attributes, except names in errors; equal within a kind.
      description: for errors; a `Description`, if of calls of one function and axes.
      lines: the user's lines that it serves.
      num_hidden: operands before the user's.
      itemsize: of the user's operands.
      joins: whether others may join it.
      num_own: numbers of leading dimensions of operand and result that XLA's partitioner must not divide; None where
        it does not divide the call.
    """

    target: str
    shared: ir.DictAttr
    description: str
    lines: tuple[str, ...]
    num_hidden: int
    itemsize: int
    joins: bool
    num_own: tuple[int, int] | None = None


@dataclass(slots=True)
class ModuleState:
    """A module's state, without a reference to it: a cycle would live on for a while.

    Attributes:
      calls: to engines, by attributes, as JAX copies operations.
      lanes: by GPU stream.
      joined_functions: symbols of the functions whose calls are joined.
      rounded_sums: pairs of a sum as float32, and rounded as asked for.
      may_leave_out: whether a rank may leave out a call.
      digest: of the program so far; empty in one process.
      number: among lowerings of programs of one name; None until needed.
      program, site: name between processes and user's line, where the module is a part of a program; else empty.
    """

    calls: dict[ir.Attribute, CustomCall] = field(default_factory=dict)
    lanes: Numbers = field(default_factory=Numbers)
    joined_functions: set[ir.Attribute] = field(default_factory=set)
    rounded_sums: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    may_leave_out: bool = False
    digest: str = ""
    number: int | None = None
    program: str = ""
    site: str = ""


# Maps a lowering context to the state of its module.
state_of: Callable[[Any], ModuleState] = partial(_compat.once, key="jax_ring", compute=ModuleState)
