"""Loads the native modules, registers their FFI targets with JAX, and reads the options from the environment."""

import importlib.metadata
import math
import os

import jax

from jax_ring import _compat as _compat  # first: it says so when this JAX is not supported

try:
    import jax_ring._ffi_cpu as _ffi_cpu
except ImportError as error:
    raise ImportError(
        f"jax_ring's native module does not load from {os.path.dirname(__file__)}: {error}. If this is the source "
        "tree, build it with `pip install .` and run from another folder, or with `pip install --editable .`."
    ) from error

try:
    import jax_ring._ffi_cuda as ffi_cuda

    why_no_cuda = ""
except ImportError as error:
    ffi_cuda = None
    why_no_cuda = f"{error}. Install it again with JAX_RING_CUDA=ON, where nvcc is, to build it."

__version__ = importlib.metadata.version("jax-ring")

# The custom call of each collective. One handler serves them all; the names are for those who read HLO.
TARGETS = {
    collective: f"jax_ring_{collective}"
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
}
TIMEOUT_VARIABLE = "JAX_RING_TIMEOUT_S"
STRICT_VARIABLE = "JAX_RING_STRICT"


def timeout_from(text: str) -> float:
    """Seconds that a call waits for ranks that have not arrived, from the text of `JAX_RING_TIMEOUT_S`.

    Raises:
      ValueError: if the text is not a positive, finite number.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf):
        raise ValueError(
            f"{TIMEOUT_VARIABLE} must be a positive number of seconds, got {text!r}. "
            "Unset it for the default, or use a large number to wait for long."
        )
    return seconds


def strict_from(text: str) -> bool:
    """Whether a call that no engine of ours serves is an error, from the text of `JAX_RING_STRICT`.

    Raises:
      ValueError: if the text is neither 1 nor 0.
    """
    if text not in ("", "0", "1"):
        raise ValueError(f"{STRICT_VARIABLE} must be 1 (no fallback to XLA's collectives) or 0, got {text!r}")
    return text == "1"


STRICT = strict_from(os.environ.get(STRICT_VARIABLE, ""))


def note_call_site(call: str, site: str) -> None:
    """Remembers that the call described by `call` was written at `site`, for the error of a rank that waits in vain."""
    for module in (_ffi_cpu, ffi_cuda):
        if site and module is not None:
            module.note_call_site(call, site)


def timeout() -> float:
    """Seconds that ranks and processes wait for each other."""
    return _ffi_cpu.deadline()


def join_processes(process: int, token: str, publish, fetch) -> None:
    """Tells the engines which process this is, and how they meet those of the others.

    token: random, and common to all processes. Publish and fetch exchange bytes with them.
    """
    _ffi_cpu.join(process, token)
    if ffi_cuda is not None:
        ffi_cuda.set_process(process, publish, fetch)


def begin_program(program: str) -> None:
    """Tells the CPU engine that a program of that name is being lowered, to be compiled next in this thread."""
    _ffi_cpu.begin_program(program)


def forget_gpu_groups() -> None:
    """Has programs compiled from now on form their GPU groups anew, which they must after a call in one has failed.

    To be called in all processes, together with `jax.clear_caches()`, when no program is running.
    """
    if ffi_cuda is not None:
        ffi_cuda.forget_groups()


def _register() -> None:
    _compat.register_cpu_ffi_type("jax_ring_call_site", _ffi_cpu.call_site_type())
    handlers = _ffi_cpu.collective_handlers()
    for target in TARGETS.values():
        jax.ffi.register_ffi_target(target, handlers, platform="cpu")
    if ffi_cuda is not None:
        # Here JAX waits for the CUDA client with both, and hands over types before handlers.
        jax.ffi.register_ffi_type("jax_ring_instance", ffi_cuda.instance_type(), platform="CUDA")
        for target in TARGETS.values():
            jax.ffi.register_ffi_target(target, ffi_cuda.collective_handlers(), platform="CUDA")
    if TIMEOUT_VARIABLE in os.environ:
        seconds = timeout_from(os.environ[TIMEOUT_VARIABLE])
        _ffi_cpu.set_deadline(seconds)
        if ffi_cuda is not None:
            ffi_cuda.set_deadline(seconds)


_register()
