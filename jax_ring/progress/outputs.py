"""Which outputs of a step tell that it is completed, so that a thread can wait for them."""

import operator
from collections.abc import Callable
from typing import Any

import jax

_GETTERS: dict[type, Callable] = {
    jax.tree_util.SequenceKey: lambda key: operator.itemgetter(key.idx),
    jax.tree_util.DictKey: lambda key: operator.itemgetter(key.key),
    jax.tree_util.GetAttrKey: lambda key: operator.attrgetter(key.name),
}


class Representative:
    """Finds in the outputs of each call of a program a small array that the next call does not take.

    All outputs of a program are ready at the same time. Keeping the large ones would take memory, and flattening many
    of them time in each step. Those that are donated to the next step are deleted before a thread can wait for them, so
    another one is taken from then on.
    """

    def __init__(self) -> None:
        self._paths: list[list[Callable]] = []  # to the arrays, from the smallest
        self._num_deleted = 0

    def of(self, outputs: Any) -> list[jax.Array]:
        """One array, or none."""
        if self._paths:
            found = outputs
            try:
                for get in self._paths[self._num_deleted % len(self._paths)]:
                    found = get(found)
            except (KeyError, IndexError, AttributeError, TypeError):
                found = None  # another structure
            if isinstance(found, jax.Array):
                return [found]
        return self._choose(outputs)

    def note_deleted(self) -> None:
        self._num_deleted += 1

    def _choose(self, outputs: Any) -> list[jax.Array]:
        found = [
            (leaf.nbytes, index, leaf, _getters(path, index))
            for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(outputs))
            if isinstance(leaf, jax.Array) and leaf.nbytes and leaf.sharding.addressable_devices
        ]
        found.sort(key=lambda each: each[:2])
        self._paths, self._num_deleted = [getters for *_, getters in found], 0
        return [found[0][2]] if found else []


def _getters(path: tuple, index: int) -> list[Callable]:
    if all(type(key) in _GETTERS for key in path):
        return [_GETTERS[type(key)](key) for key in path]
    return [lambda tree: jax.tree.leaves(tree)[index]]


def arrays_of(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def wait(arrays: list[jax.Array]) -> bool:
    """Waits until arrays are ready or have failed. Returns False if all were donated before, which tells nothing."""
    left = [array for array in arrays if not array.is_deleted()]
    try:
        jax.block_until_ready(left)  # at once: each wait of its own would need Python's lock again
    except Exception:  # donated meanwhile, or failed, which raises at the caller as well
        left = [array for array in left if not array.is_deleted()]
    return bool(left) or not arrays
