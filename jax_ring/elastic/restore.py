"""Where a new generation starts: the newest commit that all have, in host memory."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ring.elastic.checkpoints import Checkpoints
from jax_ring.elastic.generation import Generation
from jax_ring.elastic.kept import CommitId, KeptCommits
from jax_ring.elastic.snapshots import Divided, Have, Lost, Snapshot, array_of, cut, joined


class Stores(NamedTuple):
    """Where commits outlive the processes; the same in all of them."""

    kept: KeptCommits | None
    checkpoints: Checkpoints | None


def restore(
    generation: Generation, made_in: int, snapshots: Sequence[Snapshot], values: Mapping[str, Any], stores: Stores
) -> tuple[Snapshot, int]:
    """Agrees with all other members on a commit, and puts it together.

    If none has a commit, they start from the newest one that is stored, and else from the values of process 0.

    Args:
      made_in: the generation in which the commits of this process were made; -1 if it has none.
      snapshots: these commits.
      values: its state as the script has made it.

    Returns:
      The commit, with no leaf divided, the same in all processes; and how many processes had none.

    Raises:
      RuntimeError: if parts of the commit are lost and none is stored; or if the states of the processes have
        different structures.
    """
    own = {str(snapshot.number): Have(snapshot.num_processes, snapshot.held) for snapshot in snapshots}
    posted = generation.post([made_in, own])
    # All are here: start the backend together, because it waits for all processes.
    _ = generation.exchange
    newest_made_in = max(number for number, _ in posted)
    if newest_made_in < 0:
        return _first_of_all(generation, values, stores), 0
    # The commits of a former spare are older than the others', so treat it like a new process.
    known = [
        {int(number): Have(*have) for number, have in haves.items()} if made == newest_made_in else {}
        for made, haves in posted
    ]
    newest = [max(haves) for haves in known if haves]
    newcomers = generation.num_processes - len(newest)
    # A process that has ended in the last commit may not have written its parts of it, but all of the one before.
    for number in (min(newest), min(newest) - 1):
        chosen = next((each for each in snapshots if each.number == number and made_in == newest_made_in), None)
        have = [haves.get(number) for haves in known]
        lost = _lost(have)
        if lost and any(have) and stores.kept and stores.kept.owners(number, newest_made_in).issuperset(lost):
            first, had = next((process, each) for process, each in enumerate(have) if each is not None)
            have[first] = had._replace(held=sorted({*(had.held or ()), *lost}))
            if generation.process == first:
                assert chosen is not None
                chosen = stores.kept.with_parts(chosen, newest_made_in)
            lost = []
        if not lost:
            return _assembled(generation, chosen, have, values), newcomers
    if (snapshot := _loaded(generation, values, stores)) is not None:
        return snapshot, newcomers
    ended = ", ".join(map(str, _lost([haves.get(min(newest)) for haves in known])))
    raise _parts_are_lost(
        stores, f"commit {min(newest)}", f"Of its processes {ended} and those that had copies of their parts have "
        "ended at the same time"
    )  # fmt: skip


def _first_of_all(generation: Generation, values: Mapping[str, Any], stores: Stores) -> Snapshot:
    """What a job starts from."""
    process, count = generation.process, generation.num_processes
    stored = _loaded(generation, values, stores)
    if stored is not None:
        return stored
    if stores.kept is not None:
        number = max(generation.post(max((commit.number for commit in stores.kept.commits()), default=0)))
        # The first commit may never have been made by all. Before a later one all have made one.
        if number > 1:
            raise _parts_are_lost(stores, f"commit {number} and the one before")
    if any(isinstance(leaf, Lost) for leaf in jax.tree.leaves(dict(values))):
        raise RuntimeError(
            "jax_ring.elastic: a process has ended before the first commit, and with it its part of what is divided "
            "over the processes in the state. Start the job again."
        )
    own = Snapshot.of(values, 0, process, count)
    if count == 1:
        return own
    # What is not divided is that of process 0.
    first = _broadcast(generation, own if process == 0 else None, 0, values)
    pairs = zip(own.leaves, first.leaves, strict=True)
    leaves = [leaf if isinstance(array_of(leaf), Divided) else of_first for leaf, of_first in pairs]
    have = [Have(count, None if own.held is None else (p,)) for p in range(count)]
    return _assembled(generation, own._replace(leaves=leaves), have, values)


def _parts_are_lost(stores: Stores, of_what: str, why: str = "The hosts that had them have gone") -> RuntimeError:
    directory = stores.checkpoints and stores.checkpoints.directory
    where = f"there is no checkpoint in {directory}" if directory else "no directory was given"
    return RuntimeError(
        f"jax_ring.elastic: parts of {of_what} are lost. {why}, and {where}. With State(keep='host', ...) the "
        "launcher keeps the commits as well, and with State(..., directory=..., every=k) every k-th one is also "
        "written to disk: the job goes on from there then."
    )


def _loaded(generation: Generation, values: Mapping[str, Any], stores: Stores) -> Snapshot | None:
    """The newest commit that is stored; None if there is none. On equal terms that of the launchers."""
    kept, have = _newest_kept(generation, stores.kept) if stores.kept is not None else (None, [])
    newest_on_disk = -1
    if stores.checkpoints is not None:
        own = stores.checkpoints.newest_number() if generation.process == 0 else -1
        newest_on_disk = max(generation.post(own))
    if kept is not None and kept.number >= newest_on_disk:
        assert stores.kept is not None
        snapshot = stores.kept.read(kept, values) if have[generation.process] is not None else None
        return _assembled(generation, snapshot, have, values)
    if newest_on_disk < 0:
        return None
    assert stores.checkpoints is not None
    snapshot = stores.checkpoints.read(newest_on_disk, values) if generation.process == 0 else None
    return _assembled(generation, snapshot, [Have(1, None), *[None] * (generation.num_processes - 1)], values)


def _newest_kept(generation: Generation, kept: KeptCommits) -> tuple[CommitId | None, list[Have | None]]:
    """The newest commit whose parts are all in memory of launchers, and what each process can read of it."""
    is_first = generation.hosts.is_first(generation.process)
    posted = generation.post([[*each] for each in kept.commits().items()] if is_first else [])
    of_process = [{CommitId(*commit): Have(*have) for commit, have in each} for each in posted]
    for commit in sorted({commit for each in of_process for commit in each}, reverse=True):
        have = [each.get(commit) for each in of_process]
        if not _lost(have):
            return commit, have
    return None, []


def _lost(have: Sequence[Have | None]) -> list[int]:
    known = [each for each in have if each is not None]
    if any(each.held is None for each in known):
        return []
    held = {process for each in known for process in each.held or ()}
    return sorted(set(range(max((each.num_processes for each in known), default=1))) - held)


def _assembled(
    generation: Generation, snapshot: Snapshot | None, have: Sequence[Have | None], values: Mapping[str, Any]
) -> Snapshot:
    """A commit with all parts, in all processes.

    snapshot: this process's, if it has it. have: what each process has.
    """
    if generation.num_processes == 1:
        assert snapshot is not None
        return snapshot.whole()
    # A process that has all of it, for example after an earlier change, saves collecting the parts.
    with_all = [each if each is not None and each.held is None else None for each in have]
    if any(with_all):
        have = with_all
    root = next(process for process, each in enumerate(have) if each is not None)
    if None in have:
        has_it = have[generation.process] is not None
        snapshot = _broadcast(generation, snapshot if has_it else None, root, values)
    assert snapshot is not None
    return snapshot.whole() if any(with_all) else _gathered(generation, snapshot, have)


def _broadcast(generation: Generation, snapshot: Snapshot | None, root: int, values: Mapping[str, Any]) -> Snapshot:
    """The root's snapshot for processes without one, less the parts of divided leaves."""
    is_root = generation.process == root
    if is_root:
        assert snapshot is not None
        generation.put("header", snapshot.header())
    result = snapshot or Snapshot.of_header(generation.get("header"), values, generation.process, root)
    arrays = result.undivided()
    sizes = [array.nbytes for array in arrays]
    own = None if snapshot is None else joined(arrays if is_root else [])
    received = generation.exchange.broadcast(own, sum(sizes), root)
    if received is not None:
        for array, part in zip(arrays, cut(received, sizes), strict=True):
            array.reshape(-1).view(np.uint8)[:] = part
    return result


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
