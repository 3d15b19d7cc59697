"""StableHLO helpers."""

import contextlib
from collections.abc import Callable, Iterable, Sequence

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering.override_state import for_xla


def aval_of(dtype, *shape: int) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(shape, dtype)


def convert(ctx, x, dtype):
    to = mlir.aval_to_ir_type(ctx.module_context, aval_of(dtype, *ir.RankedTensorType(x.type).shape))
    return x if x.type == to else hlo.convert(to, x)


def reshape(x, shape: tuple[int, ...]):
    return hlo.reshape(ir.RankedTensorType.get(shape, ir.RankedTensorType(x.type).element_type), x)


def move_dimension(x, source: int, destination: int):
    """As jnp.moveaxis."""
    order = list(range(ir.RankedTensorType(x.type).rank))
    order.insert(destination, order.pop(source))
    return x if source == destination else hlo.transpose(x, order)


def inline(ctx, fun: Callable[..., Iterable], operands: Sequence, avals: Sequence, *, lax_by_xla: bool = True) -> list:
    """Traces fun(*operands) and emits its operations, without tracking variance.

    Args:
      avals: of the operands.
      lax_by_xla: whether its `lax` collectives are XLA's, also under the override.
    """
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
    with _compat.without_vma(), for_xla() if lax_by_xla else contextlib.nullcontext():
        emit = mlir.lower_fun(lambda *xs: list(fun(*xs)), multiple_results=True)
        return emit(ctx.replace(primitive=None, avals_in=plain, avals_out=None), *operands)


def inline_one(ctx, fun: Callable, x, aval):
    """The same with one operand, of this type, and one result."""
    (result,) = inline(ctx, lambda x: [fun(x)], [x], [aval])
    return result
