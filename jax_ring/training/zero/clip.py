"""Clipping by the norm of the whole gradient, which a sharded optimizer divides over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring.collectives import ring_psum
from jax_ring.collectives.axes import AxisName, axes_of, axes_of_equality, check_axis_name, check_named
from jax_ring.options import ORDERS, Order, array_or_none, check_choice, path_text, promoted
from jax_ring.training.implementations import implementation, is_by_lax
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.zero.block_sums import block_sums, sum_of_blocks
from jax_ring.training.zero.given_norms import norm_here, order_here
from jax_ring.training.zero.vectors import flat

if TYPE_CHECKING:
    import optax


def clip_by_global_norm(
    max_norm: float, axis_name: AxisName, *, order: Order | None = None
) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` for a sharded optimizer: `optax.chain(clip_by_global_norm(...), adam)`.

        tx = optax.chain(zero.clip_by_global_norm(1.0, "data"), optax.adam(1e-3))
        optimizer = zero.sharded_optimizer(tx, "data")

    The squares of the ranks' parts are added over the axis: the norm of the whole mean gradient. It is computed in
    float32, or in the dtype of the gradients if that is wider. Gradients that every rank has whole need
    `optax.clip_by_global_norm`, as each copy would count here, unless it is within a `replicated_optimizer`.

    Args:
      max_norm: the largest norm that is not clipped.
      axis_name: as for `sharded_optimizer`.
      order: of the sum over the ranks, as for `sharded_optimizer`; by default the order of the sharded optimizer around
        it, or "rank". With "tree" squares are added in blocks of 1024 elements and then along a fixed tree of blocks,
        so that the norm does not depend on the number of ranks. Parts must then begin at multiples of 1024 elements, as
        those of a `sharded_optimizer` with order="tree" do.

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
    check_choice("clip_by_global_norm", "order", order or "rank", ORDERS)
    _check_max_norm(max_norm)

    def update(updates, params):
        del params
        leaves = jax.tree.leaves(updates)
        chosen = order_here(order)
        if (given := norm_here()) is not None:
            norm = given(leaves, axis_name, chosen)
        else:
            _check_cut(updates, axis_name)
            if chosen == "tree":
                norm = jnp.sqrt(_sum_in_blocks(leaves, axis_name))
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


def _sum_in_blocks(leaves: Sequence[jax.Array], axis_name: AxisName) -> jax.Array:
    """The sum of the squares of leaves that are cut between blocks: for each along the tree of its blocks."""
    sums = implementation().all_gather([block_sums(x) for x in leaves], axis_name)
    return sum(map(sum_of_blocks, fence(sums)), jnp.zeros((), jnp.float32))


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
        return sum((sum_of_blocks(block_sums(x)) for x in vectors), jnp.zeros((), jnp.float32))

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
