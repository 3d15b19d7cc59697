"""Tensor parallelism in a fixed number of blocks, whose sums go along the tree: the same bits on any number of ranks.

A matrix product that is cut by columns or rows has other bits than the whole one, because kernels add in another order.
Blocks of one size have the same bits wherever they are computed, and the tree over them does not depend on the ranks.
The idea was shown for inference in arXiv:2511.17826.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, check_axis_name, check_divisible, check_named, num_ranks
from jax_ring.collectives.leaves import counted, own_copy
from jax_ring.collectives.reductions import ring_pmax, ring_psum
from jax_ring.collectives.shard_sums import ShardSums, TermStack
from jax_ring.lowering.transposed import without_reverse_mode
from jax_ring.options import check_arrays, check_function, integer
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.indices import BLOCK
from jax_ring.training.same_bits.sealed import hidden_one, sealed


def block_sum(
    f: Callable[[Any, Any], Any], axis_name: AxisName, num_blocks: int, *, remat: bool = True
) -> Callable[[Any, Any], Any]:
    """The sum of `f(block, inputs)` over the blocks of all ranks, with the same bits on any number of ranks.

    For tensor parallelism: a block is a head of attention, or a slice of the hidden units of an MLP. Each rank computes
    its B/p blocks one after the other, by one compiled body, and the sum goes along the tree of `order="tree"`. So do
    the sums of the cotangents of `inputs`; those of `blocks` stay with the rank that has the block.

        h = h + jax_ring.block_sum(one_head, "model", num_blocks=8)(params["heads"], normed(h))

    Args:
      f: a function of a block and the inputs. Returns a pytree of arrays. May ask for `block_index()`, may not
        communicate over the axis, and gets traced arrays of floats as arguments, not by closure.
      axis_name: the name of a mapped axis, or a sequence of names, as for `ring_psum`.
      num_blocks: B, of all ranks together. Take one that every number of ranks divides that a mesh may have.
      remat: whether the backward pass computes `f` again. If not, what it needs is kept, for each block, which takes
        less time and more memory. The gradients may have other bits than with remat; no bit of either depends on p.

    Returns:
      A function of (blocks, inputs), two pytrees. Leaves of blocks have a first dimension for the rank's B/p blocks: in
      order, rank r has those from r * B/p on. inputs are the same on all ranks of the axis, and so is the sum, in the
      dtype of f's result; narrow floats are added in float32. It has reverse mode, of any order, but no forward mode.

    Raises:
      ValueError: if p does not divide B, if a leaf of blocks does not have B/p blocks, if an input is known to vary
        over the axis, or if `f` communicates over it.
      TypeError: if `f` returns anything but arrays of numbers, or closes over traced arrays of floats.
      NameError: if no enclosing transformation binds the axis.
    """
    check_function("block_sum", "f", f)
    check_axis_name("block_sum", axis_name)
    num_blocks = integer("block_sum", "num_blocks", num_blocks)

    def sum_of_blocks(blocks: Any, inputs: Any) -> Any:
        where = _Where.of("block_sum", axis_name, num_blocks, blocks, inputs)
        blocks, inputs = where.same_other_axes(blocks, inputs)
        g, closed_over = where.closed(f, blocks, inputs)
        return _differentiable(where, g, [where.indices(), blocks], inputs, closed_over, remat)[1]

    return sum_of_blocks


def block_max(f: Callable[[Any, Any], Any], axis_name: AxisName) -> Callable[[Any, Any], Any]:
    """The elementwise maximum of `f(block, inputs)` over the blocks of all ranks. It has no derivative.

    For a softmax over a vocabulary that is divided: subtract the maximum of the logits, and take block_sum of their
    exponentials.

    Args:
      f, axis_name: as for `block_sum`.

    Returns:
      A function of (blocks, inputs), as `block_sum` does. Its results are constants to differentiation.

    Raises:
      NameError, TypeError, ValueError: as `block_sum`, but `f` may close over anything.
    """
    check_function("block_max", "f", f)
    check_axis_name("block_max", axis_name)

    def max_of_blocks(blocks: Any, inputs: Any) -> Any:
        blocks, inputs = lax.stop_gradient((blocks, inputs))
        where = _Where.of("block_max", axis_name, None, blocks, inputs)
        values, _ = where.run(
            lambda block, inputs: (where.applied(f, block[0], block[1], inputs), []), [where.indices(), blocks], inputs
        )
        return where.named(ring_pmax, jax.tree.map(lambda x: x.max(0), values), axis_name)

    return max_of_blocks


def each_block(f: Callable[..., Any], *trees: Any) -> Any:
    """`f` of each block, by one compiled body, with the results stacked. It has no reverse mode.

    For the optimizer's update of parameters that are divided in blocks. XLA computes the end of a vector by other
    instructions than the rest, and a rank's vector ends elsewhere for another number of ranks.

        state = jax_ring.each_block(optimizer.init, params)
        updates, state = jax_ring.each_block(optimizer.update, grads, state, params)

    Args:
      f: a function of as many pytrees as there are `trees`.
      *trees: pytrees whose leaves all have a first dimension for the rank's blocks.

    Raises:
      ValueError: if the leaves' first dimensions differ, or a leaf has none.
      TypeError: if `f` returns anything but arrays or numbers.
    """
    check_function("each_block", "f", f)
    where = _Where.of("each_block", (), None, trees, ())
    results, _ = where.run(lambda block, _: (where.arrays(f(*block)), []), trees, ())
    return without_reverse_mode(
        results,
        "each_block has no reverse mode: it is for what comes after the gradients. For a sum over blocks that is "
        "differentiated use jax_ring.block_sum, or differentiate by jax.jvp.",
    )


class _Where(NamedTuple):
    """The blocks of a call.

    Attributes:
      function: the public function, for errors.
      axis_name: over which the blocks are divided; () if there is no sum.
      num_blocks: of all ranks.
      each: of a rank.
      varying: the mesh axes over which a block's result may vary, if vma is tracked.
      caller: the stack of the user's call, which JAX does not have where it calls the rules of a `custom_vjp`.
    """

    function: str
    axis_name: AxisName
    num_blocks: int
    each: int
    varying: tuple
    caller: Any

    @classmethod
    def of(cls, function: str, axis_name: AxisName, num_blocks: int | None, blocks: Any, inputs: Any) -> "_Where":
        axes = axes_of(axis_name)
        check_named(function, axes)
        check_arrays(function, "blocks", blocks)
        check_arrays(function, "inputs", inputs)
        leaves = jax.tree_util.tree_leaves_with_path(blocks)
        if num_blocks is None:
            shapes = [np.shape(x) for _, x in leaves]
            if not shapes or not shapes[0]:
                raise ValueError(f"{function}: the first leaf must have a first dimension for blocks, got {shapes[:1]}")
            each, total = shapes[0][0], shapes[0][0] * num_ranks(axes)
        else:
            total = check_divisible(function, num_blocks, num_ranks(axes), "blocks")
            each = total // num_ranks(axes)
        for path, x in leaves:
            if np.shape(x)[:1] != (each,) or not each:
                raise ValueError(
                    f"{function}: every leaf of blocks has a first dimension for the rank's blocks, {each} here "
                    f"({total} in all); the one at {jax.tree_util.keystr(path) or 'the root'} has shape {np.shape(x)}"
                )
        if _compat.check_vma():
            for path, x in jax.tree_util.tree_leaves_with_path(inputs):
                if found := sorted(map(str, _compat.varying_axes(jnp.asarray(x)) & {*axes})):
                    raise ValueError(
                        f"{function} over {axis_name!r}: inputs must be the same on all its ranks, and the one at "
                        f"{jax.tree_util.keystr(path) or 'the root'} varies over {', '.join(found)}. Pass what each "
                        "block has for itself in blocks, with a first dimension for the rank's blocks."
                    )
        varying = {*axes}.union(*(_compat.varying_axes(jnp.asarray(x)) for x in jax.tree.leaves((blocks, inputs))))
        caller = source_info_util.current().traceback
        return cls(function, axis_name, total, each, tuple(sorted(varying, key=str)), caller)

    def named(self, collective: Callable, *args: Any, **options: Any) -> Any:
        """A collective, with the line of the user's call, in a scope of the function's name."""
        source = source_info_util.user_context(self.caller, name_stack=source_info_util.current_name_stack())
        with source, jax.named_scope(self.function):
            return collective(*args, **options)

    def own_copies(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: own_copy(jnp.asarray(x), self.varying), tree)

    def same_other_axes(self, blocks: Any, inputs: Any) -> tuple[Any, Any]:
        """Casts such that cotangents have the types of what they are of. JAX sums over the other axes by itself."""
        others = tuple(axis for axis in self.varying if axis not in axes_of(self.axis_name))
        return self.own_copies(blocks), jax.tree.map(lambda x: own_copy(jnp.asarray(x), others), inputs)

    def indices(self) -> jax.Array:
        """Those of the rank's blocks, among all."""
        axes = axes_of(self.axis_name)
        return (lax.axis_index(axes) * self.each if axes else 0) + jnp.arange(self.each, dtype=jnp.int32)

    def arrays(self, result: Any) -> Any:
        check_arrays(self.function, "the result of f", result)
        return jax.tree.map(jnp.asarray, result)

    def applied(self, f: Callable, index: jax.Array, block: Any, inputs: Any) -> Any:
        """f of a block."""
        with BLOCK.set(index):
            return self.arrays(f(block, inputs))

    def closed(self, f: Callable, blocks: Any, inputs: Any) -> tuple[Callable, list]:
        """A function of ((index, block), inputs, closed_over), and the arrays that f closes over."""
        first = jax.tree.map(lambda x: x[0], self.own_copies([self.indices(), blocks]))
        found: dict[str, Any] = {}

        def flat(block, inputs):
            leaves, found["structure"] = jax.tree.flatten(self.applied(f, *block, inputs))
            return leaves

        traced: Any = jax.make_jaxpr(flat)(first, self.own_copies(inputs))
        floats = [x for x in traced.consts if isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)]
        if floats:
            raise TypeError(
                f"{self.function}: f closes over {len(floats)} traced arrays of floats, the first of type "
                f"{jax.typeof(floats[0])}. Pass them in inputs, so that the cotangents of all blocks are added along "
                "the tree, or in blocks, if each block has its own."
            )

        jaxpr = traced.jaxpr  # without its constants, of which some belong to the trace around this one

        def g(block, inputs, closed_over):
            results = jax.core.eval_jaxpr(jaxpr, closed_over, *jax.tree.leaves((block, inputs)))
            return (), jax.tree.unflatten(found["structure"], results)

        return g, traced.consts

    def run(self, f: Callable, blocks: Any, inputs: Any) -> tuple[Any, Any]:
        """f(block, inputs) -> (what stays with the block, what is added): the first stacked, and the sums."""
        axes = axes_of(self.axis_name)
        blocks, inputs = fence(self.own_copies((blocks, inputs)))
        found: dict[str, Any] = {}

        def flat(block, inputs):
            own, summed = f(block, inputs)
            found["own"], found["sums"] = jax.tree.structure(own), jax.tree.structure(summed)
            return [*jax.tree.leaves(own), *(counted(x) for x in jax.tree.leaves(summed))]

        closed: Any = jax.make_jaxpr(flat)(jax.tree.map(lambda x: x[0], blocks), inputs)
        if used := sorted(map(str, _compat.rank_dependent_axes(closed.jaxpr) & {*axes})):
            raise ValueError(
                f"{self.function}: f is computed for each block alone, and this one communicates over, or asks for its "
                f"index in, the axis {', '.join(used)}, so that it would depend on the number of ranks. For the index "
                "of the block use jax_ring.block_index()."
            )
        count = found["own"].num_leaves
        condition = hidden_one((blocks, inputs), self.varying)

        def results(block):
            values = sealed(condition, closed, jax.tree.leaves((block, inputs)))
            values = [own_copy(x, self.varying) for x in values]
            return values[:count], values[count:]

        types = [jax.eval_shape(lambda x: own_copy(x, self.varying), x) for x in closed.out_avals[count:]]
        stack = TermStack.empty(types, self.axis_name, self.num_blocks)
        if self.each == 1:
            own, sums = results(jax.tree.map(lambda x: x[0], blocks))
            stack = stack.push(sums, self.axis_name, self.num_blocks, 0) if sums else stack
            own = [x[None] for x in own]
        else:

            def step(stack, numbered):
                number, block = numbered
                own, sums = results(block)
                return (stack.push(sums, self.axis_name, self.num_blocks, number) if sums else stack), own

            stack, own = lax.scan(step, stack, (jnp.arange(self.each, dtype=jnp.int32), blocks))
        sums = []
        if types:
            terms = stack.terms(self.axis_name, self.num_blocks)
            partial = ShardSums(terms, self.num_blocks, tuple(np.dtype(x.dtype) for x in types))
            sums = self.named(ring_psum, partial, self.axis_name, order="tree")
        return jax.tree.unflatten(found["own"], fence(own)), jax.tree.unflatten(found["sums"], fence(sums))


def _differentiable(where: _Where, f: Callable, blocks: Any, inputs: Any, closed_over: Any, remat: bool) -> Any:
    """`where.run`, with a backward pass that is such a call itself: cotangents of blocks stay, others are added.

    f: (block, inputs, closed_over) -> (what stays, what is added). What is closed over has no cotangent.
    """
    found: dict[str, Any] = {}

    def applied(blocks, inputs, closed_over):
        return where.run(lambda block, inputs: f(block, inputs, closed_over), blocks, inputs)

    def pullback_of(block, inputs, closed_over):
        xs, of_xs = _floats((block, inputs))
        return jax.vjp(lambda xs: f(*of_xs(xs), closed_over), xs)

    def forward(blocks, inputs, closed_over):
        if remat:
            return call(blocks, inputs, closed_over), (blocks, inputs, closed_over)

        def with_residuals(block, inputs, closed_over):
            (own, summed), pullback = pullback_of(block, inputs, closed_over)
            known = {id(x): i for i, x in enumerate(jax.tree.leaves((block, inputs)))}
            leaves, structure = jax.tree.flatten(pullback)
            found["pullback"] = structure, [known.get(id(x)) for x in leaves]
            return (own, [x for x in leaves if id(x) not in known]), summed

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
                structure, places = found["pullback"]
                known, rest = jax.tree.leaves((block, inputs)), iter(kept[0])
                pullback = jax.tree.unflatten(structure, [next(rest) if i is None else known[i] for i in places])
            (of_floats,) = pullback((of_own, of_sums))
            count = len(_floats(block)[0])
            return of_floats[:count], of_floats[count:]

        of_blocks, of_inputs = _differentiable(
            where, gradients, [blocks, of_own, *kept], [inputs, of_sums], closed_over, remat
        )
        return _cotangents(blocks, of_blocks), _cotangents(inputs, of_inputs), None

    call = jax.custom_vjp(applied)
    call.defvjp(forward, backward)
    return call(blocks, inputs, closed_over)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floats(tree: Any) -> tuple[list, Callable[[list], Any]]:
    """The leaves of floats, and a function from such to a tree that has them in their places."""
    leaves, structure = jax.tree.flatten(tree)

    def whole(floats):
        rest = iter(floats)
        return jax.tree.unflatten(structure, [next(rest) if _is_float(x) else x for x in leaves])

    return [x for x in leaves if _is_float(x)], whole


def _cotangents(tree: Any, of_floats: list) -> Any:
    """Those of a tree, from those of its floats."""
    leaves, structure = jax.tree.flatten(tree)
    rest = iter(of_floats)
    return jax.tree.unflatten(
        structure, [next(rest) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in leaves]
    )
