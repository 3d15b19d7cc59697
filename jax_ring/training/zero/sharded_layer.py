"""Layers whose parameters are divided over the ranks: gathered where they are computed, in both passes, and dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_ring.collectives.axes import AxisName, axes_of, check_axis_name, check_divisible, check_named, num_ranks
from jax_ring.collectives.shard_sums import ShardSums
from jax_ring.options import check_function, integer
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.parts import Parts, axes_of_results
from jax_ring.training.trees import is_float0, with_float0
from jax_ring.training.wire import wire_of
from jax_ring.training.zero.flat import checked_partitions, gathered
from jax_ring.training.zero.interface import ShardedParams, is_sharded, is_single, unflat, varying_type
from jax_ring.training.zero.reduction import LocalGradients, Reduction


def sharded_layer(
    f: Callable[[Any, Any], Any], axis_name: AxisName, *, num_shards: int, param_wire: DTypeLike | None = None
) -> Callable[[ShardedParams, Any], Any]:
    """A layer with divided parameters, computed for each shard of the batch: the same bits on any number of ranks.

        embed, block, head = (zero.sharded_layer(f, "data", num_shards=24) for f in (embed_of, block_of, loss_of))

        def loss(shards, tokens):                             # leaves of shape (V/p, examples of a shard, ...)
            h = embed(shards["embed"], tokens)
            h = block(shards["blocks"], h)                    # stacked shards: all blocks, one after the other
            return head(shards["head"], (h, tokens)).sum() / 24

        gradients = jax.grad(loss)(shards, tokens)            # shards, for `update` of the sharded optimizer

    A layer gathers its own parameters, computes `f` for the rank's V/p shards in turn, and drops them; so does the
    backward pass, which scatters the gradients.

    Partitions of several layers, stacked in a first dimension as by `jax.vmap(optimizer.shard)`, are layers of which
    each gets the result of the one before. While a layer is computed the next one's parameters are gathered. The bits
    are those of a `jax.lax.scan` over single layers.

    Args:
      f: a function of whole parameters and the inputs of a shard. Returns a pytree of arrays. May ask for
        `shard_index()`, may not communicate over the axis, and gets traced arrays of floats as arguments, not by
        closure.
      axis_name: the name of a mapped axis, or a sequence of names.
      num_shards: V, the number of shards of the batch that the optimizer has, too.
      param_wire: a floating-point dtype, or "int8", to which parameters are rounded to be gathered. Gradients are with
        respect to the rounded parameters.

    Returns:
      A function of (shards, inputs). shards: what `shard` of a `sharded_optimizer` with stage=3, order="tree" and this
      num_shards makes of the layer's parameters, or a stack of such. Leaves of inputs and of the result have a first
      dimension for the rank's V/p shards. Divide a rank's loss by V, not by V/p, for the mean. It has reverse mode of
      first order.

    Raises:
      ValueError: if p does not divide V, if a leaf of inputs does not have V/p shards, if the shards are divided
        otherwise, or if `f` communicates over the axis.
      TypeError: if `f` returns anything but arrays of numbers, or closes over traced arrays of floats; for stacked
        shards, if its result has other types than its inputs; for a `param_wire` that `sharded_optimizer` refuses.
      NameError: if no enclosing transformation binds the axis.
    """
    check_function("sharded_layer", "f", f)
    check_axis_name("sharded_layer", axis_name)
    num_shards = integer("sharded_layer", "num_shards", num_shards)
    wire = wire_of("sharded_layer", "param_wire", param_wire)

    def layer(shards: ShardedParams, inputs: Any) -> Any:
        where = _Shards.of(axis_name, num_shards, wire, shards, inputs)
        shards, inputs = where.own_copies((shards, inputs))  # JAX itself adds up cotangents over further axes
        first = jax.tree.map(lambda x: x[0], inputs)
        g, closed_over = where.closed(lambda own, params: f(params, own), first, where.types_of(shards))
        if is_single(shards):
            return _differentiable(where, g)(shards, inputs, closed_over)
        results = jax.eval_shape(g, (where.indices()[0], first), where.types_of(shards), closed_over)
        if _types(results) != _types(first):
            raise TypeError(
                "sharded_layer: of stacked shards each layer gets the result of the one before, so f must return what "
                f"has the tree, the shapes and the dtypes of its inputs. These are {_types(first)}, and the result's "
                f"are {_types(results)}."
            )
        return _one_after_the_other(where, g)(shards, inputs, closed_over)

    return layer


@dataclass(frozen=True)
class _Shards(Parts):
    """The shards of a call, and how parameters are divided."""

    reduction: Reduction

    @classmethod
    def of(cls, axis_name: AxisName, num_shards: int, wire: Any, shards: Any, inputs: Any) -> _Shards:
        function, axes = "sharded_layer", axes_of(axis_name)
        check_named(function, axes)
        each = check_divisible(function, num_shards, num_ranks(axes)) // num_ranks(axes)
        reduction = Reduction(order="tree", axis_name=axis_name, num_shards=num_shards, param_wire=wire)
        if not is_sharded(checked_partitions(shards, reduction)) or any(x.ndim > 2 for x in shards.vectors.values()):
            raise ValueError(
                "sharded_layer: takes the ShardedParams of one layer, or those of several layers stacked in a first "
                "dimension; got several in a tree, or with further dimensions."
            )
        varying = axes_of_results(axis_name, (shards, inputs))
        found = cls(function, "shard", axis_name, num_shards, each, varying, reduction)
        found.check("inputs", inputs)
        return found

    def types_of(self, shards: ShardedParams) -> Any:
        """The types of whole parameters, which vary over all axes of `varying`."""
        return jax.tree.map(lambda x: varying_type(x, self.varying), shards.like)

    def gathered(self, shards: ShardedParams, after: Any) -> Any:
        """The parameters, once what comes before is computed: else all layers could be gathered at the beginning."""
        return gathered(_fenced(shards, after), self.reduction)

    def one_after_the_other(self, f: Callable, shards: ShardedParams, carry: Any, given: Any, *, reverse: bool) -> Any:
        """A scan of f(params, carry, x, following) over layers. It gathers the next layer's, `following`, beside `f`.

        The last layer has no next one, and gathers its own again: cheaper than to compile `f` twice.
        """
        count = jax.tree.leaves(shards)[0].shape[0]
        order = np.arange(count)[:: -1 if reverse else 1]

        def of_layer(i):
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), shards)

        def step(both, numbered):
            vectors, carry = both
            following, x = numbered
            following = self.reduction.gathered(of_layer(following).vectors)  # does not depend on results of `f`
            carry, y = f(fence(unflat(vectors, shards.like)), carry, x, following)
            return (following, carry), y

        following = np.append(order[1:], order[-1]).astype(np.int32)[:: -1 if reverse else 1]
        first = self.reduction.gathered(_fenced(of_layer(order[0]), carry).vectors)
        (_, carry), ys = lax.scan(step, (first, carry), (following, given), reverse=reverse)
        return carry, ys


def _differentiable(where: _Shards, f: Callable) -> Callable[[ShardedParams, Any, Any], Any]:
    """The layer, with a backward pass that gathers and computes again. What `f` closes over has no cotangent.

    f: ((index, inputs of a shard), parameters, closed_over) -> results.
    """

    @jax.custom_vjp
    def layer(shards, inputs, closed_over):
        return _forward(where, f, where.gathered(shards, inputs), inputs, closed_over)

    def forward(shards, inputs, closed_over):
        return layer(shards, inputs, closed_over), (shards, inputs, closed_over)

    def backward(saved, cotangents):
        shards, inputs, closed_over = saved
        params = where.gathered(shards, cotangents)
        return *_backward(where, f, shards, params, inputs, closed_over, cotangents), None

    layer.defvjp(forward, backward)
    return layer


def _one_after_the_other(where: _Shards, f: Callable) -> Callable[[ShardedParams, Any, Any], Any]:
    """Layers with stacked partitions, one after the other. The inputs of each are kept.

    f: ((index, inputs of a shard), parameters, closed_over) -> results.
    """

    @jax.custom_vjp
    def layers(shards, inputs, closed_over):
        return forward(shards, inputs, closed_over)[0]

    def forward(shards, inputs, closed_over):
        def one(params, inputs, *_):
            return _forward(where, f, params, inputs, closed_over), inputs

        results, kept = where.one_after_the_other(one, shards, inputs, None, reverse=False)
        return results, (shards, kept, closed_over)

    def backward(saved, cotangents):
        shards, kept, closed_over = saved
        own = jax.tree.map(lambda x: x[0], shards)  # used for its types

        def one(params, of_results, inputs, following):
            of_results = with_float0(of_results, inputs)
            of_own, of_inputs = _backward(where, f, own, params, inputs, closed_over, of_results, following)
            return _numbers(of_inputs), _numbers(of_own)

        of_inputs, of_shards = where.one_after_the_other(one, shards, _numbers(cotangents), kept, reverse=True)
        first = jax.tree.map(lambda x: x[0], kept)
        return with_float0(of_shards, shards), with_float0(of_inputs, first), None

    layers.defvjp(forward, backward)
    return layers


def _forward(where: _Shards, f: Callable, params: Any, inputs: Any, closed_over: Any) -> Any:
    """The results of one layer, from whole parameters."""
    return where.run(lambda own, params: (f(own, params, closed_over), ()), (where.indices(), inputs), params)[0]


def _backward(
    where: _Shards,
    f: Callable,
    shards: ShardedParams,
    params: Any,
    inputs: Any,
    closed_over: Any,
    cotangents: Any,
    following: Any = (),
) -> tuple[ShardedParams, Any]:
    """The cotangents of the partition and of the inputs of one layer, from whole parameters.

    They are scattered after `following` is gathered. XLA has one collective in flight at a time, and would put the
    gather after the scatter, where nothing is left to compute beside it.
    """
    leaves, structure = jax.tree.flatten(cotangents)

    def gradients(part, params):
        (index, own), given = part
        _, pullback = jax.vjp(lambda own, params: f((index, own), params, closed_over), own, params)
        rest = iter(given)
        of_results = [np.zeros(x.shape[1:], x.dtype) if is_float0(x) else next(rest) for x in leaves]
        of_own, of_params = pullback(jax.tree.unflatten(structure, of_results))
        return _numbers(of_own), _numbers(of_params)

    numbered = (where.indices(), inputs)
    of_inputs, sums = where.run(gradients, (numbered, _numbers(cotangents)), params)
    dtypes = tuple(np.dtype(x.dtype) for x in jax.tree.leaves(shards.like))
    sums = ShardSums(with_float0(_fenced(sums.terms, following), shards.like), where.total, dtypes)
    own = LocalGradients.of(sums, shards.like, where.reduction).partition(shards.like, mean=False)
    return ShardedParams(own, shards.shapes), with_float0(of_inputs, inputs)


def _fenced(tree: Any, after: Any) -> Any:
    """`fence` of a tree, after what the first leaf of another is computed from."""
    leaves = [x for x in jax.tree.leaves(after) if x.size and not is_float0(x)]
    return fence(tree, leaves[0] if leaves else None)


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)


def _numbers(tree: Any) -> list:
    """The leaves of cotangents that have a value: those of integers have none."""
    return [x for x in jax.tree.leaves(tree) if not is_float0(x)]
