"""Clipping by the norm of the whole gradient, which a sharded optimizer divides over the ranks.

The sharded optimizer around it tells the norm in which order to add, and of what. With order="tree" squares are summed
in tiles of fixed size, so that the bits do not depend on how an array is cut between tiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jax_ring.collectives import ring_psum
from jax_ring.collectives.axes import AxisName, axes_of, axes_of_equality, check_axis_name, check_named
from jax_ring.options import ORDERS, Order, array_or_none, check_choice, path_text, promoted, setting
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.wire import collectives_here, is_by_lax
from jax_ring.training.zero.interface import flat, padded

if TYPE_CHECKING:
    import optax

# (leaves, axis_name, order) -> their norm.
Norm = Callable[[list[jax.Array], AxisName, Order], jax.Array]

# Stands for the norm over the ranks of `axes` in an update that is analyzed, or computed in pieces.
NORM = Primitive("norm")
NORM.def_abstract_eval(lambda *leaves, axes, order, dtype: jax.core.ShapedArray((), dtype))

# What gives a norm; None where it is that of the partitions that ranks have.
_norm: ContextVar[Norm | None] = ContextVar("norm", default=None)
_order: ContextVar[Order | None] = ContextVar("order", default=None)


def as_equation(leaves: list[jax.Array], axis_name: AxisName, order: Order) -> jax.Array:
    """The norm as a `NORM`. What is traced with it cannot be computed."""
    # Of complex leaves: that of their absolute values.
    dtype = jnp.finfo(promoted(jnp.float32, *(x.dtype for x in leaves))).dtype
    return NORM.bind(*leaves, axes=axes_of(axis_name), order=order, dtype=dtype)


def norm_given_by(norm: Norm) -> contextlib.AbstractContextManager[None]:
    """A block in which an update is traced, and `norm` gives its norms, unless a block around it says otherwise."""
    return setting(_norm, _norm.get() or norm)


def order_given(order: Order) -> contextlib.AbstractContextManager[None]:
    """A block in which an update is traced: the sharded optimizer around it adds gradients in this order."""
    return setting(_order, order)


def _order_here(order: Order | None) -> Order:
    """The order of a norm: the argument, or by default that of the sharded optimizer around it.

    Raises:
      ValueError: for a norm along the tree in an optimizer with another order.
    """
    around = _order.get()
    if order == "tree" and around not in (None, "tree"):
        raise ValueError(
            f"clip_by_global_norm has order='tree', within a sharded_optimizer with order={around!r}, whose ranks hold "
            "parts that depend on their number. Pass order='tree' to sharded_optimizer, too."
        )
    return order or around or "rank"


# Elements in a tile. With order="tree" a rank's partition begins and ends between tiles.
TILE = 1024

# Factors of a tile's size, for its fold, and the factor for the sums of tiles. Each is one loop over written-out
# additions: a reduction of XLA adds in an order that depends on the shape.
_FACTORS = (8, 8, 16)
_FACTOR = 16


def up_to_tiles(size: int) -> int:
    """The smallest multiple of `TILE` that is not smaller than a number of elements."""
    return -(-size // TILE) * TILE


def tile_sums(x: jax.Array) -> jax.Array:
    """The sum of the squares of each tile of an array, flattened and filled up with zeros, in float32 or wider."""
    vector = padded(jnp.ravel(x), TILE)
    wide = jnp.abs(vector) if jnp.iscomplexobj(vector) else vector
    sums = wide.astype(promoted(wide.dtype, jnp.float32))
    for i, factor in enumerate(_FACTORS):
        rows = sums.reshape(vector.size // TILE, -1)
        width = rows.shape[1] // factor
        parts = [rows[:, j * width : (j + 1) * width] for j in range(factor)]
        sums = fence(reduce(add, map(jnp.square, parts) if i == 0 else parts))
    return sums.reshape(-1)


def sum_of_tiles(sums: jax.Array) -> jax.Array:
    """The sum of a vector along a tree that zeros at its end do not change."""
    while sums.size > 1:
        sums = jnp.pad(sums, (0, -sums.size % _FACTOR)).reshape(-1, _FACTOR)
        sums = fence(reduce(add, [sums[:, j] for j in range(_FACTOR)]))
    return sums.reshape(())


def clip_by_global_norm(
    max_norm: float, axis_name: AxisName, *, order: Order | None = None
) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` for a sharded optimizer: `optax.chain(clip_by_global_norm(...), adam)`.

        tx = optax.chain(zero.clip_by_global_norm(1.0, "data"), optax.adam(1e-3))
        optimizer = zero.sharded_optimizer(tx, "data")

    The squares of the ranks' partitions are added over the axis: the norm of the whole mean gradient. It is computed in
    float32, or in the dtype of the gradients if that is wider. Gradients that every rank has whole need
    `optax.clip_by_global_norm`, as each copy would count here, unless it is within a `replicated_optimizer`.

    Args:
      max_norm: the largest norm that is not clipped.
      axis_name: the name of a mapped axis, or a sequence of names.
      order: of the sum over the ranks: "rank", "ring", "any" or "tree" (`ring_psum` says what they are); by default the
        order of the sharded optimizer around it, or "rank". With "tree" squares are added in tiles of 1024 elements and
        then along a fixed tree of tiles, so that the norm does not depend on the number of ranks. Partitions must then
        begin at multiples of 1024 elements, as those of a `sharded_optimizer` with order="tree" do.

    Returns:
      An optax `GradientTransformation`.

    Raises:
      TypeError: if `max_norm` is not a real number.
      ValueError: if it is negative or NaN; if `order` is none of its choices; from `update`, if this order is "tree"
        and that of the sharded optimizer around it is not, and with vma tracking, if gradients are the same on all
        ranks.
      NameError: from `update`, if an axis is not bound.
    """
    import optax

    check_axis_name("clip_by_global_norm", axis_name)
    check_choice("clip_by_global_norm", "order", "rank" if order is None else order, ORDERS)
    _check_max_norm(max_norm)

    def update(updates, params):
        del params
        leaves = jax.tree.leaves(updates)
        chosen = _order_here(order)
        if (given := _norm.get()) is not None:
            norm = given(leaves, axis_name, chosen)
        else:
            _check_cut(updates, axis_name)
            if chosen == "tree":
                norm = jnp.sqrt(_sum_in_tiles(leaves, axis_name))
            else:
                norm = jnp.sqrt(sum_over_ranks(sum_of_squares(leaves), axis_name, chosen))

        def clip(g):
            wide = g.astype(promoted(g.dtype, jnp.float32))
            return jnp.where(norm < max_norm, g, (wide / norm * max_norm).astype(g.dtype))

        return jax.tree.map(clip, updates)

    return optax.stateless(update)


def _check_max_norm(max_norm: Any) -> None:
    array = array_or_none(max_norm)
    is_real = array is not None and any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if array is None or not is_real or array.size != 1:
        raise TypeError(
            f"clip_by_global_norm: max_norm must be a real number, got {max_norm!r}. For one that changes use "
            "optax.inject_hyperparams."
        )
    # Do not wait for a JAX array: it may still be computed.
    if not isinstance(max_norm, jax.Array) and not np.all(np.asarray(max_norm) >= 0):
        raise ValueError(f"clip_by_global_norm: max_norm must be 0 or more, got {max_norm!r}")


def sum_of_squares(leaves: Sequence[jax.Array]) -> jax.Array:
    """The sum of the squares of all elements, as a float32, or wider if a leaf is."""
    wide = [jnp.abs(x).astype(promoted(jnp.abs(x).dtype, jnp.float32)) for x in leaves]
    return sum((jnp.sum(jnp.square(x)) for x in wide), jnp.zeros((), jnp.float32))


def sum_over_ranks(x: jax.Array, axis_name: AxisName, order: Order) -> jax.Array:
    """The sum of a scalar of each rank."""
    return lax.psum(x, axis_name) if is_by_lax() else ring_psum(x, axis_name, order=order)


def _sum_in_tiles(leaves: Sequence[jax.Array], axis_name: AxisName) -> jax.Array:
    """The sum of the squares of leaves that are cut between tiles: for each along the tree of its tiles."""
    sums = collectives_here().all_gather([tile_sums(x) for x in leaves], axis_name)
    return sum(map(sum_of_tiles, fence(sums)), jnp.zeros((), jnp.float32))


def norm_of_whole(like: Any, leaves: Sequence[jax.Array], *_: Any) -> jax.Array:
    """The norm of leaves that every rank has whole, with the bits of the flat layout. ValueError if some are missing.

    like: parameters, for their dtypes.
    """
    if len(leaves) != (count := len(jax.tree.leaves(like))):
        raise ValueError(
            f"clip_by_global_norm: in replicated_optimizer the norm is that of all {count} gradients, and it got "
            f"{len(leaves)} of them, as with a mask or labels. The flat layout, whose bits replicated_optimizer has, "
            "takes neither. Put it in front of the mask, or use sharded_optimizer(..., layout='parameter')."
        )

    @jax.custom_jvp
    def total(leaves):
        vectors = jax.tree.leaves(flat(leaves, like, 1))
        return sum((sum_of_tiles(tile_sums(x)) for x in vectors), jnp.zeros((), jnp.float32))

    # Fences have no reverse mode.
    total.defjvp(lambda leaves, tangents: (total(*leaves), jax.jvp(sum_of_squares, leaves, tangents)[1]))
    return jnp.sqrt(total([*leaves]))


def _check_cut(updates: Any, axis_name: AxisName) -> None:
    """Raises ValueError for updates whose type says that every rank has the same ones."""
    check_named("clip_by_global_norm", axes_of(axis_name))
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if same_over := axes_of_equality(leaf, axis_name):
            raise ValueError(
                f"clip_by_global_norm: the leaf at {path_text(path)}, of type "
                f"{jax.typeof(leaf)}, is the same on all ranks of {same_over}, so its square would count once for "
                "each rank. This function is for the parts that ranks have within zero.sharded_optimizer; elsewhere "
                "use optax.clip_by_global_norm."
            )
