"""The example and the benchmark of docs/any_number_of_devices.md: the same bits on several layouts of devices."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "any_number_of_devices.py"


@pytest.mark.full
@pytest.mark.one_pair
def test_the_example():
    """One device, several processes on two hosts, and a training that moves from eight devices to three and to four."""
    sizes = ("--steps=4", "--context=8", "--width=8", "--layers=1")
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), *sizes, "--dtype=float32", "--layouts=1x1,2x4@2", "--jobs=2"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    digests = re.findall(r"│ ([0-9a-f]{16}) │", result.stdout)
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert "the same bits" in result.stdout


@pytest.mark.full
def test_the_benchmark(tmp_path):
    file = tmp_path / "rows.json"
    program = [sys.executable, str(ROOT / "benchmarks" / "tree_order.py"), "--ranks=2", "-b=4K", "-e=16K"]
    options = ["--what=messages", "--dtypes=float32", "--rounds=2", "--loop-seconds=0.001", f"--json={file}"]
    result = subprocess.run([*program, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [(row["what"], row["variant"]) for row in rows] == [
        (size, order) for size in ("4 KiB", "16 KiB") for order in ("rank", "tree")
    ]
    assert all(row["ratio"] == 1 for row in rows if row["variant"] == "rank")


def test_invalid_layouts_are_rejected():
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), "--layouts=1x8,1x5"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "the devices of a layout must divide 24, and its hosts the processes, got '1x5'" in result.stderr
