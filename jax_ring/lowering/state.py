"""What is known of the module in lowering, whose calls often differ only in operands."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from jax.extend.mlir import ir

from jax_ring import _compat

if TYPE_CHECKING:
    from jax_ring.lowering.custom_call.operation import Call
    from jax_ring.lowering.passes.source_lines import Table


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
      call_sites: their lines, by what they compute; None while all name the same line.
      unsettled: calls not yet in `call_sites`, with their lines.
      callers: the only caller of a function, by body.
      lanes: by GPU stream.
      functions_on_streams: functions of one operation on a stream.
      joined_functions: whose calls are joined.
      rounded_sums: as float32, and as asked for.
      may_leave_out: whether a rank may leave out a call.
      digest: of the program so far; empty in one process.
      number: among lowerings of programs of one name; None until needed.
      program, site: name between processes and user's line, where the module is a part of a program; else empty.
    """

    calls: "dict[ir.Attribute, Call]" = field(default_factory=dict)
    call_sites: "Table | None" = None
    unsettled: list[tuple[ir.Operation, tuple[str, ...]]] = field(default_factory=list)
    callers: dict[ir.Block, ir.Operation] = field(default_factory=dict)
    lanes: Numbers = field(default_factory=Numbers)
    functions_on_streams: set[str] = field(default_factory=set)
    joined_functions: set[str] = field(default_factory=set)
    rounded_sums: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    may_leave_out: bool = False
    digest: str = ""
    number: int | None = None
    program: str = ""
    site: str = ""


# Maps a lowering context to the state of its module.
state_of: Callable[[Any], LoweringState] = partial(_compat.once, key="jax_ring", compute=LoweringState)
