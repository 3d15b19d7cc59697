"""A computation compiled by itself, with bits that do not depend on its surroundings."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat
from jax_ring.collectives.leaves import bits_of_keys, own_copy
from jax_ring.training.same_bits.evaluation import evaluate
from jax_ring.training.same_bits.fence import first_element, plus_one
from jax_ring.training.same_bits.rules import with_rules


def sealed(condition: jax.Array, closed: Any, operands: Sequence) -> list:
    """A ClosedJaxpr's results, compiled apart.

    XLA optimises a computation as a whole, and what surrounds a loss depends on the number of ranks, such as the loop
    over shards. It would affect fusion and merging of expressions, and so the last bits. A conditional's branch is
    optimised by itself.

    condition: a scalar that is 1, unknown to the compiler: `hidden_one`.
    """

    def branch():
        # A constant of the loss is the same on all ranks, but its counterpart in the other branch is not.
        results = with_rules(closed, operands, evaluate, of_derivatives=True)
        return [own_copy(x, tuple(_compat.varying_axes(condition))) for x in results]

    def never():
        # Not cheap, because XLA turns a conditional with cheap branches into a `select`.
        fill = plus_one(condition)
        return [
            own_copy(
                lax.broadcast(fill.astype(x.dtype), x.shape, out_sharding=x.sharding), tuple(_compat.varying_axes(x))
            )
            for x in closed.out_avals
        ]

    return lax.cond(condition == 1, branch, never)


def hidden_one(tree: Any, axes: tuple) -> jax.Array:
    """An int32 scalar 1, unknown to the compiler, which varies over these axes alone."""
    leaves = [
        x
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.core.Tracer) and x.size and _compat.varying_axes(x) <= {*axes}
    ]
    leaf = leaves[0] if leaves else lax.axis_index(axes)
    first = bits_of_keys(first_element(leaf))[0].ravel()[0]
    bits = lax.bitcast_convert_type(first.real.astype(jnp.float32), jnp.uint32)
    return 1 + ((bits >> 1) >> 31).astype(jnp.int32)
