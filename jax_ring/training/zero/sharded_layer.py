"""A layer whose parameters are divided over the ranks: gathered where it is computed, in both passes, and dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, check_axis_name, check_divisible, check_named, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.collectives.shard_sums import ShardSums, TermStack
from jax_ring.options import check_arrays, check_function, integer
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.indices import SHARD
from jax_ring.training.same_bits.sealed import hidden_one, sealed
from jax_ring.training.same_bits.shards import first_shard
from jax_ring.training.sync import is_float0
from jax_ring.training.zero.divided import checked_shards, gathered, scattered
from jax_ring.training.zero.local_gradients import Reduction
from jax_ring.training.zero.vectors import ShardedParams, is_single


def sharded_layer(
    f: Callable[[Any, Any], Any], axis_name: AxisName, *, num_shards: int
) -> Callable[[ShardedParams, Any], Any]:
    """A layer with divided parameters, computed for each shard of the batch: the same bits on any number of ranks.

    Where a loss gathers all parameters at once, every rank has them whole for a step. Layers of this kind gather their
    own alone, compute `f` for the rank's V/p shards one after the other, and drop them. The backward pass gathers them
    anew and computes `f` again. Gradients of the parameters are added over all V shards along the tree and scattered.

        embed, block, head = (zero.sharded_layer(f, "data", num_shards=24) for f in (embed_of, block_of, loss_of))

        def loss(shards, tokens):                             # leaves of shape (V/p, examples of a shard, ...)
            h = embed(shards["embed"], tokens)
            h, _ = jax.lax.scan(lambda h, own: (block(own, h), None), h, shards["blocks"])
            return head(shards["head"], (h, tokens)).sum() / 24

        gradients = jax.grad(loss)(shards, tokens)            # shards, for `update` of the sharded optimizer

    Args:
      f: a function of whole parameters and the inputs of a shard. Returns a pytree of arrays. May ask for
        `shard_index()`, may not communicate over the axis, and gets traced arrays of floats as arguments, not by
        closure.
      axis_name: as for `sharded_optimizer`.
      num_shards: V, that of the optimizer.

    Returns:
      A function of (shards, inputs). shards: what `shard` of a `sharded_optimizer` with stage=3, order="tree" and this
      num_shards makes of the layer's parameters. Leaves of inputs have a first dimension for the rank's V/p shards, and
      so have those of the result. The gradient of the shards is that of the sum of all ranks' losses: divide a rank's
      loss by V, not by V/p, for the mean. It has reverse mode of first order.

    Raises:
      ValueError: if p does not divide V, if a leaf of inputs does not have V/p shards, if the shards are divided
        otherwise, or if `f` communicates over the axis.
      TypeError: if `f` returns anything but arrays of numbers, or closes over traced arrays of floats.
      NameError: if no enclosing transformation binds the axis.
    """
    check_function("sharded_layer", "f", f)
    check_axis_name("sharded_layer", axis_name)
    num_shards = integer("sharded_layer", "num_shards", num_shards)

    def layer(shards: ShardedParams, inputs: Any) -> Any:
        where = _Where.of(axis_name, num_shards, shards, inputs)
        shards, inputs = where.own_copies((shards, inputs))  # JAX adds cotangents over further axes by itself
        traced, closed_over = where.traced(f, shards, inputs)
        return _differentiable(where, traced)(shards, inputs, closed_over)

    return layer


class _Where(NamedTuple):
    """The axis of a call, and how many shards all ranks and each rank have."""

    reduction: Reduction
    num_shards: int
    each: int
    varying: tuple

    @classmethod
    def of(cls, axis_name: AxisName, num_shards: int, shards: Any, inputs: Any) -> _Where:
        axes = axes_of(axis_name)
        check_named("sharded_layer", axes)
        each = check_divisible("sharded_layer", num_shards, num_ranks(axes)) // num_ranks(axes)
        reduction = Reduction(axis_name, "ring", "tree", True, num_shards)
        if not is_single(checked_shards(shards, reduction)):
            raise ValueError(
                "sharded_layer: takes the ShardedParams of one layer, got several. For layers whose shards are stacked "
                "use jax.lax.scan."
            )
        check_arrays("sharded_layer", "inputs", inputs)
        for path, x in jax.tree_util.tree_leaves_with_path(inputs):
            if np.shape(x)[:1] != (each,):
                raise ValueError(
                    f"sharded_layer: every leaf of inputs has a first dimension for the rank's shards, {each} here "
                    f"({num_shards} in all); the one at {jax.tree_util.keystr(path) or 'the root'} has shape "
                    f"{np.shape(x)}"
                )
        varying = {*axes}.union(*(_compat.varying_axes(jnp.asarray(x)) for x in jax.tree.leaves((shards, inputs))))
        return cls(reduction, num_shards, each, tuple(sorted(varying, key=str)))

    def own_copies(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: own_copy(jnp.asarray(x), self.varying), tree)

    def traced(self, f: Callable, shards: ShardedParams, inputs: Any) -> tuple[Callable, list]:
        """A function of (parameters, inputs of a shard, index, closed_over), and the arrays that f closes over."""
        found: dict[str, Any] = {}

        def flat(params, own, index):
            with SHARD.set(index):
                results = f(params, own)
            check_arrays("sharded_layer", "the result of f", results)
            leaves, found["structure"] = jax.tree.flatten(results)
            return [jnp.asarray(x) for x in leaves]

        first = jax.tree.map(lambda x: x[0], inputs)
        params = jax.eval_shape(
            lambda: self.own_copies(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shards.like))
        )
        closed: Any = jax.make_jaxpr(flat)(params, first, self.indices()[0])
        if used := sorted(map(str, _compat.rank_dependent_axes(closed.jaxpr) & {*axes_of(self.reduction.axis_name)})):
            raise ValueError(
                "sharded_layer: f is computed for each shard alone, and this one communicates over, or asks for its "
                f"index in, the axis {', '.join(used)}, so that it would depend on the number of ranks. For the index "
                "of the shard use jax_ring.shard_index()."
            )
        floats = [x for x in closed.consts if isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)]
        if floats:
            raise TypeError(
                f"sharded_layer: f closes over {len(floats)} traced arrays of floats, the first of type "
                f"{jax.typeof(floats[0])}. Pass parameters in the shards, so that their gradients are added along the "
                "tree, and what belongs to the shards of the batch in inputs."
            )

        def g(params, own, index, closed_over):
            results = jax.core.eval_jaxpr(closed.jaxpr, closed_over, *jax.tree.leaves((params, own)), index)
            return jax.tree.unflatten(found["structure"], results)

        return g, closed.consts

    def indices(self) -> jax.Array:
        """Those of the rank's shards, among all."""
        first = first_shard(self.reduction.axis_name, self.num_shards)
        return own_copy(first + jnp.arange(self.each, dtype=jnp.int32), self.varying)

    def gathered(self, shards: ShardedParams, after: Any) -> Any:
        """The parameters, once what comes before is computed: else all layers could be gathered at the beginning."""
        leaves = [x for x in jax.tree.leaves(after) if x.size and not is_float0(x)]
        return self.own_copies(gathered(fence(shards, leaves[0]) if leaves else shards, self.reduction))

    def run(self, f: Callable, params: Any, own: Any) -> tuple[Any, Any]:
        """f(params, own, index) -> (what is stacked, what is added along the tree): the first, and the terms."""
        axis_name, num_shards = self.reduction.axis_name, self.num_shards
        params, own = fence((params, own))
        numbered = (self.indices(), own)
        found: dict[str, Any] = {}

        def flat(params, numbered):
            stacked, added = f(params, numbered[1], numbered[0])
            found["stacked"], found["added"] = jax.tree.structure(stacked), jax.tree.structure(added)
            return [*jax.tree.leaves(stacked), *jax.tree.leaves(added)]

        closed: Any = jax.make_jaxpr(flat)(params, jax.tree.map(lambda x: x[0], numbered))
        count = found["stacked"].num_leaves
        condition = hidden_one((params, own), self.varying)

        def results(numbered):
            values = sealed(condition, closed, jax.tree.leaves((params, numbered)))
            values = [own_copy(x, self.varying) for x in values]
            return values[:count], values[count:]

        types = [jax.eval_shape(lambda x: own_copy(x, self.varying), x) for x in closed.out_avals[count:]]
        stack = TermStack.empty(types, axis_name, num_shards)
        if self.each == 1:
            stacked, added = results(jax.tree.map(lambda x: x[0], numbered))
            stacked = [x[None] for x in stacked]
            stack = stack.push(added, axis_name, num_shards, 0) if added else stack
        else:

            def step(stack, numbered):
                number, of_shard = numbered
                stacked, added = results(of_shard)
                return (stack.push(added, axis_name, num_shards, number) if added else stack), stacked

            numbers = jnp.arange(self.each, dtype=jnp.int32)
            stack, stacked = lax.scan(step, stack, (numbers, numbered))
        terms = fence(stack.terms(axis_name, num_shards))
        return jax.tree.unflatten(found["stacked"], fence(stacked)), jax.tree.unflatten(found["added"], terms)


def _differentiable(where: _Where, f: Callable) -> Callable[[ShardedParams, Any, list], Any]:
    """The layer, with a backward pass that gathers and computes again. What `f` closes over has no cotangent."""

    @jax.custom_vjp
    def layer(shards, inputs, closed_over):
        params = where.gathered(shards, inputs)
        return where.run(lambda params, own, index: (f(params, own, index, closed_over), ()), params, inputs)[0]

    def forward(shards, inputs, closed_over):
        return layer(shards, inputs, closed_over), (shards, inputs, closed_over)

    def backward(saved, cotangents):
        shards, inputs, closed_over = saved
        params = where.gathered(shards, cotangents)
        leaves, structure = jax.tree.flatten(cotangents)

        def gradients(params, own, index):
            own, given = own
            _, pullback = jax.vjp(lambda params, own: f(params, own, index, closed_over), params, own)
            rest = iter(given)
            of_results = [np.zeros(x.shape[1:], x.dtype) if is_float0(x) else next(rest) for x in leaves]
            of_params, of_own = pullback(jax.tree.unflatten(structure, of_results))
            return _numbers(of_own), _numbers(of_params)

        of_inputs, terms = where.run(gradients, params, (inputs, _numbers(cotangents)))
        terms = _with_float0(terms, shards.like)
        dtypes = tuple(np.dtype(x.dtype) for x in jax.tree.leaves(shards.like))
        sums = ShardSums(terms, where.num_shards, dtypes)
        return scattered(sums, shards, where.reduction, mean=False), _with_float0(of_inputs, inputs), None

    layer.defvjp(forward, backward)
    return layer


def _numbers(tree: Any) -> list:
    """The leaves of cotangents that have a value: those of integers have none."""
    return [x for x in jax.tree.leaves(tree) if not is_float0(x)]


def _with_float0(numbers: list, like: Any) -> Any:
    """A tree of cotangents, from those that have a value."""
    rest = iter(numbers)
    return jax.tree.map(
        lambda x: next(rest) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0), like
    )
