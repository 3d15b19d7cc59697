"""Lowers reduce and broadcast to XLA's all-reduce where no engine serves them."""

import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir


def lower_reduce_to_xla(ctx, operand, *, axes, axis_index_groups, root):
    """Lowers a reduce to a psum whose result only the root keeps. The others get zeros."""
    del axis_index_groups

    def reduce(x):
        return jnp.where(lax.axis_index(axes) == root, lax.psum(x, axes), jnp.zeros_like(x))

    return mlir.lower_fun(reduce, multiple_results=False)(ctx, operand)


def lower_broadcast_to_xla(ctx, operand, *, axes, axis_index_groups, root):
    """Lowers a broadcast to a psum to which all ranks but the root contribute zeros."""
    del axis_index_groups

    def broadcast(x):
        # As integers, because 0.0 + -0.0 is 0.0.
        if jnp.iscomplexobj(x):
            return lax.complex(broadcast(x.real), broadcast(x.imag))
        if x.dtype == jnp.bool_:
            return broadcast(x.astype(jnp.uint8)).astype(x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating):
            bits = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
            return lax.bitcast_convert_type(broadcast(bits), x.dtype)
        return lax.psum(jnp.where(lax.axis_index(axes) == root, x, jnp.zeros_like(x)), axes)

    return mlir.lower_fun(broadcast, multiple_results=False)(ctx, operand)
