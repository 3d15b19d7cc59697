"""Which devices reach each other's memory; splits groups across hosts between engine and XLA."""

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ring import _compat, runtime
from jax_ring.distributed import discovery
from jax_ring.distributed.discovery import Identity, assumed, assumed_host_of
from jax_ring.launcher.schema import escaped

Groups = Sequence[Sequence[int]]  # of mesh positions

# Room in the kernel arguments (kMaxRanks in ffi/device/memory/endpoint.h).
_MAX_RANKS = 64


class Member(NamedTuple):
    """A rank's device, for all processes.

    Attributes:
      process: its owner.
      id: a CPU device's position in the mesh; a GPU's id in JAX, which every process knows.
    """

    process: int
    id: int


class Levels(NamedTuple):
    """A call's groups, split between hosts.

    Attributes:
      intra: the engine's: if groups cross hosts, their parts on each, equally large, in rank order; else the groups.
      inter: XLA's: the i-th ranks of a group's parts; empty if none crosses hosts.
      num_processes: the most in one group of `intra`.
    """

    intra: tuple[tuple[int, ...], ...]
    inter: tuple[tuple[int, ...], ...] = ()
    num_processes: int = 1

    @property
    def num_ranks(self) -> int:
        """A group's ranks on each host, if groups cross hosts."""
        return len(self.intra[0])

    @property
    def num_hosts(self) -> int:
        """The hosts of each group."""
        return len(self.inter[0]) if self.inter else 1


def levels_of(
    engine: str, mesh: Any, groups: tuple[tuple[int, ...], ...], members: Sequence[Member] | None
) -> tuple[Levels | None, str]:
    """How an engine, "cpu" or "cuda", serves these groups; or None, and why not. members: as from `members_of`."""
    if members is None:
        return None, _WHY_UNKNOWN[engine].format(count=jax.process_count())
    processes = [member.process for member in members]
    levels, why_not = Levels(groups), ""
    if len(set(processes)) > 1:
        is_elsewhere = _compat.is_compile_only(mesh)
        split, why_not = _split_by_host(processes, groups, assumed_host_of if is_elsewhere else discovery.host_of)
        if split is None:
            unless = "; each process counts as a host, unless jax_ring.assume_hosts() says which of them share one"
            return None, why_not + unless if is_elsewhere and assumed.value is None else why_not
        levels = split
    why_not = _why_unreachable(mesh, levels.intra) if engine == "cuda" else ""
    return (None, why_not) if why_not else (levels, "")


def _split_by_host(
    processes: Sequence[int], groups: tuple[tuple[int, ...], ...], host_of: Callable
) -> tuple[Levels | None, str]:
    """Groups whose ranks are on several processes, split into the parts on each host; or None, and why not.

    processes: by mesh position.
    """
    intra: list[tuple[int, ...]] = []
    inter: list[tuple[int, ...]] = []
    num_hosts = []
    for group in groups:
        by_host = collections.defaultdict(list)
        for position in group:
            by_host[host_of(processes[position])].append(position)
        parts = list(map(tuple, by_host.values()))
        intra += parts
        num_hosts.append(len(parts))
        inter += zip(*parts, strict=False)
    num_processes = max(len({processes[position] for position in part}) for part in intra)
    if max(num_hosts) == 1:
        return Levels(groups, (), num_processes), ""
    crosses = crossing_text(max(num_hosts))
    # All ranks run the same program, so all parts need the same size.
    if len({len(part) for part in intra}) > 1 or len(set(num_hosts)) > 1:
        return None, f"{crosses}, with unequal numbers of ranks per host or of hosts per group"
    if len(intra[0]) == 1:
        return None, f"{crosses}, one rank on each"
    return Levels(tuple(intra), tuple(inter), num_processes), ""


def crossing_text(num_hosts: int) -> str:
    """Why a call across hosts is not split; the beginning."""
    return f"the ranks of a group are on {num_hosts} hosts"


_WHY_UNKNOWN = {
    "cpu": "the mesh is abstract, so the devices of {count} processes in each group are not known",
    "cuda": "the mesh is abstract or not of GPUs, so the GPUs in each group are not known",
}


def members_of(engine: str, mesh: Any) -> list[Member] | None:
    """The device of each mesh position; None if unknown yet, or not all are GPUs that the CUDA engine needs."""
    devices = _compat.mesh_devices(mesh)
    if engine == "cuda":
        is_known = devices is not None and all(map(_is_gpu, devices))
        return [Member(device.process_index, device.id) for device in devices or ()] if is_known else None
    if devices is not None:
        return [Member(device.process_index, position) for position, device in enumerate(devices)]
    return [Member(0, position) for position in range(mesh.size)] if jax.process_count() == 1 else None


def processes_of_cpus(mesh: Any) -> list[int] | None:
    """The process of each mesh position; None if unknown yet."""
    members = members_of("cpu", mesh)
    return None if members is None else [member.process for member in members]


def _is_gpu(device) -> bool:
    return device.platform == "gpu"


def _why_unreachable(mesh, groups: Groups) -> str:
    """Why the GPUs of a group on one host cannot reach each other, or ""."""
    largest = max(len(group) for group in groups)
    if largest > _MAX_RANKS:
        return f"a group has {largest} ranks, and the CUDA engine serves at most {_MAX_RANKS}"
    if _compat.is_compile_only(mesh):
        return ""  # their links are unknown
    devices = _compat.mesh_devices(mesh)
    assert devices is not None  # checked by members_of
    # Decide only by facts that all processes know, so that all lower the same program.
    members = {position: devices[position] for group in groups if len(group) > 1 for position in group}
    published = discovery.gpus_of(sorted({device.process_index for device in members.values()}))
    for process, gpus in published.items():
        if gpus.why_not:
            return gpus.why_not if jax.process_count() == 1 else f"in process {process}, {escaped(gpus.why_not)}"
    identities = {}
    for position, device in members.items():
        peers, own = _compat.devices_of_process(device), published[device.process_index].own
        if len(peers) != len(own):
            return f"process {device.process_index} has {len(peers)} GPUs by JAX, and {len(own)} by CUDA"
        identities[position] = own[peers.index(device)]
    severed = {pair for gpus in published.values() for pair in gpus.severed}
    for group in groups:
        for one, other in itertools.permutations(group, 2):
            here, there = identities[one], identities[other]
            is_shared = here.shares_gpu_with(there) and not runtime.SHARED_GPU
            if is_shared or (here, there) in severed:
                what = "is on the same GPU as" if is_shared else "has no peer access to"
                return f"{_name_of(devices[one], here)} {what} {_name_of(devices[other], there)}"
    return ""


def _name_of(device, identity: Identity) -> str:
    gpu = escaped(f"{identity.uuid} at {identity.bus_id}")  # as its process says
    return f"device {device.id} ({gpu}, process {device.process_index})"


# ---- Groups as tables that a rank reads at its mesh position ---------------------------------------------------------


def group_table(groups: Groups) -> np.ndarray:
    """The index of each position's group."""
    table = np.zeros(sum(map(len, groups)), np.int32)
    for i, group in enumerate(groups):
        table[list(group)] = i
    return table


def rank_table(groups: Groups) -> np.ndarray:
    """The rank of each position in its group."""
    table = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        table[list(group)] = range(len(group))
    return table
