"""What becomes of a GPU call that fails in the last step, where no later call can raise its error."""

import subprocess
import sys
import types

import jax
import pytest

from jax_ring import runtime


def test_nothing_has_failed():
    assert runtime.ffi_cuda.failure() == ""
    runtime.check_gpu_groups()


def test_raises_what_the_gpus_recorded(monkeypatch):
    text = "ring_psum of float32[4] over axis 'x': rank 1 (GPU 1 of process 0) waited 60 s for rank 0"
    monkeypatch.setattr(runtime, "ffi_cuda", types.SimpleNamespace(failure=lambda: text))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank 1 .* waited 60 s for rank 0"):
        runtime.check_gpu_groups()


def test_a_program_exits_with_its_callbacks_in_place():
    """The engine is never destroyed, and what it calls may need a Python that is gone."""
    program = (
        "from jax_ring import runtime\n"
        "store = {}\n"
        "for process in range(3):\n"
        "    runtime.ffi_cuda.set_process(process, store.__setitem__, store.__getitem__)\n"
        "    runtime.ffi_cuda.set_device_ids(lambda: {0: 5})\n"
        "print('set')\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout == "set\n", result.stderr
    assert result.returncode == 0
