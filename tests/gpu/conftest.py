"""Where the tests of the CUDA engine run: on a GPU, or, to rehearse them, on threads of the host.

They need the module of the GPU check, which benchmarks/gpu_check.sh builds. JAX_RING_GPU_CHECK_BACKEND=host rehearses
them without a GPU: the same tests, and the same algorithms, but neither kernels nor memory of a GPU.
"""

import importlib.util
import os

import pytest

from jax_ring import runtime


def check_backend() -> str | None:
    """ "cuda" or "host"; None, if the tests cannot run."""
    if os.environ.get("JAX_RING_GPU_CHECK_BACKEND") == "host":
        import jax_ring._gpu_check  # noqa: F401

        return "host"
    if importlib.util.find_spec("jax_ring._gpu_check") is None:
        return None
    return "cuda" if runtime.ffi_cuda.device_count()[0] > 0 else None


@pytest.fixture(scope="session")
def backend() -> str:
    found = check_backend()
    if found is None:
        pytest.skip("needs a GPU and the module that benchmarks/gpu_check.sh builds")
    return found
