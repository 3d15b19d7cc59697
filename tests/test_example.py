"""The examples: the main job, as the README runs it, and the others."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(*arguments, example="train_digits.py"):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("impl", ["ring", "lax"])
def test_trains_and_agrees(impl):
    result = run("--impl", impl)
    assert result.returncode == 0, result.stdout + result.stderr
    calls = {"ring": "jax_ring's all-reduce 1x and XLA's 0x", "lax": "jax_ring's all-reduce 0x and XLA's 1x"}
    assert calls[impl] in result.stdout
    assert "the same bits" in result.stdout
    table = result.stdout[result.stdout.index("┏") :]
    accuracies = [float(number) for number in re.findall(r"(\d+\.\d+)%", table)]
    assert len(accuracies) == 3
    assert min(accuracies) > 95


def test_refuses_what_it_cannot_do():
    result = run("--devices", "7")
    assert result.returncode == 2
    assert "--devices must divide the batch size 120, got 7" in result.stderr


def test_code_that_one_did_not_write():
    result = run("--devices", "4", example="replace_psum.py")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split("│")[2:4] for line in result.stdout.splitlines() if "the same bits" in line]
    # Calls by jax_ring and by XLA: as it is, with the name replaced, and under override_lax().
    assert [[int(cell) for cell in row] for row in rows] == [[0, 4], [2, 2], [4, 0]]
