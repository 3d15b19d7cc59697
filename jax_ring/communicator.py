"""Which GPUs can reach each other's memory, and how the processes that own them meet."""

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jax_ring import _compat, runtime

HOST_VARIABLE = "JAX_RING_HOST_ID"

# As many as a kernel's arguments have room for (kMaxRanks in ffi/ring/endpoint.h).
_MOST_RANKS = 64


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


def why_not_gpus(mesh, groups: Sequence[Sequence[int]]) -> str | None:
    """Why the CUDA engine cannot serve these groups of mesh positions; None if it can."""
    if runtime.ffi_cuda is None:
        return f"jax_ring was built without its CUDA engine: {runtime.why_no_cuda}"
    gpus = gpus_of(mesh)
    if gpus is None:
        return "the mesh is abstract, or not of GPUs, so that it is not known which ones will reduce together"
    largest = max(len(group) for group in groups)
    if largest > _MOST_RANKS:
        return f"a group has {largest} ranks, more than {_MOST_RANKS}"
    for group in groups:
        members = [gpus[position] for position in group]
        hosts = {host_of(gpu.process) for gpu in members}
        if len(hosts) > 1:
            return f"the ranks of a group are on {len(hosts)} hosts"
        own = [gpu.number for gpu in members if gpu.process == jax.process_index()]
        if pairs := runtime.ffi_cuda.unreachable(own):
            return f"GPU {pairs[0][0]} has no peer access to GPU {pairs[0][1]}"
    return None


@functools.cache
def host_of(process: int) -> str:
    """What tells the host of a process from others: the boot id of its kernel, or `JAX_RING_HOST_ID`.

    With several processes each must ask for this, for the others wait for its answer.
    """
    if jax.process_count() == 1:
        return ""
    publish, fetch = _compat.key_value_store(runtime.timeout())
    if process == jax.process_index():
        boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        own = os.environ.get(HOST_VARIABLE) or boot_id
        publish(f"jax_ring/host/{process}", own.encode())
        runtime.join_cuda_processes(process, publish, fetch)
        return own
    host_of(jax.process_index())  # before waiting for another: it may be waiting for this one
    return fetch(f"jax_ring/host/{process}").decode()
