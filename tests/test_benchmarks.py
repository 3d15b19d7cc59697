"""The benchmarks run, and their results are correct. Measured times are not tested."""

import csv
import importlib
import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jax_ring.schedule import topology

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


def run(name, *arguments):
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_allreduce(tmp_path):
    files = tmp_path / "rows.json", tmp_path / "rows.csv"
    text = run(
        *("allreduce.py", "-b", "4", "-e", "4K", "-f", "32", "-n", "2", "-w", "1", "--devices", "3"),
        *("-d", "float32,bfloat16,int64", "--loop-seconds", "0.01", "--json", str(files[0]), "--csv", str(files[1])),
        *("--impl", "ring_psum,lax.psum,ppermute"),
    )
    assert "# Out of bounds values: 0 OK" in text
    rows = json.loads(files[0].read_text())["rows"]
    assert {(row["implementation"], row["dtype"]) for row in rows} == {
        (implementation, dtype)
        for implementation in ("ring_psum", "lax.psum", "ppermute")
        for dtype in ("float32", "bfloat16", "int64")
    }
    assert all(row["wrong"] == 0 and row["out_of_place"]["median"] > 0 for row in rows)
    with files[1].open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


@pytest.mark.parametrize(("peer", "module"), [("torch/Gloo", "torch"), ("mpi4jax", "mpi4jax")])
def test_peers(peer, module, tmp_path):
    """An installed peer has rows in the results. For a missing one, a line says what to install."""
    file = tmp_path / "rows.json"
    text = run(
        *("allreduce.py", "-b", "4", "-e", "1K", "-f", "256", "-n", "2", "-w", "1", "--devices", "2"),
        *("--loop-seconds", "0.001", "--impl", f"ring_psum,{peer}", "--json", str(file)),
    )
    rows = [row for row in json.loads(file.read_text())["rows"] if row["implementation"] == peer]
    if importlib.util.find_spec(module) is None:
        assert f"# {peer}: left out: {module}" in text
        assert ".[peers]" in text
        assert not rows
    else:
        assert [(row["bytes"], row["ranks"], row["wrong"]) for row in rows] == [(4, 2, 0), (1024, 2, 0)]
        assert all(row["out_of_place"]["median"] > 0 for row in rows)


def test_processes(tmp_path):
    """Two hosts are simulated. Libraries that support only one rank per process are left out."""
    file = tmp_path / "rows.json"
    text = run(
        *("processes.py", "-b", "4", "-e", "1K", "-f", "256", "-n", "2", "-w", "1", "--rounds", "2"),
        *("--layout", "2x2", "--hosts", "2", "--impl", "ring_psum,lax.psum,mpi4jax"),
        *("--loop-seconds", "0.001", "--json", str(file)),
    )
    assert "# Out of bounds values: 0 OK" in text
    assert "# mpi4jax: left out: " in text
    assert "# ring_psum is served by " in text
    rows = json.loads(file.read_text())["rows"]
    assert [(row["implementation"], row["bytes"]) for row in rows] == [
        (name, size) for size in (4, 1024) for name in ("ring_psum", "lax.psum")
    ]
    for row in rows:
        assert (row["ranks"], row["processes"], row["hosts"], row["wrong"]) == (4, 2, 2, 0)
        assert row["out_of_place"]["median"] > 0
        # lax.psum passes every rank's message to XLA's all-reduce; ring_psum must not pass more.
        assert row["xla_bytes"] == 4 * row["bytes"] if row["implementation"] == "lax.psum" else row["xla_bytes"] > 0
        assert row["xla_bytes"] <= 4 * row["bytes"]


def test_processes_without_a_peer():
    text = run(
        *("processes.py", "-b", "4", "-e", "4", "-n", "1", "-w", "1", "--rounds", "1", "--layout", "2x1"),
        *("--impl", "ring_psum", "--loop-seconds", "0.001"),
    )
    assert "# ring_psum is served by jax_ring (shared memory, 2 processes)" in text
    assert "# time / ring_psum's" not in text


def test_train_step(tmp_path):
    file = tmp_path / "rows.json"
    run("train_step.py", "--devices", "2", "--steps", "2", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * 4
    assert {row["ranks"] for row in rows} == {2}


def test_docs_have_the_published_figures(monkeypatch):
    assert run("published.py") in (BENCHMARKS.parent / "docs/algorithms.md").read_text()
    # The parameters are derived from the rows with role "input"; the other rows are predictions.
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    published = importlib.import_module("published")
    rows = published.rows()
    assert max(abs(row.error) for row in rows if row.role == "input") < 0.02
    small = [abs(row.error) for row in rows if row.role == "prediction" and row.bytes <= 1024]
    large = [abs(row.error) for row in rows if row.role == "prediction" and row.bytes > 1 << 20]
    assert max(small + large) < 0.25


def test_a100_latencies_are_fitted_to_the_inputs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows = [row for row in importlib.import_module("published").rows() if row.what.startswith("A100, one host")]
    inputs = [(2 * (row.ranks - 1), row.measured) for row in rows if row.role == "input"]
    hop, launch = np.polyfit(*zip(*inputs, strict=True), 1)
    described = topology.load("nvswitch8_a100")
    assert described.host_latency * 1e6 == pytest.approx(hop, rel=1e-2)
    assert described.launch_latency * 1e6 == pytest.approx(launch, rel=1e-2)


def test_wire_error():
    text = run("wire_error.py", "--devices", "2", "--elements", "512", "--steps", "2", "--gradients", "normal")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| normal")]
    one_step = {row[1]: float(row[3]) for row in rows}
    assert one_step["float32"] < one_step["bfloat16"] < one_step["int8"] < one_step["float8_e4m3fn"]
    assert {row[1]: row[2] for row in rows}["int8"] == "0.254"


def test_lowering_time():
    text = run("lowering_time.py", "--devices", "2", "--leaves", "3", "--runs", "1")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    # The sums that are left before XLA looks at the program.
    assert [row[-1] for row in rows] == ["3", "3", "1", "1", "1"]


def test_reduction_place(tmp_path):
    file = tmp_path / "rows.json"
    run("reduction_place.py", "--devices", "2", "--steps", "2", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * 3
