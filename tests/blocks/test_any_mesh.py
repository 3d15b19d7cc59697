"""The same bits on any mesh: a small GPT on data x tensor parallel meshes, by the example."""

import pathlib
import re
import subprocess
import sys

import pytest
from helpers import AS_USERS_COMPILE

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "any_mesh.py"


@pytest.mark.parametrize(
    ("dtype", "layouts"),
    [
        ("float32", "dp=1,tp=1 dp=2,tp=3 dp=4,tp=2,processes=2"),
        ("bfloat16", "dp=1,tp=1 dp=3,tp=1 dp=1,tp=8"),
    ],
)
def test_all_meshes_have_one_digest(dtype, layouts):
    command = [
        sys.executable,
        "-P",
        str(EXAMPLE),
        "--steps=3",
        "--layers=1",
        f"--dtype={dtype}",
        f"--layouts={layouts}",
    ]
    result = subprocess.run(command, env=AS_USERS_COMPILE, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    digests = re.findall(r"digest ([0-9a-f]{16}) ", result.stdout)
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert "3 meshes, the same bits on all of them" in result.stdout
