"""Clipping by the norm of the whole gradient, of which each rank of a sharded optimizer has a part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_ring.collectives.axes import AxisName
from jax_ring.training.implementations import Impl, implementation

if TYPE_CHECKING:
    import optax


def clip_by_global_norm(max_norm: float, axis_name: AxisName, *, impl: Impl = "ring") -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` for a sharded optimizer: `optax.chain(clip_by_global_norm(...), adam)`.

    The squares of the ranks' parts are added over the axis, so the norm is that of the whole mean gradient.

    Args:
      max_norm: the largest norm that is not clipped.
      axis_name, impl: as for `sharded_optimizer`.
    """
    import optax

    def update(updates, params):
        del params
        squares = sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(updates))
        norm = jnp.sqrt(implementation("clip_by_global_norm", impl).psum(squares, axis_name))
        return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, g / norm.astype(g.dtype) * max_norm), updates)

    return optax.stateless(update)
