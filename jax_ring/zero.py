"""`jax_ring.zero`: an optimizer whose state is divided among the ranks. It is made in jax_ring/training/zero.py."""

from jax_ring.training.global_norm import clip_by_global_norm
from jax_ring.training.parameter_state import ParameterState, Shares
from jax_ring.training.sharded_optimizer import ShardedOptimizer
from jax_ring.training.zero import sharded_optimizer

__all__ = ["ParameterState", "ShardedOptimizer", "Shares", "clip_by_global_norm", "sharded_optimizer"]
