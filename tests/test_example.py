"""The main job, as the README runs it."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "train_digits.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=240, check=False
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
