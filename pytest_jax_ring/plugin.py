"""The plugin: the mark `jax_processes`, the option `--jax-ring-override`, and this process's side."""

import os
from typing import Any

import pytest

from pytest_jax_ring import rank, ranks

MARK = "jax_processes"

# The `jax_ring.Override` of the running test, with --jax-ring-override. A test may close it and set another.
active_override: Any = None

# Here, because conftest files are loaded before any hook is called.
if rank.VARIABLE in os.environ:
    rank.prepare()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("jax_ring")
    group.addoption(
        "--jax-ring-override",
        action="store_true",
        help="run every test with the collectives of jax.lax replaced by those of jax_ring, by override_lax()",
    )


@pytest.hookimpl(tryfirst=True)  # a rank needs its options before conftest files look at them
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARK}(num_processes, devices=1, timeout=None, environment={{}}, faults=()): runs the test in that many "
        "fresh processes of jax.distributed, each with `devices` CPU devices",
    )
    if rank.VARIABLE in os.environ:
        config.pluginmanager.register(rank.Rank(config), "jax_ring_rank")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Makes marked tests start their ranks here; fixtures are made in the ranks alone."""
    if rank.VARIABLE in os.environ:
        return
    for item in items:
        if mark := item.get_closest_marker(MARK):
            ranks.run_in_ranks(item, mark)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    global active_override
    in_ranks = rank.VARIABLE not in os.environ and item.get_closest_marker(MARK)
    if not item.config.getoption("--jax-ring-override") or in_ranks:
        return (yield)
    import jax_ring

    active_override = jax_ring.override_lax()
    try:
        return (yield)
    finally:
        active_override.close()
        active_override = None
