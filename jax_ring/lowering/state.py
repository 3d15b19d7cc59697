"""What is known of the module in lowering, whose calls often differ only in operands."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from jax.extend.mlir import ir

from jax_ring import _compat

if TYPE_CHECKING:
    from jax_ring.lowering.custom_call.operation import Call


class Numbers(dict[Any, int]):
    """Numbers for values, equal ones alike, in order of appearance."""

    def __missing__(self, value: Hashable) -> int:
        self[value] = number = len(self)
        return number


@dataclass(slots=True)
class LoweringState:
    """A module's state, without a reference to it: a cycle would live on for a while.

    Attributes:
      calls: to engines, by attributes, as JAX copies operations.
      lanes: by GPU stream.
      joined_functions: whose calls are joined, by symbol.
      rounded_sums: as float32, and as asked for.
      may_leave_out: whether a rank may leave out a call.
      digest: of the program so far; empty in one process.
      number: among lowerings of programs of one name; None until needed.
      program, site: name between processes and user's line, where the module is a part of a program; else empty.
    """

    calls: "dict[ir.Attribute, Call]" = field(default_factory=dict)
    lanes: Numbers = field(default_factory=Numbers)
    joined_functions: set[ir.Attribute] = field(default_factory=set)
    rounded_sums: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    may_leave_out: bool = False
    digest: str = ""
    number: int | None = None
    program: str = ""
    site: str = ""


# Maps a lowering context to the state of its module.
state_of: Callable[[Any], LoweringState] = partial(_compat.once, key="jax_ring", compute=LoweringState)
