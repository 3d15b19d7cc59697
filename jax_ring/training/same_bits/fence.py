"""A fence between parts of a program, which are compiled as if alone.

Compilers contract a product and a sum in one loop to a fused multiply-add, which rounds once. What lies between
decides: a collective on several ranks, nothing on one.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_ring import _compat
from jax_ring.collectives.axes import axes_of
from jax_ring.collectives.leaves import own_copy

T = TypeVar("T")  # a pytree: results keep the structure of the argument


def fence(tree: T, after: jax.Array | None = None) -> T:
    """A tree whose floats are stored in memory before they are used; no value changes.

    Needed where a collective over one rank is no operation.

    after: numbers whose computation precedes uses of the values.
    """
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    if floats:
        values = [leaves[i] for i in floats]
        first = [] if after is None else [after]
        fenced = lax.platform_dependent(first, values, cpu=_in_a_loop, default=_behind_barriers)
        for i, x in zip(floats, fenced, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def first_element(x: jax.Array) -> jax.Array:
    """A scalar of an array with elements, also where explicit axes of the mesh divide it."""

    def first(x):
        return lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(())

    axes = tuple(axis for axes in jax.typeof(x).sharding.spec if axes is not None for axis in axes_of(axes))
    return jax.sharding.auto_axes(first, axes=axes, out_sharding=PartitionSpec())(x) if axes else first(x)


def plus_one(count: jax.Array) -> jax.Array:
    """An int32 scalar plus one, in operations that XLA does not compile into one function with their surroundings.

    XLA for CPUs, since JAX 0.12, compiles a loop that touches less than a kilobyte as one function, and so optimizes
    across what is kept apart here. It does not where there is a sort in the loop, even in a branch that is not taken:
    https://github.com/openxla/xla/blob/main/xla/service/cpu/small_while_loop_hoisting_pass.cc
    """
    return lax.sort(jnp.stack([count, count + 1]))[1]


def behind_barriers(values: Sequence) -> list:
    """The values behind one barrier for each set of axes over which some of them vary.

    Behind a single one all would vary over the same axes.
    """
    places: dict[frozenset, list[int]] = defaultdict(list)
    for i, x in enumerate(values):
        places[_compat.varying_axes(x)].append(i)
    results: list[Any] = list(values)
    for some in places.values():
        for i, x in zip(some, lax.optimization_barrier([values[i] for i in some]), strict=True):
            results[i] = x
    return results


def _behind_barriers(first: list[jax.Array], values: list[jax.Array]) -> list[jax.Array]:
    # One element each, because all values of one fence must vary over the same axes. Values that vary over fewer axes
    # than `first` go without.
    fenced = []
    for x in values:
        axes = _compat.varying_axes(x)
        others = [own_copy(y, tuple(axes)) for y in first if _compat.varying_axes(y) <= axes]
        fenced.append(lax.optimization_barrier((others, x))[1])
    return fenced


def _in_a_loop(first: list[jax.Array], values: list[jax.Array]) -> list[jax.Array]:
    """The values after a loop that never runs, unknown to the compiler, or else the values.

    Some versions of XLA drop an optimization_barrier on CPUs before fusion, and a loop whose body returns its argument.
    """
    # Take all of them, because some may be constants.
    elements = [first_element(x).real.astype(jnp.float32) for x in first or values]
    bits = reduce(jnp.bitwise_or, [lax.bitcast_convert_type(x, jnp.int32) for x in elements])
    none = jnp.minimum(lax.population_count(bits), 0)

    def body(state):
        done, values = state
        return plus_one(done), [-x for x in values]

    return lax.while_loop(lambda state: state[0] < none, body, (jnp.zeros_like(none), values))[1]
