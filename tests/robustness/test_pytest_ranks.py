"""What is left of a pytest that is killed, and what it makes of ranks that write something else than their reports."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jax_ring.launcher.processes import state_of

pytestmark = pytest.mark.one_pair  # the plugin does not depend on JAX's version

PRELUDE = """
import json, os, pathlib, pytest, subprocess, time
REPORTS = pathlib.Path(json.loads(os.environ.get("JAX_RING_PYTEST_RANK", '{"reports": ""}'))["reports"])
"""
IS_KILLED = """
@pytest.mark.jax_processes(1)
def test_waits():
    child = subprocess.Popen(["sleep", "1000"])
    said = json.dumps([str(REPORTS.parent), os.getppid(), os.getpid(), child.pid])
    pathlib.Path("new").write_text(said)
    os.rename("new", "said")
    time.sleep(1000)
"""
GOES_WRONG = """
@pytest.mark.jax_processes(1)
def test_nested():
    with REPORTS.open("a") as reports:
        print("[" * 10**5, '["report", ', '["a"]', '[1, 2]', sep="\\n", file=reports)

@pytest.mark.jax_processes(1)
def test_pipe():
    REPORTS.unlink()
    os.mkfifo(REPORTS)

@pytest.mark.jax_processes(1)
def test_link():
    REPORTS.unlink()
    REPORTS.symlink_to("/proc/self/maps")
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Starts pytest on tests in a folder of their own."""

    def start(tests: str) -> subprocess.Popen:
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "test_of_ranks.py").write_text(PRELUDE + tests)
        command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "--color=no"]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_nothing_is_left_of_a_pytest_that_is_killed(run_pytest, tmp_path, signum):
    """Neither the ranks, nor what they have started, nor a file with their output."""
    said = tmp_path / "said"
    with run_pytest(IS_KILLED) as tests:
        while not said.exists():
            assert tests.poll() is None, tests.stdout.read()
            time.sleep(0.02)
        folder, *started = json.loads(said.read_text())
        assert started[0] == tests.pid
        assert pathlib.Path(folder).is_dir()
        tests.send_signal(signum)
        tests.wait(60)
    until = time.monotonic() + 30
    while os.path.exists(folder) or any(state_of(pid) not in ("", "Z") for pid in started):
        assert time.monotonic() < until, [os.path.exists(folder), *map(state_of, started)]
        time.sleep(0.02)


def test_reports_that_are_none(run_pytest):
    """Pytest leaves them out, and waits for no pipe: two tests have not said that they have passed."""
    with run_pytest(GOES_WRONG) as tests:
        try:
            output, _ = tests.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            tests.kill()
            raise
    assert "1 passed" in output
    for name in ("test_pipe", "test_link"):
        assert f"FAILED test_of_ranks.py::{name}" in output
    assert output.count("rank 0 of 1: ended with status 0 before the test had ended") >= 2
    assert "RecursionError" not in output
