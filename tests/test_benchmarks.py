"""The benchmarks run and check their results; what they measure is not a test's business."""

import csv
import json
import pathlib
import subprocess
import sys

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


def test_train_step(tmp_path):
    file = tmp_path / "rows.json"
    run("train_step.py", "--devices", "2", "--steps", "2", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * 4
    assert {row["ranks"] for row in rows} == {2}


def test_reduction_place(tmp_path):
    file = tmp_path / "rows.json"
    run("reduction_place.py", "--devices", "2", "--steps", "2", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * 3
