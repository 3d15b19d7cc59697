"""StableHLO helpers that several lowerings share."""

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir


def convert(ctx, x, dtype):
    """x converted to `dtype`."""
    aval = jax.core.ShapedArray(ir.RankedTensorType(x.type).shape, dtype)
    to = mlir.aval_to_ir_type(ctx.module_context, aval)
    return x if x.type == to else hlo.convert(to, x)


def reshape(x, shape: tuple[int, ...]):
    """x reshaped to `shape`."""
    return hlo.reshape(ir.RankedTensorType.get(shape, ir.RankedTensorType(x.type).element_type), x)


def move_dimension(x, source: int, destination: int):
    """x with one dimension moved, as by jnp.moveaxis."""
    order = list(range(ir.RankedTensorType(x.type).rank))
    order.insert(destination, order.pop(source))
    return x if source == destination else hlo.transpose(x, order)


def inline(ctx, fun, x, aval_in, aval_out, **params):
    """Traces fun(x), emits its operations in the program under construction, and returns the result."""
    ctx = ctx.replace(primitive=None, avals_in=[aval_in], avals_out=[aval_out])
    (result,) = mlir.lower_fun(fun, multiple_results=False)(ctx, x, **params)
    return result
