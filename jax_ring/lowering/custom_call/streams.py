"""The GPU stream of a custom call, and its group's lane.

XLA runs instructions in order on a main stream. Calling a function with a stream as attribute becomes an asynchronous
pair: work starts on that stream, and the main stream goes on until the done. "collective" is XLA's name for the stream
of its own collectives. From JAX 0.12 the latency-hiding scheduler treats the pair like an all-reduce: one at a time,
with as much work as possible in between. The scheduler of JAX 0.10.2 does not know that it takes time.

Calls of one stream run in order and share a lane; those of different streams may not.
"""

from collections.abc import Callable, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.extend.mlir.dialects import stablehlo as hlo

from jax_ring import _compat
from jax_ring.lowering.module_state import state_of
from jax_ring.options import Options

MAIN, COLLECTIVE = "", "collective"
LANES = {False: 0, True: 1}  # for calls on these two
_NUM_LANES = 4  # kLanes in ffi/cuda/groups/communicator.h


def stream_of(ctx: _compat.LoweringContext, options: Options) -> str:
    return _compat.stream_of(ctx) or (COLLECTIVE if options.overlap else MAIN)


def lane_of(ctx: _compat.LoweringContext, stream: str) -> int:
    """The lane of a stream's calls; all ranks lower one program, and number its streams alike.

    Raises:
      NotImplementedError: for more streams than lanes.
    """
    lanes = state_of(ctx).lanes
    for name in (MAIN, COLLECTIVE, stream):
        lane = lanes[name]
    if lane >= _NUM_LANES:
        others = sorted(name for name in lanes if name not in (MAIN, COLLECTIVE))
        raise NotImplementedError(
            f"jax_ring's calls are on the GPU streams {', '.join(others)} of compute_on, and one program can have them "
            f"on {_NUM_LANES - 2} streams besides XLA's main and its collective one. Use fewer streams for them."
        )
    return lane


def emit_on(
    ctx: _compat.LoweringContext, stream: str, build: Callable[..., ir.Operation], operands: Sequence, types: Sequence
) -> list:
    """Emits an operation in a function, and a call to it on the stream.

    Args:
      build: (operands) to the operation, with results of these types.
    """
    function = _compat.new_function(ctx, f"on_stream_{stream}", [value.type for value in operands], list(types))
    block = function.add_entry_block()
    with ir.InsertionPoint(block):
        func.return_(build(list(block.arguments)).results)
    return call_on(stream, function.name.value, operands, types)


ANNOTATION = "_xla_stream_annotation"  # XLA's name


def attributes_of(stream: str) -> dict[str, str]:
    return {ANNOTATION: stream, "inlineable": "false"}


def call_on(stream: str, function: str, operands: Sequence, types: Sequence) -> list:
    """Emits a call of a function on the stream, with results of these types."""
    call = func.CallOp(list(types), ir.FlatSymbolRefAttr.get(function), operands).operation
    call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {name: ir.StringAttr.get(value) for name, value in attributes_of(stream).items()}
    )
    results = list(call.results)
    if len(results) > 1:
        # The ops that unpack the call's tuple inherit its attributes, and XLA of JAX 0.12 would run each of them on the
        # stream. The barrier takes the tuple as a whole, and the ops after it have no attributes.
        results = list(hlo.OptimizationBarrierOp(results).results)
    return results
