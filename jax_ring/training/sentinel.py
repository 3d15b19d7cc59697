"""The sentinel: compares digests of the ranks' copies of parameters within a step, and fails the step if they differ.

Each rank's 64-bit digest goes with a sum that the step makes anyway. The digests of the leaves follow only if those
differ, so that a step without an error has no further collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, check_named, num_ranks
from jax_ring.collectives.leaves import bits_of_keys, own_copy
from jax_ring.options import array_or_none, check_arrays, path_text, path_texts
from jax_ring.training.trees import is_float0
from jax_ring.training.wire import collectives_here
from jax_ring.training.zero.by_parameter.pieces import ParameterShards
from jax_ring.training.zero.interface import ShardedParams

T = TypeVar("T")  # a pytree: results keep the structure of the argument

# Odd multipliers make every mixing step a bijection of 32-bit words.
_LANES = ((0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35), (0x61C88647, 0x7FEB352D, 0x846CA68B))
_NAMED = 4  # leaves described in an error


class CheckedState(NamedTuple):
    """The state of an optimizer that compares the ranks' parameters in some of its steps.

    Attributes:
      step: the number of steps so far, int32, the same on all ranks.
      inner: the state that it would have without `check_replicas`.
    """

    step: jax.Array
    inner: Any


class Digests(NamedTuple):
    """What a rank knows about its own copy.

    Attributes:
      function, axes: of the call.
      names: of the leaves.
      leaves: the digests of the leaves, uint32 [leaves, 2]; zeros in a step that does not compare.
      table: what has to be summed over the ranks, [p, 4] or [p, 16]: the digest of the whole in the row of the rank, as
        integers of 16 or 4 bits in a floating-point dtype, and zeros in the other rows.
    """

    function: str
    axes: tuple
    names: tuple[str, ...]
    leaves: jax.Array
    table: jax.Array

    def verdict(self, sums: jax.Array) -> jax.Array:
        """Fails the step on all ranks if their digests differ; else an int32 zero, on which the step has to depend.

        sums: the sum of `table` over the ranks.
        """
        # On one rank too, so that the rest of the step compiles as on several.
        differ = (sums != sums[:1]).any()
        others = tuple(_other_axes(self.axes, self.leaves))

        def fail(leaves):
            return own_copy(failure(partial(report, self.function, self.names), leaves, self.axes), others)

        return lax.cond(differ, fail, lambda _: own_copy(jnp.zeros((), jnp.int32), others), self.leaves)


def check_when(function: str, name: str, when: Any) -> None:
    """Raises TypeError unless `when`, the argument `name` of `function`, is a boolean scalar."""
    array = array_or_none(when)
    if array is None or array.shape or array.dtype != jnp.bool_:
        raise TypeError(f"{function}: {name} must be a boolean scalar, such as step % 10 == 0; got {when!r}")


def check_callbacks(function: str) -> None:
    """Raises NotImplementedError in a `shard_map` where JAX has no callbacks, by which a step is failed."""
    mesh = jax.sharding.get_abstract_mesh()
    others = [str(axis) for axis in mesh.axis_names if axis not in mesh.manual_axes]
    if mesh.manual_axes and others:
        raise NotImplementedError(
            f"{function}: a step that compares bits fails by a callback, and JAX has none in a shard_map that leaves "
            f"axes of the mesh to the compiler, here {', '.join(others)}. Leave check_replicas and audit out there. "
            "jax_ring.assert_replicated compares results outside of it."
        )


def digests(function: str, tree: Any, axis_name: AxisName, when: Any) -> Digests:
    """This rank's digests of a pytree, if `when`, a boolean that is the same on all ranks."""
    axes = axes_of(axis_name)
    check_named(function, axes)
    check_callbacks(function)
    divided = (ShardedParams, ParameterShards)
    for path, shards in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, divided)):
        if isinstance(shards, divided):
            raise ValueError(
                f"{function}: what is at {path_text(path)} are shards, a {type(shards).__name__}, of which each rank "
                "has another part: there are no copies to compare. Leave them out. For copies of shards along another "
                "axis pass that axis and their arrays."
            )
    names, arrays = tuple(path_texts(tree, "the array")), jax.tree.leaves(tree)
    if not names:
        raise ValueError(f"{function}: there are no arrays to compare in {tree!r}")
    bits = [bits_of_keys(jnp.asarray(x))[0] for x in arrays]
    varying = (*axes, *_other_axes(axes, *bits))
    local = [own_copy(x, varying) for x in bits]
    zeros = own_copy(jnp.zeros((len(local), 2), jnp.uint32), varying)

    def compute(local):
        return jnp.stack([digest(x) for x in local])

    by_leaf = lax.cond(when, compute, lambda _: zeros, local)
    return Digests(function, axes, names, by_leaf, _in_own_row(row_of_table(by_leaf, local), axes))


def row_of_table(by_leaf: jax.Array, leaves: Sequence) -> jax.Array:
    """The digest of the digests of these leaves, as integers of 16 or 4 bits in a floating-point dtype."""
    whole = _folded([by_leaf[:, lane] for lane in range(len(_LANES))])
    dtype, width = _dtype_of_table(leaves)
    shifts = np.arange(0, 32, width, dtype=np.uint32)[None]
    return ((whole[:, None] >> shifts) & np.uint32(2**width - 1)).reshape(-1).astype(dtype)


def _in_own_row(x: jax.Array, axes: tuple) -> jax.Array:
    """[p, *x.shape]: x in the row of the rank, and zeros in the others, for a sum over the ranks."""
    rows = own_copy(jnp.zeros((num_ranks(axes), *x.shape), x.dtype), (*axes, *_other_axes(axes, x)))
    return rows.at[lax.axis_index(axes)].set(x)


def _other_axes(axes: tuple, *arrays: jax.Array) -> list:
    """The axes over which arrays vary, as parameters do that these axes divide, without those of the ranks."""
    return sorted(frozenset().union(*map(_compat.varying_axes, arrays)) - {*axes}, key=str)


def _dtype_of_table(leaves: Sequence) -> tuple[np.dtype, int]:
    """The dtype of the table, and how many bits each of its elements holds.

    It is that of gradients of some of the leaves, so that the table needs no bucket of its own. Even after a division
    by the number of ranks, any two integers of so many bits differ in it.
    """
    dtypes = {x.dtype for x in leaves}
    if np.dtype(np.float32) not in dtypes:
        for dtype in (jnp.bfloat16, jnp.float16):
            if np.dtype(dtype) in dtypes:
                return np.dtype(dtype), 4
    return np.dtype(np.float32), 16


def digest(x: jax.Array) -> jax.Array:
    """64 bits of an array's bits and positions, uint32 [2].

    Two arrays that differ within one 32-bit word, or in one element of at most 32 bits, never have the same digest.
    """
    return _folded([_words(x)] * len(_LANES))


def _folded(words: list[jax.Array]) -> jax.Array:
    """The sum of the words of each lane, each mixed with its place."""

    def add(sums, others):
        return tuple(x + y for x, y in zip(sums, others, strict=True))

    mixed = tuple(map(_mixed, words, _LANES))
    zeros = tuple(jnp.zeros_like(x, shape=()) for x in mixed)
    # One reduction of two operands takes XLA half as long as two reductions.
    return jnp.stack(lax.reduce(mixed, zeros, add, (0,)))


def _mixed(words: jax.Array, lane: tuple[int, int, int]) -> jax.Array:
    # A weighted sum of words would not do: two flipped signs would cancel, because the weights are odd.
    by_place, first, second = lane
    words = words ^ (lax.iota(jnp.uint32, words.size) * np.uint32(by_place))
    words = (words ^ (words >> 16)) * np.uint32(first)
    words = (words ^ (words >> 13)) * np.uint32(second)
    return words ^ (words >> 16)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as a vector of uint32."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = jnp.finfo(x.dtype).bits
        x = lax.bitcast_convert_type(x, f"uint{min(bits, 32)}")  # 64-bit elements get one more dimension
    elif x.dtype.itemsize == 8:
        x = lax.bitcast_convert_type(x, jnp.uint32)
    return x.reshape(-1).astype(jnp.uint32)


def failure(text: Callable[..., str], own: jax.Array, axes: tuple, *numbers: jax.Array) -> jax.Array:
    """An int32 scalar that cannot be computed: the step fails on all ranks with an error.

    text: (`own` of all ranks, stacked; the numbers) -> that of the error.
    """

    def fail(by_rank, *numbers):
        raise AssertionError(text(np.asarray(by_rank), *map(int, numbers)))

    by_rank = lax.psum(_in_own_row(own, axes), axes)
    return jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.int32), by_rank, *numbers)


def report(function: str, names: tuple[str, ...], by_rank: np.ndarray) -> str:
    """The error for digests by rank and leaf, uint32 [p, leaves, 2]."""
    lines = []
    for i, name in enumerate(names):
        of_ranks = [by_rank[rank, i].tobytes() for rank in range(len(by_rank))]
        # Of several equally common values, take the first rank's.
        common = Counter(of_ranks).most_common(1)[0][0]
        others = [rank for rank, own in enumerate(of_ranks) if own != common]
        if others:
            ranks = f"rank {others[0]} differs" if len(others) == 1 else f"ranks {', '.join(map(str, others))} differ"
            lines.append(f"{name}: {ranks} from that on rank {of_ranks.index(common)}")
    more = f"; and {len(lines) - _NAMED} more leaves" if len(lines) > _NAMED else ""
    return (
        f"{function}: the copies of parameters are not the same on all ranks: {'; '.join(lines[:_NAMED])}{more}. The "
        "step is not applied. Go on from a checkpoint. If this happens again at the same step, a reduction may be "
        "missing (shard_map(..., check_vma=True) checks that), or ranks started with different values "
        "(jax_ring.broadcast_params makes them equal); if not, suspect the rank's hardware."
    )


def after(tree: T, ok: jax.Array) -> T:
    """`tree`, unchanged, but so that its smallest array needs `ok`, the zero of a verdict.

    If `ok` differs along other axes, as parameters do that these divide, it is an array that does so, too.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = _compat.varying_axes(ok)
    sizes = {
        i: size
        for i, x in enumerate(leaves)
        if not is_float0(x) and (size := jnp.size(x)) and axes <= _compat.varying_axes(x)
    }
    if not sizes:
        return tree
    smallest = min(sizes, key=sizes.__getitem__)
    bits, from_bits = bits_of_keys(jnp.asarray(leaves[smallest]))
    # A select: adding a zero would change the sign of another zero.
    leaves[smallest] = from_bits(jnp.where(ok == 0, bits, jnp.zeros_like(bits)))
    return jax.tree.unflatten(structure, leaves)


def next_step(step: jax.Array, tree: T, ok: jax.Array) -> tuple[jax.Array, T]:
    """The number of steps after this one, and `tree`, its result. One of the two needs `ok`, the zero of a verdict."""
    return (step + 1, after(tree, ok)) if _compat.varying_axes(ok) else (step + 1 + ok, tree)


def check_every(function: str, every: Any) -> None:
    """Raises unless `every`, the argument `check_replicas` of an optimizer, is None or a positive number of steps."""
    if every is None:
        return
    if isinstance(every, bool) or not isinstance(every, int | np.integer):
        raise TypeError(f"{function}: check_replicas must be a number of steps, got {every!r}")
    if every < 1:
        raise ValueError(f"{function}: check_replicas must be a positive number of steps, got {every}")


def check_counted(function: str, state: Any) -> None:
    """Raises TypeError unless the state of an optimizer with `check_replicas` counts its steps."""
    if not hasattr(state, "step") or not hasattr(state, "inner"):
        raise TypeError(
            f"{function}: with check_replicas the state is a CheckedState, as init makes it; got "
            f"{jax.tree.structure(state)}. One that was made without check_replicas has to be made again."
        )


def digests_every(function: str, params: Any, axis_name: AxisName, every: int, count: jax.Array) -> Digests:
    """The digests of an optimizer's parameters, in every so many of its steps, the first among them."""
    if params is None:
        raise ValueError(
            f"{function}: check_replicas={every} compares the ranks' parameters; pass them to the optimizer: "
            "optimizer.update(gradients, state, params)"
        )
    return digests(function, params, axis_name, count % every == 0)


def check_replicas(tree: T, axis_name: AxisName, *, when: Any = True) -> T:
    """Compares the ranks' copies of a pytree within a step, and fails the step on all ranks if any two differ.

        params = check_replicas(params, "data", when=step % 10 == 0)  # under shard_map

    Go on with the result: a step that does not use it does not compare. Where `when` is true, each rank computes a
    64-bit digest of its copy; in every step the ranks exchange 16 or 32 bytes each. `value_and_grad`,
    `allreduce_gradients` and `zero.sharded_optimizer` do the same by their option `check_replicas`.
    docs/any_number_of_devices.md says what is found. The program cannot be exported.

    Args:
      tree: a pytree of arrays of any dtype, random keys among them, which should be the same on all ranks.
      axis_name: the name of a mapped axis, or a sequence of names.
      when: whether to compare, a boolean scalar, the same on all ranks.

    Returns:
      `tree`, with the same values.

    Raises:
      jax.errors.JaxRuntimeError: when the program runs, if copies differ, in every process. It names the leaves and the
        ranks. As with any error of a step, its results do not exist, and what it was donated is gone.
      ValueError: if the tree has no arrays, or shards of ZeRO.
      NotImplementedError: in a `shard_map` that leaves axes to the compiler.
      TypeError: if `when` is no boolean scalar, or a leaf is neither an array nor a number.
      NameError: if no enclosing transformation binds the axis.
    """
    check_when("check_replicas", "when", when)
    check_arrays("check_replicas", "tree", tree)
    own = digests("check_replicas", tree, axis_name, when)
    sums = collectives_here().psum(own.table, axis_name)
    return after(tree, own.verdict(sums))
