"""The parameter layout of a sharded optimizer: ranks own parameters, so that every optimizer sees the whole tree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_ring.collectives.axes import AxisName, axes_of, check_named, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.implementations import Impl, implementation
from jax_ring.training.sync import sync_gradients
from jax_ring.training.zero import data_flow
from jax_ring.training.zero.global_norm import sum_of_squares
from jax_ring.training.zero.interface import ShardedOptimizer, Stage, gradient_leaves
from jax_ring.training.zero.own_update import OwnInputs
from jax_ring.training.zero.parameter_plan import Blocks
from jax_ring.training.zero.parameter_state import ParameterState, Plan, Shapes, plan_state
from jax_ring.training.zero.traced_update import trace_update

if TYPE_CHECKING:
    import optax


def parameter_layout(
    tx: optax.GradientTransformation, axis_name: AxisName, *, stage: Stage, impl: Impl, overlap: bool
) -> ShardedOptimizer:
    """The sharded optimizer that updates each parameter on one rank, or pieces of it where `tx` is elementwise.

    `tx.update` is traced for all parameters. A rank runs the equations that the updates of its own need, in a branch of
    `lax.switch`; masks, labels and shapes are therefore those of the whole tree. The gradients of each dtype are packed
    by owner, padded to the fullest rank and summed with `ring_psum_scatter`; the updates are gathered likewise.
    """
    run = implementation("sharded_optimizer", impl, overlap)

    @functools.cache
    def plan_for(shapes: Shapes, num_ranks: int) -> Plan:
        return plan_state(tx, shapes, num_ranks, axis_name)

    def init(params):
        check_named("sharded_optimizer", axes_of(axis_name))
        plan = plan_for(Shapes.of(params), num_ranks(axes_of(axis_name)))
        leaves, structure = jax.tree.flatten(params)
        closed = jax.make_jaxpr(lambda *x: jax.tree.leaves(tx.init(jax.tree.unflatten(structure, x))))(*leaves)

        def on_rank(rank):
            pieces = plan.state.ranks[rank]
            values = data_flow.compute(closed, [piece.leaf for piece in pieces], leaves)
            flat = [jnp.reshape(x, -1)[piece.start : piece.stop] for x, piece in zip(values, pieces, strict=True)]
            return plan.state.pack(rank, flat)

        shared = data_flow.compute(closed, plan.shared, leaves)
        return plan.pack_state(shared, _on_each_rank(on_rank, plan, axis_name))

    def update(gradients, state, params):
        local, has_gradient = gradient_leaves(gradients, params, axis_name)
        p = num_ranks(axes_of(axis_name))
        plan = plan_for(Shapes.of(params), p)
        shared, own = plan.unpack_state(state)
        traced = trace_update(tx, local, plan.types(axis_name, shared), params, axis_name)
        traced.check_state(plan.owners, params, has_gradient)
        gradient_blocks = Blocks(local, plan.pieces)
        if stage == 1:
            synced = sync_gradients(local, axis_name, impl=impl, overlap=overlap)
            means = [own_copy(jnp.reshape(x, -1), axis_name) for x in synced]
        else:
            means = jax.tree.map(lambda g: g / p, run.psum_scatter(gradient_blocks.pack_all(local), axis_name))

        def own_gradients(rank):
            if stage == 1:
                return [means[piece.leaf][piece.start : piece.stop] for piece in plan.pieces[rank]]
            return gradient_blocks.unpack(rank, means)

        norms: list[jax.Array] = []

        def inputs_of(rank):
            states = plan.state.unpack(rank, own)
            return OwnInputs(traced, plan.pieces[rank], own_gradients(rank), states, shared, params, tuple(norms))

        for request in traced.norms:

            def squares(rank, request=request):
                inputs = inputs_of(rank)
                values = inputs.compute(lambda leaf: [i for i in request.leaves if traced.owners[i] == leaf])
                parts = [x for of_piece in values for x in of_piece]
                if rank == 0:  # what needs no gradient is nobody's
                    parts += inputs.compute_shared([i for i in request.leaves if traced.owners[i] is None])
                return sum_of_squares([jnp.zeros((), request.dtype), *parts])

            norm_impl = implementation("clip_by_global_norm", request.impl)
            norms.append(jnp.sqrt(norm_impl.psum(_on_each_rank(squares, plan, axis_name), axis_name)))

        update_blocks = Blocks(traced.update_types, plan.pieces)

        def on_rank(rank):
            inputs = inputs_of(rank)
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

        updates, new_own = _on_each_rank(on_rank, plan, axis_name)
        whole = update_blocks.unpack_all(run.all_gather(updates, axis_name))
        shared_inputs = OwnInputs(traced, [], [], [], shared, params, tuple(norms))
        new_shared = shared_inputs.compute_shared(traced.new_states(plan.shared))
        updates = jax.tree.unflatten(jax.tree.structure(params), [whole[i] for i in range(traced.num_leaves)])
        return updates, plan.pack_state(new_shared, new_own)

    def specs(params):
        plan = plan_for(Shapes.of(params), 1)
        empty = plan.pack_state([PartitionSpec()] * len(plan.shared), {})
        return empty._replace(own={name: PartitionSpec(axis_name) for name in plan.state.sizes})

    def repartition(state, params, num_ranks):
        if not state.own:
            return state
        shapes = Shapes.of(params)
        before = plan_for(shapes, len(next(iter(state.own.values()))))
        before.check(state, len(before.pieces))
        whole = before.state.unpack_all({name: jnp.reshape(x, -1) for name, x in state.own.items()})
        after = plan_for(shapes, num_ranks).state
        blocks = after.pack_all([whole.get(k) for k in range(len(after.arrays))])
        return ParameterState(state.shared, {name: jnp.reshape(x, (num_ranks, -1)) for name, x in blocks.items()})

    def shares(params, num_ranks):
        return plan_for(Shapes.of(params), num_ranks).shares(params)

    return ShardedOptimizer(init, update, specs, repartition, shares)


def _on_each_rank(function: Callable[[int], Any], plan: Plan, axis_name: AxisName) -> Any:
    """`function(rank)` in a branch per rank that owns anything. All other ranks share one branch."""

    def branch(rank):
        return jax.tree.map(lambda x: own_copy(x, axis_name), function(rank))

    ranks = range(min(plan.num_busy + 1, len(plan.pieces)))
    if len(ranks) == 1:
        return branch(0)
    index = jnp.minimum(lax.axis_index(axis_name), len(ranks) - 1)
    return lax.switch(index, [functools.partial(branch, rank) for rank in ranks])
