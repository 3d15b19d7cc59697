"""The pytest plugin: tests in several processes, what they report, faults on purpose, and lax replaced."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest

from pytest_jax_ring import delay, kill, ranks, stop
from pytest_jax_ring.faults import Fault, check_faults
from pytest_jax_ring.processes import ProcessGroup
from pytest_jax_ring.ranks import Job

CONFTEST = """
import os
import pathlib
import sys
import time

assert "jax" not in sys.modules, "the plugin must leave it to the conftest file to import JAX first"

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)

def pytest_addoption(parser):
    parser.addoption("--scale", type=int, default=1)
    parser.addoption("--data", type=pathlib.Path)
    parser.addoption("--model", action="append", default=[])
    parser.addoption("--seed", type=int, default=os.getpid())

def pytest_generate_tests(metafunc):
    if "model" in metafunc.fixturenames:
        metafunc.parametrize("model", metafunc.config.getoption("--model"))

# A timeout may be that of what a test does: ranks start slowly on a loaded machine. It begins when the last rank has
# made the file that the mark's variable BEGINS_WITH names.

from pytest_jax_ring import ranks

def wait(self, wait=ranks._Ranks.wait):
    if file := self._job.environments()[-1].get("BEGINS_WITH"):
        while self.popen[-1].poll() is None and not pathlib.Path(file).exists():
            time.sleep(0.01)
    wait(self)

ranks._Ranks.wait = wait

def pytest_terminal_summary():
    assert "JAX_RING_PYTEST_RANK" not in os.environ, "nobody reads it, and plugins import what they need for it"
"""
PRELUDE = """
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum
from pytest_jax_ring import delay, fault_point, kill, stop

assert jax.device_count() == jax.process_count() * jax.local_device_count()  # at import: the job has been joined

def total():
    size = jax.device_count()
    mesh = jax.make_mesh((size,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.make_array_from_callback(
        (size,), jax.NamedSharding(mesh, P("i")), lambda index: jnp.arange(float(size))[index]
    )
    f = jax.jit(jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
    return float(f(x).addressable_data(0)[0])
"""


@pytest.fixture
def tmp_path(tmp_path):
    """A folder whose name pytest refuses in an argument. Started there, it runs tests by relative paths."""
    folder = tmp_path / "of [all] ranks"
    folder.mkdir()
    return folder


@pytest.fixture
def run_tests(tmp_path):
    """Runs tests in a folder of their own, and returns the status and the output of pytest."""

    def run(tests: str, *options: str) -> tuple[int, str]:
        (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\n")
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "test_ranks.py").write_text(PRELUDE + tests)
        result = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", "-q", "-rA", "--color=no", *options],
            cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        return result.returncode, result.stdout + result.stderr

    return run


@pytest.mark.full
def test_the_body_runs_in_each_process(run_tests, monkeypatch, tmp_path):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nothing listens there
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--last-failed --cache-clear")
    (tmp_path / "plugins").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "plugins"), prepend=os.pathsep)
    (tmp_path / "plugins" / "halves.py").write_text("import pytest\n\n@pytest.fixture\ndef half():\n    return 0.5\n")
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "constants.py").write_text("TWO = 2.0\n")
    status, output = run_tests(
        """
import pathlib
import unittest
import warnings

from constants import TWO

@pytest.fixture
def scale(request):
    return request.config.getoption("--scale")

@pytest.mark.jax_processes(3, devices=2, environment=[{"NAME": name} for name in "xyz"])
@pytest.mark.parametrize("factor", [2.0])
def test_sum(factor, model, scale, half, request, tmp_path, monkeypatch):
    import os
    assert os.environ["NAME"] == "xyz"[jax.process_index()]
    assert jax.process_count() == 3 and jax.local_device_count() == 2
    assert jax.config.jax_enable_x64
    assert factor * scale * total() == 150.0
    assert model == "small" and half * TWO == 1.0
    assert request.config.getoption("--data") == pathlib.Path("data")
    assert request.config.getoption("--seed") == os.getppid()
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning)

@pytest.mark.jax_processes(1)
class TestCase(unittest.TestCase):
    def setUp(self):
        self.reason = "not today"

    def test_skipped(self):
        pytest.skip(self.reason)

    def test_known_to_fail(self):
        pytest.xfail("tomorrow")

@pytest.mark.jax_processes(1)
@pytest.mark.xfail(raises=ZeroDivisionError)
def test_expected_to_fail():
    1 / 0

def test_in_this_process():
    assert jax.process_count() == 1
""",
        "--scale=5", "--model=small", "--data", "data", "-p", "halves", "-o", "pythonpath=library",
        "-W", "error::DeprecationWarning", f"--rootdir={tmp_path / 'library'}", "test_ranks.py",
    )  # fmt: skip
    assert status == 0, output
    assert "2 passed, 1 skipped, 2 xfailed" in output
    assert "not today" in output
    assert "tomorrow" in output


def texts_by_test(output: str) -> dict[str, str]:
    """What pytest says of each test that failed."""
    texts = re.split(r"^_+ (test_\w+) _+$", output.partition("short test summary")[0], flags=re.MULTILINE)
    return dict(zip(texts[1::2], texts[2::2], strict=True))


@pytest.mark.full
@pytest.mark.one_pair
def test_the_rank_that_failed_comes_first(run_tests):
    status, output = run_tests(
        """
@pytest.mark.jax_processes(3)
@pytest.mark.xfail(raises=KeyError)
def test_fails():
    print("rank", jax.process_index(), "was here")
    if jax.process_index() == 1:
        raise ValueError("the batch is empty")
    total()

@pytest.mark.jax_processes(2, devices=0)
def test_wrong_mark():
    pass
"""
    )
    assert status == 1
    of = texts_by_test(output)
    assert of["test_fails"].lstrip().startswith("rank 1 of 3: ValueError: the batch is empty")
    assert '>           raise ValueError("the batch is empty")' in of["test_fails"]  # its traceback
    assert re.search(r"^rank 0 of 3: .*rank", of["test_fails"], re.MULTILINE)
    assert "rank 2 was here" in of["test_fails"]
    assert "devices must be a positive integer, got 0" in of["test_wrong_mark"]
    assert "2 failed" in output


@pytest.mark.full
@pytest.mark.one_pair
def test_hangs_and_exits(run_tests):
    status, output = run_tests(
        """
@pytest.mark.jax_processes(2, timeout=2, environment={"BEGINS_WITH": "hangs"})
def test_hangs():
    if jax.process_index() == 1:
        open("hangs", "x").close()
        time.sleep(1000)

@pytest.mark.jax_processes(2)
def test_exits():
    import os
    if jax.process_index() == 1:
        print("this is the end", flush=True)
        os._exit(7)

@pytest.mark.jax_processes(1)
def test_ends_all():
    pytest.exit("no network")

def test_not_run():
    pass
"""
    )
    assert status == 2
    of = texts_by_test(output)
    assert "still running after 2 s" in of["test_hangs"]
    assert re.search(r"test_ranks.py\", line \d+ in test_hangs", of["test_hangs"])  # in the stack of rank 1
    assert "rank 1 of 2: ended with status 7 before the test had ended" in of["test_exits"]
    assert "this is the end" in of["test_exits"]
    assert "Exit: no network" in output
    assert "2 failed" in output


@pytest.mark.full
@pytest.mark.one_pair
def test_stacks_of_slow_ranks(run_tests, tmp_path):
    # As on a loaded machine: a rank that takes seconds to handle the signal, and one that is still starting.
    starts = "import os, time\nif 'STARTS_SLOWLY' in os.environ: time.sleep(1000)"
    (tmp_path / "sitecustomize.py").write_text(starts)
    status, output = run_tests(
        """
WAIT_FOR_SIGNAL = "while ! grep -q 'ShdPnd:.*[1-9a-f]' /proc/$0/status; do sleep 0.1; done; sleep 4; kill -CONT $0"

@pytest.mark.jax_processes(1, timeout=2, environment={"BEGINS_WITH": "stops"})
def test_stopped():
    import os, signal, subprocess
    subprocess.Popen(["sh", "-c", WAIT_FOR_SIGNAL, str(os.getpid())])
    open("stops", "x").close()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)

@pytest.mark.jax_processes(1, timeout=2, environment={"STARTS_SLOWLY": "1"})
def test_starting():
    pass
"""
    )
    assert status == 1
    of = texts_by_test(output)
    assert re.search(r"test_ranks.py\", line \d+ in test_stopped", of["test_stopped"])
    assert "still starting after 2 s" in of["test_starting"]


@pytest.mark.full
@pytest.mark.one_pair
def test_faults(run_tests):
    status, output = run_tests(
        """
@pytest.mark.jax_processes(2, 1, None, {}, [kill(1, at="step 2")])
@pytest.mark.xfail(strict=True)
def test_killed():
    with pytest.raises(Exception, match=r"[Pp]rocess 1"):
        for step in range(4):
            fault_point(f"step {step}")
            total()
    assert step == 2

@pytest.mark.jax_processes(1, faults=[kill(0, at="another point")])
def test_not_reached():
    fault_point("a point")
"""
    )
    assert status == 1
    assert "[XPASS(strict)]" in texts_by_test(output)["test_killed"]
    assert "2 failed" in output
    assert "did not happen: kill of rank 0 at 'another point'" in output


@pytest.mark.full
@pytest.mark.one_pair
def test_stops_and_delays(run_tests):
    status, output = run_tests(
        """
@pytest.mark.jax_processes(2, faults=[stop(1, at="a point")])
def test_stopped():
    from jax_ring import _ffi_cpu
    total()
    _ffi_cpu.set_deadline(2)  # now that both have compiled, which takes them different times
    fault_point("a point")
    with pytest.raises(Exception, match=r"[Pp]rocess 1"):
        total()

@pytest.mark.jax_processes(2, faults=[delay(1, 0.3, at="a point")])
def test_delayed():
    total()
    start = time.monotonic()
    total()  # no rank goes on before all have read the clock
    fault_point("a point")
    total()
    assert time.monotonic() - start >= 0.3
"""
    )
    assert status == 0, output
    assert "2 passed" in output


@pytest.mark.full
def test_lax_is_replaced(run_tests):
    tests = """
import jax_ring

@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.jax_processes(2))])
def test_served(processes):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
    (call,) = jax_ring.explain(f, jax.ShapeDtypeStruct((jax.device_count(),), jnp.float32)).collectives
    assert call.served_by.startswith("jax_ring")
"""
    status, output = run_tests(tests, "--jax-ring-override")
    assert status == 0, output
    assert "2 passed" in output
    status, output = run_tests(tests, "-k", "not 2")
    assert "1 failed" in output


def test_ranks_connect_at_a_socket_of_their_own(run_tests, monkeypatch):
    tests = """
import os
@pytest.mark.jax_processes(2)
def test_address():
    path = os.environ["JAX_COORDINATOR_ADDRESS"].removeprefix("unix:")
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
"""
    status, output = run_tests(tests)
    assert status == 0, output
    monkeypatch.setenv("JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS", "1")
    status, output = run_tests(tests)
    assert status == 1, output
    assert "credentials" in output.lower()


def test_no_other_program_is_given_the_address_of_the_ranks():
    with ProcessGroup() as group, socket.socket() as other:
        host, port = group.address.split(":")
        with pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))


def test_nothing_is_left_if_a_rank_cannot_be_started(request, monkeypatch):
    started, memory = [], []

    def popen(*arguments, **options):
        if len(started) == 3:  # what removes the sockets, the service, and rank 0
            raise BlockingIOError("no more processes")
        started.append(original(*arguments, **options))
        if len(started) == 3:
            memory.append(pathlib.Path(f"/dev/shm/jax_ring-{options['env']['JAX_RING_MEMORY']}-test"))
            memory[0].touch()
        return started[-1]

    original = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(BlockingIOError):
        ranks._Ranks(request.node, Job(2))
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 3
    assert not memory[0].exists()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_processes": 0}, ValueError, "num_processes must be a positive integer, got 0"),
        ({"num_processes": 2, "devices": 1.5}, ValueError, "devices must be a positive integer, got 1.5"),
        ({"num_processes": 2, "environment": [{}] * 3}, ValueError, "one for each of the 2 processes, got [{}"),
        ({"num_processes": 2, "environment": None}, ValueError, "got None"),
        ({"num_processes": 2, "environment": {"A": 1}}, ValueError, "got {'A': 1}"),
        ({"num_processes": 2, "environment": "AB"}, ValueError, "got 'AB'"),
        ({"num_processes": 2, "timeout": "10"}, ValueError, "timeout must be a positive number of seconds, got '10'"),
        ({"num_processes": 2, "timeout": 0}, ValueError, "timeout must be a positive number of seconds, got 0"),
        (
            {"num_processes": 2, "faults": [kill(2, at="x")]},
            ValueError,
            "kill of rank 2 at 'x', but the ranks are 0 to 1",
        ),
        ({"num_processes": 2, "faults": [kill(1, at="x"), stop(1, at="y")]}, ValueError, "killed or stopped once"),
        ({"num_processes": 2, "faults": "kill"}, TypeError, "faults must be a list of"),
        ({"num_processes": 2, "faults": [Fault("explode", 1, "x")]}, ValueError, "got Fault(kind='explode', rank=1"),
        ({"num_processes": 2, "faults": [kill("1", at="x")]}, ValueError, "got Fault(kind='kill', rank='1'"),
        ({"num_processes": 2, "faults": [delay(1, -1, at="x")]}, ValueError, "seconds=-1)"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        Job(**arguments)


def test_delays_may_be_many():
    check_faults([delay(0, 0.1, at="x"), delay(0, 0.2, at="x"), kill(0, at="y")], 1)
