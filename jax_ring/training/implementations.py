"""The collectives of training: jax_ring's, or those of `jax.lax`, with which tests and benchmarks compare them."""

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from jax_ring import collectives
from jax_ring.collectives.axes import AxisName
from jax_ring.collectives.leaves import bits_of_keys
from jax_ring.options import Order, bucketed, setting

_by_lax: ContextVar[bool] = ContextVar("by_lax", default=False)


def reduced_by(name: Literal["ring", "lax"]) -> contextlib.AbstractContextManager[None]:
    """For tests and benchmarks: whose collectives the functions of training use that are traced in this block.

    Also a decorator. `jax.lax` adds in XLA's order, whatever `order` says.
    """
    return setting(_by_lax, name == "lax")


def is_by_lax() -> bool:
    """Whether `jax.lax` reduces here."""
    return _by_lax.get()


class Implementation(NamedTuple):
    """The training layer's collectives, each (tree, axis_name) -> tree.

    Scattered and gathered in tiles along dimension 0; what is gathered is invariant over the axis with vma tracking.
    all_to_all takes split_axis and concat_axis, too, and broadcast the keyword argument `root`.
    """

    psum: Callable
    psum_scatter: Callable
    all_gather: Callable
    all_to_all: Callable
    broadcast: Callable


def implementation(overlap: bool = False, order: Order = "rank") -> Implementation:
    """The collectives to use here.

    overlap, order: of jax_ring's: whether GPUs run them beside computation, and in which order they add.
    """
    if is_by_lax():
        return Implementation(
            lax.psum,
            partial(lax.psum_scatter, tiled=True),
            partial(lax.all_gather, tiled=True, to="invarying"),
            lax.all_to_all,
            _lax_broadcast,
        )
    chosen = (
        partial(collectives.ring_psum, order=order),
        partial(collectives.ring_psum_scatter, tiled=True, order=order),
        partial(collectives.ring_all_gather, tiled=True, to="invarying"),
        collectives.ring_all_to_all,
        collectives.ring_broadcast,
    )
    return Implementation(*(partial(_bucketed, overlap, collective) for collective in chosen))


def _bucketed(overlap: bool, collective: Callable, *args: Any, **kwargs: Any) -> Any:
    with bucketed(overlap):
        return collective(*args, **kwargs)


def _lax_broadcast(tree: Any, axis_name: AxisName, *, root: int) -> Any:
    # jax.lax has no broadcast that keeps all bits and whose result is invariant over the axis.
    def broadcast(x):
        bits, from_bits = bits_of_keys(x)  # JAX up to 0.12 cannot lower an untiled all_gather of keys
        return from_bits(lax.all_gather(bits, axis_name, to="invarying")[root])

    return jax.tree.map(broadcast, tree)
