"""The tiers of tests: CI's invocations run every test together, and no pattern of them is for nothing."""

import pathlib
import re
import subprocess
import sys

import pytest
import tiers

ROOT = pathlib.Path(__file__).parents[2]
CI = (ROOT / ".ci" / "run").read_text()


@pytest.fixture
def ids(request):
    """Those of all tests."""
    if [pathlib.Path(argument).resolve() for argument in request.config.args] != [ROOT / "tests"]:
        pytest.skip("needs a session that collects all tests, as pytest tests -k test_tiers")
    return request.config.stash[tiers.ALL_IDS]


def test_every_test_is_run_in_ci(ids):
    assert len(ids) > 3000
    assert f'tests_of_oldest="{tiers.OLDEST}" tests_of_newest="{tiers.NEWEST}"' in CI
    assert re.findall(r"^\.venv.*pytest -n 3 .*-m .*$", CI, re.MULTILINE) == [
        '.venv/bin/pytest -n 3 "${another_order[@]}" -m "$tests_of_oldest" tests',
        '.venv-newest/bin/pytest -n 3 "${another_order[@]}" -m "$tests_of_newest" tests',
    ]
    # Once for each of the script's two modes, and nowhere else: pytest takes a path for a marker, and selects nothing.
    for variable in ("tests_of_oldest", "tests_of_newest"):
        assert len(re.findall(rf"\b{variable}=", CI)) == 2
    # In another order, each runs once.
    assert not [each for each in ids if tiers.selects(tiers.OLDEST, each) == tiers.selects(tiers.NEWEST, each)]


def test_the_plain_command_has_something_of_every_folder(ids):
    def folders(nodeids):
        return {tiers.below_tests(nodeid).partition("/")[0] for nodeid in nodeids}

    assert folders(ids) == folders(nodeid for nodeid in ids if tiers.selects(tiers.PLAIN, nodeid))


@pytest.mark.parametrize("marker", tiers.MARKERS)
def test_every_pattern_names_tests(ids, marker):
    names = [tiers.below_tests(nodeid) for nodeid in ids]
    for pattern in {"full": tiers.FULL, "one_pair": tiers.ONE_PAIR}[marker]:
        folder = pattern.partition("/")[0]
        # A folder that needs what is not there is not collected.
        if (ROOT / "tests" / folder).is_dir() and not any(name.startswith(f"{folder}/") for name in names):
            continue
        assert any(re.match(pattern, name) for name in names), pattern


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [([], ["plain"]), (["tests"], ["plain", "left_out"]), (["-m", "full"], ["left_out"])],
    ids=["plain command", "a path", "a marker"],
)
def test_which_tests_a_command_runs(tmp_path, arguments, selected):
    (tmp_path / "tests" / "support").mkdir(parents=True)
    for name in ("conftest.py", "support/tiers.py"):
        text = (ROOT / "tests" / name).read_text().replace("FULL = [", 'FULL = [".*left_out",')
        (tmp_path / "tests" / name).write_text(text)
    (tmp_path / "tests" / "test_some.py").write_text("def test_plain(): pass\ndef test_left_out(): pass")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\npythonpath = tests/support\naddopts = -n 1")
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", *arguments]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"PASSED tests/test_some.py::test_(\w+)", text)) == set(selected), text
