"""The collectives that random programs call, in several dialects: jax_ring's, those of lax, and a reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from wrappers import mesh_axes, ragged_plan, rank_in_group, vary

import jax_ring


def _axes_of(axes) -> tuple:
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def _varies_in_part(x, axes) -> bool:
    varying = jax_ring._compat.varying_axes(x) if isinstance(x, jax.Array) else frozenset()
    return bool(varying.intersection(axes))


def _group_size(axes, groups) -> int:
    return lax.axis_size(axes) if groups is None else len(groups[0])


class Dialect:
    """Collectives as methods. Each call notes the types of its results, with the axes over which they vary.

    functions: by name; those of `jax.lax`, or drop-ins for them.
    options: whether they take jax_ring's options, `algorithm` and `order`.
    """

    def __init__(self, functions: dict, *, options: bool) -> None:
        self._functions = functions
        self._options = options
        self.types: list[str] = []

    def __getattr__(self, name: str):
        return partial(self._call, name)

    def _call(self, name: str, x, axes, *arguments, algorithm=None, order=None, **more):
        for key, value in (("algorithm", algorithm), ("order", order)):
            if self._options and value is not None:
                more[key] = value
        # lax.psum refuses what varies over some of its axes only.
        x = jax.tree.map(lambda leaf: vary(leaf, _axes_of(axes)) if _varies_in_part(leaf, _axes_of(axes)) else leaf, x)
        result = self._functions[name](x, axes, *arguments, **more)
        # Over a vmap axis the reference does not track over which axes a value varies.
        is_tracked = all(axis in mesh_axes() for axis in _axes_of(axes))
        types = map(jax.typeof, jax.tree.leaves(result))
        self.types += [f"{name}: {x if is_tracked else (x.shape, x.dtype)}" for x in types]
        return result


# ---- What lax does not have, or not for CPUs, or wrong --------------------------------------------------------------


def _reduce(x, axes, *, root):
    is_root = rank_in_group(axes) == root
    totals = jax.tree.map(lambda total: vary(total, _axes_of(axes)), _over_batch(lax.psum, x, axes))
    return jax.tree.map(lambda total: jnp.where(is_root, total, jnp.zeros_like(total)), totals)


def _broadcast(x, axes, *, root):
    is_root = rank_in_group(axes) == root
    own = jax.tree.map(lambda leaf: jnp.where(is_root, leaf, jnp.zeros_like(leaf)), x)
    return jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), _over_batch(lax.psum, own, axes), x)


def _pbroadcast(x, axes, source):
    return jax.tree.map(lambda leaf: vary(leaf, _axes_of(axes)), _broadcast(x, axes, root=source))


def _over_batch(function, x, axes, **more):
    """A reduction: over the vmap axes first, without vma tracking, and then over those of the mesh.

    Most functions of lax over a vmap axis fail inside a shard_map with vma tracking, in JAX 0.10.2.
    """
    mesh = tuple(axis for axis in _axes_of(axes) if axis in mesh_axes())
    batch = tuple(axis for axis in _axes_of(axes) if axis not in mesh)
    if batch:
        with jax_ring._compat.without_vma():
            x = function(x, batch, **more)
    return function(x, mesh, **more) if mesh or not batch else x


def _gathered(leaf, axes, groups=None, **more):
    """The values of all ranks of the group, along a new first dimension.

    Its rule for vmap is the one of a dimension that is there already: for a new one it fails with groups in JAX 0.12.
    """
    if all(axis in mesh_axes() for axis in _axes_of(axes)):
        return lax.all_gather(leaf[None], axes, axis_index_groups=groups, tiled=True, **more)
    with jax_ring._compat.without_vma():
        return lax.all_gather(leaf, axes)


def _all_gather(x, axes, *, axis=0, axis_index_groups=None, tiled=False, **more):
    def one(leaf):
        blocks = _gathered(leaf, axes, axis_index_groups, **more)
        return jnp.concatenate(list(blocks), axis) if tiled else jnp.moveaxis(blocks, 0, axis)

    return jax.tree.map(one, x)


def _psum_scatter(x, axes, *, scatter_dimension=0, axis_index_groups=None, tiled=False):
    def one(leaf):
        total = jnp.sum(_gathered(leaf, axes, axis_index_groups), 0, dtype=leaf.dtype)
        count = leaf.shape[scatter_dimension] // _group_size(axes, axis_index_groups)
        rank = rank_in_group(axes, axis_index_groups)
        own = lax.dynamic_slice_in_dim(total, rank * count, count, scatter_dimension)
        return own if tiled else jnp.squeeze(own, scatter_dimension)

    return jax.tree.map(one, x)


def _all_to_all(x, axes, split_axis, concat_axis, *, axis_index_groups=None, tiled=False):
    """By an all-gather of which each rank takes its blocks: the derivatives are those of the gather."""

    def one(leaf):
        blocks = _gathered(leaf, axes, axis_index_groups)
        size, rank = blocks.shape[0], rank_in_group(axes, axis_index_groups)
        count = leaf.shape[split_axis] // size
        own = lax.dynamic_slice_in_dim(blocks, rank * count, count, split_axis + 1)
        if not tiled:
            return jnp.moveaxis(jnp.squeeze(own, split_axis + 1), 0, concat_axis)
        return jnp.concatenate(list(own), concat_axis)

    return jax.tree.map(one, x)


def _pswapaxes(x, axes, axis, *, axis_index_groups=None):
    return _all_to_all(x, axes, axis, axis, axis_index_groups=axis_index_groups)


def _row(x, number):
    # Not x[number]: XLA crashes in some programs that scatter complex numbers, as the derivative of this does.
    return lax.dynamic_index_in_dim(x, number, keepdims=False)


def _ppermute(x, axes, perm):
    order = [axis for axis in mesh_axes() if axis in _axes_of(axes) and lax.axis_size(axis) > 1]
    if order != [axis for axis in _axes_of(axes) if lax.axis_size(axis) > 1 or axis not in mesh_axes()] and order:
        if hasattr(jax.config, "jax_raise_on_ppermute_sort_diff"):
            raise RuntimeError("the axes must be in the order of the mesh")
        axes = tuple(order)  # JAX 0.10 counts ranks in this order, whatever order is named
    size = lax.axis_size(axes)
    sources = np.full(size, -1, np.int32)
    for source, receiver in perm:
        sources[receiver] = source

    def one(leaf):
        if not perm:
            return vary(jnp.zeros_like(leaf), _axes_of(axes))
        own = jnp.asarray(sources)[rank_in_group(axes)]
        received = _row(_gathered(leaf, axes), jnp.maximum(own, 0))
        return jnp.where(own >= 0, received, jnp.zeros_like(received))

    return jax.tree.map(one, x)


def _pshuffle(x, axes, perm):
    return _ppermute(x, axes, list(zip(perm, range(len(perm)), strict=True)))


def _ragged_by_gather(x, axes, *, seed, slices, axis_index_groups=None):
    """x: the operand and the output."""
    operand, output = x
    rows = lax.all_gather(operand, axes, axis_index_groups=axis_index_groups)
    size = rows.shape[0]
    _, sources = ragged_plan(seed, size, slices, operand.shape[0], output.shape[0])
    own = jnp.asarray(sources)[rank_in_group(axes, axis_index_groups)]
    if operand.shape[0] == 0:
        return vary(output, _axes_of(axes))
    received = rows.reshape(size * operand.shape[0], *operand.shape[1:])[jnp.maximum(own, 0)]
    return jnp.where((own >= 0).reshape(-1, *[1] * (output.ndim - 1)), received, output)


def _ragged_by(function, x, axes, *, seed, slices, axis_index_groups=None, **more):
    operand, output = x
    size = _group_size(axes, axis_index_groups)
    plan, _ = ragged_plan(seed, size, slices, operand.shape[0], output.shape[0])
    rank = rank_in_group(axes, axis_index_groups)
    numbers = [jnp.asarray(table)[rank] for table in plan]
    varying = jax_ring._compat.varying_axes(operand) | jax_ring._compat.varying_axes(output) | {*_axes_of(axes)}
    operand, output = (vary(value, varying) for value in (operand, output))
    numbers = [vary(value, varying) for value in numbers]
    return function(operand, output, *numbers, axis_name=axes, axis_index_groups=axis_index_groups, **more)


# ---- The dialects ---------------------------------------------------------------------------------------------------

_NAMES = (
    "psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "pswapaxes", "ppermute", "pshuffle",
)  # fmt: skip


def ring() -> Dialect:
    """jax_ring's functions."""
    functions = {name: getattr(jax_ring, f"ring_{name}") for name in (*_NAMES, "pbroadcast", "reduce", "broadcast")}
    functions["ragged_all_to_all"] = partial(_ragged_by, jax_ring.ring_ragged_all_to_all)
    return Dialect(functions, options=True)


def plain_lax() -> Dialect:
    """The functions of lax. It has neither reduce nor broadcast: these are made of a sum."""
    functions = {name: getattr(lax, name) for name in (*_NAMES, "pbroadcast")}
    functions |= {"reduce": _reduce, "broadcast": _broadcast}
    functions["ragged_all_to_all"] = partial(_ragged_by, lax.ragged_all_to_all)
    return Dialect(functions, options=False)


def reference() -> Dialect:
    """The functions of lax that have a lowering for CPUs and right derivatives; the others are made of these.

    Why the others are not used: `lax.all_to_all` has a wrong transpose in JAX 0.10.2 (untiled, with split_axis and
    concat_axis unequal), and does not take groups under vmap. `lax.ppermute` hangs in a branch that only some ranks
    take, though all ranks of its groups do, and does not take incomplete permutations under vmap. `lax.psum_scatter`,
    untiled, fails under vmap if the batch dimension comes after the scattered one. `lax.all_gather` does not
    concatenate along a dimension without elements. `lax.pbroadcast` has no lowering for CPUs in JAX 0.10.2, and
    `lax.ragged_all_to_all` has none.
    """
    dialect = plain_lax()
    dialect._functions |= {
        "pbroadcast": _pbroadcast,
        **{name: partial(_over_batch, getattr(lax, name)) for name in ("psum", "pmean", "pmax", "pmin")},
        "psum_scatter": _psum_scatter,
        "all_gather": _all_gather,
        "ppermute": _ppermute,
        "pshuffle": _pshuffle,
        "all_to_all": _all_to_all,
        "pswapaxes": _pswapaxes,
        "ragged_all_to_all": _ragged_by_gather,
    }
    return dialect


def lax_on_cpus() -> Dialect:
    """The functions of lax, with others for those that have no lowering for CPUs."""
    dialect = plain_lax()
    dialect._functions |= {"pbroadcast": _pbroadcast, "ragged_all_to_all": _ragged_by_gather}
    return dialect
