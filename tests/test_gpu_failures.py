"""What becomes of a GPU call that fails in the last step, where no later call can raise its error."""

import subprocess
import sys
import threading
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
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank 1 .* waited 60 s for rank 0"):
        runtime.check_gpu_groups()


def test_groups_can_be_forgotten_while_other_threads_need_python():
    """Neither lets the other wait: the engine holds no lock of its own while it wants Python's, nor the other way."""
    stop = threading.Event()

    def set_the_deadline():
        while not stop.is_set():
            runtime.ffi_cuda.set_deadline(runtime.timeout())

    thread = threading.Thread(target=set_the_deadline)
    thread.start()
    try:
        for _ in range(100):
            runtime.forget_gpu_groups()
            assert runtime.ffi_cuda.failure() == ""
    finally:
        stop.set()
        thread.join()


def test_the_engine_keeps_what_finds_device_ids_to_the_end():
    """A program may exit with the callbacks still in place."""
    program = (
        "from jax_ring import runtime\n"
        "class Store(dict):\n"
        "    pass\n"
        "store = Store()\n"
        "for process in range(3):\n"
        "    runtime.ffi_cuda.set_process(process, store.__setitem__, store.__getitem__)\n"
        "    runtime.ffi_cuda.set_device_ids(lambda: {0: 5})\n"
        "print('set')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout == "set\n", result.stderr
    assert result.returncode == 0
