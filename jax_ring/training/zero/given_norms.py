"""What `zero.clip_by_global_norm` has to know of the optimizer around it: in which order to add, and of what."""

import contextlib
from collections.abc import Callable
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_ring.collectives.axes import AxisName, axes_of
from jax_ring.options import Order, promoted, setting

# (leaves, axis_name, order) -> their norm.
Norm = Callable[[list[jax.Array], AxisName, Order], jax.Array]

# Stands for the norm over the ranks of `axes` in an update that is analyzed, or computed in parts.
NORM = Primitive("norm")
NORM.def_abstract_eval(lambda *leaves, axes, order, dtype: jax.core.ShapedArray((), dtype))

_norm: ContextVar[Norm | None] = ContextVar("norm", default=None)
_order: ContextVar[Order | None] = ContextVar("order", default=None)


def as_equation(leaves: list[jax.Array], axis_name: AxisName, order: Order) -> jax.Array:
    """The norm as a `NORM`. What is traced with it cannot be computed."""
    # Of complex leaves: that of their absolute values.
    dtype = jnp.finfo(promoted(jnp.float32, *(x.dtype for x in leaves))).dtype
    return NORM.bind(*leaves, axes=axes_of(axis_name), order=order, dtype=dtype)


def norm_given_by(norm: Norm) -> contextlib.AbstractContextManager[None]:
    """For the time of tracing an update: what gives its norms, unless what is around this block does."""
    return setting(_norm, _norm.get() or norm)


def norm_here() -> Norm | None:
    """What gives a norm here; None where it is that of the parts that ranks have."""
    return _norm.get()


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
