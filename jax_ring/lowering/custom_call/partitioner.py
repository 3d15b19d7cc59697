"""Replaces the calls of partitioned.py by the engine's, on one device's part, for XLA's partitioner."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering.custom_call import streams
from jax_ring.lowering.custom_call.attributes import CONFIG, named, of_operation

# A call to this target has the attributes of the engine's call, plus those described in partitioned.py.
TARGET = "jax_ring.partitioned"
ENGINE_TARGET, TAKES_POSITION, ALIASES, STREAM = "target", "takes_position", "aliases", "stream"
NUM_OWN = "num_own"


def partition(shapes_in, shardings_in, shape_out, sharding_out, config: bytes) -> tuple:
    """The program of one device: (bytecode, shardings of operands, sharding of the result)."""
    shapes_out, shardings_out = [shape_out], [sharding_out]
    if is_tuple := shape_out.is_tuple():
        shapes_out, shardings_out = shape_out.tuple_shapes(), sharding_out.tuple_elements()
    with mlir.make_ir_context(), ir.Location.unknown():
        attributes = dict(named(ir.DictAttr(ir.Attribute.parse(config.decode()))))
        own_in, own_out = _integers(attributes.pop(NUM_OWN))
        # The rule asks for operands divided like their results. The partitioner inserts resharding if the program
        # divides them otherwise.
        alike = [partial(_compat.reshape_sharding, each, own_out) for each in shardings_out]
        shardings_in, shardings_out = [each(own_in) for each in alike], [each(own_out) for each in alike]
        types_in = [_local_type(*each) for each in zip(shapes_in, shardings_in, strict=True)]
        types_out = [_local_type(*each) for each in zip(shapes_out, shardings_out, strict=True)]
        program = mlir.module_to_bytecode(_program(types_in, types_out, attributes))
    return program, shardings_in, _compat.tuple_sharding(shape_out, shardings_out) if is_tuple else shardings_out[0]


def _integers(attribute: ir.Attribute) -> list[int]:
    return [int(n) for n in np.array(attribute)]


def _local_type(shape, sharding) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(sharding.tile(shape).dimensions(), mlir.dtype_to_ir_type(shape.numpy_dtype()))


def _program(types_in: Sequence, types_out: Sequence, attributes: dict) -> ir.Module:
    """A module whose main function makes the engine's call."""
    target = ir.StringAttr(attributes.pop(ENGINE_TARGET)).value
    takes_position = ir.BoolAttr(attributes.pop(TAKES_POSITION)).value
    aliases = _integers(attributes.pop(ALIASES))
    stream = ir.StringAttr(attributes.pop(STREAM)).value

    def call(operands) -> list:
        before = [hlo.partition_id()] if takes_position else []
        pairs = [(len(before) + operand, result) for operand, result in zip(aliases[::2], aliases[1::2], strict=True)]
        operands = [*before, *operands]
        of_operation_ = of_operation(target, [x.type for x in operands], types_out, pairs)
        call = ir.Operation.create(
            "stablehlo.custom_call", results=list(types_out), operands=operands,
            attributes={**of_operation_, CONFIG: ir.DictAttr.get(attributes)},
        )  # fmt: skip
        return list(call.results)

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
