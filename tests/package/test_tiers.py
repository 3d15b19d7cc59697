"""The tiers of tests: CI's invocations run every test together, and the plain command leaves some out."""

import itertools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CI = (ROOT / ".ci" / "run").read_text()


def selects(expression: str, full: bool, one_pair: bool) -> bool:
    """Whether `pytest -m expression` runs a test with these marks."""
    return eval(expression, {}, {"full": full, "one_pair": one_pair})


def test_every_test_is_run_in_ci():
    assert "$(command_of README.md 'pytest$')" in CI  # the plain command
    assert re.findall(r"^\.venv.*pytest -n 3 .*-m .*$", CI, re.MULTILINE) == [
        '.venv/bin/pytest -n 3 "${another_order[@]}" -m "$tests_of_oldest" tests',
        '.venv-newest/bin/pytest -n 3 "${another_order[@]}" -m "$tests_of_newest" tests',
    ]
    # Twice each, for the script's two modes, and nowhere else: pytest takes a path for a marker, and selects nothing.
    of_oldest, of_newest = (re.findall(rf'\b{name}="(.*?)"', CI) for name in ("tests_of_oldest", "tests_of_newest"))
    for oldest, newest in zip(of_oldest, of_newest, strict=True):
        for marks in itertools.product([False, True], repeat=2):
            assert any(selects(expression, *marks) for expression in ("not full", oldest, newest))
    assert len(of_oldest) == 2


@pytest.mark.full
@pytest.mark.one_pair  # pytest's selection does not depend on JAX
@pytest.mark.parametrize(
    ("arguments", "selected"),
    # xdist's workers are started with paths: the plain command must be known in them as well.
    [([], ["plain"]), (["-n0", "tests"], ["plain", "left_out"]), (["-n0", "-m", "full"], ["left_out"])],
    ids=["plain command", "a path", "a marker"],
)
def test_which_tests_a_command_runs(tmp_path, arguments, selected):
    (tmp_path / "tests" / "support").mkdir(parents=True)
    for name in ("conftest.py", "support/tiers.py"):
        (tmp_path / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    (tmp_path / "tests" / "test_some.py").write_text(
        "import pytest\ndef test_plain(): pass\n@pytest.mark.full\ndef test_left_out(): pass"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\npythonpath = tests/support\naddopts = -n 1\nmarkers = full"
    )
    command = [sys.executable, "-m", "pytest", "-rA", "--color=no", "-p", "no:cacheprovider", *arguments]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"PASSED tests/test_some.py::test_(\w+)", text)) == set(selected), text
