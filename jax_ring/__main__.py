"""`python -m jax_ring`: Prints versions, devices, native modules, options, and which platforms can be served.

`python -m jax_ring flight` prints the last calls of the processes of this user that run on this host, with --all-users
those of others, too.

`python -m jax_ring run (script | -m module) [arguments]` runs a program under `override_lax()`, unchanged.
"""

import argparse
import itertools
import os
import pathlib
import platform
import sys
from collections.abc import Iterator
from typing import NoReturn

import jax
import jaxlib
import numpy as np

from jax_ring import _compat, _ffi_cpu, runtime
from jax_ring.distributed import discovery
from jax_ring.inspect.recorded import tables_of_host
from jax_ring.launcher import worker
from jax_ring.lowering import tuning

DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def main() -> None:
    description, _, about_flight = (__doc__ or "").partition(": ")[2].partition("\n\n")
    parser = argparse.ArgumentParser(prog="python -m jax_ring", description=description, epilog=about_flight)
    commands = parser.add_subparsers(dest="what", metavar="{flight,run}")
    flight = commands.add_parser("flight", help="prints the last calls of running processes")
    flight.add_argument("--all-users", action="store_true", help="also of other users' processes, as root may")
    run = commands.add_parser("run", help="runs a program under override_lax(), unchanged")
    run.add_argument("-m", "--module", action="store_true", help="run a module, as `python -m` does")
    run.add_argument("script", help="a Python file; a module after -m")
    run.add_argument("arguments", default=[], nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args()
    if options.what == "flight":
        print(tables_of_host(of_all_users=options.all_users), end="")
        return
    if options.what == "run":
        run_overridden("module" if options.module else "script", options.script, *options.arguments)
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


def run_overridden(kind: str, *command: str) -> NoReturn:
    """Replaces this process, which has imported JAX already, by the program."""
    os.environ[runtime.OVERRIDE_VARIABLE] = "1"
    os.execv(sys.executable, [sys.executable, *_options_of_python(), "-P", worker.__file__, "alone", kind, *command])


def _options_of_python() -> list[str]:
    """Python's own options: what the command line has in front of `-m jax_ring`."""
    given = sys.orig_argv[1:]
    for i, (arg, following) in enumerate(itertools.pairwise([*given, ""])):
        flags, m, name = arg.partition("m")  # as in -Om jax_ring and -mjax_ring
        if m and flags.startswith("-") and (name or following) == "jax_ring":
            return [*given[:i], *[flags] * (flags != "-")]
    return []


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
    try:
        default = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # as in _compat.devices()
        return {"default": f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}: none {error}".rstrip()}
    lines = {"default": default, "processes": str(jax.process_count())}
    for name in dict.fromkeys(("cpu", "cuda", default)):
        found = _compat.devices(name)
        lines[name] = f"{len(found)} x {found[0].device_kind}" if found else "none"
    spread = _ffi_cpu.spreads_ranks(len(_compat.devices("cpu")))
    lines["cores"] = "CPU ranks are spread over them" if spread else "ranks stay where the system runs them"
    return lines


def native_modules() -> dict[str, str]:
    return {
        "_ffi_cpu": f"loaded, instruction set {_ffi_cpu.instruction_set()}",
        "_cuda_kernels": f"not loaded: {runtime.why_no_cuda}" if runtime.why_no_cuda else "loaded",
    }


def environment() -> dict[str, str]:
    values = {
        runtime.TIMEOUT_VARIABLE: f"{_ffi_cpu.deadline():g} seconds",
        runtime.ISA_VARIABLE: _ffi_cpu.instruction_set(),
        runtime.RECORDER_VARIABLE: f"calls are {'recorded' if _ffi_cpu.is_recording() else 'not recorded'}",
        discovery.HOST_VARIABLE: (
            "processes with equal names share memory"
            if os.environ.get(discovery.HOST_VARIABLE)
            else "hosts are told apart by boot id, /dev/shm and user"
        ),
        tuning.VARIABLE: tuning.describe(),
        runtime.SHARED_GPU_VARIABLE: f"processes {'may' if runtime.SHARED_GPU else 'may not'} share a GPU",
        runtime.MULTICAST_VARIABLE: "groups of GPUs of one process "
        + (
            "use multicast memory"
            if os.environ.get(runtime.MULTICAST_VARIABLE) == "1"
            else "do not use multicast memory"
        ),
        runtime.OVERRIDE_VARIABLE: f"override_lax() is {'on in all threads' if runtime.OVERRIDE else 'off at first'}",
        runtime.STRICT_VARIABLE: f"fallback to XLA's collectives is {'an error' if runtime.STRICT else 'allowed'}",
    }
    return {
        name: f"{os.environ[name]!r}: {value}" if name in os.environ else f"not set: {value}"
        for name, value in values.items()
    }


def served(platform: str) -> str:
    """Whether jax_ring can serve calls on a platform's devices here, and if not, why."""
    reasons = list(_reasons_against(platform))
    return "no: " + "; ".join(reasons) if reasons else "yes"


def _reasons_against(platform: str) -> Iterator[str]:
    if platform == "cuda":
        if runtime.cuda_kernels is None:
            yield f"the CUDA kernels are not loaded ({runtime.why_no_cuda})"
        else:
            count, why_none = runtime.cuda_kernels.device_count()
            if count == 0:
                yield f"the CUDA runtime finds no GPU ({why_none or 'there is none'})"
        if not DRIVER.exists():
            yield f"there is no NVIDIA driver ({DRIVER} does not exist)"
    if not _compat.devices(platform):
        yield "JAX has no such devices"


if __name__ == "__main__":
    main()
