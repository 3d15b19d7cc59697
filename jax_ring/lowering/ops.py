"""Small pieces of StableHLO that several lowerings put together."""

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir


def convert(ctx, x, dtype):
    """x, converted to `dtype`."""
    aval = jax.core.ShapedArray(ir.RankedTensorType(x.type).shape, dtype)
    to = mlir.aval_to_ir_type(ctx.module_context, aval)
    return x if x.type == to else hlo.convert(to, x)


def reshape(x, shape: tuple[int, ...]):
    """x under another shape."""
    return hlo.reshape(ir.RankedTensorType.get(shape, ir.RankedTensorType(x.type).element_type), x)


def inline(ctx, fun, x, aval_in, aval_out, **params):
    """The operations of fun(x), traced, in the program that is being built."""
    ctx = ctx.replace(primitive=None, avals_in=[aval_in], avals_out=[aval_out])
    (result,) = mlir.lower_fun(fun, multiple_results=False)(ctx, x, **params)
    return result
