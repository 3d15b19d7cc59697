"""Where a new generation starts: the newest commit that all have, in host memory."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ring.elastic import spares
from jax_ring.elastic.checkpoints import Checkpoints
from jax_ring.elastic.generation import Generation
from jax_ring.elastic.headers import header_of, without_arrays
from jax_ring.elastic.kept import KeptCommits
from jax_ring.elastic.snapshots import Divided, Lost, Snapshot, array_of, cut, joined, with_array
from jax_ring.elastic.spares import Place

Store = KeptCommits | Checkpoints


class Have(NamedTuple):
    """What others need to know of a process's snapshot.

    Attributes:
      num_processes: over which its divided leaves are divided.
      held: the processes whose parts it has; None if no leaf is divided.
    """

    num_processes: int
    held: Sequence[int] | None


class Restored(NamedTuple):
    """What a generation starts from.

    Attributes:
      snapshot: the commit, with no leaf divided, the same in all processes.
      newcomers: processes without a commit.
    """

    snapshot: Snapshot
    newcomers: int


def restore(
    generation: Generation,
    place: Place | None,
    snapshots: Sequence[Snapshot],
    values: Mapping[str, Any],
    stores: Sequence[Store],
) -> Restored:
    """Agrees with all other members on a commit, and puts it together.

    If none has a commit, they start from the newest one that is stored, and else from the values of process 0.

    Args:
      place: where the commits of this process were made; None if it has none.
      snapshots: these commits.
      values: its state as the script has made it.
      stores: where commits outlive the processes, the one that is asked first first. The same in all processes.

    Raises:
      RuntimeError: if parts of the commit are lost and none is stored; or if the states of the processes have
        different structures.
    """
    own = {str(snapshot.number): Have(snapshot.num_processes, snapshot.held) for snapshot in snapshots}
    posted = generation.post([place.generation if place else -1, own])
    # All are here: start the backend together, because it waits for all processes.
    _ = generation.exchange
    made_in = max(number for number, _ in posted)
    if made_in < 0:
        return Restored(_first_of_all(generation, values, stores), 0)
    # The commits of a former spare are older than the others', so treat it like a new process.
    known = [
        {int(number): Have(*have) for number, have in haves.items()} if made == made_in else {}
        for made, haves in posted
    ]
    newest = [max(haves) for haves in known if haves]
    number = min(newest)
    is_current = place is not None and place.generation == made_in
    chosen = {snapshot.number: snapshot for snapshot in snapshots}.get(number) if is_current else None
    have = [haves.get(number) for haves in known]
    if lost := _lost(have):
        chosen, have = _from_spares(generation, made_in, chosen, have, lost)
        lost = _lost(have)
    if lost:
        snapshot = _from_stores(generation, values, stores, number, lost)
    else:
        snapshot = _assembled(generation, chosen, have, values)
    return Restored(snapshot, generation.num_processes - len(newest))


def _from_spares(
    generation: Generation, made_in: int, snapshot: Snapshot | None, have: list[Have | None], lost: Sequence[int]
) -> tuple[Snapshot | None, list[Have | None]]:
    """This process's snapshot and what each has, after spares were asked for lost parts."""
    first = next(process for process, each in enumerate(have) if each is not None)
    found = None
    if generation.process == first:
        assert snapshot is not None
        found = spares.fetched(made_in, snapshot, lost)
    if any(generation.post(found is not None)):
        snapshot = found or snapshot
        had = have[first]
        assert had is not None
        have = [*have]
        have[first] = had._replace(held=sorted({*(had.held or ()), *lost}))
    return snapshot, have


def _first_of_all(generation: Generation, values: Mapping[str, Any], stores: Sequence[Store]) -> Snapshot:
    """What a job starts from."""
    process, count = generation.process, generation.num_processes
    stored = _loaded(generation, values, stores)
    if stored is not None:
        return stored
    if any(isinstance(leaf, Lost) for leaf in jax.tree.leaves(dict(values))):
        raise RuntimeError(
            "jax_ring.elastic: a process has ended before the first commit, and with it its part of what is divided "
            "over the processes in the state. Start the job again."
        )
    snapshot = Snapshot.of(values, 0, process, count)
    divided = snapshot.held is not None
    root_only = [Have(count, (p,)) if divided else None for p in range(count)]
    root_only[0] = Have(count, (0,) if divided else None)
    return _assembled(generation, snapshot, root_only, values, from_root=True)


def _from_stores(generation, values, stores: Sequence[Store], number: int, lost: Sequence[int]) -> Snapshot:
    snapshot = _loaded(generation, values, stores)
    if snapshot is not None:
        return snapshot
    directories = [str(store.directory) for store in stores if isinstance(store, Checkpoints)]
    where = f"there is no checkpoint in {directories[0]}" if directories else "no directory was given"
    raise RuntimeError(
        f"jax_ring.elastic: parts of commit {number} are lost. Of its processes {', '.join(map(str, lost))} and the "
        f"neighbors that had copies of their parts have ended at the same time, and {where}. With State(keep='host', "
        "...) the launcher keeps the commits as well, and with State(..., directory=..., every=k) every k-th one is "
        "also written to disk: the job goes on from there then."
    )


def _loaded(generation: Generation, values: Mapping[str, Any], stores: Sequence[Store]) -> Snapshot | None:
    """The newest commit of the first store that has one, which process 0 reads; None if there is none."""
    if not stores:
        return None
    snapshot = None
    if generation.process == 0:
        snapshot = next((found for store in stores if (found := store.newest(values)) is not None), None)
    if not any(generation.post(snapshot is not None)):
        return None
    have = [None] * generation.num_processes
    return _assembled(generation, snapshot, [Have(1, None), *have[1:]], values)


def _lost(have: Sequence[Have | None]) -> list[int]:
    known = [each for each in have if each is not None]
    if any(each.held is None for each in known):
        return []
    held = {process for each in known for process in each.held or ()}
    return sorted(set(range(known[0].num_processes)) - held)


def _assembled(
    generation: Generation,
    snapshot: Snapshot | None,
    have: Sequence[Have | None],
    values: Mapping[str, Any],
    *,
    from_root: bool = False,
) -> Snapshot:
    """A commit with all parts, in all processes.

    Args:
      snapshot: this process's, if it has it.
      have: what each process has.
      from_root: whether all take undivided leaves from the first process that has them.
    """
    if generation.num_processes == 1:
        assert snapshot is not None
        return snapshot.whole()
    # A process that has all of it, for example after an earlier change, saves collecting the parts.
    with_all = [process for process, each in enumerate(have) if each is not None and each.held is None]
    root = with_all[0] if with_all else next(process for process, each in enumerate(have) if each is not None)
    if with_all and snapshot is not None and snapshot.held is not None:
        snapshot = None
    if from_root or (with_all and len(with_all) < len(have)) or None in have:
        snapshot = _broadcast(generation, snapshot, root, values, from_root=from_root)
    assert snapshot is not None
    if with_all or not snapshot.divided():
        return snapshot.whole()
    return _gathered(generation, snapshot, have)


def _broadcast(generation: Generation, snapshot: Snapshot | None, root: int, values, *, from_root: bool) -> Snapshot:
    """The root's snapshot for processes without one, less the parts of divided leaves."""
    if generation.process == root:
        assert snapshot is not None
        generation.put("header", header_of(snapshot))
    receives = snapshot is None or (from_root and generation.process != root)
    described = without_arrays(generation.get("header"), values, generation.process, root) if receives else snapshot
    assert described is not None
    arrays = [array for leaf in described.leaves if _is_whole(array := array_of(leaf))]
    size = sum(array.nbytes for array in arrays)
    own = None if receives else joined(arrays if generation.process == root else [])
    received = generation.exchange.broadcast(own, size, root)
    if received is not None:
        for array, part in zip(arrays, cut(received, [array.nbytes for array in arrays]), strict=True):
            array.reshape(-1).view(np.uint8)[:] = part  # parts of the header are empty
        if from_root and snapshot is not None:  # the root's own parts
            parts = iter(snapshot.divided())
            leaves = [with_array(leaf, next(parts)) if isinstance(array_of(leaf), Divided) else leaf
                      for leaf in described.leaves]  # fmt: skip
            described = described._replace(leaves=leaves, held=snapshot.held)
    return described


def _gathered(generation: Generation, snapshot: Snapshot, have: Sequence[Have | None]) -> Snapshot:
    gives: list[list[int]] = [[] for _ in have]
    for owner in range(snapshot.num_processes):
        giver = next(process for process, each in enumerate(have) if each is not None and owner in (each.held or ()))
        gives[giver].append(owner)
    sizes = [sum(map(snapshot.num_bytes, owners)) for owners in gives]
    own = joined([snapshot.packed(owner) for owner in gives[generation.process]])
    received = generation.exchange.gather(own, sizes, range(len(have)))
    parts: dict[int, np.ndarray] = {}
    for process, owners in enumerate(gives):
        parts.update(zip(owners, cut(received[process], map(snapshot.num_bytes, owners)), strict=True))
    return snapshot.with_parts(parts).whole()


def _is_whole(array: Any) -> bool:
    return isinstance(array, np.ndarray)
