"""The choice that all of the training layer offers: collectives of this library, or those of `jax.lax`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from jax_ring import collectives


class Implementation(NamedTuple):
    """What the training layer is made of. Every member takes (tree, axis_name)."""

    psum: Callable
    psum_scatter: Callable  # along dimension 0, tiled
    all_gather: Callable  # the same, back; with vma tracking, to a result that is invariant over the axis
    broadcast: Callable  # takes root= as well


def _lax_broadcast(tree: Any, axis_name, *, root: int) -> Any:
    # jax.lax has none that keeps all bits and is invariant over the axis.
    return jax.tree.map(lambda x: lax.all_gather(x, axis_name, to="invarying")[root], tree)


IMPLEMENTATIONS = {
    "ring": Implementation(
        collectives.ring_psum,
        partial(collectives.ring_psum_scatter, tiled=True),
        partial(collectives.ring_all_gather, tiled=True, to="invarying"),
        collectives.ring_broadcast,
    ),
    "lax": Implementation(
        lax.psum,
        partial(lax.psum_scatter, tiled=True),
        partial(lax.all_gather, tiled=True, to="invarying"),
        _lax_broadcast,
    ),
}


def implementation(function: str, impl: str) -> Implementation:
    """That of the given name, for a call of `function`.

    Raises:
      ValueError: if there is none.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"{function}: impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; got {impl!r}")
    return IMPLEMENTATIONS[impl]
