"""Tensor parallelism in a fixed number of blocks, with sums along the tree: the same bits on any number of ranks.

A product cut by columns or rows has other bits than the whole, because kernels add in another order. Blocks of one size
have the same bits anywhere, and their tree does not depend on ranks. Shown for inference in arXiv:2511.17826.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, check_axis_name, check_divisible, check_named, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.collectives.reductions import ring_pmax, ring_psum
from jax_ring.lowering.custom_transpose import without_reverse_mode
from jax_ring.options import check_arrays, check_function, integer, path_text
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.parts import Parts, axes_of_results
from jax_ring.training.trees import floats, is_inexact, with_float0


def block_sum(
    f: Callable[[Any, Any], Any], axis_name: AxisName, num_blocks: int, *, remat: bool = True
) -> Callable[[Any, Any], Any]:
    """The sum of `f(block, inputs)` over all ranks' blocks, with the same bits on any number of ranks.

        h = h + jax_ring.block_sum(one_head, "model", num_blocks=8)(params["heads"], normed(h))

    A block is a head of attention, or a slice of an MLP's hidden units. A rank computes its B/p blocks in turn, by one
    compiled body; sums go along the tree of `order="tree"`. So do cotangents of `inputs`; those of `blocks` stay with
    their rank.

    Args:
      f: a function of a block and the inputs, to a pytree of arrays. It may ask for `block_index()`, may not
        communicate over the axis, and gets traced arrays of floats as arguments, not by closure.
      axis_name: the name of a mapped axis, or a sequence of names.
      num_blocks: B, of all ranks together. Take one that all numbers of ranks of your meshes divide.
      remat: whether the backward pass computes all of `f` again. If not, the results of its matrix products and
        convolutions are kept per block: more memory, and less time where blocks are large. Bits of gradients may
        differ, but never depend on p.

    Returns:
      A function of (blocks, inputs), two pytrees. Leaves of blocks have a first dimension for the rank's B/p blocks,
        from r * B/p on. inputs and the sum are the same on all ranks; narrow floats are added in float32, the result
        has f's dtype. It has reverse mode of any order, and no forward mode.

    Raises:
      ValueError: if p does not divide B, a leaf does not have B/p blocks, an input varies over the axis, or `f`
        communicates over it.
      TypeError: if `f` returns anything but arrays of numbers, or closes over traced arrays of floats.
      NameError: if the axis is not bound.
    """
    check_function("block_sum", "f", f)
    check_axis_name("block_sum", axis_name)
    num_blocks = integer("block_sum", "num_blocks", num_blocks)

    def sum_of_blocks(blocks: Any, inputs: Any) -> Any:
        where = _Blocks.of("block_sum", axis_name, num_blocks, blocks, inputs)
        blocks, inputs = where.same_other_axes(blocks, inputs)
        g, closed_over = where.closed(f, jax.tree.map(lambda x: x[0], blocks), where.own_copies(inputs))
        if not remat:
            # The rest takes longer to write and to read than to compute again.
            g = jax.checkpoint(g, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
        numbered = (where.indices(), blocks)
        return _differentiable(where, lambda *args: ((), g(*args)), numbered, inputs, closed_over, remat)[1]

    return sum_of_blocks


def block_max(f: Callable[[Any, Any], Any], axis_name: AxisName) -> Callable[[Any, Any], Any]:
    """The elementwise maximum of `f(block, inputs)` over all ranks' blocks, without derivative.

        highest = jax_ring.block_max(lambda head, h: (h @ head).max(-1), "model")(params["heads"], h)

    For a softmax over a divided vocabulary: subtract the maximum, and take block_sum of the exponentials.

    Args:
      f: a function of a block and the inputs, to a pytree of arrays. It may ask for `block_index()`, and may not
        communicate over the axis.
      axis_name: the name of a mapped axis, or a sequence of names.

    Returns:
      A function of (blocks, inputs), two pytrees. Leaves of blocks have a first dimension for the rank's blocks; inputs
        and the maximum are the same on all ranks. Results are constants to differentiation.

    Raises:
      ValueError: if a leaf has another number of blocks, an input varies over the axis, or `f` communicates over it.
      TypeError: if `f` returns anything but arrays of numbers.
      NameError: if the axis is not bound.
    """
    check_function("block_max", "f", f)
    check_axis_name("block_max", axis_name)

    def max_of_blocks(blocks: Any, inputs: Any) -> Any:
        blocks, inputs = lax.stop_gradient((blocks, inputs))
        where = _Blocks.of("block_max", axis_name, None, blocks, inputs)
        values, _ = where.run(
            lambda block, inputs: (where.applied(f, block[0], block[1], inputs), ()), (where.indices(), blocks), inputs
        )
        return where.named(ring_pmax, jax.tree.map(lambda x: x.max(0), values), axis_name)

    return max_of_blocks


def each_block(f: Callable[..., Any], *trees: Any) -> Any:
    """`f` of each block, by one compiled body, stacked; without reverse mode.

    For optimizer updates of parameters in blocks: XLA computes a vector's end by other instructions, and a rank's
    vector ends elsewhere for another number of ranks.

        state = jax_ring.each_block(optimizer.init, params)
        updates, state = jax_ring.each_block(optimizer.update, grads, state, params)

    Args:
      f: a function of as many pytrees as `trees`.
      *trees: pytrees with a first dimension for the rank's blocks.

    Raises:
      ValueError: if first dimensions differ, or are missing.
      TypeError: if `f` returns anything but arrays or numbers.
    """
    check_function("each_block", "f", f)
    where = _Blocks.of("each_block", (), None, trees, ())
    results, _ = where.run(lambda block, _: (where.arrays(f(*block)), ()), trees, ())
    return without_reverse_mode(
        results,
        "each_block has no reverse mode: it is for what comes after the gradients. For a sum over blocks that is "
        "differentiated use jax_ring.block_sum, or differentiate by jax.jvp.",
    )


@dataclass(frozen=True)
class _Blocks(Parts):
    """The blocks of a call.

    Attributes:
      caller: the user's stack, which JAX lacks in rules of a `custom_vjp`.
    """

    caller: Any

    @classmethod
    def of(cls, function: str, axis_name: AxisName, num_blocks: int | None, blocks: Any, inputs: Any) -> "_Blocks":
        axes = axes_of(axis_name)
        check_named(function, axes)
        check_arrays(function, "inputs", inputs)
        if num_blocks is None:
            shapes = [np.shape(x) for x in jax.tree.leaves(blocks)]
            if not shapes or not shapes[0]:
                raise ValueError(f"{function}: the first leaf must have a first dimension for blocks, got {shapes[:1]}")
            num_blocks = shapes[0][0] * num_ranks(axes)
        else:
            num_blocks = check_divisible(function, num_blocks, num_ranks(axes), "blocks")
        for path, x in jax.tree_util.tree_leaves_with_path(inputs):
            if differs := sorted(map(str, _compat.varying_axes(jnp.asarray(x)) & {*axes})):
                raise ValueError(
                    f"{function} over {axis_name!r}: inputs must be the same on all its ranks, and the one at "
                    f"{path_text(path)} varies over {', '.join(differs)}. Pass what each block has for itself in "
                    "blocks, with a first dimension for the rank's blocks."
                )
        varying, caller = axes_of_results(axis_name, (blocks, inputs)), source_info_util.current().traceback
        found = cls(function, "block", axis_name, num_blocks, num_blocks // num_ranks(axes), varying, caller)
        found.check("blocks", blocks)
        return found

    def named(self, collective: Callable, *args: Any, **options: Any) -> Any:
        """A collective, with the user's line, in a scope of the function's name."""
        source = source_info_util.user_context(self.caller, name_stack=source_info_util.current_name_stack())
        with source, jax.named_scope(self.function):
            return collective(*args, **options)

    def same_other_axes(self, blocks: Any, inputs: Any) -> tuple[Any, Any]:
        """Casts cotangents to their primals' types; JAX sums over other axes."""
        others = tuple(axis for axis in self.varying if axis not in axes_of(self.axis_name))
        return self.own_copies(blocks), jax.tree.map(lambda x: own_copy(jnp.asarray(x), others), inputs)

    def summed(self, f: Callable, blocks: Any, inputs: Any) -> tuple[Any, Any]:
        """f(block, inputs) -> (what stays with the block, what is added): stacked, and summed."""
        stays, partial = self.run(f, blocks, inputs)
        sums = self.named(ring_psum, partial, self.axis_name, order="tree") if partial.dtypes else partial.terms
        return stays, fence(sums)


def _differentiable(where: _Blocks, f: Callable, blocks: Any, inputs: Any, closed_over: Any, remat: bool) -> Any:
    """`where.summed`, whose backward pass is such a call: cotangents of blocks stay, others are added.

    f: (block, inputs, closed_over) -> (what stays, what is added). What is closed over has none.
    """

    def applied(blocks, inputs, closed_over):
        return where.summed(lambda block, inputs: f(block, inputs, closed_over), blocks, inputs)

    def pullback_of(block, inputs, closed_over):
        both = block, inputs
        return jax.vjp(lambda xs: f(*_with_floats(both, xs), closed_over), floats(both))

    def form_of_pullback(*arguments):
        """A pullback's structure, and by leaf its place among the leaves of the arguments, None for others.

        Forward and backward pass trace for it, apart, and so agree. The structure is no residual: it has a jaxpr, and
        JAX wants residuals of equal structures where it traces a forward pass twice.
        """
        closed, types = jax.make_jaxpr(lambda *args: pullback_of(*args)[1], return_shape=True)(*arguments)
        place_of = {id(x): i for i, x in enumerate(closed.jaxpr.invars)}
        return jax.tree.structure(types), [place_of.get(id(x)) for x in closed.jaxpr.outvars]

    def forward(blocks, inputs, closed_over):
        if remat:
            return call(blocks, inputs, closed_over), (blocks, inputs, closed_over)

        def with_residuals(block, inputs, closed_over):
            (own, summed), pullback = pullback_of(block, inputs, closed_over)
            _, places = form_of_pullback(block, inputs, closed_over)
            return (own, [x for x, i in zip(jax.tree.leaves(pullback), places, strict=True) if i is None]), summed

        (own, kept), sums = _differentiable(where, with_residuals, blocks, inputs, closed_over, True)
        return (own, sums), (blocks, inputs, closed_over, kept)

    def backward(saved, cotangents):
        blocks, inputs, closed_over, *kept = saved
        of_own, of_sums = cotangents

        def gradients(block, inputs, closed_over):
            (block, of_own, *kept), (inputs, of_sums) = block, inputs
            if remat:
                _, pullback = pullback_of(block, inputs, closed_over)
            else:
                structure, places = form_of_pullback(block, inputs, closed_over)
                known, rest = jax.tree.leaves((block, inputs, closed_over)), iter(kept[0])
                pullback = jax.tree.unflatten(structure, [next(rest) if i is None else known[i] for i in places])
            (of_floats,) = pullback((of_own, of_sums))
            count = len(floats(block))
            return of_floats[:count], of_floats[count:]

        of_blocks, of_inputs = _differentiable(
            where, gradients, [blocks, of_own, *kept], [inputs, of_sums], closed_over, remat
        )
        return with_float0(of_blocks, blocks), with_float0(of_inputs, inputs), None

    call = jax.custom_vjp(applied)
    call.defvjp(forward, backward)
    return call(blocks, inputs, closed_over)


def _with_floats(tree: Any, values: Iterable) -> Any:
    """A tree with other floats."""
    rest = iter(values)
    return jax.tree.map(lambda x: next(rest) if is_inexact(x) else x, tree)
