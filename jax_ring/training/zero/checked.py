"""A sharded optimizer that compares the ranks' copies of the parameters in some of its steps."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName
from jax_ring.training.implementations import implementation
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.sentinel import CheckedState, check_counted, digests_every, next_step
from jax_ring.training.zero.interface import ShardedOptimizer


def checked(optimizer: ShardedOptimizer, axis_name: AxisName, every: int) -> ShardedOptimizer:
    """`optimizer`, with `check_replicas` in its first step and after every so many. Its state is a `CheckedState`.

    The table of the digests is summed in a call of its own: gradients are scattered, so that no rank gets all sums.
    """
    name = "sharded_optimizer"

    def init(params):
        return CheckedState(jnp.zeros((), jnp.int32), optimizer.init(params))

    def update(gradients, state, params):
        check_counted(name, state)
        own = digests_every(name, params, axis_name, every, state.step)
        sums = implementation().psum(own.table, axis_name)
        ok = own.verdict(sums)
        updates, inner = optimizer.update(gradients, state.inner, params)
        step, updates = next_step(state.step, fence(updates, sums), ok)
        return updates, CheckedState(step, inner)

    def specs(params):
        return CheckedState(PartitionSpec(), optimizer.specs(params))

    def repartition(state: Any, params: Any, num_ranks: int):
        check_counted(name, state)
        return CheckedState(state.step, optimizer.repartition(state.inner, params, num_ranks))

    def unsharded(state: Any, params: Any):
        check_counted(name, state)
        return optimizer.unsharded(state.inner, params)

    return ShardedOptimizer(init, update, specs, repartition, unsharded, optimizer.shares)
