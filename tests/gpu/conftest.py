"""Runs the tests of the CUDA engine on a GPU or, as a rehearsal, on threads of the host.

They need the module that benchmarks/gpu/gpu_check.sh builds. JAX_RING_GPU_CHECK_BACKEND=host selects the rehearsal: the
same tests and algorithms, but no GPU kernels and no GPU memory.
"""

import importlib.util
import os

import pytest

from jax_ring import runtime


def check_backend() -> str | None:
    """Returns "cuda", "host", or None if the tests cannot run."""
    if os.environ.get("JAX_RING_GPU_CHECK_BACKEND") == "host":
        import jax_ring._gpu_check  # noqa: F401

        return "host"
    if importlib.util.find_spec("jax_ring._gpu_check") is None:
        return None
    return "cuda" if runtime.cuda_kernels.device_count()[0] > 0 else None


@pytest.fixture(scope="session")
def backend() -> str:
    found = check_backend()
    if found is None:
        pytest.skip("needs a GPU and the module that benchmarks/gpu/gpu_check.sh builds")
    return found
