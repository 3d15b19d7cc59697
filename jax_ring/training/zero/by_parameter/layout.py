"""The parameter layout: ranks own parameters, so optimizers see the whole tree."""

from __future__ import annotations

import functools
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import axes_of, check_named, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.implementations import implementation
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.zero import wires
from jax_ring.training.zero.analysis import slicing
from jax_ring.training.zero.block_sums import BLOCK
from jax_ring.training.zero.by_parameter.norm import norm_over_ranks
from jax_ring.training.zero.by_parameter.plan import Blocks
from jax_ring.training.zero.by_parameter.shards import ParameterShards, check_shards
from jax_ring.training.zero.by_parameter.state import ParameterState, Plan, plan_state, varying_type
from jax_ring.training.zero.by_parameter.traced_update import trace_update
from jax_ring.training.zero.by_parameter.update import OwnInputs, on_each_rank
from jax_ring.training.zero.given_norms import order_given
from jax_ring.training.zero.interface import ShardedOptimizer, Stage, check_num_ranks, check_undivided
from jax_ring.training.zero.local_gradients import LocalGradients, Reduction
from jax_ring.training.zero.vectors import Shapes

if TYPE_CHECKING:
    import optax


def parameter_layout(tx: optax.GradientTransformation, *, stage: Stage, reduction: Reduction) -> ShardedOptimizer:
    """Updates each parameter on one rank, or in pieces where `tx` is elementwise. In stage 3 that rank alone has it.

    `tx.update` is traced for all parameters, so masks, labels and shapes see the whole tree. A rank runs the equations
    of its own updates, in a branch of `lax.switch`. Gradients are packed by dtype and owner, padded to the fullest rank
    and summed with `ring_psum_scatter`; updates are gathered likewise.
    """
    axis_name = reduction.axis_name
    run = implementation("sharded_optimizer", reduction.impl, reduction.overlap)
    separated = fence if reduction.is_tree else lambda tree: tree
    divided = stage == 3

    @functools.cache
    def plan_for(shapes: Shapes, num_ranks: int) -> Plan:
        with order_given(reduction.order):
            return plan_state(tx, shapes, num_ranks, axis_name, BLOCK if reduction.is_tree else 1, divided)

    def checked(shards):
        """The argument, and the rank's vectors. Raises ValueError unless it is divided as here."""
        check_named("sharded_optimizer", axes_of(axis_name))
        check_shards(shards)
        division = plan_for(shards.division.shapes, reduction.num_ranks).division
        sizes = division.blocks(reduction.num_ranks).sizes
        expected, found = {name: (1, size) for name, size in sizes.items()}, jax.tree.map(jnp.shape, shards.own)
        if shards.division != division or found != expected:
            raise ValueError(
                f"sharded_optimizer: a rank's shards have the shapes {expected} here, and these have {found}. Those of "
                "another number of ranks have to pass through `repartition` first; those of another optimizer or order "
                "have to be made again, by optimizer.shard(shards.whole())."
            )
        return shards, {name: x[0] for name, x in shards.own.items()}

    def shard(params):
        check_named("sharded_optimizer", axes_of(axis_name))
        check_undivided(params, axis_name)
        plan = plan_for(Shapes.of(params), reduction.num_ranks)
        blocks, leaves = plan.division.blocks(reduction.num_ranks), jax.tree.leaves(params)
        own = on_each_rank(lambda rank: blocks.pack_whole(rank, leaves), plan, axis_name)
        return ParameterShards({name: x[None] for name, x in own.items()}, plan.division)

    def gather(shards):
        shards, vectors = checked(shards)
        return separated(shards.unpacked(wires.gathered(vectors, reduction), reduction.num_ranks))

    def shapes_of(params):
        return params.division.shapes if isinstance(params, ParameterShards) else Shapes.of(params)

    def init(params):
        params = gather(params) if divided else params
        check_named("sharded_optimizer", axes_of(axis_name))
        plan = plan_for(Shapes.of(params), num_ranks(axes_of(axis_name)))
        leaves, structure = jax.tree.flatten(params)
        closed = jax.make_jaxpr(lambda *x: jax.tree.leaves(tx.init(jax.tree.unflatten(structure, x))))(*leaves)

        def on_rank(rank):
            pieces = plan.state.ranks[rank]
            values = slicing.compute(closed, [piece.leaf for piece in pieces], leaves)
            flat = [jnp.reshape(x, -1)[piece.start : piece.stop] for x, piece in zip(values, pieces, strict=True)]
            return plan.state.pack(rank, flat)

        shared = slicing.compute(closed, plan.shared, leaves)
        return plan.pack_state(shared, on_each_rank(on_rank, plan, axis_name))

    def update(gradients, state, params):
        shards, own_vectors, all_params = None, {}, params
        if divided:
            shards, own_vectors = checked(params)
            params, all_params = shards.like, ()
        else:
            check_undivided(params, axis_name)
        local = LocalGradients.of(gradients, params, reduction)
        has_gradient = local.has_gradient
        plan = plan_for(Shapes.of(params), reduction.num_ranks)
        shared, own = plan.unpack_state(state)
        with order_given(reduction.order):
            of_params = jax.tree.map(lambda x: varying_type(x, axis_name), params) if divided else params
            of_state = plan.types(axis_name, shared)
            traced = trace_update(tx, local.varying_types(), of_state, of_params, axis_name, divided)
        traced.check_state(plan.owners, params, has_gradient)
        if reduction.is_tree:
            traced = traced.with_scalars_apart()
        gradient_blocks = Blocks(local.sent_types, plan.pieces)
        if stage == 1:
            synced = local.synced([x.dtype for x in local.types])
            means = [own_copy(jnp.reshape(x, -1), axis_name) for x in synced]
        else:
            sums = local.scattered_sums(local.packed(gradient_blocks.pack_all))

        def own_gradients(rank):
            if stage == 1:
                return [means[piece.leaf][piece.start : piece.stop] for piece in plan.pieces[rank]]
            return [
                local.mean(x, local.types[piece.leaf].dtype)
                for x, piece in zip(gradient_blocks.unpack(rank, sums), plan.pieces[rank], strict=True)
            ]

        norms: list[jax.Array] = []

        def inputs_of(scalars, rank):
            states = plan.state.unpack(rank, own)
            own_params = plan.division.blocks(len(plan.pieces)).unpack(rank, own_vectors) if divided else None
            return OwnInputs(
                traced, plan.pieces[rank], own_gradients(rank), states, shared, all_params, tuple(norms),
                plan.in_blocks, scalars, own_params,
            )  # fmt: skip

        for request in traced.norms:
            of_rank = partial(inputs_of, separated(traced.shared_scalars(shared, norms)))
            norms.append(norm_over_ranks(request, traced, plan, of_rank, axis_name))
        scalars = separated(traced.shared_scalars(shared, norms))
        # Updates of shards are packed as the parameters are, whatever their own dtypes.
        names = [np.dtype(x.dtype).name for x in jax.tree.leaves(params)] if divided else None
        update_blocks = Blocks(traced.update_types, plan.pieces, names)

        def on_rank(rank):
            inputs = inputs_of(scalars, rank)
            results = inputs.compute(
                lambda leaf: (
                    [leaf, *(traced.num_leaves + k for k in plan.states_of(leaf))] if has_gradient[leaf] else []
                )
            )
            updates, states = [], []
            for piece, kept, values in zip(plan.pieces[rank], inputs.states_by_piece(), results, strict=True):
                nothing = [jnp.zeros(piece.stop - piece.start, traced.update_types[piece.leaf].dtype), *kept]
                update, *new = values or nothing  # a parameter without a gradient keeps its value and its state
                updates.append(update)
                states += new
            return update_blocks.pack(rank, updates), plan.state.pack(rank, states)

        updates, new_own = on_each_rank(on_rank, plan, axis_name)
        if divided:
            updates = ParameterShards({name: x[None] for name, x in updates.items()}, plan.division)
        else:
            whole = update_blocks.unpack_all(run.all_gather(updates, axis_name))
            updates = jax.tree.unflatten(jax.tree.structure(params), [whole[i] for i in range(traced.num_leaves)])
        shared_inputs = OwnInputs(traced, [], [], [], shared, all_params, tuple(norms), scalars=scalars)
        new_shared = separated(shared_inputs.compute_shared(traced.new_states(plan.shared)))
        return updates, plan.pack_state(new_shared, new_own)

    def param_specs(params):
        division = plan_for(shapes_of(params), 1).division
        return ParameterShards({name: PartitionSpec(axis_name) for name in division.blocks(1).sizes}, division)

    def specs(params):
        plan = plan_for(shapes_of(params), 1)
        empty = plan.pack_state([PartitionSpec()] * len(plan.shared), {})
        return empty._replace(own={name: PartitionSpec(axis_name) for name in plan.state.sizes})

    def whole_arrays(state, params):
        """The state's leaves that belong to parameters, by index."""
        num_ranks = len(next(iter(state.own.values()))) if isinstance(state, ParameterState) and state.own else 1
        plan = plan_for(shapes_of(params), num_ranks)
        plan.check(state, num_ranks)
        return plan.state.unpack_all({name: jnp.reshape(x, -1) for name, x in state.own.items()})

    def repartition(state, params, num_ranks):
        num_ranks = check_num_ranks(num_ranks)
        whole, plan = whole_arrays(state, params), plan_for(shapes_of(params), num_ranks)

        def packed(blocks, arrays):
            return {name: jnp.reshape(x, (num_ranks, -1)) for name, x in blocks.pack_all(arrays).items()}

        state = ParameterState(state.shared, packed(plan.state, [whole.get(k) for k in range(len(plan.owners))]))
        if not divided:
            return state
        check_shards(params)
        leaves = jax.tree.leaves(params.whole())
        return state, ParameterShards(packed(plan.division.blocks(num_ranks), leaves), plan.division)

    def unsharded(state, params):
        whole = whole_arrays(state, params)
        plan = plan_for(shapes_of(params), 1)
        whole |= zip(plan.shared, jax.tree.leaves(state.shared), strict=True)
        return jax.tree.unflatten(plan.structure, [whole[k] for k in range(len(plan.owners))])

    def shares(params, num_ranks):
        return plan_for(Shapes.of(params), check_num_ranks(num_ranks)).shares(params)

    optimizer = ShardedOptimizer(init, update, specs, repartition, unsharded, shares)
    return optimizer._replace(shard=shard, gather=gather, param_specs=param_specs) if divided else optimizer
