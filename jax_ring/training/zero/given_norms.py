"""Norms over all parameters, for a transformation that is traced once though each rank owns only some of them."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, get_opaque_trace_state

from jax_ring.collectives.axes import AxisName, axes_of
from jax_ring.options import Order, promoted, setting
from jax_ring.training.implementations import Impl


class NormRequest(NamedTuple):
    """A norm that a transformation has asked for.

    Attributes:
      leaves: of what; values of the trace, or whatever stands for them.
      impl: the implementation of the sum over the ranks.
      order: of the sum.
      dtype: of the norm.
    """

    leaves: Any
    impl: Impl
    order: Order
    dtype: Any


class _Given(NamedTuple):
    axis_name: AxisName
    norms: Sequence[jax.Array]
    requests: list[NormRequest]
    trace: object


# Stands for the norm over the ranks of `axes` while an update is only analyzed.
NORM = Primitive("norm")
NORM.def_abstract_eval(lambda *leaves, axes, dtype: jax.core.ShapedArray((), dtype))

_given: ContextVar[_Given | None] = ContextVar("given_norms", default=None)
_order: ContextVar[Order | None] = ContextVar("order", default=None)
_whole: ContextVar[Any] = ContextVar("whole", default=None)
_as_equations: ContextVar[bool] = ContextVar("norms_as_equations", default=False)


def norms_as_equations() -> contextlib.AbstractContextManager[None]:
    """In the block `given_norm` binds `NORM`. What is traced in it cannot be computed."""
    return setting(_as_equations, True)


def order_given(order: Order) -> contextlib.AbstractContextManager[None]:
    """For the time of tracing an update: the order in which the sharded optimizer around it adds gradients."""
    return setting(_order, order)


def order_here(order: Order | None) -> Order:
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


def whole_on_each_rank(like: Any) -> contextlib.AbstractContextManager[None]:
    """For the time of tracing an update of parameters that every rank has whole; `like` has their dtypes."""
    return setting(_whole, like)


def whole_here() -> Any:
    """What `whole_on_each_rank` got, if this is in its block; else None."""
    return _whole.get()


@contextlib.contextmanager
def norms_given(axis_name: AxisName, norms: Sequence[jax.Array]) -> Iterator[list[NormRequest]]:
    """In the block `given_norm` returns these norms, in the order in which it is called; 1 when there are no more.

    Args:
      axis_name: of the sharded optimizer.
      norms: scalars.

    Yields:
      The list of requests, to which each call adds one.
    """
    given = _Given(axis_name, norms, [], get_opaque_trace_state())
    with setting(_given, given):
        yield given.requests


def given_norm(leaves: Sequence[jax.Array], axis_name: AxisName, impl: Impl, order: Order) -> jax.Array | None:
    """The norm of all leaves of all ranks; None outside of the blocks above, where the caller computes it.

    Raises:
      ValueError: within `norms_given`, if it is over other axes, or the call is within a nested trace.
    """
    # Of complex leaves: that of their absolute values.
    dtype = jnp.finfo(promoted(jnp.float32, *(x.dtype for x in leaves))).dtype
    if _as_equations.get():
        return NORM.bind(*leaves, axes=axes_of(axis_name), dtype=dtype)
    given = _given.get()
    if given is None:
        return None
    if axes_of(axis_name) != axes_of(given.axis_name):
        raise ValueError(
            f"clip_by_global_norm is over {axis_name!r}, within a sharded_optimizer over {given.axis_name!r}: with "
            "layout='parameter' both must name the same axes"
        )
    if get_opaque_trace_state() != given.trace:
        raise ValueError(
            "clip_by_global_norm: with layout='parameter' it cannot be within a transformation that applies another "
            "one under a condition, as optax.MultiSteps does, or under jit. Chain it outside of that; to accumulate "
            "gradients use jax_ring.accumulate_gradients."
        )
    index = len(given.requests)
    given.requests.append(NormRequest(list(leaves), impl, order, dtype))
    return given.norms[index].astype(dtype) if index < len(given.norms) else jnp.ones((), dtype)
