"""The parameter layout: ranks own parameters, so optimizers see the whole tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.zero.by_parameter import slicing
from jax_ring.training.zero.by_parameter.pieces import Packing, ParameterShards, check_partition
from jax_ring.training.zero.by_parameter.plan import ParameterState, Plan, plan_state
from jax_ring.training.zero.by_parameter.traced_update import TracedUpdate, trace_update
from jax_ring.training.zero.by_parameter.update import OwnInputs, norm_over_ranks, on_each_rank
from jax_ring.training.zero.clip import TILE, order_given
from jax_ring.training.zero.interface import (
    Shapes,
    ShardedOptimizer,
    Stage,
    check_num_ranks,
    check_undivided,
    on_all_devices,
    varying_type,
)
from jax_ring.training.zero.reduction import LocalGradients, Reduction

if TYPE_CHECKING:
    import optax


def parameter_layout(tx: optax.GradientTransformation, stage: Stage, reduction: Reduction) -> ShardedOptimizer:
    """Updates each parameter on one rank, or in pieces where `tx` is elementwise. In stage 3 that rank alone has it.

    `tx.update` is traced for all parameters, so masks, labels and shapes see the whole tree. A rank runs the equations
    of its own updates, in a branch of `lax.switch`. Gradients are packed by dtype and owner, padded to the fullest rank
    and summed with `ring_psum_scatter`; updates are gathered likewise.
    """
    layout = _Layout(tx, stage, reduction)
    optimizer = ShardedOptimizer(
        layout.init, layout.update, layout.specs, layout.repartition, layout.unsharded, layout.shares
    )
    if not layout.divided:
        return optimizer
    return optimizer._replace(shard=layout.shard, gather=layout.gather, param_specs=layout.param_specs)


@dataclass(frozen=True)
class _Layout:
    """The functions of a `ShardedOptimizer`, and what they have in common.

    Attributes:
      plans: by the parameters' shapes and the number of ranks.
    """

    tx: optax.GradientTransformation
    stage: Stage
    reduction: Reduction
    plans: dict[tuple[Shapes, int], Plan] = field(default_factory=dict)

    @property
    def axis_name(self) -> AxisName:
        return self.reduction.axis_name

    @property
    def divided(self) -> bool:
        """Whether a rank has only the parameters that it owns."""
        return self.stage == 3

    def plan(self, params: Any, num_ranks: int) -> Plan:
        """The plan for parameters, or for a partition of them."""
        shapes = params.division.shapes if isinstance(params, ParameterShards) else Shapes.of(params)
        if (key := (shapes, num_ranks)) not in self.plans:
            multiple = TILE if self.reduction.is_tree else 1
            with order_given(self.reduction.order):
                self.plans[key] = plan_state(self.tx, shapes, num_ranks, self.axis_name, multiple, self.divided)
        return self.plans[key]

    def separated(self, tree: Any) -> Any:
        """`tree`, in a program of its own if its bits must not depend on the number of ranks."""
        return fence(tree) if self.reduction.is_tree else tree

    def checked(self, shards: Any) -> dict[str, Any]:
        """The rank's vectors. Raises ValueError unless they are divided as here."""
        check_partition(shards)
        plan = self.plan(shards, self.reduction.num_ranks)
        expected = {name: (1, size) for name, size in plan.params.sizes.items()}
        found = jax.tree.map(jnp.shape, shards.own)
        if shards.division != plan.division or found != expected:
            raise ValueError(
                f"sharded_optimizer: a rank's shards have the shapes {expected} here, and these have {found}. Those of "
                "another number of ranks have to pass through `repartition` first; those of another optimizer or order "
                "have to be made again, by optimizer.shard(shards.whole())."
            )
        return {name: x[0] for name, x in shards.own.items()}

    def shard(self, params):
        check_undivided(params, self.axis_name)
        plan = self.plan(params, self.reduction.num_ranks)
        leaves = jax.tree.leaves(params)
        own = on_each_rank(lambda rank: plan.params.pack_whole(rank, leaves), plan, self.axis_name)
        return ParameterShards({name: x[None] for name, x in own.items()}, plan.division)

    def gather(self, shards):
        vectors = self.reduction.gathered(self.checked(shards))
        return self.separated(shards.unpacked(vectors, self.reduction.num_ranks))

    def init(self, params):
        params = self.gather(params) if self.divided else params
        plan = self.plan(params, self.reduction.num_ranks)
        leaves, closed = jax.tree.leaves(params), jax.make_jaxpr(self.tx.init)(params)

        def on_rank(rank):
            pieces = plan.state.ranks[rank]
            values = slicing.compute(closed, [piece.leaf for piece in pieces], leaves)
            flat = [jnp.reshape(x, -1)[piece.start : piece.stop] for x, piece in zip(values, pieces, strict=True)]
            return plan.state.pack(rank, flat)

        shared = slicing.compute(closed, plan.shared, leaves)
        return plan.pack_state(shared, on_each_rank(on_rank, plan, self.axis_name))

    def update(self, gradients, state, params):
        shards, vectors, all_params = params, {}, jax.tree.leaves(params)
        if self.divided:
            vectors, params, all_params = self.checked(shards), shards.like, []
        else:
            check_undivided(params, self.axis_name)
        local = LocalGradients.of(gradients, params, self.reduction)
        plan = self.plan(params, self.reduction.num_ranks)
        shared, own = plan.unpack_state(state)
        traced = self.traced(local, plan, shared, params)
        gradients_of = self.reduced(local, plan)

        def inputs_of(common, rank):
            pieces, states = plan.params.ranks[rank], plan.state.unpack(rank, own)
            own_params = plan.params.unpack(rank, vectors) if self.divided else None
            gradients = gradients_of(rank)
            return replace(common, pieces=pieces, gradients=gradients, states=states, own_params=own_params)

        common = self.with_norms(OwnInputs(traced, shared, all_params, plan.in_tiles), plan, inputs_of)
        # Updates of partitions are packed as the parameters are, whatever their own dtypes.
        names = [np.dtype(x.dtype).name for x in jax.tree.leaves(params)] if self.divided else None
        packed = Packing(traced.update_types, plan.params.ranks, names)

        def on_rank(rank):
            updates, states = inputs_of(common, rank).updates(local.has_gradient)
            return packed.pack(rank, updates), plan.state.pack(rank, states)

        updates, own = on_each_rank(on_rank, plan, self.axis_name)
        if self.divided:
            updates = ParameterShards({name: x[None] for name, x in updates.items()}, plan.division)
        else:
            whole = packed.unpack_all(self.reduction.collectives.all_gather(updates, self.axis_name))
            updates = jax.tree.unflatten(jax.tree.structure(params), [whole[i] for i in range(traced.num_leaves)])
        shared = self.separated(common.compute_shared([traced.num_leaves + k for k in plan.shared]))
        return updates, plan.pack_state(shared, own)

    def traced(self, local: LocalGradients, plan: Plan, shared: dict[int, Any], params: Any) -> TracedUpdate:
        """`tx.update` for these gradients. Raises unless it keeps the plan's state."""
        gradients = [varying_type(x, self.axis_name) for x in local.types]
        gradients = jax.tree.unflatten(jax.tree.structure(params), gradients)
        of_params = jax.tree.map(lambda x: varying_type(x, self.axis_name), params) if self.divided else params
        of_state = plan.types(self.axis_name, shared)
        with order_given(self.reduction.order):
            traced = trace_update(self.tx, gradients, of_state, of_params, self.axis_name)
        traced.check_state(plan.owners, params, local.has_gradient)
        return traced.with_scalars_apart() if self.reduction.is_tree else traced

    def reduced(self, local: LocalGradients, plan: Plan) -> Callable[[int], list[jax.Array]]:
        """Sums gradients over the ranks. Returns (rank) -> the means of its pieces, there."""
        if self.stage == 1:
            synced = local.synced([x.dtype for x in local.types])
            means = [own_copy(jnp.reshape(x, -1), self.axis_name) for x in synced]
            return lambda rank: [means[leaf][start:stop] for leaf, start, stop in plan.params.ranks[rank]]
        packed = Packing(local.sent_types, plan.params.ranks)
        sums = local.scattered_sums(packed.pack_all)
        return lambda rank: [
            local.mean(x, local.types[piece.leaf].dtype)
            for x, piece in zip(packed.unpack(rank, sums), plan.params.ranks[rank], strict=True)
        ]

    def with_norms(self, common: OwnInputs, plan: Plan, inputs_of: Callable[[OwnInputs, int], OwnInputs]) -> OwnInputs:
        """Inputs that all ranks have, with the norms that `tx` asks for, and scalars."""
        traced = common.traced
        for request in traced.norms:
            of_rank = partial(inputs_of, self.with_scalars(common))
            norm = norm_over_ranks(request, traced, plan, of_rank, self.axis_name)
            common = replace(common, norms=(*common.norms, norm))
        return self.with_scalars(common)

    def with_scalars(self, common: OwnInputs) -> OwnInputs:
        scalars = common.traced.shared_scalars(common.shared, common.norms)
        return replace(common, scalars=self.separated(scalars))

    def param_specs(self, params):
        plan = self.plan(params, 1)
        return ParameterShards({name: PartitionSpec(self.axis_name) for name in plan.params.sizes}, plan.division)

    def specs(self, params):
        plan = self.plan(params, 1)
        empty = plan.pack_state([PartitionSpec()] * len(plan.shared), {})
        return empty._replace(own={name: PartitionSpec(self.axis_name) for name in plan.state.sizes})

    def whole_arrays(self, state, params):
        """The state's leaves that belong to parameters, by index."""
        num_ranks = len(next(iter(state.own.values()))) if isinstance(state, ParameterState) and state.own else 1
        plan = self.plan(params, num_ranks)
        plan.check(state, num_ranks)
        return plan.state.unpack_all({name: jnp.reshape(x, -1) for name, x in on_all_devices(state.own).items()})

    def repartition(self, state, params, num_ranks):
        num_ranks = check_num_ranks(num_ranks)
        whole, plan = self.whole_arrays(state, params), self.plan(params, num_ranks)

        def packed(packing, arrays):
            return {name: jnp.reshape(x, (num_ranks, -1)) for name, x in packing.pack_all(arrays).items()}

        state = ParameterState(state.shared, packed(plan.state, [whole.get(k) for k in range(len(plan.owners))]))
        if not self.divided:
            return state
        check_partition(params)
        leaves = jax.tree.leaves(params.whole())
        return state, ParameterShards(packed(plan.params, leaves), plan.division)

    def unsharded(self, state, params):
        whole, plan = self.whole_arrays(state, params), self.plan(params, 1)
        whole |= zip(plan.shared, jax.tree.leaves(state.shared), strict=True)
        return jax.tree.unflatten(plan.structure, [whole[k] for k in range(len(plan.owners))])

    def shares(self, params, num_ranks):
        return self.plan(params, check_num_ranks(num_ranks)).shares(params)
