"""Collectives for JAX as XLA custom calls: bitwise reproducible, drop-ins for those of `jax.lax`."""

import importlib
import sys
from typing import TYPE_CHECKING

# First, because its errors say what is wrong with the installation.
try:
    import jax_ring.runtime as _runtime
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError(
        f"jax_ring needs JAX, which this Python ({sys.executable}) does not have. Use the Python of the environment "
        "that jax_ring is installed in, such as .venv/bin/python; its README has the command that makes one."
    ) from error

from jax_ring._install import install as _install
from jax_ring.collectives import (
    ShardSums,
    ring_all_gather,
    ring_all_to_all,
    ring_broadcast,
    ring_pbroadcast,
    ring_pmax,
    ring_pmean,
    ring_pmin,
    ring_ppermute,
    ring_pshuffle,
    ring_psum,
    ring_psum_scatter,
    ring_pswapaxes,
    ring_ragged_all_to_all,
    ring_reduce,
)
from jax_ring.distributed.discovery import assume_hosts
from jax_ring.lowering.override import Override, override_lax
from jax_ring.training.accumulation import accumulate_gradients
from jax_ring.training.buckets import Bucket, BucketPlan, plan_buckets
from jax_ring.training.gradients import grad, reduce_in_backward, value_and_grad
from jax_ring.training.replicas import assert_replicated, broadcast_params
from jax_ring.training.same_bits.blocks import block_max, block_sum, each_block
from jax_ring.training.same_bits.parts import block_index, shard_index
from jax_ring.training.sentinel import check_replicas
from jax_ring.training.sync import ReductionOptions, sync_gradients, sync_with_feedback
from jax_ring.training.transformation import FeedbackState, allreduce_gradients, feedback_specs
from jax_ring.training.weighted_mean import weighted_pmean
from jax_ring.training.zero.interface import ShardedOptimizer

if TYPE_CHECKING:
    from jax_ring import elastic, zero
    from jax_ring.inspect.compiled import Instruction
    from jax_ring.inspect.explanation import Collective, Explanation, explain
    from jax_ring.inspect.recorded import (
        CallStatistics,
        FlightRecord,
        Late,
        RecordedCall,
        Statistics,
        flight_recorder,
        statistics,
    )
    from jax_ring.progress.watch import watch

_install()

__version__ = _runtime.__version__

__all__ = [
    "Bucket",
    "BucketPlan",
    "CallStatistics",
    "Collective",
    "Explanation",
    "FeedbackState",
    "FlightRecord",
    "Instruction",
    "Late",
    "Override",
    "RecordedCall",
    "ReductionOptions",
    "ShardSums",
    "ShardedOptimizer",
    "Statistics",
    "accumulate_gradients",
    "allreduce_gradients",
    "assert_replicated",
    "assume_hosts",
    "block_index",
    "block_max",
    "block_sum",
    "broadcast_params",
    "check_replicas",
    "each_block",
    "elastic",
    "explain",
    "feedback_specs",
    "flight_recorder",
    "grad",
    "override_lax",
    "plan_buckets",
    "reduce_in_backward",
    "ring_all_gather",
    "ring_all_to_all",
    "ring_broadcast",
    "ring_pbroadcast",
    "ring_pmax",
    "ring_pmean",
    "ring_pmin",
    "ring_ppermute",
    "ring_pshuffle",
    "ring_psum",
    "ring_psum_scatter",
    "ring_pswapaxes",
    "ring_ragged_all_to_all",
    "ring_reduce",
    "shard_index",
    "statistics",
    "sync_gradients",
    "sync_with_feedback",
    "value_and_grad",
    "watch",
    "weighted_pmean",
    "zero",
]


def __dir__() -> list[str]:
    # Without this, every submodule that has been imported would be listed as well.
    return sorted([*__all__, "__version__"])


if not TYPE_CHECKING:  # a type checker would take every name for a public one

    def __getattr__(name: str):
        # Programs that communicate need none of these to start, and they would take half as long again to import.
        if name in ("elastic", "inspect", "zero"):
            return importlib.import_module(f"{__name__}.{name}")
        if name == "watch":
            return importlib.import_module(f"{__name__}.progress.watch").watch
        if name in __all__:
            return getattr(importlib.import_module(f"{__name__}.inspect"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
