"""Which devices can reach each other's memory: what an engine serves of a call's groups, and what is left to XLA."""

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jax_ring import _compat, runtime
from jax_ring.distributed.discovery import host_of

# As many as a kernel's arguments have room for (kMaxRanks in ffi/ring/endpoint.h).
_MOST_RANKS = 64

Groups = Sequence[Sequence[int]]  # of mesh positions


class Levels(NamedTuple):
    """How the groups of a call lie on hosts.

    Attributes:
      within: what an engine serves: the groups themselves, or where they cross hosts, those ranks of each group that
        are on one host, all equally many, in the order of their ranks.
      across: where groups cross hosts, what is left to XLA: the i-th ranks of all hosts of a group. Else empty.
      num_processes: the largest number of processes that a group of `within` has ranks in.
    """

    within: Groups
    across: Groups = ()
    num_processes: int = 1

    @property
    def num_hosts(self) -> int:
        """On how many hosts each group lies."""
        return len(self.across[0]) if self.across else 1


def levels_of(engine: str, mesh, groups: Groups) -> tuple[Levels | None, str]:
    """How an engine, "cpu" or "cuda", serves groups of a mesh; or None, and why it cannot."""
    processes, why_not = _PLATFORMS[engine].processes_of(mesh)
    if processes is None:
        return None, why_not
    levels, why_not = _split(processes, groups)
    if levels is not None:
        why_not = _PLATFORMS[engine].why_unreachable(mesh, levels.within)
    return (None, why_not) if why_not else (levels, "")


def _split(processes: Sequence[int], groups: Groups) -> tuple[Levels | None, str]:
    """processes: of each mesh position."""
    within: list[Sequence[int]] = []
    across: list[Sequence[int]] = []
    num_hosts = []
    for group in groups:
        by_host = collections.defaultdict(list)
        for position in group:
            by_host[host_of(processes[position])].append(position)
        parts = list(by_host.values())
        within += parts
        num_hosts.append(len(parts))
        across += zip(*parts, strict=False)
    num_processes = max(len({processes[position] for position in part}) for part in within)
    if max(num_hosts) == 1:
        return Levels(groups, (), num_processes), ""
    crosses = f"the ranks of a group are on {max(num_hosts)} hosts"
    # All ranks run one program, in which the parts have one size.
    if len({len(part) for part in within}) > 1 or len(set(num_hosts)) > 1:
        return None, f"{crosses}, and not all groups have equally many ranks on each of equally many hosts"
    if len(within[0]) == 1:
        return None, f"{crosses}, each on its own"
    return Levels(within, across, num_processes), ""


# ---- CPU devices ----------------------------------------------------------------------------------------------------


def processes_of_cpus(mesh) -> list[int] | None:
    """The process of each mesh position; None if that is not known yet."""
    devices = _compat.mesh_devices(mesh)
    if devices is not None:
        return [device.process_index for device in devices]
    return [0] * mesh.size if jax.process_count() == 1 else None


def _processes_of_cpus(mesh) -> tuple[list[int] | None, str]:
    processes = processes_of_cpus(mesh)
    if processes is None:
        return None, (
            f"the mesh is abstract, so that it is not known which devices of {jax.process_count()} processes will "
            "reduce together"
        )
    return processes, ""


# ---- GPUs -----------------------------------------------------------------------------------------------------------


class Gpu(NamedTuple):
    """A GPU by its process and its number among those that the process sees: the same in all processes."""

    process: int
    number: int


def gpus_of(mesh) -> list[Gpu] | None:
    """The GPUs of a mesh, by mesh position; None if its devices are not known yet, or are no GPUs."""
    devices = _compat.mesh_devices(mesh)
    if devices is None or any(device.platform != "gpu" for device in devices):
        return None
    return [Gpu(device.process_index, device.local_hardware_id) for device in devices]


def _processes_of_gpus(mesh) -> tuple[list[int] | None, str]:
    if runtime.ffi_cuda is None:
        return None, f"jax_ring was built without its CUDA engine: {runtime.why_no_cuda}"
    gpus = gpus_of(mesh)
    if gpus is None:
        return None, "the mesh is abstract, or not of GPUs, so that it is not known which ones will reduce together"
    return [gpu.process for gpu in gpus], ""


def _why_unreachable_gpus(mesh, groups: Groups) -> str:
    gpus = gpus_of(mesh)
    assert gpus is not None  # or their processes would not be known
    assert runtime.ffi_cuda is not None
    largest = max(len(group) for group in groups)
    if largest > _MOST_RANKS:
        return f"a group has {largest} ranks, more than {_MOST_RANKS}"
    for group in groups:
        own = [gpus[position].number for position in group if gpus[position].process == jax.process_index()]
        if pairs := runtime.ffi_cuda.unreachable(own):
            return f"GPU {pairs[0][0]} has no peer access to GPU {pairs[0][1]}"
    return ""


class _Platform(NamedTuple):
    processes_of: Callable  # (mesh) to the process of each mesh position, or to None, and why they are not known
    why_unreachable: Callable  # (mesh, groups) to why the ranks of a group cannot reach each other on one host, or ""


_PLATFORMS = {
    "cpu": _Platform(_processes_of_cpus, lambda mesh, groups: ""),
    "cuda": _Platform(_processes_of_gpus, _why_unreachable_gpus),
}
