"""Commits in memory of the launcher: which one is found, whatever the writers have left."""

import os
import pickle
import types

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_ring.elastic.generation import HostsOfProcesses
from jax_ring.elastic.kept import KeptCommits
from jax_ring.elastic.restore import Stores, restore
from jax_ring.elastic.snapshots import Divided, Snapshot
from jax_ring.elastic.state import State
from jax_ring.launcher import environment
from jax_ring.launcher.protocol import KEPT_VARIABLE, RESTART_VARIABLE

ONE_HOST = HostsOfProcesses((0,), 2)
BOXES = ((((0, 1),), ((3, 4),)), (((1, 3),),))  # of two processes


@pytest.fixture
def files():
    files = environment.kept_files(3)
    yield files
    for file in files:
        os.close(file)


def values(number, divided=True):
    """A state, as it is after so many commits."""
    w = (np.arange(6) + number).astype(ml_dtypes.bfloat16)
    return {"w": w, "step": number, "m": np.arange(4.0) * number if divided else np.zeros(0), "empty": np.zeros((0, 3))}


def member(process, generation, hosts):
    """What `write` needs to know of a process's generation."""
    return types.SimpleNamespace(process=process, number=generation, hosts=hosts)


def snapshot_of(process, number, divided=True):
    """What one of two processes has of a commit."""
    leaves, structure = jax.tree.flatten(values(number, divided))
    if divided:
        whole = values(number)["m"]
        parts = [whole[begin:end] for ((begin, end),) in BOXES[process]]
        leaves = [Divided(whole.shape, whole.dtype, BOXES, {process: parts}) if x is leaves[1] else x for x in leaves]
    return Snapshot(number, structure, leaves, 2, (process,) if divided else None)


def commit(files, process, number, *, slot=None, generation=0, divided=True):
    kept = KeptCommits(files, process if slot is None else slot)
    kept.write(snapshot_of(process, number, divided), member(process, generation, ONE_HOST))


class Alone:
    """The generation of a process that is started when all others are lost."""

    process, num_processes, hosts = 0, 1, HostsOfProcesses((0,), 1)
    exchange = None

    def post(self, own):
        return [own]


def newest(files, divided=True, **others):
    """What a job goes on from."""
    state = values(0, divided) | others
    return restore(Alone(), -1, [], state, Stores(KeptCommits(files, 0), None))[0]


def assert_newest(files, number, divided=True):
    assert_values(newest(files, divided), number, divided)


def assert_values(found, number, divided=True):
    assert (found.number, found.held) == (number, None)
    expected = values(number, divided)
    for name, leaf in found.trees().items():
        assert np.asarray(leaf).dtype == np.asarray(expected[name]).dtype
        np.testing.assert_array_equal(leaf, expected[name])


def test_nothing_is_kept_at_the_beginning(files):
    assert newest(files).number == 0


@pytest.mark.parametrize("divided", [True, False])
def test_the_newest(files, divided):
    for number in (1, 2, 3):
        for process in (0, 1):
            commit(files, process, number, divided=divided)
        assert_newest(files, number, divided)


def test_a_first_commit_that_a_process_has_not_made(files):
    commit(files, 0, 1)
    assert newest(files).number == 0


def test_parts_that_are_gone(files):
    commit(files, 0, 6)
    commit(files, 0, 7)
    with pytest.raises(RuntimeError, match=r"parts of commit 7 and the one before are lost.*no directory was given"):
        newest(files)


def test_on_several_hosts_any_may_be_lost():
    """Three processes on hosts of two, and one: each has what is not divided, and copies of the other's parts."""
    processes = HostsOfProcesses((0, 2), 3)
    assert [processes.keeper(owner) for owner in range(3)] == [2, 2, 0]
    assert [processes.kept_by(process) for process in range(3)] == [[2], [], [0, 1]]
    whole = np.arange(6.0)
    boxes = tuple((((2 * p, 2 * p + 2),),) for p in range(3))
    hosts = [environment.kept_files(2), environment.kept_files(1)]
    for process, (host, slot) in enumerate([(0, 0), (0, 1), (1, 0)]):
        parts = {p: [whole[2 * p : 2 * p + 2]] for p in (process, *processes.kept_by(process))}
        leaves, structure = jax.tree.flatten({"m": 0, "step": 5})
        leaves[0] = Divided(whole.shape, whole.dtype, boxes, parts)
        snapshot = Snapshot(5, structure, leaves, 3, tuple(sorted(parts)))
        KeptCommits(hosts[host], slot).write(snapshot, member(process, 0, processes))
    for files in hosts:
        stores = Stores(KeptCommits(files, 0), None)
        found = restore(Alone(), -1, [], {"m": whole * 0, "step": 0}, stores)[0]
        assert found.number == 5
        np.testing.assert_array_equal(found.trees()["m"], whole)
        for file in files:
            os.close(file)


def test_one_that_a_process_has_not_made_is_not_taken(files):
    for process in (0, 1):
        commit(files, process, 6)
        commit(files, process, 7)
    commit(files, 1, 8)
    assert_newest(files, 7)
    commit(files, 0, 8)
    assert_newest(files, 8)


def test_parts_stay_until_all_have_restored(files, monkeypatch):
    """A process in the place of one that has ended has its files: others may still need the parts in them."""
    monkeypatch.setenv(KEPT_VARIABLE, ",".join(map(str, (1, *files))))
    kept = KeptCommits(files, 1, parts_only=True)
    kept.write(snapshot_of(1, 6), member(1, 3, ONE_HOST))
    generation = Alone()
    generation.number, generation.change_pending = 4, lambda: False
    state = State(**values(0, divided=False))
    state._enter(generation)
    assert kept.owners(6, 3) == {1}
    state.commit()
    assert kept.owners(6, 3) == set()


def test_parts_of_two_generations_are_not_mixed(files):
    for process in (0, 1):
        commit(files, process, 6)
    commit(files, 0, 7)
    # Process 1 has died in commit 7. Another one takes its index, in another slot, and all go on from commit 6.
    commit(files, 1, 7, slot=2, generation=1)
    assert_newest(files, 6)
    commit(files, 0, 7, generation=1)
    assert_newest(files, 7)


def test_restarts_begin_with_generation_0_again(files, monkeypatch):
    for process in (0, 1):
        commit(files, process, 6)
    commit(files, 0, 7)
    monkeypatch.setenv(RESTART_VARIABLE, "1")
    commit(files, 1, 7)
    assert_newest(files, 6)


def test_a_process_that_dies_while_it_writes(files, monkeypatch):
    for process in (0, 1):
        for number in (6, 7):
            commit(files, process, number)
    commit(files, 1, 8)
    dump = pickle.dump

    def dies(entry, stream):
        dump(entry, stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(pickle, "dump", dies)
    with pytest.raises(KeyboardInterrupt):
        commit(files, 0, 8)
    assert_newest(files, 7)


@pytest.mark.parametrize("parts_only", [True, False])
@pytest.mark.parametrize("last", [6, 7])
def test_parts_of_a_process_that_is_no_longer_a_member(files, parts_only, last):
    """Of the newest commit that all members have, or if it has not written those, of the one before."""
    of = [KeptCommits(files, slot, parts_only) for slot in (0, 1)]
    for number in range(5, last + 1):
        of[1].write(snapshot_of(1, number), member(1, 3, ONE_HOST))
    own = [snapshot_of(0, 6), snapshot_of(0, 7)]
    restored, newcomers = restore(Alone(), 3, own, values(0), Stores(of[0], None))
    assert_values(restored, last)
    assert newcomers == 0
    assert KeptCommits(files, 0, not parts_only).owners(last, 3) == of[0].owners(last, 2) == set()
    assert of[0].commits() == {}
    with pytest.raises(RuntimeError, match=r"parts of commit 7 are lost\. Of its processes 1 and those"):
        restore(Alone(), 2, own, values(0), Stores(of[0], None))
    of[1].forget_parts()
    assert of[0].owners(last, 3) == (set() if parts_only else {1})


def test_a_larger_commit_leaves_nothing_of_itself(files):
    commit(files, 0, 2, divided=False)
    snapshot = Snapshot.of({"w": np.ones(10_000)}, 4, 0, 1)
    KeptCommits(files, 0).write(snapshot, member(0, 0, ONE_HOST))
    commit(files, 0, 6, divided=False)
    assert os.fstat(files[0]).st_size < 10_000
    assert_newest(files, 6, divided=False)


def test_another_state_is_refused(files):
    commit(files, 0, 2, divided=False)
    with pytest.raises(RuntimeError, match=r"other leaves than that of process 0: \['other'\]"):
        newest(files, divided=False, other=1)


def test_files_of_others_are_left_alone(files, monkeypatch, tmp_path):
    monkeypatch.setenv(KEPT_VARIABLE, ",".join(map(str, (1, *files))))
    assert KeptCommits.of_launcher() is not None
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setenv(KEPT_VARIABLE, f"1,{log.fileno()}")
        assert KeptCommits.of_launcher() is None
    monkeypatch.setenv(KEPT_VARIABLE, "1,9999")
    assert KeptCommits.of_launcher() is None
    monkeypatch.delenv(KEPT_VARIABLE)
    assert KeptCommits.of_launcher() is None
