"""A commit as one process has it, and its header: JSON that says what its arrays are, checked before it is believed."""

import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring import _compat
from jax_ring.launcher.schema import escaped
from jax_ring.options import path_texts

Box = tuple[tuple[int, int], ...]  # the range of each dimension

# A snapshot's arrays come in sections: what is not divided over the processes, and by process its parts of what is.
UNDIVIDED = -1
_DTYPES = {
    str(each.dtype): each.dtype for each in vars(jnp).values() if isinstance(getattr(each, "dtype", 0), np.dtype)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # numpy takes long to name one
_OF_ARRAYS = ("path", "dtype", "shape", "boxes", "key", "weak")
_MAX_BITS = 8192  # of an integer; Python refuses texts of much longer ones
_MAX_DIMENSIONS = 32
_MAX_PROCESSES = 1 << 20


@dataclasses.dataclass(frozen=True)  # not a tuple: JAX would treat it as a tree
class Leaf:
    """A leaf of a state, without its array."""

    path: str
    # Of one that is no array. It may differ between processes.
    value: bool | int | float | str | None = dataclasses.field(default=None, compare=False)
    dtype: np.dtype | None = None  # None if it is no array
    shape: tuple[int, ...] = ()  # of the whole array
    boxes: tuple[tuple[Box, ...], ...] | None = None  # by process, where its parts are; None if it is not divided
    key: str | None = None  # the generator of random keys, whose bits the array has
    weak: bool = False  # whether JAX's type is weak

    def shapes(self, section: int) -> list[tuple[int, ...]]:
        """The shapes in a section, of one that is an array."""
        if (self.boxes is None) != (section == UNDIVIDED):
            return []
        boxes = self.boxes[section] if self.boxes is not None else [[(0, size) for size in self.shape]]
        return [tuple(stop - start for start, stop in box) for box in boxes]

    def to_json(self) -> dict[str, Any]:
        if self.dtype is None:
            return {"path": self.path, "value": self.value}
        more = {name: value for name in _OF_ARRAYS[3:] if (value := getattr(self, name))}
        return {"path": self.path, "dtype": _NAMES[self.dtype], "shape": self.shape, **more}

    @classmethod
    def of_json(cls, found: Any, num_processes: int) -> "Leaf":
        """Raises ValueError if it is none of that many processes."""
        _check(type(found) is dict and type(found.get("path")) is str, f"{found!r:.80} is no leaf")
        if "value" in found:
            _check(len(found) == 2 and _is_value(found["value"]), f"{found!r:.200} is no value")
            return cls(**found)
        path, name, shape, boxes, key, weak = map(found.get, _OF_ARRAYS)
        is_shape = _are_counts(shape) and len(shape) <= _MAX_DIMENSIONS
        is_known = type(name) is str and name in _DTYPES and (key is None or type(key) is str) and weak in (None, True)
        _check(set(found) <= {*_OF_ARRAYS} and is_shape and is_known, f"{found!r:.200} is no array")
        if boxes is not None:
            _check(type(boxes) is list and len(boxes) == num_processes, f"{path} is not of {num_processes} processes")
            boxes = tuple(tuple(_box(box, shape, path) for box in each) for each in boxes)
        leaf = cls(path, None, _DTYPES[name], tuple(shape), boxes, key, bool(weak))
        least = math.prod(max(1, n) for n in shape)  # numpy limits the shapes of empty arrays too
        _check(least * _DTYPES[name].itemsize <= _memory(), f"{path} is larger than this host's memory")
        if boxes is not None:
            size = sum(math.prod(part) for process in range(num_processes) for part in leaf.shapes(process))
            _check(size == math.prod(shape), f"the parts of {path} have {size} of {math.prod(shape)} elements")
            _check(_divides([box for each in boxes for box in each]), f"the parts of {path} overlap")
        if key is not None:
            _check(key.isprintable(), f"{key!r:.80} names no generator of random numbers")  # JAX's error has it raw
            bits = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=key), bits)
        return leaf


class Snapshot:
    """What a process has of a commit.

    arrays: by section, those of all leaves, and of one leaf by its boxes; of numpy or JAX. num_processes: over which
    leaves are divided.
    """

    def __init__(self, leaves: Iterable[Leaf], num_processes: int, arrays: dict[int, list[Any]]) -> None:
        self.leaves, self.num_processes, self.arrays = list(leaves), num_processes, arrays

    @classmethod
    def of(cls, trees: Mapping[str, Any], process: int, num_processes: int) -> "Snapshot":
        """A state's arrays, not copied. Raises TypeError if a leaf cannot be kept."""
        leaves: list[Leaf] = []
        undivided: list[Any] = []
        own: list[Any] = []
        of_trees, structure = jax.tree.flatten(dict(trees))
        for path, leaf in zip(_paths(structure), of_trees, strict=True):
            described, arrays = _described(path, leaf, process, num_processes)
            leaves.append(described)
            (undivided if described.boxes is None else own).extend(arrays)
        is_divided = any(leaf.boxes is not None for leaf in leaves)
        return cls(leaves, num_processes, {UNDIVIDED: undivided} | ({process: own} if is_divided else {}))

    @classmethod
    def of_header(cls, header: bytes, where: str) -> tuple["Snapshot", list[int]]:
        """The snapshot of a header, without arrays, and the sections that follow it.

        where: it comes from, for the RuntimeError if it is not one.
        """
        try:
            found = json.loads(header)
            _check(type(found) is dict and set(found) == {"processes", "sections", "leaves"}, "it is no header")
            count, sections = found["processes"], found["sections"]
            _check(type(count) is int and 1 <= count <= _MAX_PROCESSES, f"it is of {count!r:.80} processes")
            leaves = [Leaf.of_json(each, count) for each in found["leaves"]]
            snapshot = cls(leaves, count, {})
            known = [each for each in sections if type(each) is int and UNDIVIDED <= each < snapshot.num_parts]
            _check(known == sections and len({*known}) == len(known), f"its sections are {sections!r:.80}")
            size = snapshot.num_bytes(UNDIVIDED, *range(snapshot.num_parts))
            _check(size <= _memory(), f"its {size} bytes are more than this host's memory")
        except (ValueError, TypeError, RecursionError) as error:  # JAX's as well
            raise RuntimeError(
                f"jax_ring.elastic: {where} is damaged, or of another version of jax_ring: {escaped(str(error))}"
            ) from error
        return snapshot, sections

    def header(self, sections: Sequence[int] = ()) -> bytes:
        """What is sent or kept before the bytes of sections."""
        leaves = [leaf.to_json() for leaf in self.leaves]
        return json.dumps({"processes": self.num_processes, "sections": [*sections], "leaves": leaves}).encode()

    @property
    def num_parts(self) -> int:
        """The number of processes that have parts; 0 if no leaf is divided."""
        return self.num_processes if any(leaf.boxes is not None for leaf in self.leaves) else 0

    def num_bytes(self, *sections: int) -> int:
        return sum(math.prod(shape) * dtype.itemsize for section in sections for dtype, shape in self._types(section))

    def data(self, section: int) -> Iterator[np.ndarray]:
        """The bytes of a section, which must be here: those of one array after the other."""
        return (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in self.arrays[section])

    def packed(self, sections: Iterable[int]) -> np.ndarray:
        """The bytes of sections, one after the other."""
        return np.concatenate([np.empty(0, np.uint8), *(data for section in sections for data in self.data(section))])

    def unpack(self, sections: Iterable[int], data: np.ndarray) -> None:
        """Takes sections from their bytes."""
        begin = 0
        for section in sections:
            arrays = self.arrays[section] = []
            for dtype, shape in self._types(section):
                end = begin + math.prod(shape) * dtype.itemsize
                arrays.append(data[begin:end].view(dtype).reshape(shape))
                begin = end

    def types(self) -> list[tuple]:
        """What must be the same in all processes, of each leaf: first its shape."""
        return [(leaf.shape, _NAMES.get(leaf.dtype), leaf.path, leaf.key, leaf.weak) for leaf in self.leaves]

    def undivided(self) -> "Snapshot":
        """A snapshot with no leaf divided; all sections must be here."""
        arrays = [array for array in self._whole() if array is not None]
        return Snapshot([dataclasses.replace(leaf, boxes=None) for leaf in self.leaves], 1, {UNDIVIDED: arrays})

    def trees(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Copies for the user: writable arrays of numpy, and JAX's random keys and weak types.

        values: trees of the structure. All sections must be here.
        """
        leaves = map(_for_user, self.leaves, self._whole())
        found = jax.tree.unflatten(jax.tree.structure(dict(values)), leaves)
        return {name: found[name] for name in values}  # JAX has sorted the names

    def paths_not_in_both(self, values: Mapping[str, Any]) -> str:
        """Which leaves a state and this snapshot do not both have; empty if they have the same ones."""
        ours, theirs = [leaf.path for leaf in self.leaves], _paths(jax.tree.structure(dict(values)))
        if ours == theirs:
            return ""
        return ", ".join(map(escaped, sorted(set(ours) ^ set(theirs))[:6])) or "the same, in another order"

    def _types(self, section: int) -> Iterator[tuple[np.dtype, tuple[int, ...]]]:
        """The types of the arrays of a section."""
        return ((leaf.dtype, shape) for leaf in self.leaves if leaf.dtype is not None for shape in leaf.shapes(section))

    def _whole(self) -> Iterator[np.ndarray | None]:
        """The whole array of each leaf; None for a value."""
        following = {section: iter(arrays) for section, arrays in self.arrays.items()}
        for leaf in self.leaves:
            if leaf.dtype is None:
                yield None
            elif leaf.boxes is None:
                yield np.asarray(next(following[UNDIVIDED]))
            else:
                whole = np.empty(leaf.shape, leaf.dtype)
                for process, boxes in enumerate(leaf.boxes):
                    for box in boxes:
                        whole[tuple(slice(*ends) for ends in box)] = next(following[process])
                yield whole


@functools.lru_cache(maxsize=4)
def _paths(structure: Any) -> list[str]:
    return path_texts(jax.tree.unflatten(structure, range(structure.num_leaves)))


def _described(path: str, leaf: Any, process: int, num_processes: int) -> tuple[Leaf, list[Any]]:
    """A leaf of a state, and what this process has of it."""
    if _is_value(leaf):
        return Leaf(path, leaf), []
    key = None
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    if is_array and leaf.dtype not in _NAMES and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    if not is_array or leaf.dtype not in _NAMES:
        kind = f"{type(leaf).__name__} of {leaf.dtype}" if is_array else type(leaf).__name__
        raise TypeError(
            f"State: the leaf at {path}, a {kind}, cannot be kept: leaves are arrays of JAX's types, random keys, and "
            "Python's bool, int, float and str. Convert it, to an array of numpy for example, or make it in train, as "
            "an iterator of data from the step."
        )
    weak = key is None and getattr(leaf, "weak_type", False)
    described = Leaf(path, None, np.dtype(leaf.dtype), tuple(leaf.shape), None, key, weak)
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return described, [leaf]
    if leaf.is_fully_replicated:
        return described, [leaf.addressable_data(0)]
    boxes, own = _divided(leaf, process, num_processes)
    return dataclasses.replace(described, boxes=boxes), own


def _divided(x: jax.Array, process: int, num_processes: int) -> tuple[tuple[tuple[Box, ...], ...], list[jax.Array]]:
    """Where the parts of each process are, and this process's."""

    def box_of(index: tuple[slice, ...]) -> Box:
        return tuple(each.indices(size)[:2] for each, size in zip(index, x.shape, strict=True))

    owners: dict[Box, int] = {}
    device: Any
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        box = box_of(index)
        owners[box] = min(owners.get(box, num_processes), device.process_index)
    boxes = tuple(tuple(sorted(box for box in owners if owners[box] == p)) for p in range(num_processes))
    here = {box_of(shard.index): shard.data for shard in x.addressable_shards}
    return boxes, [here[box] for box in boxes[process]]


def _for_user(leaf: Leaf, array: np.ndarray | None) -> Any:
    if array is None:
        return leaf.value
    copy = np.array(array)
    if leaf.key is not None:
        return jax.random.wrap_key_data(jnp.asarray(copy), impl=leaf.key)
    return _compat.weakly_typed(copy) if leaf.weak else copy


# ---- What is checked -------------------------------------------------------------------------------------------------


def _check(condition: bool, text: str) -> None:
    """Raises ValueError unless a condition holds of what another process has sent or written."""
    if not condition:
        raise ValueError(text)


def _are_counts(x: Any) -> bool:
    return type(x) is list and all(type(n) is int and n >= 0 for n in x)


def _is_value(x: Any) -> bool:
    """Whether JSON keeps it exactly."""
    return type(x) in (bool, float, str) or (type(x) is int and x.bit_length() <= _MAX_BITS)


def _box(box: Any, shape: Sequence[int], path: str) -> Box:
    is_box = type(box) is list and len(box) == len(shape) and all(map(_is_range, box, shape))
    _check(is_box, f"a part of {path}, of the shape {shape}, is at {box!r:.80}")
    return tuple((start, stop) for start, stop in box)


def _divides(boxes: Sequence[Box]) -> bool:
    """Whether boxes are those of a mesh, each once: all combinations of ranges that follow one another."""
    ranges = [sorted(set(of_dimension)) for of_dimension in zip(*boxes, strict=True)]
    follow = all(stop == start for each in ranges for (_, stop), (start, _) in itertools.pairwise(each))
    return follow and len({*boxes}) == len(boxes) == math.prod(map(len, ranges))


def _is_range(x: Any, size: int) -> bool:
    return _are_counts(x) and len(x) == 2 and x[0] <= x[1] <= size


def _memory() -> int:
    """The bytes of this host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
