"""Parts: a rank's shards or blocks, computed in turn by one compiled body, whatever the number of ranks.

Sums go along the tree. A function of a part can ask for its index: `shard_index`, `block_index`.
"""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of
from jax_ring.collectives.leaves import bits_of_keys, counted, own_copy
from jax_ring.collectives.shard_sums import ShardSums, TermStack
from jax_ring.options import check_arrays, path_text, setting
from jax_ring.training.same_bits.evaluation import evaluate, with_rules
from jax_ring.training.same_bits.fence import fence, first_element, plus_one

_numbers = itertools.count(1)


class TracedIndex:
    """An index with a value while a function is traced.

    JAX's caches know the value by a number, so a jitted layer is traced again for another. Instances are made at
    import: JAX allows no new user context while other threads trace.
    """

    def __init__(self, name: str):
        self._index: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar(name, default=None)
        self._number = jax.make_user_context(0)

    @contextlib.contextmanager
    def set(self, index: jax.Array) -> Iterator[None]:
        with setting(self._index, index), self._number(next(_numbers)):
            yield

    def get(self, missing: str) -> jax.Array:
        """The value, or a NameError with this text."""
        index = self._index.get()
        if index is None:
            raise NameError(missing)
        return index


SHARD = TracedIndex("shard")
BLOCK = TracedIndex("block")


def shard_index() -> jax.Array:
    """The index of the current shard among those of all ranks: an int32 scalar.

    For the function of `value_and_grad(..., num_shards=V)`, which runs once per shard. A random key from it does not
    depend on the number of ranks:

        key = jax.random.fold_in(key, jax_ring.shard_index())

    Raises:
      NameError: outside of such a function.
    """
    return SHARD.get(
        "shard_index: there is no shard here. It has a value in a function that jax_ring.value_and_grad or grad "
        "differentiates with num_shards=V. Pass num_shards to it, or use jax.lax.axis_index for the rank."
    )


def block_index() -> jax.Array:
    """The index of the current block among those of all ranks: an int32 scalar.

        first = jax_ring.block_index() * len(block)  # the row of the whole table where the block begins

    For the function of `block_sum` and `block_max`, which runs once per block.

    Raises:
      NameError: outside of such a function.
    """
    return BLOCK.get(
        "block_index: there is no block here. It has a value in a function that jax_ring.block_sum or block_max runs "
        "for each block. Use jax.lax.axis_index for the rank."
    )


_INDICES: dict[str, TracedIndex] = {"block": BLOCK, "shard": SHARD}


@dataclass(frozen=True)
class Parts:
    """The parts of a call: "block"s or "shard"s, `total` on all ranks and `each` on one.

    Attributes:
      axis_name: that divides them; () if nothing is added.
      varying: axes over which results may vary, with vma tracking.
    """

    function: str
    part: str
    axis_name: AxisName
    total: int
    each: int
    varying: tuple

    def check(self, name: str, tree: Any) -> None:
        """Raises unless the argument `name` is a tree of arrays of the rank's parts."""
        check_arrays(self.function, name, tree)
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if np.shape(x)[:1] != (self.each,) or not self.each:
                raise ValueError(
                    f"{self.function}: every leaf of {name} has a first dimension for the rank's {self.part}s, "
                    f"{self.each} here ({self.total} in all); the one at {path_text(path)} has shape {np.shape(x)}"
                )

    def own_copies(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: own_copy(jnp.asarray(x), self.varying), tree)

    def indices(self) -> jax.Array:
        """The indices of the rank's parts among all."""
        axes = axes_of(self.axis_name)
        first = lax.axis_index(axes) * self.each if axes else 0
        return own_copy(first + jnp.arange(self.each, dtype=jnp.int32), self.varying)

    def arrays(self, result: Any) -> Any:
        check_arrays(self.function, "the result of f", result)
        return jax.tree.map(jnp.asarray, result)

    def applied(self, f: Callable, index: jax.Array, part: Any, shared: Any) -> Any:
        """f of a part, with its index."""
        with _INDICES[self.part].set(index):
            return self.arrays(f(part, shared))

    def closed(self, f: Callable, part: Any, shared: Any) -> tuple[Callable, Sequence]:
        """f(part, shared) as a function of ((index, part), shared, closed_over), and what f closes over.

        part, shared: examples or types, varying over `varying`.
        """
        applied = partial(self.applied, f)
        traced, types = jax.make_jaxpr(applied, return_shape=True)(self.indices()[0], part, shared)
        floats = [x for x in traced.consts if isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)]
        if floats:
            raise TypeError(
                f"{self.function}: f closes over {len(floats)} traced arrays of floats, the first of type "
                f"{jax.typeof(floats[0])}. Pass them to f as arguments: closed over, they would have no cotangents."
            )
        jaxpr = traced.jaxpr  # without its constants: some belong to the enclosing trace

        def g(numbered, shared, closed_over):
            results = jax.core.eval_jaxpr(jaxpr, closed_over, *jax.tree.leaves((numbered, shared)))
            return jax.tree.unflatten(jax.tree.structure(types), results)

        return g, traced.consts

    def run(self, f: Callable, parts: Any, shared: Any) -> tuple[Any, ShardSums]:
        """f(part, shared) -> (what stays with the part, what is added) for each part: stacked, and partial sums."""
        axes = axes_of(self.axis_name)
        parts, shared = fence(self.own_copies((parts, shared)))

        def varying(part, shared):
            stays, added = f(part, shared)
            return jax.tree.map(lambda x: own_copy(x, self.varying), (stays, jax.tree.map(counted, added)))

        first = jax.tree.map(lambda x: x[0], parts)
        closed, (stays, added) = jax.make_jaxpr(varying, return_shape=True)(first, shared)
        if used := sorted(map(str, _compat.rank_dependent_axes(closed.jaxpr) & {*axes})):
            raise ValueError(
                f"{self.function}: f is computed for each {self.part} alone, and this one communicates over, or asks "
                f"for its index in, the axis {', '.join(used)}, so that it would depend on the number of ranks. For "
                f"the index of the {self.part} use jax_ring.{self.part}_index()."
            )
        count = len(jax.tree.leaves(stays))
        types = closed.out_avals[count:]
        condition = hidden_one((parts, shared), self.varying)

        def step(stack, number, part):
            values = sealed(condition, closed, jax.tree.leaves((part, shared)))
            if types:
                stack = stack.push(values[count:], self.axis_name, self.total, number)
            return stack, values[:count]

        stack = TermStack.empty(types, self.axis_name, self.total)
        stack, kept = in_turn(step, stack, self.each, parts)
        terms = stack.terms(self.axis_name, self.total) if types else []
        dtypes = tuple(np.dtype(x.dtype) for x in types)
        sums = ShardSums(jax.tree.unflatten(jax.tree.structure(added), terms), self.total, dtypes)
        return jax.tree.unflatten(jax.tree.structure(stays), fence(kept)), sums


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


def in_turn(step: Callable, carry: Any, count: int, xs: Any = None) -> tuple[Any, Any]:
    """`lax.scan` of step(carry, number, x), but a single step is no loop."""
    if count > 1:
        numbers = jnp.arange(count, dtype=jnp.int32)
        return lax.scan(lambda carry, numbered: step(carry, *numbered), carry, (numbers, xs))
    carry, y = step(carry, np.int32(0), jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)


def axes_of_results(axis_name: AxisName, tree: Any) -> tuple:
    """The axes over which results from a tree may vary."""
    varying = {*axes_of(axis_name)}.union(*(_compat.varying_axes(jnp.asarray(x)) for x in jax.tree.leaves(tree)))
    return tuple(sorted(varying, key=str))
