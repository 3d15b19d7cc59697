"""Commits in memory of the launcher: which one is found, whatever the writers have left."""

import fcntl
import json
import os
import struct
import threading
import types

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_ring.elastic import kept
from jax_ring.elastic.generation import HostsOfProcesses
from jax_ring.elastic.kept import CommitId, KeptCommits
from jax_ring.elastic.restore import restore
from jax_ring.elastic.snapshots import UNDIVIDED, Leaf, Snapshot
from jax_ring.elastic.state import State
from jax_ring.launcher import environment, protocol
from jax_ring.launcher.protocol import KEPT_VARIABLE

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
    is_first = hosts.first_beside(process) == process
    return types.SimpleNamespace(process=process, number=generation, hosts=hosts, is_first_of_host=is_first)


def snapshot_of(process, number, divided=True):
    """What one of two processes has of a commit."""
    snapshot = Snapshot.of(values(number, divided), process, 2)
    if divided:
        place = next(i for i, leaf in enumerate(snapshot.leaves) if leaf.path == "['m']")
        whole = values(number)["m"]
        snapshot.leaves[place] = Leaf("['m']", None, whole.dtype, whole.shape, BOXES)
        del snapshot.arrays[UNDIVIDED][1]  # after 'empty'
        snapshot.arrays[process] = [whole[begin:end] for ((begin, end),) in BOXES[process]]
    return snapshot


class Writers:
    """What processes write, by slot and generation."""

    def __init__(self, files):
        self._files, self._kept = files, {}

    def commit(self, process, number, *, slot=None, generation=0, divided=True):
        key = process if slot is None else slot, generation
        if key not in self._kept:
            self._kept[key] = KeptCommits(self._files, key[0])
            mine = [protocol.read_mark(file) for file in self._files[2 * key[0] :][:2]]
            self._kept[key].last = max((CommitId(m[1], m[0]) for m in mine if m and m[1] < number), default=None)
        self._kept[key].write(number, snapshot_of(process, number, divided), member(process, generation, ONE_HOST))


@pytest.fixture
def commit(files):
    return Writers(files).commit


class Alone:
    """The generation of a process that is started when all others are lost."""

    number, process, num_processes, hosts, is_first_of_host = 1, 0, 1, HostsOfProcesses((0,), 1), True
    exchange, newest_commit = None, 0

    def post(self, own):
        return [own]

    def change_pending(self):
        return False


def newest(files, divided=True, **others):
    """What a job goes on from."""
    return restore(Alone(), values(0, divided) | others, KeptCommits(files, 0), None)


def assert_newest(files, number, divided=True):
    found, snapshot = newest(files, divided)
    assert (found, snapshot.num_parts) == (number, 0)
    expected = values(number, divided)
    for name, leaf in snapshot.trees(expected).items():
        assert np.asarray(leaf).dtype == np.asarray(expected[name]).dtype
        np.testing.assert_array_equal(leaf, expected[name])


def test_nothing_is_kept_at_the_beginning(files):
    assert newest(files)[0] == 0


@pytest.mark.parametrize("divided", [True, False])
def test_the_newest(files, commit, divided):
    for number in (1, 2, 3):
        for process in (0, 1):
            commit(process, number, divided=divided)
        assert_newest(files, number, divided)


def test_a_first_commit_that_a_process_has_not_made(files, commit):
    commit(0, 1)
    assert newest(files)[0] == 0


def test_parts_that_are_gone(files, commit):
    commit(0, 6)
    commit(0, 7)
    with pytest.raises(RuntimeError, match=r"parts of commit 7 and the one before are lost.*no directory was given"):
        newest(files)


def test_commits_of_which_only_launchers_know():
    """Who had them is gone, and those that are left have none: whoever of them knows of it, all end."""

    class One(Alone):
        def post(self, own):
            return [own, json.dumps([0, 2 - self.newest_commit, []]).encode()]

    for known in (0, 2):
        generation = One()
        generation.newest_commit = known
        with pytest.raises(RuntimeError, match=r"parts of commit 2 and the one before are lost\. The hosts that had"):
            restore(generation, values(0), KeptCommits((), 0), None)


def test_a_lost_first_commit_is_spoken_of(capsys):
    """It may never have been made by all, so the job begins anew."""
    generation = Alone()
    generation.newest_commit = 1
    assert restore(generation, values(0), KeptCommits((), 0), None)[0] == 0
    assert "the first commit is lost" in capsys.readouterr().err


def test_on_several_hosts_any_may_be_lost():
    """Three processes on hosts of two, and one: each has what is not divided, and copies of the other's parts."""
    processes = HostsOfProcesses((0, 2), 3)
    assert [processes.keeper(owner) for owner in range(3)] == [2, 2, 0]
    assert [processes.kept_by(process) for process in range(3)] == [[2], [], [0, 1]]
    assert [processes.first_beside(process) for process in range(3)] == [0, 0, 2]
    whole = np.arange(6.0)
    boxes = tuple((((2 * p, 2 * p + 2),),) for p in range(3))
    hosts = [environment.kept_files(2), environment.kept_files(1)]
    for process, (host, slot) in enumerate([(0, 0), (0, 1), (1, 0)]):
        parts = {p: [whole[2 * p : 2 * p + 2]] for p in (process, *processes.kept_by(process))}
        leaves = [Leaf("['m']", None, whole.dtype, whole.shape, boxes), Leaf("['step']", 5)]
        KeptCommits(hosts[host], slot).write(
            5, Snapshot(leaves, 3, {UNDIVIDED: []} | parts), member(process, 0, processes)
        )
    for files in hosts:
        number, found = restore(Alone(), {"m": whole * 0, "step": 0}, KeptCommits(files, 0), None)
        assert number == 5
        np.testing.assert_array_equal(found.trees({"m": 0, "step": 0})["m"], whole)
        for file in files:
            os.close(file)


def test_one_that_a_process_has_not_made_is_not_taken(files, commit):
    for process in (0, 1):
        commit(process, 6)
        commit(process, 7)
    commit(1, 8)
    assert_newest(files, 7)
    commit(0, 8)
    assert_newest(files, 8)


def test_parts_of_two_generations_are_not_mixed(files, commit):
    for process in (0, 1):
        commit(process, 6)
    commit(0, 7)
    # Process 1 has died in commit 7. Another one takes its index, in another slot, and all go on from commit 6.
    commit(1, 7, slot=2, generation=1)
    assert_newest(files, 6)
    commit(0, 7, generation=1)
    assert_newest(files, 7)


def test_what_a_generation_starts_from_stays_until_all_have_gone_on(files, commit):
    """Whichever of a process's two files it is in: numbers may be set back, by a commit on disk for example."""
    for process in (0, 1):
        commit(process, 6)
    commit(0, 7)
    for generation, number in ((1, 7), (2, 9), (3, 8)):
        kept = [KeptCommits(files, process) for process in (0, 1)]
        for each in kept:
            each.last = CommitId(6, 0)
        kept[0].write(number, snapshot_of(0, number), member(0, generation, ONE_HOST))
        assert_newest(files, 6)
    kept[1].write(8, snapshot_of(1, 8), member(1, 3, ONE_HOST))
    assert_newest(files, 8)


def test_a_process_that_dies_while_it_writes(files, commit, monkeypatch):
    for process in (0, 1):
        for number in (6, 7):
            commit(process, number)
    commit(1, 8)
    packed = Snapshot.data

    def dies(snapshot, section):
        yield next(packed(snapshot, section))
        raise KeyboardInterrupt

    monkeypatch.setattr(Snapshot, "data", dies)
    with pytest.raises(KeyboardInterrupt):
        commit(0, 8)
    monkeypatch.undo()
    assert_newest(files, 7)


def test_a_larger_commit_leaves_nothing_of_itself(files, commit):
    one = member(0, 0, ONE_HOST)
    kept = KeptCommits(files, 0)
    kept.write(4, Snapshot.of({"w": np.ones(10_000)}, 0, 1), one)
    for number in (5, 6):
        kept.write(number, snapshot_of(0, number, divided=False), one)
    assert all(os.fstat(file).st_blocks * 512 < 10_000 for file in files)
    assert_newest(files, 6, divided=False)


def test_nobody_takes_memory_away_that_others_have_mapped(files, commit):
    commit(0, 6)
    commit(1, 6)
    found = KeptCommits(files, 0).commits()
    for file in files:
        if os.fstat(file).st_size:
            with pytest.raises(PermissionError):
                os.ftruncate(file, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    (snapshot,) = found.values()
    np.testing.assert_array_equal(snapshot.trees(values(6))["m"], values(6)["m"])


def test_the_launcher_sees_which_generation_has_made_a_commit(files, commit):
    assert {*map(protocol.read_mark, files)} == {None}
    commit(1, 6, generation=3)
    assert {*map(protocol.read_mark, files)} == {None, (3, 6)}
    protocol.write_mark(files[2], False, 3, 6)
    assert {*map(protocol.read_mark, files)} == {None}


def test_another_state_is_refused(files, commit):
    commit(0, 2, divided=False)
    with pytest.raises(RuntimeError, match=r"other leaves than commit 2 in the launchers' memory.*are \['other'\]\."):
        newest(files, divided=False, other=1)


def test_a_state_that_no_header_can_hold_is_written_nowhere(files):
    state = State(lock=threading.Lock())
    state.__dict__.update(_kept=KeptCommits(files, 0), _generation=Alone())
    with pytest.raises(TypeError, match=r"the leaf at \['lock'\], a lock, cannot be kept"):
        state.commit()
    assert {*map(protocol.read_mark, files)} == {None}
    assert state.commits == 0


def test_a_state_goes_on_in_the_next_process(files, monkeypatch):
    monkeypatch.setenv(KEPT_VARIABLE, ",".join(map(str, (1, *files))))
    key = jax.random.key(7)
    first = State(w=np.arange(3.0), step=0, key=key)
    first._enter(Alone())
    first.step, first.key = 5, jax.random.fold_in(key, 5)
    first.commit()
    second = State(w=np.zeros(3), step=0, key=key)
    second._enter(Alone())
    assert (second.step, second.commits) == (5, 1)
    np.testing.assert_array_equal(second.w, first.w)
    np.testing.assert_array_equal(jax.random.key_data(second.key), jax.random.key_data(first.key))
    second.w[:] = 7
    second.commit()
    assert second.commits == 2
    assert [each.number for each in KeptCommits(files, 0).commits()] in ([1, 2], [2, 1])


# ---- Several processes, which are threads here -----------------------------------------------------------------------


class Member(Alone):
    """The generation of one of several processes, which are all on one host, or each on its own."""

    def __init__(self, process, count, shared, barrier, hosts):
        self.process, self.num_processes, self.hosts = process, count, hosts
        self.is_first_of_host = hosts.first_beside(process) == process
        self.exchange, self._shared, self._barrier = self, shared, barrier

    def _all(self, value):
        self._shared[self.process] = value
        self._barrier.wait(10)
        values = [self._shared[process] for process in range(self.num_processes)]
        self._barrier.wait(10)
        return values

    def post(self, own):
        return self._all(own)

    def put(self, key, value):
        self._shared[key] = value

    def get(self, key, process):
        while key not in self._shared:
            if self._barrier.broken:  # another process has failed
                raise threading.BrokenBarrierError
        return self._shared[key]

    def broadcast(self, own, size, *, is_wanted):
        (data,) = [each for each in self._all(own) if each is not None]
        assert len(data) == size
        return data.copy() if is_wanted else None

    def gather(self, own, sizes, wanted):
        everyones = self._all(own)
        assert [*map(len, everyones)] == sizes
        return {process: everyones[process].copy() for process in wanted}


def restored_by(count, hosts, restores):
    """By process what `restores(generation)` returns, or its error."""
    shared, barrier, found = {}, threading.Barrier(count), [None] * count

    def run(process):
        try:
            found[process] = restores(Member(process, count, shared, barrier, hosts))
        except RuntimeError as error:
            found[process] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(process,)) for process in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_without_a_commit_all_begin_with_the_values_of_process_0():
    def begins(generation):
        own = {"w": np.full(3, generation.process), "name": f"of {generation.process}"}
        return restore(generation, own, KeptCommits((), 0), None)

    for number, snapshot in restored_by(3, HostsOfProcesses((0,), 3), begins):
        found = snapshot.trees({"w": 0, "name": 0})
        assert (number, found["name"], found["w"].tolist()) == (0, "of 0", [0, 0, 0])


def test_values_of_hosts_that_differ(files):
    """Such as a time: no array, and not divided. All processes take those of the first."""
    hosts = HostsOfProcesses((0, 1), 2)
    for process in (0, 1):
        snapshot = Snapshot.of({"w": np.ones(3), "time": 1.0 + process}, process, 2)
        KeptCommits(files[2 * process :][:2], 0).write(6, snapshot, member(process, 0, hosts))

    def goes_on(generation):
        own = KeptCommits(files[2 * generation.process :][:2], 0)
        return restore(generation, {"w": np.zeros(3), "time": 0.0}, own, None)

    for number, snapshot in restored_by(2, hosts, goes_on):
        found = snapshot.trees({"w": 0, "time": 0})
        assert (number, found["time"], found["w"].tolist()) == (6, 1.0, [1.0] * 3)


def test_a_process_that_has_made_another_state_is_told(files):
    def begins(generation):
        return restore(generation, {"w": np.zeros(3 + generation.process // 2)}, KeptCommits((), 0), None)

    *_, last = restored_by(3, HostsOfProcesses((0,), 3), begins)
    assert "the state of process 2 differs from what process 0 has sent, in the leaves, shapes or dtypes" in str(last)


def test_each_host_has_a_part_of_a_commit(files, commit):
    """A third one, which has come, has nothing."""
    for process in (0, 1):
        commit(process, 6)

    def goes_on(generation):
        own = files[2 * generation.process : 2 * generation.process + 2]
        return restore(generation, values(0), KeptCommits(own, 0), None)

    for number, snapshot in restored_by(3, HostsOfProcesses((0, 1, 2), 3), goes_on):
        assert (number, snapshot.num_parts) == (6, 0)
        found = snapshot.trees(values(0))
        for name, expected in values(6).items():
            np.testing.assert_array_equal(found[name], expected)


# ---- Files that are damaged ------------------------------------------------------------------------------------------

BEGIN = protocol.KEPT_MARK.size


def damage(file, what):
    header = struct.unpack("<q", os.pread(file, 8, BEGIN))[0]
    match what:
        case "huge header":
            os.pwrite(file, struct.pack("<q", 1 << 62), BEGIN)
        case "negative header":
            os.pwrite(file, struct.pack("<q", -8), BEGIN)
        case "other shapes":
            text = os.pread(file, header, BEGIN + 8).replace(b"[6]", b"[7]")
            os.pwrite(file, text, BEGIN + 8)
        case "no JSON":
            os.pwrite(file, b"\x80\x04", BEGIN + 8)


DAMAGE = {
    "huge header": "is damaged, or of another",
    "negative header": "is damaged, or of another",
    "other shapes": "is damaged: it lacks 2 bytes",
    "no JSON": "is damaged, or of another",
}


def file_of(files, slot, number):
    """That with a process's commit."""
    return next(file for file in files[2 * slot :][:2] if protocol.read_mark(file) == (0, number))


@pytest.mark.parametrize(
    ("slot", "what", "text"),
    [(0, *each) for each in DAMAGE.items()]
    + [(1, "no JSON", DAMAGE["no JSON"]), (1, "other shapes", "has different leaves in different processes")],
)
def test_a_damaged_commit_is_not_taken(files, commit, slot, what, text, capsys):
    """The one before is there for that, and the next one of this process does not overwrite it."""
    for number in (6, 7):
        for process in (0, 1):
            commit(process, number)
    damage(file_of(files, slot, 7), what)
    assert_newest(files, 6)
    said = capsys.readouterr().err
    assert f"commit 7 of generation 0, in the launcher's memory, {text}" in said
    assert said.endswith("The job goes on from commit 6 in the launchers' memory.\n")
    commit(1, 7, generation=1)
    assert_newest(files, 6)
    commit(0, 7, generation=1)
    assert_newest(files, 7)


def test_an_older_damaged_commit_is_nothing_to_speak_of(files, commit, capsys):
    for number in (6, 7):
        for process in (0, 1):
            commit(process, number)
    damage(file_of(files, 0, 6), "no JSON")
    assert_newest(files, 7)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("what", DAMAGE)
def test_a_job_does_not_begin_anew_because_all_is_damaged(files, commit, what):
    for number in (6, 7):
        for process in (0, 1):
            commit(process, number)
        damage(file_of(files, 0, number), what)
    with pytest.raises(RuntimeError, match=f"parts of commit 7 and the one before are lost.*{DAMAGE[what]}.*, and no "):
        newest(files)


def test_a_host_has_whole_what_is_damaged_on_another(capsys):
    """All know of it, and take it from there."""
    hosts, of_host = HostsOfProcesses((0, 1), 2), [environment.kept_files(1) for _ in range(2)]
    for process, files in enumerate(of_host):
        for number in (6, 7):
            kept = KeptCommits(files, 0)
            kept.last = CommitId(number - 1, 0)
            kept.write(number, snapshot_of(process, number, divided=False), member(process, 0, hosts))
    damage(file_of(of_host[0], 0, 7), "no JSON")

    def goes_on(generation):
        return restore(generation, values(0, False), KeptCommits(of_host[generation.process], 0), None)

    for number, snapshot in restored_by(2, hosts, goes_on):
        assert number == 7
        assert snapshot.trees(values(0, False))["step"] == 7
    assert capsys.readouterr().err == ""
    for files in of_host:
        for file in files:
            os.close(file)


def test_processes_that_have_written_different_states(files, commit):
    for process in (0, 1):
        commit(process, 6)
    KeptCommits(files, 0).write(7, snapshot_of(0, 7), member(0, 0, ONE_HOST))
    other = snapshot_of(1, 7)
    other.leaves[0] = Leaf("['other']", 3)
    KeptCommits(files, 1).write(7, other, member(1, 0, ONE_HOST))
    with pytest.raises(RuntimeError, match=r"commit 7 .* has different leaves in different processes"):
        newest(files)


@pytest.mark.parametrize("posted", [
    None, 3, [], [0], [0, 0], [0, []], [[]], [0, [0, 1]], [0, 0, [0], [1]], [0, 0, {}], [0, 0, [1, 0, 0, [-1]]],
    ["0", 0, []], [0, "0", []], [0, True, []], [0, None, []], [0, 0, [[[1, 0], 0, -1]]],
    [0, 0, [[[1, 0], 0, [True]]]], [0, 0, [[[1], 0, []]]],
    b"\x80\x04", b"[" * 100_000,
])  # fmt: skip
def test_a_post_that_is_none_is_refused(files, posted):
    class Liar(Alone):
        def post(self, own):
            return [posted if isinstance(posted, bytes) else json.dumps(posted).encode()]

    with pytest.raises(RuntimeError, match="have posted something else than commits: "):
        restore(Liar(), values(0), KeptCommits(files, 0), None)


@pytest.mark.parametrize(("parts", "sections"), [(1 << 60, [-1]), (-5, [-1]), (1, [-2, 0]), (1, [0, 1]), (2, [-1, 5])])
def test_a_post_of_no_whole_commit_is_not_taken(files, parts, sections):
    class Liar(Alone):
        def post(self, own):
            return [json.dumps([0, 0, [[[7, 0], parts, sections]]]).encode()]

    with pytest.raises(RuntimeError, match="parts of commit 7 and the one before are lost"):
        restore(Liar(), values(0), KeptCommits(files, 0), None)


def test_that_nothing_can_be_kept_is_said(files, monkeypatch, tmp_path, capsys):
    """Without /proc, to the first process of a host."""
    monkeypatch.setenv(KEPT_VARIABLE, ",".join(map(str, (0, *files))))
    for folder, said in ((kept._FILES, ""), (str(tmp_path / "none"), "jax_ring.elastic: no commits are kept, ")):
        monkeypatch.setattr(kept, "_FILES", folder)
        assert restore(Alone(), values(0), KeptCommits.of_launcher(), None)[0] == 0
        assert capsys.readouterr().err[: len(said) or None] == said


def test_files_of_others_are_left_alone(files, commit, monkeypatch, tmp_path):
    commit(0, 6)
    monkeypatch.setenv(KEPT_VARIABLE, ",".join(map(str, (1, *files))))
    assert [*KeptCommits.of_launcher().commits()] == [CommitId(6, 0)]
    log = tmp_path / "log"
    log.write_bytes(protocol.KEPT_MARK.pack(True, 0, 6))
    with log.open("r+b") as stream:
        for others in (f"0,{stream.fileno()},{stream.fileno()}", "1,9999"):
            monkeypatch.setenv(KEPT_VARIABLE, others)
            kept = KeptCommits.of_launcher()
            assert kept.commits() == {}
            kept.write(7, snapshot_of(0, 7), member(0, 0, ONE_HOST))
    assert log.read_bytes() == protocol.KEPT_MARK.pack(True, 0, 6)
    monkeypatch.delenv(KEPT_VARIABLE)
    assert KeptCommits.of_launcher().commits() == {}
