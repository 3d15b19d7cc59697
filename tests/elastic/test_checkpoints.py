"""Commits on disk, which somebody else may have written or changed: what is no commit is refused before it is read."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from jax_ring.elastic.checkpoints import Checkpoints
from jax_ring.elastic.snapshots import Snapshot

TIME_LIMIT = 240


def write(directory, number):
    Checkpoints(str(directory)).write(number, Snapshot.of({"w": np.ones(3), "step": 3}, 0, 1))


def header_of(folder):
    return next(path for path in (folder / "header").iterdir() if b"shape" in path.read_bytes())


def in_process(code, *arguments):
    """The result of Python code in a process of its own: one that is killed or hangs is a failed test, no more."""
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code), *map(str, arguments)], stdin=subprocess.DEVNULL, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        timeout=TIME_LIMIT,
    )  # fmt: skip


def test_a_job_of_several_processes_starts_from_disk(tmp_path):
    """Where nothing has started the backend before: that of process 0, for orbax, waits for those of the others."""
    write(tmp_path / "commits", 8)
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys, jax, numpy as np
        jax.distributed.initialize()
        import jax_ring
        state = jax_ring.elastic.State(w=np.zeros(3), step=0, directory=sys.argv[1], every=1)
        @jax_ring.elastic.run()
        def train(state):
            w, step = state.w.tolist(), state.step
            state.commit()
            print(f"{w} at step {step}, then {state.commits} commits, {jax.process_count()} processes", flush=True)
        train(state)
    """)
    )
    command = [sys.executable, "-P", "-m", "jax_ring.launch", "-n", "2", str(script), str(tmp_path / "commits")]
    result = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdin=subprocess.DEVNULL, text=True, timeout=TIME_LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert result.stdout.count("[1.0, 1.0, 1.0] at step 3, then 9 commits, 2 processes") == 2, result.stdout
    assert Checkpoints(str(tmp_path / "commits")).newest_number() == 9


def test_a_commit_that_is_made_anew_replaces_the_one_on_disk(tmp_path):
    """Process 0 had written it when another was lost that had not made it."""
    for value in (1, 2):
        Checkpoints(str(tmp_path)).write(8, Snapshot.of({"w": np.full(3, value)}, 0, 1))
    found = Checkpoints(str(tmp_path)).read(8).trees({"w": 0})
    np.testing.assert_array_equal(found["w"], [2, 2, 2])


def test_damaged_checkpoints_are_refused(tmp_path):
    write(tmp_path, 8)
    header = header_of(tmp_path / "8")
    text = header.read_text()
    assert json.loads(text)  # orbax writes JSON around that of a commit
    for old, new, what in (
        ("[3]", "[4]", r"is damaged: it has float64\[3\] at \['w'\] instead of float64\[4\]"),
        ("float64", "float32", "is damaged: it has float64"),
        ("['w']", "['v']", r"is damaged: it has nothing at \['v'\] instead of float64\[3\]"),
        ("{", "", "is damaged: its header is no JSON"),
        ("processes", "process", "is damaged, or of another version of jax_ring: it is no header"),
        ("[-1]", "[]", "is damaged: it has parts of leaves"),
        ("[3]", '[3], "boxes": [[[[0, 3]]]]'.replace('"', '\\"'), "is damaged: it has parts of leaves"),
    ):
        assert old in text
        header.write_text(text.replace(old, new))
        with pytest.raises(RuntimeError, match=what):
            Checkpoints(str(tmp_path)).read(8)
    for other in ("[]", "[" * 100_000, "null", "3", '"\\ud800"'):
        header.write_text(other)
        with pytest.raises(RuntimeError, match=f"{re.escape(str(tmp_path / '8'))} is damaged"):
            Checkpoints(str(tmp_path)).read(8)
    (tmp_path / "8" / "header").rename(tmp_path / "8" / "others")
    with pytest.raises(RuntimeError, match="is of another version of jax_ring, or no checkpoint"):
        Checkpoints(str(tmp_path)).read(8)


def replaced_by_link(path, elsewhere):
    """What is at a path is elsewhere, and the path a link to it: nothing but the link is wrong."""
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def chunk_of(folder):
    return max(path for path in (folder / "arrays").rglob("d/*") if path.is_file())


LINKS = {
    "a chunk": chunk_of,
    "the header": header_of,
    "what orbax says of the arrays": lambda folder: folder / "arrays" / "_METADATA",
    "a folder within": lambda folder: folder / "arrays",
    "the folder itself": lambda folder: folder,
}


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("use", [Checkpoints.newest_number, lambda each: each.read(8), lambda each: each._manager()])
def test_links_are_not_followed(tmp_path, name, use):
    """Whoever can write to the directory would have files of the job's user read, and written back."""
    write(tmp_path / "commits", 8)
    path = LINKS[name](tmp_path / "commits" / "8")
    replaced_by_link(path, tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match=rf"{re.escape(str(path))} is a link, .* remove .*/commits/8, or take a dir"):
        use(Checkpoints(str(tmp_path / "commits")))


@pytest.mark.parametrize("use", [Checkpoints.newest_number, lambda each: each.read(8), lambda each: each._manager()])
@pytest.mark.parametrize(
    "change",
    [
        lambda folder: folder.chmod(0o777),
        lambda folder: folder.chmod(0o1777),
        pytest.param(
            lambda folder: os.chown(folder, 12345, 12345),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_a_directory_of_others_is_refused(tmp_path, use, change):
    """They could put links in the place of what orbax writes to at that moment, and so write to any file."""
    directory = tmp_path / "commits"
    write(directory, 8)
    change(directory)
    with pytest.raises(
        PermissionError, match=r"other users .* may decide what is in .*/commits, of user \d+ and mode 1?7"
    ):
        use(Checkpoints(str(directory)))


def test_a_directory_is_made_for_this_user_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        write(tmp_path / "commits", 8)
    finally:
        os.umask(before)
    assert Checkpoints(str(tmp_path / "commits")).newest_number() == 8


def test_an_old_commit_that_is_a_link_is_refused_before_anything_is_written(tmp_path):
    """It is removed once there are newer ones."""
    for number in (1, 2):
        write(tmp_path, number)
    replaced_by_link(tmp_path / "1", tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match="/1 is a link"):
        write(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "elsewhere"]


def test_links_of_others_beside_commits_do_not_matter(tmp_path):
    write(tmp_path, 8)
    (tmp_path / "newest").symlink_to("8")
    (tmp_path / "2026-results").symlink_to(tmp_path)
    assert Checkpoints(str(tmp_path)).newest_number() == 8


@pytest.mark.parametrize("name", ["the header", "metrics"])
def test_what_is_no_file_is_not_waited_for(tmp_path, name):
    write(tmp_path, 8)
    path = tmp_path / "8" / "metrics" / "metrics" if name == "metrics" else LINKS[name](tmp_path / "8")
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    read = "import sys; from jax_ring.elastic.checkpoints import Checkpoints; Checkpoints(sys.argv[1]).read(8)"
    assert f"{path} is neither a file nor a folder, which" in in_process(read, tmp_path).stdout


@pytest.mark.parametrize("number", [1 << 63, 10**40])
def test_numbers_that_no_job_counts_to_are_refused(tmp_path, number):
    """The next commit would have one that does not fit its place in memory."""
    write(tmp_path, 8)
    (tmp_path / "8").rename(tmp_path / str(number))
    with pytest.raises(RuntimeError, match=f"{number} is no checkpoint: jobs do not make so many commits. Remove it"):
        Checkpoints(str(tmp_path)).newest_number()


def write_with_plain_array(directory, folder=None, **changes):
    """Writes a commit whose one array is in a folder of the old format of zarr, which has its type in JSON."""
    Checkpoints(str(directory)).write(8, Snapshot.of({"w": np.ones(8, np.float32)}, 0, 1))
    arrays = directory / "8" / "arrays"
    for each in arrays.iterdir():
        if each.name not in ("_METADATA", "commit_success.txt"):
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    metadata = json.loads((arrays / "_METADATA").read_text()) | {"use_ocdbt": False, "use_zarr3": False}
    text = json.dumps(metadata)
    if folder is not None:
        text = text.replace("['w']", str(folder))
        header_of(directory / "8").write_text(header_of(directory / "8").read_text().replace("['w']", str(folder)))
    (arrays / "_METADATA").write_text(text)
    folder = folder or arrays / "['w']"
    folder.mkdir()
    (folder / "0").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    zarr = {
        "chunks": [8], "compressor": None, "dtype": "<f4", "fill_value": 0, "filters": None, "order": "C", "shape": [8],
        "zarr_format": 2, **changes,
    }  # fmt: skip
    (folder / ".zarray").write_text(json.dumps(zarr))


def test_arrays_elsewhere_are_not_read(tmp_path):
    """Whose folder is not the commit's, and so has not been looked through."""
    write_with_plain_array(tmp_path / "commits", tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match=f"/8 is damaged: its array {tmp_path}/elsewhere is elsewhere"):
        Checkpoints(str(tmp_path / "commits")).read(8)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "read"),
        ({"shape": [1 << 40]}, f"it has float32[{1 << 40}] at ['w'] instead of float32[8]"),
        ({"chunks": [1 << 40]}, f"['w'], of the shape [8], has chunks of [{1 << 40}]"),
    ],
)
def test_arrays_of_another_size_are_not_allocated(tmp_path, changes, what):
    """orbax takes the memory for what is said beside an array, and a process without so much is killed by it."""
    write_with_plain_array(tmp_path, **changes)
    read = "import sys; from jax_ring.elastic.checkpoints import Checkpoints; Checkpoints(sys.argv[1]).read(8)"
    result = in_process(f"{read}; print('read')", tmp_path).stdout
    assert result.endswith("read\n" if what == "read" else f"{tmp_path / '8'} is damaged: {what}\n"), result
