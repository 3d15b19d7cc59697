"""The same bits on any mesh: a small GPT on data x tensor parallel meshes, by the example."""

import pathlib
import re
import subprocess
import sys

import pytest
from helpers import AS_USERS_COMPILE

pytestmark = pytest.mark.full  # each number of ranks and each mesh compiles anew

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "any_mesh.py"


@pytest.mark.parametrize(
    ("options", "layouts", "environment"),
    [
        (["--dtype=float32"], "dp=1,tp=1 dp=4,tp=2", None),
        # With LLVM's optimizations, which could round differently.
        (["--dtype=bfloat16"], "dp=1,tp=8 dp=3,tp=1", AS_USERS_COMPILE),
        (["--dtype=float32", "--stage-3"], "dp=2,tp=3 dp=2,tp=2,processes=2", None),
    ],
    ids=["float32", "bfloat16", "stage 3"],
)
def test_all_meshes_have_one_digest(options, layouts, environment):
    command = [sys.executable, str(EXAMPLE), "--steps=2", "--layers=1", *options, f"--layouts={layouts}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    digests = re.findall(r"digest ([0-9a-f]{16}) ", result.stdout)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    assert "2 meshes, the same bits on all of them" in result.stdout
