"""A fence between two parts of a program: the compiler computes each as if the other were not there.

Compilers contract a product and a sum in one loop to a fused multiply-add, which rounds once instead of twice. Which
operations share a loop depends on what lies between them: a collective on several ranks, nothing on one.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")  # a pytree: results have the structure of the argument


def fence(tree: T) -> T:
    """The same values, which are stored in memory before anything is computed from them.

    Bits that do not depend on the number of ranks need it where a collective over one rank is no operation at all.

    Args:
      tree: a pytree of arrays. Only those of floating-point numbers are fenced.

    Returns:
      A pytree like `tree`.
    """
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    if floats:
        fenced = lax.platform_dependent(
            *(leaves[i] for i in floats),
            cpu=_in_a_loop,
            default=lambda *values: tuple(map(lax.optimization_barrier, values)),
        )
        for i, x in zip(floats, fenced, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def _in_a_loop(*values: jax.Array) -> tuple[jax.Array, ...]:
    """The values after a loop that never runs, which the compiler cannot know.

    XLA drops an optimization_barrier on CPUs before it fuses operations, in some versions. It also drops a loop whose
    body returns its argument.
    """
    element = values[0].reshape(-1)[0].real.astype(jnp.float32)
    none = jnp.minimum(lax.population_count(lax.bitcast_convert_type(element, jnp.int32)), 0)

    def body(state):
        done, values = state
        return done + 1, tuple(-x for x in values)

    return lax.while_loop(lambda state: state[0] < none, body, (jnp.zeros_like(none), values))[1]
