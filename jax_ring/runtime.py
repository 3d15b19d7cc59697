"""Loads the native modules, registers FFI targets, and reads options from the environment."""

import importlib.metadata
import math
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jax_ring import _compat as _compat  # first: it raises if this JAX is not supported
from jax_ring._fingerprint import fingerprint

_PROJECT = pathlib.Path(__file__).parent.parent  # in the source tree; site-packages when installed as a wheel
_IN_SOURCE_TREE = (_PROJECT / "ffi" / "CMakeLists.txt").is_file() and (_PROJECT / "pyproject.toml").is_file()
_BUILD = f"{sys.executable} -m pip install --editable '{_PROJECT}'"

try:
    import jax_ring._ffi_cpu as _ffi_cpu
    import jax_ring._ffi_cuda as ffi_cuda
except ImportError as error:
    if _IN_SOURCE_TREE:
        raise ImportError(
            f"jax_ring is imported from its source tree {_PROJECT}, and its native module is not built for this "
            f"Python: {error}. Build it with: {_BUILD}"
        ) from error
    raise ImportError(
        f"jax_ring's native module does not load from {os.path.dirname(__file__)}: {error}. Install jax_ring again "
        "with this Python."
    ) from error

try:
    import jax_ring._cuda_kernels as cuda_kernels

    why_no_cuda = ""
except ImportError as error:
    cuda_kernels = None  # type: ignore[assignment]
    why_no_cuda = f"{error}. To build it, install jax_ring with JAX_RING_CUDA=ON on a machine with nvcc."


def _check_not_stale(module: types.ModuleType) -> None:
    """Raises ImportError if a native module was built from other sources."""
    built_from = module.fingerprint() if hasattr(module, "fingerprint") else "none"
    if _IN_SOURCE_TREE and built_from != (found := fingerprint(_PROJECT / "ffi")):
        raise ImportError(
            f"{module.__file__} is not built from the native sources in {_PROJECT / 'ffi'}, which have changed since: "
            f"its fingerprint is {built_from}, theirs is {found}. Rebuild it with: {_BUILD}"
        )


for _module in (_ffi_cpu, ffi_cuda, cuda_kernels):
    if _module is not None:
        _check_not_stale(_module)

__version__ = importlib.metadata.version("jax-ring")
FINGERPRINT = _ffi_cpu.fingerprint()  # of the native sources

# The custom call of each collective. One handler serves them all; the names make HLO readable.
TARGETS = {
    collective: f"jax_ring_{collective}"
    for collective in (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "reduce",
        "broadcast",
        "all_to_all",
        "permute",
        "ragged_all_to_all",
    )
}
# For calls on a GPU's other streams. XLA must not record these in a CUDA graph: there, calls of one stream could run at
# the same time. By default it does not record its own collectives either.
ASYNC_TARGETS = {collective: f"{target}_async" for collective, target in TARGETS.items()}
# Another prefix: a barrier is no collective.
BARRIER_TARGET = "jax_ring.barrier"
BETWEEN_HOSTS_TARGET = "jax_ring.between_hosts"
TIMEOUT_VARIABLE = "JAX_RING_TIMEOUT_S"
STRICT_VARIABLE = "JAX_RING_STRICT"
OVERRIDE_VARIABLE = "JAX_RING_OVERRIDE"
SHARED_GPU_VARIABLE = "JAX_RING_SHARED_GPU"
MULTICAST_VARIABLE = "JAX_RING_MULTICAST"  # read by the CUDA engine
ISA_VARIABLE = "JAX_RING_ISA"
RECORDER_VARIABLE = "JAX_RING_RECORDER"
_MAX_SECONDS = 2.0**31 - 1  # XLA's limit has 32 bits; 68 years


def timeout_from(text: str) -> float:
    """`JAX_RING_TIMEOUT_S`: seconds that a call waits for missing ranks."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf):
        raise ValueError(
            f"{TIMEOUT_VARIABLE} must be a positive number of seconds, got {text!r}. "
            "Unset it for the default of 60, or use a large number to wait longer."
        )
    return min(seconds, _MAX_SECONDS)


def _flag(variable: str, meaning: str) -> bool:
    """An environment variable of 1 or 0, by default 0. meaning: of 1."""
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{variable} must be 1 ({meaning}) or 0, got {text!r}")
    return text == "1"


def recorder_from(text: str) -> bool:
    """`JAX_RING_RECORDER`: whether calls are recorded."""
    if text not in ("", "0", "1"):
        raise ValueError(f"{RECORDER_VARIABLE} must be 0 (record no calls) or 1, the default; got {text!r}")
    return text != "0"


STRICT = _flag(STRICT_VARIABLE, "no fallback to XLA's collectives")
OVERRIDE = _flag(OVERRIDE_VARIABLE, "override_lax() in all threads")
# On one GPU, processes wait for each other's time slices, so this is for tests.
SHARED_GPU = _flag(SHARED_GPU_VARIABLE, "ranks may share a GPU")

# The engine reads it, but ignores unknown names.
if (_isa := os.environ.get(ISA_VARIABLE, "")) not in ("", "baseline", "avx2", "avx512"):
    raise ValueError(f"{ISA_VARIABLE} must be baseline, avx2 or avx512, got {_isa!r}. Unset it for the best one.")

RECORDER = recorder_from(os.environ.get(RECORDER_VARIABLE, ""))


def timeout() -> float:
    """Seconds that ranks and processes wait for each other."""
    return _ffi_cpu.deadline()


class CallOfXla(NamedTuple):
    """A call that waits in XLA's collectives between processes.

    Attributes:
      age: seconds since it began.
      text: its name.
      processes: of its ranks, this one included.
    """

    age: float
    text: str
    processes: list[int]


def calls_of_xla() -> list[CallOfXla]:
    """XLA's open calls."""
    return [CallOfXla(*call) for call in _ffi_cpu.calls_of_xla()]


def take_calls_of_xla() -> list[CallOfXla]:
    """Returns and clears XLA's open calls: those that XLA has left with an error do not end."""
    return [CallOfXla(*call) for call in _ffi_cpu.take_calls_of_xla()]


class Failure(NamedTuple):
    """Why calls have failed.

        except Exception as error:
            failure = jax_ring.runtime.failure_of(error)
            if failure is not None and failure.kind == "ended":
                print(failure.process, failure.cause)

    Attributes:
      number: in this process; texts of its exceptions end in `[failure 7]`.
      code: their beginning: `DEADLINE_EXCEEDED`, `RESOURCE_EXHAUSTED`, `FAILED_PRECONDITION`, `INVALID_ARGUMENT` or
        `INTERNAL`.
      kind: `deadline`: ranks did not come in time. `mismatch`: a process or rank made another call. `absent`: a process
        has made no call in the group. `stopped`: it is stopped, or busy elsewhere. `left`: it has announced its
        exception or exit. `ended`: it has ended silently. `aborted`: it has given up the group. `resources`: memory,
        files or threads are short. `released`: the program or its groups were given up. `overlap`: two calls of a GPU
        ran at once. `other`.
      process: the index of another process at fault, or None.
      rank: at fault, in the call's group, or the first of several; None if unknown.
      cause: what it did, such as `process 2 (rank 1) has ended`; empty if unknown.
      text: the error without code and number.
    """

    number: int
    code: str
    kind: str
    process: int | None
    rank: int | None
    cause: str
    text: str


def failure(number: int) -> Failure:
    """The failure in which an exception's text ends: 7 in `... [failure 7]`.

        print(jax_ring.runtime.failure(7).kind)

    Raises:
      ValueError: if this process has no such failure among the last 256.
    """
    found = _ffi_cpu.failure(number)
    if found is None:
        raise ValueError(
            f"jax_ring.runtime.failure: this process knows no failure {number}. It keeps the last 256, and numbers "
            "are those of the process that has raised the exception."
        )
    return Failure(*found)


# The only part of jax_ring's own messages that is parsed. An exception that quotes another one ends in its own number.
_NUMBER = re.compile(r"\[failure (\d{1,18})\]")


def failure_of(error: BaseException | str) -> Failure | None:
    """The failure that an exception names, or None if it names none that is kept."""
    numbers = _NUMBER.findall(str(error))
    found = _ffi_cpu.failure(int(numbers[-1])) if numbers else None
    return Failure(*found) if found else None


class Departure(NamedTuple):
    """How a process leaves, as others hear it.

    Attributes:
      cause: a predicate: `raised ValueError: bad batch`, or the cause of a failure.
      kind, process, rank: of that failure.
    """

    cause: str
    kind: str = "left"
    process: int | None = None
    rank: int | None = None


# The parent process of a fork that happened after JAX had started.
_forked_from: int | None = None


def note_fork() -> None:
    """Called in the child of a fork."""
    global _forked_from
    _ffi_cpu.leave_parents_recorder()
    if _compat.has_backends():
        _forked_from = os.getppid()


def refuse_in_child(function: str) -> None:
    """Raises where the program would wait forever.

    Raises:
      RuntimeError: in a child forked after JAX had started.
    """
    if _forked_from is not None:
        raise RuntimeError(
            f"{function}: this process was forked from process {_forked_from} after JAX had started there, and has "
            "none of JAX's threads. Start it by multiprocessing's method spawn or forkserver, or before the first use "
            "of JAX."
        )


def join_processes(
    process: int, label: str, key: bytes, publish: Callable[[str, bytes], None], fetch: Callable[[str], bytes]
) -> None:
    """Gives the engines this process's index, and the means to reach others.

    label: what the names of their shared memory begin with. key: what these names follow from, 16 random bytes of all
    processes. publish, fetch: put a value in the store of `jax.distributed`, and wait for one.
    """
    _ffi_cpu.join(process, label, key)
    ffi_cuda.set_process(process, publish, fetch)


def forget_gpu_groups() -> None:
    """Drops all GPU groups, so that later programs form new ones: after a failed GPU call.

    Call it in all processes with `jax.clear_caches()`, while no program runs.
    """
    ffi_cuda.forget_groups()


def check_gpu_groups() -> None:
    """Raises an error if a GPU call of this process has failed.

    Kernels cannot raise, and JAX does not ask custom calls for success: `jax.block_until_ready` returns a failed call's
    results, with all bits set. The group's next call raises. Call this after the last one, when results are ready.

    Raises:
      jax.errors.JaxRuntimeError: with rank, peer and call of each failure.
    """
    if text := ffi_cuda.failure():
        raise jax.errors.JaxRuntimeError(text)


def register() -> None:
    """Registers the FFI targets, and passes the engines the environment's options."""
    _compat.register_cpu_ffi_type("jax_ring_call_site", _ffi_cpu.call_site_type())
    handlers = _ffi_cpu.collective_handlers()
    for target in TARGETS.values():
        jax.ffi.register_ffi_target(target, handlers, platform="cpu")
    jax.ffi.register_ffi_target(BARRIER_TARGET, _ffi_cpu.barrier_handlers(), platform="cpu")
    jax.ffi.register_ffi_target(BETWEEN_HOSTS_TARGET, _ffi_cpu.between_hosts_handlers(), platform="cpu")
    # JAX queues both until the CUDA client exists, and registers types before handlers.
    instance: Any = ffi_cuda.instance_type()  # the name of its type is private to JAX
    jax.ffi.register_ffi_type("jax_ring_instance", instance, platform="CUDA")
    for targets, recorded in ((TARGETS, True), (ASYNC_TARGETS, False)):
        for target in targets.values():
            jax.ffi.register_ffi_target(target, ffi_cuda.collective_handlers(recorded), platform="CUDA")
    ffi_cuda.share_failures(_ffi_cpu.failures())
    if cuda_kernels is not None:
        ffi_cuda.set_gpus(cuda_kernels.gpus())
    # The JAX device id of each GPU of this process, by CUDA ordinal.
    ffi_cuda.set_device_ids(lambda: {gpu.local_hardware_id: gpu.id for gpu in jax.local_devices(backend="cuda")})
    if not RECORDER:
        _ffi_cpu.turn_off_recorder()
    if _compat.LAUNCHES_HOLD_THREADS:
        _ffi_cpu.say_that_launches_hold_threads()
    if TIMEOUT_VARIABLE in os.environ:
        seconds = timeout_from(os.environ[TIMEOUT_VARIABLE])
        _ffi_cpu.set_deadline(seconds)
        ffi_cuda.set_deadline(seconds)
