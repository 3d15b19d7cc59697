"""StableHLO operations for values of a program: casts, reshapes, and the inlining of a traced function."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir
from jax.typing import DTypeLike

from jax_ring import _compat
from jax_ring.lowering.override_state import for_xla


def aval_of(dtype: DTypeLike, *shape: int) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(shape, dtype)


def aval_of_value(x: ir.Value) -> jax.core.ShapedArray:
    of_value = ir.RankedTensorType(x.type)
    return aval_of(_dtypes()[str(of_value.element_type)], *of_value.shape)


@functools.cache
def _dtypes() -> dict[str, np.dtype]:
    """The engines' dtypes, by name in StableHLO."""
    dtypes = (
        jnp.bool_, jnp.int8, jnp.int16, jnp.int32, jnp.int64, jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64,
        jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128, jnp.float8_e3m4,
        jnp.float8_e4m3, jnp.float8_e4m3b11fnuz, jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2,
        jnp.float8_e5m2fnuz,
    )  # fmt: skip
    return {str(mlir.dtype_to_ir_type(dtype)): dtype for dtype in map(np.dtype, dtypes)}


def convert(x: ir.Value, dtype: DTypeLike):
    to = ir.RankedTensorType.get(ir.RankedTensorType(x.type).shape, mlir.dtype_to_ir_type(np.dtype(dtype)))
    return x if x.type == to else hlo.convert(to, x)


def reshape(x: ir.Value, shape: tuple[int, ...]):
    return hlo.reshape(ir.RankedTensorType.get(shape, ir.RankedTensorType(x.type).element_type), x)


def move_dimension(x: ir.Value, source: int, destination: int):
    """x with a dimension moved, by jnp.moveaxis's rules."""
    order = list(range(ir.RankedTensorType(x.type).rank))
    order.insert(destination, order.pop(source))
    return x if source == destination else hlo.transpose(x, order)


def inline(
    ctx: _compat.LoweringContext,
    fun: Callable[..., Iterable],
    operands: Sequence,
    avals: Sequence | None = None,
    *,
    lax_by_xla: bool = True,
) -> list:
    """Traces fun(*operands) and emits its operations, without tracking variance.

    Args:
      avals: of the operands, if their shapes may be symbolic.
      lax_by_xla: whether its `lax` collectives are XLA's, also under the override.
    """
    plain = [aval_of(aval.dtype, *aval.shape) for aval in avals or map(aval_of_value, operands)]
    with _compat.without_vma(), for_xla() if lax_by_xla else contextlib.nullcontext():
        emit = mlir.lower_fun(lambda *xs: list(fun(*xs)), multiple_results=True)
        return emit(ctx.replace(primitive=None, avals_in=plain, avals_out=None), *operands)


def inline_one(ctx: _compat.LoweringContext, fun: Callable, x: ir.Value, aval: jax.core.ShapedArray | None = None):
    """`inline` with one operand and one result."""
    (result,) = inline(ctx, lambda x: [fun(x)], [x], None if aval is None else [aval])
    return result
