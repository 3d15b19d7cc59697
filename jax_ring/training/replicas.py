"""Replicated parameters: broadcast, and checked to be equal."""

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.collectives.axes import AxisName, axes_of, check_named, check_root
from jax_ring.distributed import discovery
from jax_ring.launcher.schema import read
from jax_ring.options import check_arrays, path_texts
from jax_ring.training.wire import collectives_here

# Digests per round of the search for the first difference: four rounds for 4 billion elements.
PARTS = 256

T = TypeVar("T")  # a pytree: results keep the structure of the argument

# What processes tell each other, about this process's copies.
_Digests = tuple[tuple[tuple[str, int, str], ...], ...]  # of each array: part, rank, digest
_Parts = tuple[tuple[int, tuple[str, ...]], ...]  # by rank, digests of parts
_Values = tuple[tuple[int, str], ...]  # by rank


def broadcast_params(params: T, axis_name: AxisName, *, root: int = 0) -> T:
    """Sends rank `root`'s parameters to every rank of a mapped axis, bit for bit.

        params = jax_ring.broadcast_params(params, "data")  # under shard_map

    Args:
      params: a pytree of arrays of any dtype, random keys included.
      axis_name: the name of a mapped axis, or a sequence of names.
      root: the rank that sends, an integer. With several axes ranks are counted in row-major order.

    Returns:
      A pytree like `params`, invariant over the axis with vma tracking.

    Raises:
      ValueError: if there is no rank `root`.
      NameError, TypeError, jax.errors.JaxRuntimeError: where `ring_broadcast` raises them.
    """
    axes = axes_of(axis_name)
    check_named("broadcast_params", axes)
    root = check_root("broadcast_params", axes, root)
    check_arrays("broadcast_params", "params", params)
    return collectives_here().broadcast(params, axis_name, root=root)


def assert_replicated(tree: Any) -> None:
    """Checks that an array's copies have the same bits on all devices of all processes.

        jax_ring.assert_replicated(params)  # outside of jit, now and then

    Without vma tracking `shard_map` trusts `out_specs=P()`: a forgotten reduction leaves copies that drift apart.
    Copies of each shard are compared, on the host. All processes with devices of the arrays must call it, in one order
    and with one tree; they exchange digests.

    Args:
      tree: a pytree, of which each `jax.Array` is compared.

    Raises:
      AssertionError: if copies differ, in every process that has one, with the leaf, the ranks (positions of devices in
        the sharding), the first differing index, and both values.
      TypeError: under `jit`, which has no copies.
      ValueError: if another process does not call it within the deadline, or with other arrays.
    """
    here: dict[str, jax.Array] = {}
    across: dict[str, jax.Array] = {}
    for name, leaf in zip(path_texts(tree, "the array"), jax.tree.leaves(tree), strict=True):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"assert_replicated: {name} is being traced. Call it outside jit, on the results.")
        if isinstance(leaf, jax.Array):
            array = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            (here if array.is_fully_addressable else across)[name] = array
    # Make the checks common to all processes first: a local failure would leave the others waiting.
    devices: list[Any] = [device for array in across.values() for device in array.sharding.device_set]
    processes = sorted({device.process_index for device in devices})
    if jax.process_index() in processes:
        _assert_copies_equal(across, _gather_from(across, processes))
    _assert_copies_equal(here, lambda value, kind: [value])


def _gather_from(arrays: dict[str, jax.Array], processes: list[int]) -> Callable[[Any, Any], list]:
    """Returns gather(value, kind): all these arrays' processes' values of a type, by process."""
    members = f"jax_ring/replicas/{','.join(map(str, processes))}"
    key = f"{members}/{discovery.next_number(members)}"
    types = "\n".join(f"{name}: {_type(array)}" for name, array in arrays.items())
    discovery.compare("assert_replicated", types, key, processes)
    rounds = itertools.count()

    def gather(value, kind):
        encoded = json.dumps(value).encode()
        values = discovery.gather("assert_replicated", encoded, f"{key}/{next(rounds)}", processes)
        return [_read(process, theirs, kind) for process, theirs in values]

    return gather


def _read(process: int, theirs: bytes, kind: Any) -> Any:
    try:
        return read(theirs, kind)
    except ValueError as error:
        raise ValueError(f"assert_replicated: process {process} has sent no digests: {error}") from error


def _assert_copies_equal(arrays: dict[str, jax.Array], gather: Callable[[Any, Any], list]) -> None:
    digests = [[(place, rank, _digest(copy)) for place, rank, copy in _copies(array)] for array in arrays.values()]
    everyones = gather(digests, _Digests)
    if any(len(theirs) != len(arrays) for theirs in everyones):
        raise ValueError(f"assert_replicated: a process has sent digests of other than {len(arrays)} arrays")
    for i, (name, array) in enumerate(arrays.items()):
        by_place: dict[str, dict[int, str]] = defaultdict(dict)
        for place, rank, digest in itertools.chain(*(theirs[i] for theirs in everyones)):
            by_place[place][rank] = digest
        for place, by_rank in by_place.items():
            first = min(by_rank)
            different = [rank for rank in sorted(by_rank) if by_rank[rank] != by_rank[first]]
            if different:
                raise AssertionError(_report(name, array, place, (first, *different), gather))


def _report(name: str, array: jax.Array, place: str, ranks: tuple[int, ...], gather: Callable[[Any, Any], list]) -> str:
    """The error for a shard whose copies on `ranks[1:]` differ from that on `ranks[0]`."""
    first, *different = ranks
    pair = {rank: copy for at, rank, copy in _copies(array) if at == place and rank in ranks[:2]}
    shape = array.sharding.shard_shape(array.shape)
    place_in_flat = _first_difference({rank: copy.reshape(-1) for rank, copy in pair.items()}, math.prod(shape), gather)
    index = tuple(int(i) for i in np.unravel_index(place_in_flat, shape))
    values = _merged(gather([(rank, str(copy[index])) for rank, copy in pair.items()], _Values))
    of_shard = "" if shape == array.shape else f" of the shard {place}"
    return (
        f"assert_replicated: {name}, of type {_type(array)}, is not the same on all ranks: "
        f"{', '.join(map(str, different))} {'differs' if len(different) == 1 else 'differ'} from {first}. "
        f"The first difference is at index {index}{of_shard}: {values[first]} on rank {first}, "
        f"{values[different[0]]} on rank {different[0]}. A reduction may be missing: "
        "shard_map(..., check_vma=True) checks that at trace time."
    )


def _first_difference(pair: dict[int, np.ndarray], size: int, gather: Callable[[Any, Any], list]) -> int:
    """The first index at which two flat arrays differ, of which this process may have any.

    Compares digests of parts, and goes on in the first that differs.
    """
    begin, end = 0, size
    while end - begin > 1:
        cuts = [*range(begin, end, math.ceil((end - begin) / PARTS)), end]
        own = [(rank, [_digest(x[a:b]) for a, b in itertools.pairwise(cuts)]) for rank, x in pair.items()]
        one, other = _merged(gather(own, _Parts)).values()
        part = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        begin, end = cuts[part], cuts[part + 1]
    return begin


def _copies(array: jax.Array) -> Iterator[tuple[str, int, np.ndarray]]:
    """This process's copies of shards: (part of the array, as text; rank; copy)."""
    ranks = {device: rank for rank, device in enumerate(array.sharding.devices_indices_map(array.shape))}
    for shard in array.addressable_shards:
        yield str(shard.index), ranks[shard.device], np.asarray(shard.data)


def _merged(pairs: list[Any]) -> dict:
    return {key: value for part in pairs for key, value in part}


def _digest(x: np.ndarray) -> str:
    return hashlib.blake2b(x.tobytes(), digest_size=16).hexdigest()


def _type(array: jax.Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
