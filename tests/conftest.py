"""Devices and time limits for all tests."""

import faulthandler

import jax
import pytest

# More devices than cores, and more than most tests use, so that those run on a part of the machine's devices.
jax.config.update("jax_num_cpu_devices", 16)


def pytest_configure(config):
    # A hang that pytest-timeout cannot interrupt (in native code, without the GIL) still ends, with all stacks.
    del config
    faulthandler.dump_traceback_later(1500, exit=True)


@pytest.fixture(params=[True, False], ids=["vma", "no_vma"])
def check_vma(request):
    """Both modes of shard_map: with and without tracking of the axes that values vary over."""
    return request.param
