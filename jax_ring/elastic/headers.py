"""A snapshot without its arrays, as bytes: what is sent or kept before the arrays themselves."""

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ring.elastic.snapshots import Divided, Snapshot, array_of, with_array
from jax_ring.options import path_texts


class _Empty(NamedTuple):
    """Stands for an array."""

    shape: tuple[int, ...]
    dtype: np.dtype


def header_of(snapshot: Snapshot) -> bytes:
    """The snapshot without its arrays.

    Raises:
      RuntimeError: if a leaf that is no array cannot be pickled.
    """

    def without_array(leaf):
        array = array_of(leaf)
        if isinstance(array, Divided):
            return with_array(leaf, array._replace(parts={}))
        return with_array(leaf, _Empty(array.shape, array.dtype)) if isinstance(array, np.ndarray) else leaf

    leaves = [without_array(leaf) for leaf in snapshot.leaves]
    paths = snapshot.paths()
    try:
        return pickle.dumps((snapshot.number, paths, leaves, snapshot.num_processes, snapshot.held is not None))
    except Exception as error:
        kinds = sorted({type(array_of(leaf)).__name__ for leaf in snapshot.leaves} - {"ndarray", "Divided"})
        raise RuntimeError(
            "jax_ring.elastic: a leaf of the state cannot be sent to a new process: it is no array, and cannot be "
            f"pickled ({error}). The leaves that are no arrays have the types {', '.join(kinds)}."
        ) from error


def without_arrays(header: bytes, values: Mapping[str, Any], process: int, root: int) -> Snapshot:
    """The snapshot of a header, with arrays to be filled, in the structure of this process's state.

    values: that state. process, root: this process, and the one whose header it is.

    Raises:
      RuntimeError: if it is of a state with other leaves.
    """
    number, paths, leaves, num_processes, is_divided = pickle.loads(header)
    own = path_texts(dict(values))
    if own != paths:
        difference = sorted(set(own) ^ set(paths))
        raise RuntimeError(
            f"jax_ring.elastic: the state of this process, {process}, has other leaves than that of process {root}: "
            f"{', '.join(difference[:6]) or 'in another order'}. All processes must make the state in the same way, "
            "and its trees keep their structure."
        )

    def with_empty(leaf):
        array = array_of(leaf)
        return with_array(leaf, np.empty(array.shape, array.dtype)) if isinstance(array, _Empty) else leaf

    structure = jax.tree.structure(dict(values))
    return Snapshot(number, structure, [*map(with_empty, leaves)], num_processes, () if is_divided else None)
