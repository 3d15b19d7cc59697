"""Clipping by the norm of the whole gradient, of which each rank of a sharded optimizer has a part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jax_ring.collectives.axes import AxisName, axes_of
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
        norm = _global_norm(jax.tree.leaves(updates), axis_name, impl)
        return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, g / norm.astype(g.dtype) * max_norm), updates)

    return optax.stateless(update)


def sum_of_squares(leaves: Sequence[jax.Array]) -> jax.Array:
    """The sum of the squares of all elements, as a float32."""
    return sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves), jnp.zeros((), jnp.float32))


class NormRequest(NamedTuple):
    """A norm that was asked for within `norms_given`: of which leaves, and the implementation of the sum."""

    leaves: Any
    impl: Impl


class _Given(NamedTuple):
    axis_name: AxisName
    norms: Sequence[jax.Array]
    requests: list[NormRequest]
    trace: object


_given: ContextVar[_Given | None] = ContextVar("norms_given", default=None)


@contextlib.contextmanager
def norms_given(axis_name: AxisName, norms: Sequence[jax.Array]) -> Iterator[list[NormRequest]]:
    """Where a transformation sees all parameters, of which each rank only owns some: its norms are computed elsewhere.

    Args:
      axis_name: of the sharded optimizer.
      norms: the results, in the order in which they are asked for. The result is 1 when there are no more.

    Yields:
      The list of requests, to which each adds one.
    """
    given = _Given(axis_name, norms, [], get_opaque_trace_state())
    token = _given.set(given)
    try:
        yield given.requests
    finally:
        _given.reset(token)


def _global_norm(leaves: Sequence[jax.Array], axis_name: AxisName, impl: Impl) -> jax.Array:
    given = _given.get()
    if given is None:
        return jnp.sqrt(implementation("clip_by_global_norm", impl).psum(sum_of_squares(leaves), axis_name))
    if axes_of(axis_name) != axes_of(given.axis_name):
        raise ValueError(
            f"clip_by_global_norm is over {axis_name!r}, within a sharded_optimizer over {given.axis_name!r}: with "
            "layout='parameter' both must name the same axes"
        )
    if get_opaque_trace_state() != given.trace:
        raise ValueError(
            "clip_by_global_norm: with layout='parameter' it cannot be within a transformation that applies another one "
            "under a condition, as optax.MultiSteps does, or under jit. Chain it outside of that; to accumulate "
            "gradients use jax_ring.accumulate_gradients."
        )
    index = len(given.requests)
    given.requests.append(NormRequest(leaves, impl))
    return given.norms[index] if index < len(given.norms) else jnp.ones((), jnp.float32)
