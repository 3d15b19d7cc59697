"""The custom call as an operation, and what is known of it."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering.custom_call import partitioned
from jax_ring.lowering.custom_call.attributes import CONFIG, named, of_operation
from jax_ring.lowering.state import state_of

Lines = tuple[str, ...]  # user lines served by one call
Aliases = Collection[tuple[int, int]]  # pairs of operand and result that may share a buffer
# Numbers beyond which a text does not help.
_MAX_SHAPES = 4
_MAX_LINES = 4


class Description(str):
    """A call in timeout errors, without its line; equal for equal calls.

    Attributes:
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


class Call(NamedTuple):
    """A custom call to an engine.

    Attributes:
      shared: attributes, except names in errors; equal within a kind.
      description: for errors.
      lines: that it serves.
      num_hidden: operands before the user's.
      itemsize: of the user's operands.
      joins: whether others may join it.
      num_own: as in `partitioned.attributes`; None if the partitioner does not divide it.
    """

    target: str
    shared: ir.DictAttr
    description: str
    lines: Lines
    num_hidden: int
    itemsize: int
    joins: bool
    num_own: tuple[int, int] | None = None

    def function(self) -> str:
        """Function and axes of the description; empty if unknown."""
        is_known = isinstance(self.description, Description)
        return f"{self.description.function} {self.description.over}" if is_known else ""  # type: ignore[attr-defined]


def build(
    ctx, call: Call, types: Sequence[ir.Type], aliases: Aliases, location: ir.Location, operands: Sequence
) -> ir.Operation:
    """Builds the call at the insertion point, as `jax.ffi.ffi_lowering` does in ten times the time.

    Args:
      types: of the results.
      operands: hidden ones, then the user's.
    """
    aliases, operand_types = tuple(aliases), tuple([value.type for value in operands])
    # Separate, because calls on different lines otherwise have the same attributes.
    of_line = _compat.once(ctx, ("config", call, aliases), _config, ctx, call, aliases)
    key = (call.target, operand_types, tuple(types), aliases)
    attributes = {**_compat.once(ctx, ("operation", *key), of_operation, *key), CONFIG: of_line}
    if call.num_own is not None:
        attributes["sdy.sharding_rule"] = partitioned.rule(operand_types, types, call.num_own)
    operation = ir.Operation.create(
        "stablehlo.custom_call", results=types, operands=operands, attributes=attributes, loc=location
    )
    calls = state_of(ctx).calls  # by attributes, as JAX copies operations
    if of_line not in calls or not call.joins:
        calls[of_line] = call
    return operation


def _config(ctx, call: Call, aliases: Aliases) -> ir.DictAttr:
    """Attributes for the handler."""
    more: dict[str, ir.Attribute] = {"call": ir.StringAttr.get(call.description)}
    if call.num_own is not None:
        more[partitioned.ALIASES] = mlir.ir_attribute(np.array([*aliases], np.int64).reshape(-1))
    entries = _compat.once(ctx, ("entries", call.shared), named, call.shared)
    site, num_more = " and ".join(call.lines), len(call.lines) - _MAX_LINES
    if num_more > 0:
        site = f"{', '.join(call.lines[:_MAX_LINES])} and {num_more} more places"
    more["site"] = ir.StringAttr.get(site)  # until equal calls are known
    return ir.DictAttr.get({**dict(entries), **more})


def compared(operation: ir.Operation) -> tuple:
    """An operation's attributes, to compare."""
    try:
        return tuple(named(operation.attributes))
    except TypeError:
        return (str(operation).partition("=")[2],)


def aliased_operands(operation: ir.Operation) -> set[int]:
    """Operands that may have a result's buffer."""
    if "output_operand_aliases" not in operation.attributes:
        return set()
    aliases = ir.ArrayAttr(operation.attributes["output_operand_aliases"])
    return {hlo.OutputOperandAlias(alias).operand_index for alias in aliases}
