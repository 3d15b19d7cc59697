"""Replicated parameters: broadcast, and checked to be equal."""

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.collectives.axes import AxisName, axes_of, check_named, check_root
from jax_ring.distributed import discovery
from jax_ring.launcher.schema import escaped, read
from jax_ring.options import check_arrays, path_texts
from jax_ring.training.wire import collectives_here

# Digests per round of the search for the first difference: four rounds for 4 billion elements.
PARTS = 256

T = TypeVar("T")  # a pytree: results keep the structure of the argument

# What processes tell each other, about this process's copies.
_Digests = tuple[tuple[tuple[str, int, str], ...], ...]  # of each array: part, rank, digest
_Parts = tuple[tuple[int, tuple[str, ...]], ...]  # by rank, digests of parts
_Values = tuple[tuple[int, str], ...]  # by rank

# gather(value, kind): each process with its value of a type.
Gather = Callable[[Any, Any], list[tuple[int, Any]]]


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
      RuntimeError: if somebody who is no process of this job answers for one.
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
    _assert_copies_equal(here, lambda value, kind: [(jax.process_index(), value)])


def _gather_from(arrays: dict[str, jax.Array], processes: list[int]) -> Gather:
    """Gathers values of these arrays' processes."""
    members = f"jax_ring/replicas/{','.join(map(str, processes))}"
    key = f"{members}/{discovery.next_number(members)}"
    types = "\n".join(f"{name}: {_type(array)}" for name, array in arrays.items())
    discovery.compare("assert_replicated", types, key, processes)
    rounds = itertools.count()

    def gather(value, kind):
        encoded = json.dumps(value).encode()
        values = discovery.gather("assert_replicated", encoded, f"{key}/{next(rounds)}", processes)
        return [(process, _read(process, theirs, kind)) for process, theirs in values]

    return gather


def _read(process: int, theirs: bytes, kind: Any) -> Any:
    try:
        return read(theirs, kind)
    except ValueError as error:
        raise ValueError(f"assert_replicated: process {process} has sent no digests: {error}") from error


def _check(process: int, is_right: bool, what: str) -> None:
    """Raises ValueError unless what a process has sent is about its own copies."""
    if not is_right:
        raise ValueError(
            f"assert_replicated: process {process} has sent {what}. All processes must call it with one tree, and have "
            "one version of jax_ring."
        )


def _assert_copies_equal(arrays: dict[str, jax.Array], gather: Gather) -> None:
    own = [[(place, rank, _digest(copy)) for place, rank, copy in _copies(array)] for array in arrays.values()]
    ranks = [_ranks(array) for array in arrays.values()]
    digests: list[dict[str, dict[int, str]]] = [defaultdict(dict) for _ in arrays]  # by place and rank
    for process, theirs in gather(own, _Digests):
        found = [sorted((rank, place) for place, rank, _ in copies) for copies in theirs]
        expected = [
            [(rank, place) for rank, (owner, place) in enumerate(of_array) if owner == process] for of_array in ranks
        ]
        _check(process, found == expected, "digests of other copies than its devices have")
        for by_place, copies in zip(digests, theirs, strict=True):
            for place, rank, digest in copies:
                by_place[place][rank] = digest
    for (name, array), by_place in zip(arrays.items(), digests, strict=True):
        for place, by_rank in by_place.items():
            first = min(by_rank)
            different = [rank for rank in sorted(by_rank) if by_rank[rank] != by_rank[first]]
            if different:
                raise AssertionError(_report(name, array, place, (first, *different), gather))


def _report(name: str, array: jax.Array, place: str, ranks: tuple[int, ...], gather: Gather) -> str:
    """The error for a shard whose copies on `ranks[1:]` differ from that on `ranks[0]`."""
    first, *different = ranks
    owners = {rank: _ranks(array)[rank][0] for rank in ranks[:2]}
    pair = {rank: copy for at, rank, copy in _copies(array) if at == place and rank in owners}
    shape = array.sharding.shard_shape(array.shape)
    flat = {rank: copy.reshape(-1) for rank, copy in pair.items()}
    place_in_flat = _first_difference(flat, math.prod(shape), owners, gather)
    index = tuple(int(i) for i in np.unravel_index(place_in_flat, shape))
    values = _by_rank(gather([(rank, str(copy[index])) for rank, copy in pair.items()], _Values), owners)
    of_shard = "" if shape == array.shape else f" of the shard {place}"
    return (
        f"assert_replicated: {name}, of type {_type(array)}, is not the same on all ranks: "
        f"{', '.join(map(str, different))} {'differs' if len(different) == 1 else 'differ'} from {first}. "
        f"The first difference is at index {index}{of_shard}: {escaped(values[first])} on rank {first}, "
        f"{escaped(values[different[0]])} on rank {different[0]}. A reduction may be missing: "
        "shard_map(..., check_vma=True) checks that at trace time."
    )


def _first_difference(pair: dict[int, np.ndarray], size: int, owners: dict[int, int], gather: Gather) -> int:
    """The first index at which two flat arrays differ, of which this process may have any.

    Compares digests of parts, and goes on in the first that differs. owners: the processes of both, by rank.
    """
    begin, end = 0, size
    while end - begin > 1:
        cuts = [*range(begin, end, math.ceil((end - begin) / PARTS)), end]
        own = [(rank, [_digest(x[a:b]) for a, b in itertools.pairwise(cuts)]) for rank, x in pair.items()]
        parts = _by_rank(gather(own, _Parts), owners)
        for rank, process in owners.items():
            _check(process, len(parts[rank]) == len(cuts) - 1, "digests of another number of parts")
        one, other = parts.values()
        different = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        if not different:
            raise ValueError(
                f"assert_replicated: the copies on the ranks {', '.join(map(str, owners))} differ, but none of their "
                f"parts, by what the processes {', '.join(map(str, owners.values()))} have sent"
            )
        begin, end = cuts[different[0]], cuts[different[0] + 1]
    return begin


def _by_rank(everyones: list[tuple[int, Any]], owners: dict[int, int]) -> dict[int, Any]:
    """What processes have sent of their ranks."""
    for process, theirs in everyones:
        expected = [rank for rank, owner in owners.items() if owner == process]
        _check(process, sorted(rank for rank, _ in theirs) == expected, "something of other copies than its own")
    found = dict(itertools.chain.from_iterable(theirs for _, theirs in everyones))
    return {rank: found[rank] for rank in owners}


def _ranks(array: jax.Array) -> list[tuple[int, str]]:
    """The process of each rank, and its part of the array."""
    places: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
    return [(device.process_index, str(index)) for device, index in places.items()]


def _copies(array: jax.Array) -> Iterator[tuple[str, int, np.ndarray]]:
    """This process's copies of shards: (part of the array, as text; rank; copy)."""
    ranks = {device: rank for rank, device in enumerate(array.sharding.devices_indices_map(array.shape))}
    for shard in array.addressable_shards:
        yield str(shard.index), ranks[shard.device], np.asarray(shard.data)


def _digest(x: np.ndarray) -> str:
    return hashlib.blake2b(x.tobytes(), digest_size=16).hexdigest()


def _type(array: jax.Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
