"""Devices and time limits for all tests, and the option that runs them with lax under override_lax()."""

import faulthandler
import pathlib
import types

import jax
import pytest

# More devices than cores, and more than most tests use, so that those run on a part of the machine's devices.
jax.config.update("jax_num_cpu_devices", 16)


def pytest_addoption(parser):
    parser.addoption(
        "--override-lax",
        action="store_true",
        help="run the tests that compare with lax, with lax's functions under override_lax() in the place of ours",
    )
    parser.addoption(
        "--soak",
        type=float,
        default=0,
        metavar="SECONDS",
        help="how long to run random programs of several processes, some of which are stopped or killed; default: two",
    )


def pytest_configure(config):
    # A hang that pytest-timeout cannot interrupt (in native code, without the GIL) still ends, with all stacks.
    faulthandler.dump_traceback_later(3000 + config.getoption("--soak"), exit=True)
    if config.getoption("--override-lax"):
        import overriding

        overriding.replace_ours_by_lax()


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "soak":
                terminalreporter.write_line(text)


def pytest_collection_modifyitems(config, items):
    if config.getoption("--override-lax"):
        kept = [item for item in items if _compares_with_lax(item.function)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _compares_with_lax(function):
    """Whether a test gets to `helpers.ours_and_lax`, itself or by functions that it calls."""
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
    """Both modes of shard_map: with and without tracking of the axes that values vary over."""
    return request.param
