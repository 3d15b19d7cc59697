"""Devices, time limits and command-line options for all tests."""

import faulthandler
import pathlib
import sys
import types

import jax
import pytest

# More devices than most tests use, so that most meshes leave some devices out.
jax.config.update("jax_num_cpu_devices", 16)
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


def pytest_configure(config):
    # pytest-timeout cannot interrupt native code that holds the GIL. This dumps all stacks and exits.
    faulthandler.dump_traceback_later(3000 + config.getoption("--soak"), exit=True)
    if config.getoption("--jax-ring-override"):
        import override_option

        override_option.replace_ring_functions()


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
    codes = [function.__code__]
    names = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    called = [function.__globals__.get(name) for name in names]
    called = [value for value in called if isinstance(value, types.FunctionType) and value is not function]
    tests = pathlib.Path(__file__).parent
    return any(
        value.__name__ == "ours_and_lax" or _compares_with_lax(value)
        for value in called
        if tests in pathlib.Path(value.__code__.co_filename).parents
    )


@pytest.fixture(params=[True, False], ids=["vma", "no_vma"])
def check_vma(request):
    """Both modes of shard_map: with and without tracking of varying manual axes."""
    return request.param
