"""Commits on disk: written, started from, and refused where they are damaged."""

import os
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
    Checkpoints(str(tmp_path)).write(8, Snapshot.of({"w": np.ones(3), "step": 3}, 0, 1))
    header = next(path for path in (tmp_path / "8" / "header").iterdir() if b"shape" in path.read_bytes())
    text = header.read_text()
    for old, new, what in (
        ("[3]", "[4]", r"is damaged: it has float64\[3\] at \['w'\] instead of float64\[4\]"),
        ("float64", "float32", "is damaged: it has float64"),
        ("['w']", "['v']", "is damaged: it has object"),
        ("processes", "process", "is damaged, or of another version of jax_ring: it is no header"),
        ("[-1]", "[]", "is damaged: it has parts of leaves"),
        ("[3]", '[3], "boxes": [[[[0, 3]]]]'.replace('"', '\\"'), "is damaged: it has parts of leaves"),
    ):
        assert old in text
        header.write_text(text.replace(old, new))
        with pytest.raises(RuntimeError, match=what):
            Checkpoints(str(tmp_path)).read(8)
    (tmp_path / "8" / "header").rename(tmp_path / "8" / "others")
    with pytest.raises(RuntimeError, match="is of another version of jax_ring, or no checkpoint"):
        Checkpoints(str(tmp_path)).read(8)
