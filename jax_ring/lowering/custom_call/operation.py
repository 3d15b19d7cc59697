"""The custom call as an operation of the program, and what is known of it."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring.lowering.custom_call import ffi_attributes, partitioned, partitioner
from jax_ring.lowering.custom_call.ffi_attributes import CONFIG, named
from jax_ring.lowering.state import LoweringState

Lines = tuple[str, ...]  # those of the user that one call serves
Aliases = Collection[tuple[int, int]]  # pairs of an operand and a result that may have one buffer
_MAX_SHAPES = 4


class Description(str):
    """Describes a call in timeout errors, without its line: equal calls have equal descriptions.

    Attributes:
      function: of the user's call.
      shapes: the types of the first operands.
      num_operands: of all of them.
      over: the axes and groups.
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
    """Describes a call that has joined others."""
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
    """What is known of a custom call to an engine.

    Attributes:
      target: of the custom call.
      shared: its attributes, but for those that name it in errors. The calls of one kind have equal ones.
      description: names it in errors.
      lines: the lines that it serves.
      num_hidden: how many operands it has in front of the user's.
      itemsize: of the user's operands, in bytes.
      joins: whether it may be joined with others.
      num_own: for a call that the partitioner divides, as in `partitioned.attributes`; else None.
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
        """The function and the axes that the description names; empty if it does not tell them."""
        is_known = isinstance(self.description, Description)
        return f"{self.description.function} {self.description.over}" if is_known else ""  # type: ignore[attr-defined]


def build(
    state: LoweringState, call: Call, operands: Sequence, types: Sequence, aliases: Aliases, location=None
) -> ir.Operation:
    """Builds the custom call at the insertion point.

    The operation is the same as that of `jax.ffi.ffi_lowering`, at a tenth of the time.

    Args:
      operands: the hidden ones and those of the user.
      types: of the results.
      location: an `ir.Location`, if not that of the insertion point.
    """
    aliases, operand_types = tuple(aliases), tuple([value.type for value in operands])
    # Apart, because calls of different lines have the same attributes otherwise.
    of_line = state.once(("config", call, aliases), _config, state, call, aliases)
    of_types = state.once(
        ("operation", call.target, call.num_own, aliases, operand_types, *types),
        _attributes, call, operand_types, types, aliases,
    )  # fmt: skip
    attributes = {**of_types, CONFIG: of_line}
    operation = ir.Operation.create(
        "stablehlo.custom_call", results=types, operands=operands, attributes=attributes, loc=location
    )
    note(state, of_line, call)
    return operation


def _config(state: LoweringState, call: Call, aliases: Aliases) -> ir.DictAttr:
    """The attributes that the handler decodes."""
    of_kind = state.once(("entries", call.shared), named, call.shared)
    names: dict[str, ir.Attribute] = {"call": ir.StringAttr.get(call.description), "site": site_of(call.lines)}
    if call.num_own is not None:
        names[partitioner.ALIASES] = mlir.ir_attribute(np.array([*aliases], np.int64).reshape(-1))
    return ir.DictAttr.get({**dict(of_kind), **names})


def _attributes(
    call: Call, operand_types: Sequence[ir.Type], types: Sequence[ir.Type], aliases: Aliases
) -> dict[str, ir.Attribute]:
    """All others."""
    attributes = ffi_attributes.fixed(call.target)
    if call.num_own is not None:
        attributes["sdy.sharding_rule"] = partitioned.rule(operand_types, types, call.num_own)
    attributes["operand_layouts"] = ffi_attributes.layouts(operand_types)
    attributes["result_layouts"] = ffi_attributes.layouts(types)
    if aliases:
        attributes["output_operand_aliases"] = ffi_attributes.aliases(aliases, len(types))
    return attributes


def config(shared: ir.DictAttr, **more: ir.Attribute) -> ir.DictAttr:
    """The attributes of a call, with some more or others."""
    return ir.DictAttr.get({**dict(named(shared)), **more})


def site_of(lines: Lines) -> ir.StringAttr:
    """The attribute `site` of a call that serves these lines, before it is known which calls are equal to it."""
    return ir.StringAttr.get(" and ".join(lines))


def compared(operation: ir.Operation) -> tuple:
    """The attributes of an operation, in a form that is equal for operations with equal ones."""
    try:
        return tuple(named(operation.attributes))
    except TypeError:
        return (str(operation).partition("=")[2],)


def note(state: LoweringState, attributes: ir.Attribute, call: Call) -> None:
    """Notes what is known of a call with these attributes. JAX copies operations, so they are what it is found by."""
    known = state.calls.get(attributes)
    state.calls[attributes] = call if known is None else call._replace(joins=call.joins and known.joins)


def aliased_operands(operation: ir.Operation) -> set[int]:
    """The operands of a custom call that may have the buffer of a result."""
    if "output_operand_aliases" not in operation.attributes:
        return set()
    aliases = ir.ArrayAttr(operation.attributes["output_operand_aliases"])
    return {hlo.OutputOperandAlias(alias).operand_index for alias in aliases}
