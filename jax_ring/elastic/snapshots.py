"""Host copies of a state: whole arrays, and parts of divided ones."""

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ring import _compat
from jax_ring.options import path_texts

Box = tuple[tuple[int, int], ...]  # the range of each dimension


@dataclasses.dataclass(frozen=True)  # not a tuple: JAX would treat it as a tree
class Typed:
    """An array whose type numpy has not: the bits of random keys, or values of a weak type."""

    array: Any
    key_impl: str | None  # the generator; None for a weak type


class Divided(NamedTuple):
    """An array divided over the devices of several processes."""

    shape: tuple[int, ...]  # of the whole array
    dtype: np.dtype
    boxes: tuple[tuple[Box, ...], ...]  # by process, where its parts are
    parts: dict[int, list[np.ndarray]]  # by process, those that are here

    @classmethod
    def of(cls, x: jax.Array, process: int, num_processes: int) -> "Divided":
        """Copies of this process's parts."""
        owners: dict[Box, int] = {}
        device: Any
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            box = tuple(slice_.indices(size)[:2] for slice_, size in zip(index, x.shape, strict=True))
            owners[box] = min(owners.get(box, num_processes), device.process_index)
        boxes = tuple(tuple(sorted(box for box in owners if owners[box] == p)) for p in range(num_processes))
        here = {
            tuple(slice_.indices(size)[:2] for slice_, size in zip(shard.index, x.shape, strict=True)): shard
            for shard in x.addressable_shards
        }
        own = [np.array(here[box].data) for box in boxes[process]]
        return cls(x.shape, np.dtype(x.dtype), boxes, {process: own})

    def num_bytes(self, process: int) -> int:
        """The bytes of a process's parts."""
        sizes = (int(np.prod([stop - start for start, stop in box])) for box in self.boxes[process])
        return sum(sizes) * self.dtype.itemsize

    def unpack(self, process: int, data: np.ndarray) -> None:
        shapes = [[stop - start for start, stop in box] for box in self.boxes[process]]
        parts = cut(data, [int(np.prod(shape)) * self.dtype.itemsize for shape in shapes])
        self.parts[process] = [part.view(self.dtype).reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def whole(self) -> np.ndarray:
        """The array; all parts must be here."""
        result = np.empty(self.shape, self.dtype)
        for process, boxes in enumerate(self.boxes):
            for box, part in zip(boxes, self.parts[process], strict=True):
                result[tuple(slice(*ends) for ends in box)] = part
        return result


class _Empty(NamedTuple):
    """Stands for an array in a header."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Snapshot(NamedTuple):
    """A commit, as one process keeps it."""

    number: int  # of earlier commits
    structure: Any  # that of the dictionary of trees
    leaves: list[Any]  # arrays of numpy, `Divided`, `Typed` with either, and copies of anything else
    num_processes: int  # over which leaves are divided
    held: tuple[int, ...] | None  # the processes whose parts are here; None if no leaf is divided

    @classmethod
    def of(cls, trees: Mapping[str, Any], number: int, process: int, num_processes: int) -> "Snapshot":
        """Copies a state to host memory, once it is computed. Raises TypeError if Python cannot copy a leaf."""
        leaves, structure = jax.tree.flatten(dict(trees))
        copies: list[Any] = []
        for leaf in leaves:
            try:
                copies.append(_copied(leaf, process, num_processes))
            except TypeError as error:
                path = path_texts(dict(trees))[len(copies)]
                raise TypeError(
                    f"State: the leaf at {path}, a {type(leaf).__name__}, cannot be copied ({error}). Make "
                    "what cannot be copied in train, an iterator of data from the step for example."
                ) from error
        held = (process,) if any(isinstance(array_of(leaf), Divided) for leaf in copies) else None
        return cls(number, structure, copies, num_processes, held)

    @classmethod
    def of_header(cls, header: bytes, values: Mapping[str, Any], process: int, root: int) -> "Snapshot":
        """The snapshot of a header, with arrays to be filled, in the structure of this process's state.

        values: that state. process, root: this process, and the one whose header it is. Raises RuntimeError if it is
        of a state with other leaves.
        """
        number, paths, leaves, num_processes, is_divided = pickle.loads(header)
        own = path_texts(dict(values))
        if own != paths:
            difference = sorted(set(own) ^ set(paths))
            raise RuntimeError(
                f"jax_ring.elastic: the state of this process, {process}, has other leaves than that of process "
                f"{root}: {', '.join(difference[:6]) or 'in another order'}. All processes must make the state in the "
                "same way, and its trees keep their structure."
            )

        def with_empty(leaf):
            array = array_of(leaf)
            return with_array(leaf, np.empty(array.shape, array.dtype)) if isinstance(array, _Empty) else leaf

        structure = jax.tree.structure(dict(values))
        return cls(number, structure, [*map(with_empty, leaves)], num_processes, () if is_divided else None)

    def header(self) -> bytes:
        """The snapshot without its arrays: what is sent or kept before the arrays themselves.

        Raises RuntimeError if a leaf that is no array cannot be pickled.
        """

        def without_array(leaf):
            array = array_of(leaf)
            if isinstance(array, Divided):
                return with_array(leaf, array._replace(parts={}))
            return with_array(leaf, _Empty(array.shape, array.dtype)) if isinstance(array, np.ndarray) else leaf

        leaves = [*map(without_array, self.leaves)]
        paths = self.paths()
        try:
            return pickle.dumps((self.number, paths, leaves, self.num_processes, self.held is not None))
        except Exception as error:
            kinds = sorted({type(array_of(leaf)).__name__ for leaf in self.leaves} - {"ndarray", "Divided"})
            raise RuntimeError(
                "jax_ring.elastic: a leaf of the state cannot be sent to a new process: it is no array, and cannot be "
                f"pickled ({error}). The leaves that are no arrays have the types {', '.join(kinds)}."
            ) from error

    def paths(self) -> list[str]:
        return path_texts(jax.tree.unflatten(self.structure, range(len(self.leaves))))

    def divided(self) -> list[Divided]:
        return [array for leaf in self.leaves if isinstance(array := array_of(leaf), Divided)]

    def undivided(self) -> list[np.ndarray]:
        return [array for leaf in self.leaves if isinstance(array := array_of(leaf), np.ndarray)]

    def num_bytes(self, process: int) -> int:
        return sum(leaf.num_bytes(process) for leaf in self.divided())

    def packed(self, process: int) -> np.ndarray:
        """The bytes of a process's parts, which must be here."""
        return joined([part for leaf in self.divided() for part in leaf.parts[process]])

    def with_parts(self, received: Mapping[int, np.ndarray]) -> "Snapshot":
        """With other processes' parts, from their bytes."""
        leaves = self.divided()
        for process, data in received.items():
            parts = cut(data, [leaf.num_bytes(process) for leaf in leaves])
            for leaf, own in zip(leaves, parts, strict=True):
                leaf.unpack(process, own)
        return self._replace(held=tuple(sorted({*(self.held or ()), *received})))

    def whole(self) -> "Snapshot":
        """With no leaf divided; all parts must be here."""
        leaves = [with_array(leaf, a.whole()) if isinstance(a := array_of(leaf), Divided) else leaf
                  for leaf in self.leaves]  # fmt: skip
        return self._replace(leaves=leaves, held=None)

    def trees(self) -> dict[str, Any]:
        """The trees, with writable arrays of numpy and JAX's random keys; no leaf may be divided."""
        return jax.tree.unflatten(self.structure, [_for_user(leaf) for leaf in self.leaves])

    def trees_without_backend(self) -> dict[str, Any]:
        """The trees without JAX, from which a snapshot can be made; `Lost` for divided leaves."""
        leaves = [Lost() if isinstance(array_of(leaf), Divided) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


class Have(NamedTuple):
    """What others need to know of a process's or a host's snapshot."""

    num_processes: int  # over which its divided leaves are divided
    held: Sequence[int] | None  # the processes whose parts it has; None if no leaf is divided


def array_of(leaf: Any) -> Any:
    """The array of a leaf, or the leaf."""
    return leaf.array if isinstance(leaf, Typed) else leaf


def with_array(leaf: Any, array: Any) -> Any:
    return dataclasses.replace(leaf, array=array) if isinstance(leaf, Typed) else array


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return np.concatenate(flat) if flat else np.empty(0, np.uint8)


def cut(data: np.ndarray, sizes: Iterable[int]) -> list[np.ndarray]:
    """The inverse of `joined`."""
    return [data[begin:end] for begin, end in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def _copied(leaf: Any, process: int, num_processes: int) -> Any:
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            bits = _copied(jax.random.key_data(leaf), process, num_processes)
            return Typed(bits, str(jax.random.key_impl(leaf)))
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            array: Any = np.array(leaf if leaf.is_fully_addressable else leaf.addressable_data(0))
        else:
            array = Divided.of(leaf, process, num_processes)
        return Typed(array, None) if leaf.weak_type else array
    return np.array(leaf) if isinstance(leaf, np.ndarray | np.generic) else copy.deepcopy(leaf)


class Lost:
    """A divided leaf lost before the first commit."""


def _for_user(leaf: Any) -> Any:
    if isinstance(leaf, Typed):
        impl = leaf.key_impl
        return jax.random.wrap_key_data(leaf.array, impl=impl) if impl else _compat.weakly_typed(leaf.array)
    return leaf.copy() if isinstance(leaf, np.ndarray) else copy.deepcopy(leaf)
