"""The call in the engine's errors."""

from collections.abc import Sequence

import jax

from jax_ring.lowering.call import CallSpec

_MAX_SHAPES = 4  # beyond which a text does not help


class Description(str):
    """A call in timeout errors, without its line; equal for equal calls.

    Attributes:
      function: the public function.
      shapes: of the first operands.
      num_operands: in total.
      over: axes and groups.
    """

    function: str
    shapes: tuple[str, ...]
    num_operands: int
    over: str

    def __new__(cls, function: str, shapes: Sequence[str], num_operands: int, over: str):
        shapes = tuple(shapes[:_MAX_SHAPES])
        more = f" and {num_operands - len(shapes)} more" if num_operands > len(shapes) else ""
        self = super().__new__(cls, f"{function} of {', '.join(shapes)}{more} over {over}")
        self.function, self.shapes, self.num_operands, self.over = function, shapes, num_operands, over
        return self


def describe(call: CallSpec, avals: Sequence[jax.core.ShapedArray]) -> Description:
    """The description of a call of operands of these types."""
    shapes = [f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]" for aval in avals]
    axis = f"axis {call.axes[0]!r}" if len(call.axes) == 1 else f"axes {call.axes!r}"
    groups = "" if call.axis_index_groups is None else f" in groups {list(map(list, call.axis_index_groups))}"
    return Description(call.function, shapes, len(shapes), axis + groups)


def describe_joined(calls: Sequence[str]) -> str:
    if all(isinstance(call, Description) for call in calls):
        first, num_operands = calls[0], 0
        shapes: list[str] = []
        for call in calls:
            num_operands += call.num_operands  # type: ignore[attr-defined]
            if len(shapes) < _MAX_SHAPES:
                shapes.extend(call.shapes)  # type: ignore[attr-defined]
        return Description(first.function, shapes, num_operands, first.over)  # type: ignore[attr-defined]
    different = list(dict.fromkeys(calls))
    return " and ".join(different[:2]) + (f" and {len(different) - 2} more calls" if len(different) > 2 else "")


def function_and_axes(description: str) -> str:
    """Function, axes and groups of a description; empty if unknown."""
    return f"{description.function} {description.over}" if isinstance(description, Description) else ""
