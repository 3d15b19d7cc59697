"""The time of a data-parallel training step, with and without overlap of computation and communication."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """A model whose gradients are all-reduced once per step, with a fixed batch per rank.

    The default is a GPT of 1.3 billion parameters, 8192 tokens per rank, at 400 TFLOP/s, with 16-bit gradients. Six
    floating-point operations per parameter and token: two forward, four backward.
    """

    parameters: float = 1.3e9
    tokens: float = 8192
    flops: float = 4e14
    bytes_per_gradient: float = 2

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return 2 * self.parameters * self.tokens / self.flops

    @property
    def backward(self) -> float:
        """Seconds of the backward pass."""
        return 2 * self.forward

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients of one rank."""
        return self.parameters * self.bytes_per_gradient


def step_seconds(workload: Workload, all_reduce: Callable[[float], float], buckets: int, overlap: bool) -> float:
    """The time of one step whose gradients are all-reduced in equal buckets, one after the other.

    Args:
      workload: the model and its batch.
      all_reduce: (bytes) to the seconds of an all-reduce.
      buckets: the number of buckets. Bucket i of b is ready after (i+1)/b of the backward pass.
      overlap: whether a bucket is sent when it is ready, rather than after the backward pass.
    """
    compute = workload.forward + workload.backward
    each = all_reduce(workload.gradient_bytes / buckets)
    if not overlap:
        return compute + buckets * each
    done = 0.0
    for ready in workload.forward + workload.backward * np.arange(1, buckets + 1) / buckets:
        done = max(done, ready) + each
    return done
