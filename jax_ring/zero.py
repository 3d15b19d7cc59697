"""`jax_ring.zero`: an optimizer whose state is divided among the ranks. It is made in jax_ring/training/zero."""

from jax_ring.training.zero.by_parameter.pieces import ParameterShards
from jax_ring.training.zero.by_parameter.plan import ParameterState, Shares
from jax_ring.training.zero.clip import clip_by_global_norm
from jax_ring.training.zero.interface import ShardedOptimizer, ShardedParams
from jax_ring.training.zero.optimizer import replicated_optimizer, sharded_optimizer
from jax_ring.training.zero.sharded_layer import sharded_layer

__all__ = [
    "ParameterShards",
    "ParameterState",
    "ShardedOptimizer",
    "ShardedParams",
    "Shares",
    "clip_by_global_norm",
    "replicated_optimizer",
    "sharded_layer",
    "sharded_optimizer",
]
