"""The training layer's option `impl`: jax_ring's collectives, or `jax.lax`'s."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax import lax

from jax_ring import collectives
from jax_ring.collectives.leaves import bits_of_keys
from jax_ring.options import Order, bucketed, check_choice

Impl = Literal["ring", "lax"]


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


def _lax_broadcast(tree: Any, axis_name, *, root: int) -> Any:
    # jax.lax has no broadcast that keeps all bits and whose result is invariant over the axis.
    def broadcast(x):
        bits, from_bits = bits_of_keys(x)  # JAX up to 0.12 cannot lower an untiled all_gather of keys
        return from_bits(lax.all_gather(bits, axis_name, to="invarying")[root])

    return jax.tree.map(broadcast, tree)


_IMPLEMENTATIONS: dict[Impl, Implementation] = {
    "ring": Implementation(
        collectives.ring_psum,
        partial(collectives.ring_psum_scatter, tiled=True),
        partial(collectives.ring_all_gather, tiled=True, to="invarying"),
        collectives.ring_all_to_all,
        collectives.ring_broadcast,
    ),
    "lax": Implementation(
        lax.psum,
        partial(lax.psum_scatter, tiled=True),
        partial(lax.all_gather, tiled=True, to="invarying"),
        lax.all_to_all,
        _lax_broadcast,
    ),
}


def implementation(function: str, impl: Impl, overlap: bool = False, order: Order = "rank") -> Implementation:
    """The implementation named by `impl` of `function`.

    overlap, order: of jax_ring's collectives: whether GPUs run them beside computation, and in which order they add.

    Raises:
      ValueError: for another `impl`.
      TypeError: if `overlap` is no boolean.
    """
    check_choice(function, "impl", impl, get_args(Impl))
    if not isinstance(overlap, bool):
        raise TypeError(f"{function}: overlap must be True or False, got {overlap!r}")
    chosen = _IMPLEMENTATIONS[impl]
    if impl == "ring":
        psum, psum_scatter = partial(chosen.psum, order=order), partial(chosen.psum_scatter, order=order)
        chosen = chosen._replace(psum=psum, psum_scatter=psum_scatter)
    return Implementation(*(partial(_bucketed, overlap, collective) for collective in chosen))


def _bucketed(overlap: bool, collective: Callable, *args: Any, **kwargs: Any) -> Any:
    with bucketed(overlap):
        return collective(*args, **kwargs)
