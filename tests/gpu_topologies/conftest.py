"""GPUs that are not there, but that XLA compiles for. Needs JAX's CUDA plugin and a CUDA toolkit, and no GPU."""

import functools
import importlib.util
import pathlib
import shutil

import jax
import pytest
from jax.experimental import topologies

HERE = pathlib.Path(__file__).parent


def why_not() -> str:
    """Why these tests cannot run here, or ""."""
    if not jax.config.jax_platforms:
        # Else JAX's plugin insists on NVIDIA's libraries. It is read when the first test asks for a device.
        jax.config.update("jax_platforms", "cpu")
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "needs JAX's CUDA plugin: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt, of the version of jax"
    if shutil.which("ptxas") is None and not pathlib.Path("/usr/local/cuda/bin/ptxas").exists():
        return "needs ptxas and libdevice of a CUDA toolkit"
    return ""


@pytest.fixture(scope="session", autouse=True)
def _compiler():
    if why := why_not():
        pytest.skip(why)


@pytest.fixture(scope="session")
def topology():
    """topology("1x2x8") is that many partitions x processes x GPUs of each process; H100s unless `gpu` is "a100"."""

    @functools.cache
    def describe(shape: str, gpu="h100"):
        text = (HERE / f"{gpu}.txtpb").read_text()
        return topologies.get_topology_desc(platform="cuda", target_config=text, topology=shape)

    return describe


@pytest.fixture(scope="session")
def mesh_of(topology):
    """mesh_of("1x2x8") is a mesh of all these GPUs, over one axis "i" unless a shape and names are given."""

    def mesh(topology_shape: str, shape=None, names=("i",), **options):
        found = topology(topology_shape, **options)
        return topologies.make_mesh(found, shape or (len(found.devices),), names)

    return mesh
