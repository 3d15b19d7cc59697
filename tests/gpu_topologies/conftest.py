"""GPUs that are not there, but that XLA compiles for. Needs JAX's CUDA plugin and a CUDA toolkit, and no GPU."""

import functools
import importlib.util
import os
import pathlib
import shutil

import jax
import pytest
from jax.experimental import topologies

HERE = pathlib.Path(__file__).parent


def what_is_missing() -> str:
    """What these tests need and this machine lacks, or ""."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "needs JAX's CUDA plugin: see docs/compile_for_gpus.md"
    if shutil.which("ptxas") is None and not pathlib.Path("/usr/local/cuda/bin/ptxas").exists():
        return "needs ptxas and libdevice of a CUDA toolkit"
    return ""


def stop(why: str) -> None:
    # For CI, where a skipped test would pass unnoticed.
    if os.environ.get("JAX_RING_TEST_TOPOLOGIES") == "1":
        pytest.fail(why)
    pytest.skip(why, allow_module_level=True)


def pytest_pycollect_makemodule():
    if why := what_is_missing():
        stop(why)  # the folder, so that one line says so


@functools.cache
def describe(shape: str, gpu="h100"):
    """A topology of partitions x processes x GPUs of each process."""
    text = (HERE / f"{gpu}.txtpb").read_text()
    return topologies.get_topology_desc(platform="cuda", target_config=text, topology=shape)


@pytest.fixture(scope="session", autouse=True)
def _compiler():
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")  # else the plugin insists on NVIDIA's libraries
    try:
        describe("1x1x1")
    except NotImplementedError:  # other tests have started JAX, which has refused the plugin then
        stop("needs a session of its own, or JAX_PLATFORMS=cpu: pytest tests/gpu_topologies")


@pytest.fixture(scope="session")
def topology():
    """topology("1x2x8") is that many partitions x processes x GPUs of each process; H100s unless `gpu` is "a100"."""
    return describe


@pytest.fixture(scope="session")
def mesh_of(topology):
    """mesh_of("1x2x8") is a mesh of all these GPUs, over one axis "i" unless a shape and names are given."""

    def mesh(topology_shape: str, shape=None, names=("i",), **options):
        found = topology(topology_shape, **options)
        return topologies.make_mesh(found, shape or (len(found.devices),), names)

    return mesh
