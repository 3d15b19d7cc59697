"""GPUs for the lowering, where there are none: CPU devices and a fake of the native module of kernels."""

from jax_ring import runtime
from jax_ring.lowering import topology


class FakeKernels:
    """A fake of `jax_ring._cuda_kernels` on a machine of 16 GPUs, as many as the tests have CPU devices.

    Attributes:
      gpus: PCI address and UUID of each.
      severed: pairs of GPUs, the first without access to the memory of the second.
    """

    def __init__(self):
        self.gpus = [(f"0000:{i:02x}:00.0", f"GPU-{i}") for i in range(16)]
        self.severed = set()

    def identities(self):
        return self.gpus

    def unreachable(self, ordinals):
        return [(a, b) for a in ordinals for b in ordinals if (a, b) in self.severed]


def pretend_gpus(monkeypatch) -> FakeKernels:
    """Makes CPU device d GPU d."""
    monkeypatch.setattr(topology, "_is_gpu", lambda device: True)
    monkeypatch.setattr(runtime, "cuda_kernels", FakeKernels())
    return runtime.cuda_kernels
