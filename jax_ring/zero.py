"""`jax_ring.zero`: an optimizer whose state is divided among the ranks. It is made in jax_ring/training/zero."""

from jax_ring.training.zero.by_parameter.state import ParameterState, Shares
from jax_ring.training.zero.clip import clip_by_global_norm
from jax_ring.training.zero.interface import ShardedOptimizer
from jax_ring.training.zero.optimizer import sharded_optimizer

__all__ = ["ParameterState", "ShardedOptimizer", "Shares", "clip_by_global_norm", "sharded_optimizer"]
