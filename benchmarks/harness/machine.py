"""What a result depends on: processor, what its cores and memory cost, and versions. The one user of native names."""

import math
import os
import pathlib
import platform
import re
import subprocess
import time

import jax
import jax.numpy as jnp
import jaxlib

import jax_ring

# The last model numbers of AMD's microarchitectures, by family. Other processors are named by family and model.
ZEN = {
    23: ((0x2F, "Zen 1"), (0xFF, "Zen 2")),
    25: ((0x0F, "Zen 3"), (0x1F, "Zen 4"), (0x5F, "Zen 3"), (0xFF, "Zen 4")),
    26: ((0xFF, "Zen 5"),),
}


def _native(name: str, *arguments, otherwise):
    """What a native function gives, or `otherwise` where an older jax_ring has no such one."""
    try:
        from jax_ring import _ffi_cpu

        return getattr(_ffi_cpu, name)(*arguments)
    except (ImportError, AttributeError, TypeError):
        return otherwise


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fold_limit(ranks: int, count: int, dtype) -> float:
    """Seconds of a bare fold of the message, by one thread per core."""
    dtype = jnp.dtype(dtype)
    if dtype.kind == "c":  # two floats
        count, dtype = 2 * count, jnp.dtype(f"float{4 * dtype.itemsize}")
    # The engine's names: f32, bf16, s8, u16, f8e4m3fn.
    name = re.sub("^(bf|f|u|i)[a-z]*", lambda match: match[1].replace("i", "s"), dtype.name).replace("_", "")
    arguments = (ranks, count * dtype.itemsize, usable_cores(), 5, name)
    return _native("fold_limit_seconds", *arguments, otherwise=math.nan)


def _lines(path: str) -> list[str]:
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []


def _core_seconds() -> tuple[float, float, float]:
    """The time, and the seconds of cores that all programs have taken, and that this one has with those it started."""
    fields = next(iter(_lines("/proc/stat")), "").split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = [int(text) / os.sysconf("SC_CLK_TCK") for text in fields] or [0.0] * 7
    return time.monotonic(), user + nice + system + irq + softirq, sum(os.times()[:4])


_BEGIN = _core_seconds()


def share_of_others() -> float:
    """The part of all cores that other programs have taken since this module was imported."""
    (begin, all_before, own_before), (end, all_after, own_after) = _BEGIN, _core_seconds()
    others = all_after - all_before - (own_after - own_before)
    return round(max(others, 0) / max(end - begin, 1e-3) / (os.cpu_count() or 1), 3)


def processor_of(vendor: str, family: int, model: int) -> str:
    names = ZEN.get(family, ()) if vendor == "AuthenticAMD" else ()
    return next((name for last, name in names if model <= last), f"{vendor} family {family} model {model}")


def _processor() -> dict:
    """Vendor, family, model and name, as far as /proc/cpuinfo has them, and the caches of the first core."""
    fields = dict(re.split(r"\s*:\s*", text, maxsplit=1) for text in reversed(_lines("/proc/cpuinfo")) if ":" in text)
    result = {"cpu": fields.get("model name", "unknown")}
    if "cpu family" in fields:
        vendor, family, model = fields["vendor_id"], int(fields["cpu family"]), int(fields["model"])
        result |= {"processor": processor_of(vendor, family, model), "vendor": vendor, "family": family, "model": model}
    caches = {}
    for folder in sorted(pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ("".join(_lines(f"{folder}/{name}")) for name in ("level", "type", "size"))
        if kind != "Instruction":
            caches[f"L{level}"] = size
    return result | {"caches": caches}


def _commit() -> str:
    """The commit of the source tree that jax_ring was imported from, with + if it has changes; or the version."""
    folder = pathlib.Path(jax_ring.__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=7"]
    tracked = ["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"]
    try:
        subprocess.run(tracked, capture_output=True, check=True)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return jax_ring.__version__


def _positive(value: float, digits: int) -> float | None:
    return round(value, digits) if value > 0 else None


def describe() -> dict:
    """The machine and the versions of a result, for its JSON file. Measures for about half a second."""
    round_trip, switch = _native("core_costs", otherwise=(math.nan, math.nan))
    seconds = fold_limit(2, 16 << 20, jnp.float32)
    return {
        **_processor(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "isa": _native("instruction_set", otherwise=None),
        "forced_isa": os.environ.get("JAX_RING_ISA"),
        "round_trip_us": _positive(round_trip * 1e6, 3),
        "switch_us": _positive(switch * 1e6, 3),
        # Two messages of 64 MiB, each read and written.
        "memory_gb_s": _positive(4 * (64 << 20) / seconds / 1e9, 1),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jax_ring": _commit(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def at_end() -> dict:
    """What may have changed while a benchmark ran: a virtual machine's cores move, near to each other and apart."""
    round_trip, _ = _native("core_costs", otherwise=(math.nan, math.nan))
    return {"share_of_others": share_of_others(), "round_trip_at_end_us": _positive(round_trip * 1e6, 3)}


def heading(machine: dict, more: str = "") -> str:
    """The description as a comment above a table."""
    return (
        f"# {machine['cpu']} ({machine.get('processor')}), {machine['usable_cores']} of {machine['cores']} cores, "
        f"{machine['isa']}\n# JAX {machine['jax']}, jax_ring {machine['jax_ring']}{more and f'; {more}'}\n"
        f"# t = {machine['round_trip_us']} us: a cache line to another core and back\n"
        f"# s = {machine['switch_us']} us: a context switch; memory {machine['memory_gb_s']} GB/s"
    )
