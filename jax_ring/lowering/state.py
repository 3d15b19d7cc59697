"""What is known of the module under lowering: programs have many calls that differ in nothing but their operands."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jax.extend.mlir import ir

from jax_ring import _compat

if TYPE_CHECKING:
    from jax_ring.lowering.custom_call.operation import Call
    from jax_ring.lowering.passes.source_lines import Table

T = TypeVar("T")


class Numbers(dict[Any, int]):
    """Numbers for values, in the order in which they are first asked for; equal values have one."""

    def __missing__(self, value: Hashable) -> int:
        self[value] = number = len(self)
        return number


@dataclass(slots=True)
class LoweringState:
    """The state of one module. It has no reference to the module, which owns it: cycles live on for a while.

    Attributes:
      known: what has been computed for a key, once for all calls.
      calls: the calls to engines, by their attributes. JAX copies operations, so they are found by these.
      call_sites: the lines of these calls, by what the calls compute.
      lanes: the lane of each of a GPU's streams.
      functions_on_streams: the names of functions that hold one operation that runs on a stream.
      joined_functions: the names of functions whose calls are joined.
      rounded_sums: sums as float32, and as they were asked for.
      may_leave_out: whether there are calls that a rank may leave out.
      digest: of the program so far; empty in a program of one process.
      number: of the lowering, among those of programs of one name; None until it is asked for.
      program, site: the name of the program between processes and the user's line, where the module is only a part of
        a program; else empty.
    """

    known: dict[Hashable, Any] = field(default_factory=dict)
    calls: "dict[ir.Attribute, Call]" = field(default_factory=dict)
    call_sites: "Table | None" = None
    lanes: Numbers = field(default_factory=Numbers)
    functions_on_streams: set[str] = field(default_factory=set)
    joined_functions: set[str] = field(default_factory=set)
    rounded_sums: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    may_leave_out: bool = False
    digest: str = ""
    number: int | None = None
    program: str = ""
    site: str = ""

    def once(self, key: Hashable, compute: Callable[..., T], *args: Any) -> T:
        """The result of compute(*args), which is called once for each key."""
        if key not in self.known:
            self.known[key] = compute(*args)
        return self.known[key]


# Of a lowering context, the state of its module.
state_of: Callable[[Any], LoweringState] = partial(_compat.module_state, make=LoweringState)
