"""Calls in a partial-manual shard_map, some of whose axes are the compiler's.

The program has its author's shapes there, and XLA's partitioner divides arrays over the automatic axes. A collective
treats all elements alike, so each device can call with its part, in groups of the whole mesh. The program gets a call
to `TARGET`, with a rule that says which dimensions of operands and results belong together, and XLA's partitioner has
`partition` replace it by the engine's call, on one device's part. It has all attributes of the engine's call, so any
process can compile it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, sdy
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering.call import Kind
from jax_ring.lowering.custom_call import streams
from jax_ring.lowering.custom_call.operation import custom_call, dictionary, entries
from jax_ring.options import Options

TARGET = "jax_ring.partitioned"
# Attributes that the engine's call does not have.
_ENGINE_TARGET, _TAKES_POSITION, _NUM_OWN, _STREAM, ALIASES = "target", "takes_position", "num_own", "stream", "aliases"


def why_not(axes: Sequence[str], kind: Kind, options: Options, num_hosts: int) -> str:
    """Why no engine serves such a call on so many hosts, with these axes automatic."""
    left = f"the enclosing shard_map leaves the axes {list(axes)} to the compiler"
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        return f"{left}, and jax_use_shardy_partitioner is off"
    if kind.is_ragged:
        return f"{left}, and the rows of a ragged all-to-all cannot be divided"
    if options.order == "ring":
        return f"{left}, and the blocks of order='ring' would depend on how it divides the operand"
    return f"{left}, and the ranks of a group are on {num_hosts} hosts" if num_hosts > 1 else ""


def attributes(
    shared: ir.DictAttr, target: str, takes_position: bool, num_own: tuple[int, int], stream: str
) -> ir.DictAttr:
    """The attributes of a call to be divided, from the engine's.

    An operand is divided like its result, along their last dimensions. Those before number ranks or terms; each device
    needs all.

    Args:
      target: the engine's custom call.
      takes_position: whether it takes the mesh position before the operands.
      num_own: dimensions that operand and result do not share.
      stream: of the GPU, unless that of its surroundings.
    """
    own = {_ENGINE_TARGET: target, _TAKES_POSITION: takes_position, _NUM_OWN: num_own, _STREAM: stream}
    return ir.DictAttr.get(dict([*entries(shared), *entries(dictionary(own))]))


def rule(operand_types: Sequence[ir.Type], result_types: Sequence[ir.Type], num_own: tuple[int, int]) -> ir.Attribute:
    """Shardy's rule for a call to be divided."""
    sizes: list[int] = []  # one factor for dimensions that are divided alike
    undivided: list[int] = []
    mappings: tuple[list, list] = ([], [])
    for types in zip(operand_types, result_types, strict=True):
        shapes = [ir.RankedTensorType(each).shape for each in types]
        shared = range(len(sizes), len(sizes) + len(shapes[0]) - num_own[0])
        sizes += shapes[0][num_own[0] :]
        for shape, num, mapping in zip(shapes, num_own, mappings, strict=True):
            own = range(len(sizes), len(sizes) + num)
            sizes += shape[:num]
            undivided += own
            dimensions = [sdy.DimMappingAttr.get(factor_indices=[i]) for i in (*own, *shared)]
            mapping.append(sdy.TensorMappingAttr.get(dim_mappings=dimensions))
    return sdy.OpShardingRuleAttr.get(
        factor_sizes=sizes, operand_mappings=mappings[0], result_mappings=mappings[1],
        need_replication_factors=undivided, is_custom=True,
    )  # fmt: skip


# ---- For XLA's partitioner -------------------------------------------------------------------------------------------


def partition(shapes_in: Sequence, shardings_in: Sequence, shape_out: Any, sharding_out: Any, config: bytes) -> tuple:
    """The program of one device: (bytecode, shardings of operands, sharding of the result).

    Raises ValueError if the shapes do not fit the call's attributes.
    """
    shapes_out, shardings_out = [shape_out], [sharding_out]
    if is_tuple := shape_out.is_tuple():
        shapes_out, shardings_out = shape_out.tuple_shapes(), sharding_out.tuple_elements()
    with mlir.make_ir_context(), ir.Location.unknown():
        values = dict(entries(ir.DictAttr(ir.Attribute.parse(config.decode()))))
        own_in, own_out = _integers(values.pop(_NUM_OWN))
        for operand, result in zip(shapes_in, shapes_out, strict=True):
            _check_dimensions(tuple(operand.dimensions()), tuple(result.dimensions()), own_in, own_out)
        # The rule asks for operands divided like their results. The partitioner inserts resharding if the program
        # divides them otherwise.
        alike = [partial(_compat.reshape_sharding, each, own_out) for each in shardings_out]
        shardings_in, shardings_out = [each(own_in) for each in alike], [each(own_out) for each in alike]
        types_in = [_local_type(*each) for each in zip(shapes_in, shardings_in, strict=True)]
        types_out = [_local_type(*each) for each in zip(shapes_out, shardings_out, strict=True)]
        program = mlir.module_to_bytecode(_program(types_in, types_out, values))
    return program, shardings_in, _compat.tuple_sharding(shape_out, shardings_out) if is_tuple else shardings_out[0]


def _check_dimensions(operand: tuple[int, ...], result: tuple[int, ...], own_in: int, own_out: int) -> None:
    """A program may come from a file, and XLA would divide by zero."""
    have_own = 0 <= own_in <= len(operand) and 0 <= own_out <= len(result)
    if not have_own or operand[own_in:] != result[own_out:]:
        raise ValueError(
            f"{_NUM_OWN} = {[own_in, own_out]} does not fit an operand of shape {operand} and a result of shape "
            f"{result}: behind their own dimensions they have the same"
        )


def _integers(attribute: ir.Attribute) -> list[int]:
    return [int(n) for n in np.array(attribute)]


def _local_type(shape, sharding) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(sharding.tile(shape).dimensions(), mlir.dtype_to_ir_type(shape.numpy_dtype()))


def _program(types_in: Sequence, types_out: Sequence, values: dict) -> ir.Module:
    """A module whose main function makes the engine's call.

    values: the call's attributes, and the ones above, which the engine's call does not have.
    """
    target = ir.StringAttr(values.pop(_ENGINE_TARGET)).value
    takes_position = ir.BoolAttr(values.pop(_TAKES_POSITION)).value
    aliases = _integers(values.pop(ALIASES))
    stream = ir.StringAttr(values.pop(_STREAM)).value

    def call(operands) -> list:
        before = [hlo.partition_id()] if takes_position else []
        pairs = [(len(before) + operand, result) for operand, result in zip(aliases[::2], aliases[1::2], strict=True)]
        return list(custom_call(target, [*before, *operands], types_out, pairs, ir.DictAttr.get(values)).results)

    def add_function(name: str, emit: Callable, **options) -> None:
        block = func.FuncOp(name, ir.FunctionType.get(types_in, types_out), **options).body.blocks.append(*types_in)
        with ir.InsertionPoint(block):
            func.return_(emit(block.arguments))

    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        if stream:
            add_function("on_stream", call, visibility="private")
            add_function("main", lambda operands: streams.call_on(stream, "on_stream", operands, types_out))
        else:
            add_function("main", call)
    return module
