"""Devices, time limits and command-line options for all tests, and which of them the plain command runs."""

import faulthandler
import gc
import importlib.util
import inspect
import os
import pathlib
import secrets
import sys
import types

import jax
import pytest
from jax._src import dispatch
from tiers import vma_fixture

TESTS = pathlib.Path(__file__).parent

# More devices than most tests use, so that most meshes leave some devices out.
jax.config.update("jax_num_cpu_devices", 16)
# Tests read the tracebacks of programs, which Python 3.13 colors where FORCE_COLOR is set.
os.environ["PYTHON_COLORS"] = "0"
# Last, because some benchmarks have the names of modules of the tests.
sys.path.append(str(pathlib.Path(__file__).parent.parent / "benchmarks"))


def pytest_addoption(parser):
    parser.addoption(
        "--soak",
        type=float,
        default=0,
        metavar="SECONDS",
        help="how long test_soak runs random multi-process programs; by default it runs two programs",
    )


class Watchdog:
    """Dumps all stacks and exits: pytest-timeout cannot interrupt native code that holds the GIL."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.stderr = os.dup(sys.stderr.fileno())  # not where pytest captures what a test writes
        self.pytest_runtest_logstart()

    def pytest_runtest_logstart(self):
        # From the start of each test on: all of them may take hours on a slow machine. The process that has xdist's
        # workers gets to know of theirs.
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.stderr)


def pytest_configure(config):
    # What JAX traces has few cycles and many objects, so that looking for them takes 5 to 8 % of the time.
    gc.set_threshold(20_000)
    config.pluginmanager.register(Watchdog(3000 + config.getoption("--soak")))
    # The plain command, without files and without -m. xdist's workers, which have the files, get this option.
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr:
        config.option.markexpr = "not full"
    if config.getoption("--jax-ring-override"):
        import override_option

        override_option.replace_ring_functions()
    elif importlib.util.find_spec("jax_plugins") is None:  # no GPU, whose programs the option changes as well
        # The compiler's work for speed would take half of the time. XLA_FLAGS= keeps it, and so does the override.
        flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
        if jax.__version_info__ < (0, 11):
            flags.append("--xla_cpu_use_fusion_emitters=false")  # newer versions abort on this flag
        os.environ.setdefault("XLA_FLAGS", " ".join(flags))


check_vma = vma_fixture()
_STATES: dict[types.ModuleType, dict] = {}


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(request):
    """Each test draws from its module's RNG as if it ran alone."""
    if generator := getattr(request.module, "RNG", None):
        generator.bit_generator.state = _STATES.setdefault(request.module, generator.bit_generator.state)


@pytest.fixture(autouse=True)
def no_effects_of_failed_programs():
    """Each test waits for its own effects alone.

    A step that `check_replicas` or an audit has refused leaves its error with the devices that ran it. There the next
    `jax.effects_barrier()` raises it, whichever test calls it, unless they have run another program with a callback.
    """
    yield
    dispatch.runtime_tokens.clear()


@pytest.fixture
def left_to_xla(monkeypatch):
    """No engine serves calls in a shard_map that leaves axes to the compiler, as if there were no partitioner."""
    from jax_ring.lowering.custom_call import partitioned  # not above: the options for all tests come first

    def why_not(axes, *rest):
        return f"the enclosing shard_map leaves the axes {list(axes)} to the compiler"

    monkeypatch.setattr(partitioned, "why_not", why_not)


@pytest.fixture
def script(tmp_path):
    """Writes a script for the launcher, and returns its path."""

    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def secret(monkeypatch):
    """The secret of launchers of several hosts that the test starts, which find it in their environment."""
    monkeypatch.setenv("JAX_RING_SECRET", text := secrets.token_hex())
    return text


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "soak":
                terminalreporter.write_line(text)


def pytest_collection_modifyitems(config, items):
    # Those that compare with lax; in others there would be nothing to compare.
    if config.getoption("--jax-ring-override"):
        kept = [item for item in items if _compares_with_lax(item.function)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _compares_with_lax(function):
    """Whether a test calls `helpers.ours_and_lax`, directly or through functions of the tests."""
    function = inspect.unwrap(function)
    codes = [function.__code__]
    names = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    called = [function.__globals__.get(name) for name in names]
    called = [value for value in called if isinstance(value, types.FunctionType) and value is not function]
    return any(
        value.__name__ == "ours_and_lax" or _compares_with_lax(value)
        for value in called
        if TESTS in pathlib.Path(value.__code__.co_filename).parents
    )
