"""A process's GPUs, and those that cannot reach each other's memory, as told to other processes."""

import functools
import json
from typing import NamedTuple

from jax_ring import _compat, runtime


class Identity(NamedTuple):
    """A GPU or MIG slice, as all processes of a host see it."""

    bus_id: str  # its PCI address, shared by slices
    uuid: str  # differs between slices

    def shares_gpu_with(self, other: "Identity") -> bool:
        return self.bus_id == other.bus_id or self.uuid == other.uuid


class Gpus(NamedTuple):
    """What a process tells of GPUs."""

    own: tuple[Identity, ...] = ()  # its JAX devices, by id
    # pairs of visible GPUs, the first without peer access to the second
    severed: frozenset[tuple[Identity, Identity]] = frozenset()
    why_not: str = ""  # why it can serve no GPUs, or ""

    def to_bytes(self) -> bytes:
        return json.dumps([self.own, sorted(self.severed), self.why_not]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Gpus":
        own, severed, why_not = json.loads(data)
        pairs = frozenset((Identity(*one), Identity(*other)) for one, other in severed)
        return cls(tuple(Identity(*gpu) for gpu in own), pairs, why_not)


def gpus_here() -> Gpus:
    """The GPUs of this process, without starting a JAX backend or a CUDA context."""
    return _gpus_of(runtime.cuda_kernels, _compat.visible_gpus())


@functools.lru_cache(maxsize=1)
def _gpus_of(kernels, visible: tuple[int, ...] | None) -> Gpus:
    if kernels is None:
        return Gpus(why_not=f"jax_ring was built without its CUDA kernels: {runtime.why_no_cuda}")
    try:
        seen = [Identity(*identity) for identity in kernels.identities()]
        severed = kernels.unreachable(list(range(len(seen))))
    except RuntimeError as error:
        return Gpus(why_not=f"the CUDA runtime cannot list the GPUs: {error}")
    # JAX numbers the devices of a process in the order of their CUDA ordinals.
    ordinals = range(len(seen)) if visible is None else sorted(i for i in visible if i < len(seen))
    return Gpus(tuple(seen[i] for i in ordinals), frozenset((seen[a], seen[b]) for a, b in severed if a != b))
