"""`python -m jax_ring`: what is installed, what it runs on, the options in force, and whether GPUs can be served."""

import os
import pathlib
import platform
from collections.abc import Iterator

import jax
import jaxlib
import numpy as np

from jax_ring import _ffi_cpu, runtime
from jax_ring.distributed import discovery
from jax_ring.lowering import tuning

DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def main() -> None:
    sections = {
        "versions": versions(),
        "devices": devices(),
        "native modules": native_modules(),
        "environment": environment(),
        "served": {platform: served(platform) for platform in ("cpu", "cuda")},
    }
    width = max(len(key) for section in sections.values() for key in section)
    for title, section in sections.items():
        print(title)
        for key, value in section.items():
            print(f"  {key:{width}}  {value}")


def versions() -> dict[str, str]:
    return {
        "jax_ring": runtime.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def devices() -> dict[str, str]:
    default = jax.default_backend()
    lines = {"default": default, "processes": str(jax.process_count())}
    for name in dict.fromkeys(("cpu", "cuda", default)):
        found = _devices_of(name)
        lines[name] = f"{len(found)} x {found[0].device_kind}" if found else "none"
    return lines


def _devices_of(name: str) -> list:
    try:
        return jax.devices(name)
    except RuntimeError:
        return []


def native_modules() -> dict[str, str]:
    return {
        "_ffi_cpu": f"loaded, instruction set {_ffi_cpu.instruction_set()}",
        "_ffi_cuda": f"not loaded: {runtime.why_no_cuda}" if runtime.why_no_cuda else "loaded",
    }


def environment() -> dict[str, str]:
    in_force = {
        runtime.TIMEOUT_VARIABLE: f"{_ffi_cpu.deadline():g} seconds",
        "JAX_RING_ISA": _ffi_cpu.instruction_set(),
        discovery.HOST_VARIABLE: "the name of this host, by which processes find who shares it",
        tuning.VARIABLE: tuning.in_force(),
        runtime.STRICT_VARIABLE: "XLA's collectives are an error" if runtime.STRICT else "XLA's collectives may serve",
    }
    return {
        name: f"{os.environ[name]!r}: {value}" if name in os.environ else f"not set: {value}"
        for name, value in in_force.items()
    }


def served(platform: str) -> str:
    """Whether calls on a platform's devices are served by this library here, and if not, why not."""
    reasons = list(_reasons_against(platform))
    return "no: " + "; ".join(reasons) if reasons else "yes"


def _reasons_against(platform: str) -> Iterator[str]:
    if platform == "cuda":
        if runtime.ffi_cuda is None:
            yield f"the CUDA engine is not loaded ({runtime.why_no_cuda})"
        else:
            count, why_none = runtime.ffi_cuda.device_count()
            if count == 0:
                yield f"the CUDA runtime finds no GPU ({why_none or 'none is there'})"
        if not DRIVER.exists():
            yield f"there is no NVIDIA driver ({DRIVER} does not exist)"
    if not _devices_of(platform):
        yield "JAX has no such devices"


if __name__ == "__main__":
    main()
