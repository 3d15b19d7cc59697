"""Where a new generation starts: the newest commit whose parts are all there, in all of its processes."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ring.elastic.checkpoints import Checkpoints
from jax_ring.elastic.generation import Generation
from jax_ring.elastic.kept import CommitId, KeptCommits
from jax_ring.elastic.snapshots import UNDIVIDED, Snapshot
from jax_ring.launcher.schema import read


def restore(
    generation: Generation, values: Mapping[str, Any], kept: KeptCommits, checkpoints: Checkpoints | None
) -> tuple[int, Snapshot]:
    """Agrees with all other members on what to start from, and puts it together.

    It is the newest commit in memory of the launchers or on disk; on equal terms that in memory. If there is none, what
    is not divided is that of process 0's values.

    values: the state as the script has made it. kept, checkpoints: where commits outlive the processes.

    Returns the number of the commit, 0 for none, and its snapshot with no leaf divided, the same in all processes.
    Raises RuntimeError if parts of all commits are lost or damaged and none is on disk, also where only launchers know
    that there were some; or if the states of the processes have different structures.
    """
    process, count = generation.process, generation.num_processes
    directory = checkpoints.directory if checkpoints is not None else None
    commits, nothing = kept.commits(), Snapshot((), 1, {})
    newest_on_disk = checkpoints.newest_number() if checkpoints is not None and process == 0 else 0
    if kept.why_not and generation.is_first_of_host:
        what = "the job begins anew after a loss" + (f", unless {directory} has a checkpoint" if directory else "")
        print(f"jax_ring.elastic: no commits are kept, {what}: {kept.why_not}.", file=sys.stderr, flush=True)
    # All are here once they have posted, and so may start their backends, each of which waits for all others.
    own = [(commit, found.num_parts, [*found.arrays]) for commit, found in commits.items()]
    posts = generation.post(json.dumps((newest_on_disk, generation.newest_commit, own)).encode())
    on_disk, known, of_processes = _read(posts)
    newest = max(known, *(commit.number for each in of_processes for commit in each), 0)
    commit, have = _newest_whole(of_processes)
    if commit is not None and commit.number >= on_disk:
        number, where = commit.number, f"commit {commit.number} in the launchers' memory"
        snapshot = commits.get(commit, nothing)
        kept.last = commit
    elif on_disk:
        number, where = on_disk, f"the checkpoint {on_disk} in {directory}"
        _ = generation.exchange  # all start their backends: orbax needs that of process 0, which waits for the others
        snapshot = checkpoints.read(on_disk) if checkpoints is not None and process == 0 else nothing
        have = [{UNDIVIDED} if p == 0 else set() for p in range(count)]
    elif newest > 1:  # the first may never have been made by all; before a later one all have made one
        why = "; ".join(kept.damaged.values()) or "The hosts that had them have gone, or have no process"
        raise RuntimeError(
            f"jax_ring.elastic: parts of commit {newest} and the one before are lost. {why}, and "
            f"{f'there is no checkpoint in {directory}' if directory else 'no directory was given'}. With "
            "State(..., directory=..., every=k) every k-th commit is also written to disk: the job goes on from there "
            "then."
        )
    else:
        number, where = 0, "that of process 0"
        if newest and generation.is_first_of_host:
            what = "jax_ring.elastic: the first commit is lost, or not all had made it. The job begins anew."
            print(what, file=sys.stderr, flush=True)
        snapshot = Snapshot.of(values, process, count)
        have = [{p} | ({UNDIVIDED} if p == 0 else set()) for p in range(count)]
    if generation.is_first_of_host:
        for each, what in kept.damaged.items():
            if each.number > number:
                print(f"{what}. The job goes on from {where}.", file=sys.stderr, flush=True)
    snapshot = _with_undivided(generation, snapshot, have)
    if different := snapshot.paths_not_in_both(values):
        raise RuntimeError(
            f"jax_ring.elastic: the state of process {process} has other leaves than {where}. Those that only one of "
            f"them has are {different}. All processes must make the state in the same way, its trees keep their "
            "structure, and a directory has the checkpoints of one state."
        )
    return number, _with_parts(generation, snapshot, have).undivided()


def _read(posts: Sequence[bytes]) -> tuple[int, int, list[dict[CommitId, tuple[int, set[int]]]]]:
    """The newest number on disk, and that of which launchers know; by process what is there of each commit.

    That is the number of parts, and sections.
    """
    try:
        posted = [read(post, tuple[int, int, tuple[tuple[CommitId, int, tuple[int, ...]], ...]]) for post in posts]
    except ValueError as error:
        raise RuntimeError(
            f"jax_ring.elastic: processes have posted something else than commits: {posts!r:.300}"
        ) from error
    found = [{commit: (num_parts, {*sections}) for commit, num_parts, sections in kept} for _, _, kept in posted]
    return max(on_disk for on_disk, _, _ in posted), max(known for _, known, _ in posted), found


def _newest_whole(
    of_process: Sequence[Mapping[CommitId, tuple[int, set[int]]]],
) -> tuple[CommitId | None, list[set[int]]]:
    """The newest commit of which all sections are somewhere, and by process those that are in reach."""
    for commit in sorted({commit for each in of_process for commit in each}, reverse=True):
        there = [each.get(commit, (0, set[int]())) for each in of_process]
        have, num_parts = [sections for _, sections in there], max(parts for parts, _ in there)
        found = {section for sections in have for section in sections}
        # The number is not believed before so many are there.
        if len(found) == num_parts + 1 and found == {UNDIVIDED, *range(num_parts)}:
            return commit, have
    return None, []


def _with_undivided(generation: Generation, snapshot: Snapshot, have: Sequence[set[int]]) -> Snapshot:
    """A snapshot with what is not divided, from the first process that has it; `snapshot` may have nothing.

    Values that are no arrays are those of this process in all, also where each host has its own.
    """
    have_all = all(UNDIVIDED in each for each in have)
    if have_all and not generation.hosts.has_several_hosts:
        return snapshot
    root = next(process for process, each in enumerate(have) if UNDIVIDED in each)
    own = None
    if generation.process == root:
        own = snapshot.packed([UNDIVIDED]) if not have_all else None
        generation.put("header", snapshot.header())
    where = f"what process {root} has sent"
    received, _ = Snapshot.of_header(generation.get("header", root), where)
    if snapshot.leaves and received.leaves != snapshot.leaves:
        raise RuntimeError(
            f"jax_ring.elastic: the state of process {generation.process} differs from {where}, in the leaves, "
            "shapes or dtypes. All processes must make the state in the same way."
        )
    received.arrays = snapshot.arrays
    if have_all:
        return received
    lacks = UNDIVIDED not in have[generation.process]
    data = generation.exchange.broadcast(own, received.num_bytes(UNDIVIDED), is_wanted=lacks)
    if data is not None:
        received.unpack([UNDIVIDED], data)
    return received


def _with_parts(generation: Generation, snapshot: Snapshot, have: Sequence[set[int]]) -> Snapshot:
    """A snapshot with all parts of divided leaves."""
    owners = range(snapshot.num_parts)
    if all(owner in each for owner in owners for each in have):
        return snapshot
    gives: list[list[int]] = [[] for _ in have]
    for owner in owners:
        givers = [process for process, each in enumerate(have) if owner in each]
        gives[givers[owner % len(givers)]].append(owner)
    sizes = [snapshot.num_bytes(*each) for each in gives]
    own = snapshot.packed(gives[generation.process])
    received = generation.exchange.gather(own, sizes, [process for process, each in enumerate(gives) if each])
    for process, data in received.items():
        snapshot.unpack(gives[process], data)
    return snapshot
