"""ZeRO: an optimizer that is sharded over the data-parallel ranks, and one with its bits that is not."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_ring.collectives.axes import AxisName, check_axis_name
from jax_ring.options import ORDERS, Order, check_choice, integer
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.rounding import each_rounded
from jax_ring.training.sentinel import CheckedState, check_counted, check_every, digests_every, next_step
from jax_ring.training.wire import UNCHANGED, Int8Wire, collectives_here, wire_of
from jax_ring.training.zero.by_parameter.layout import parameter_layout
from jax_ring.training.zero.clip import norm_given_by, norm_of_whole, order_given
from jax_ring.training.zero.flat import flat_layout
from jax_ring.training.zero.interface import ShardedOptimizer, Stage
from jax_ring.training.zero.reduction import Reduction
from jax_ring.training.zero.traced import all_names, check_transformation

if TYPE_CHECKING:
    import optax

Layout = Literal["flat", "parameter"]


def sharded_optimizer(
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    stage: Stage = 2,
    layout: Layout = "flat",
    order: Order = "rank",
    overlap: bool = True,
    check_replicas: int | None = None,
    num_shards: int | None = None,
    wire: DTypeLike | None = None,
    param_wire: DTypeLike | None = None,
) -> ShardedOptimizer:
    """Shards an optax optimizer over the ranks of a mapped axis: each holds 1/p of its state.

        optimizer = zero.sharded_optimizer(optax.adam(1e-3), "data")
        specs = optimizer.specs(params)
        state = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)
        # in a train step, under shard_map with `specs` in in_specs and out_specs for the state:
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)

    With `stage=3` parameters are divided as well, and only its partition is kept by a rank from step to step:

        shards = jax.jit(jax.shard_map(optimizer.shard, mesh=mesh, in_specs=P(), out_specs=P("data")))(params)
        # in a train step, under shard_map with P("data") for the shards:
        params = optimizer.gather(shards)
        updates, state = optimizer.update(gradients, state, shards)
        shards = optax.apply_updates(shards, updates)

    Gradients may have another dtype than their parameters, and travel in it. Updates have the dtypes that optax gives.
    Integer parameters may have no gradient (float0, from `allow_int=True`): their updates are zero. The idea is from
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020); docs/zero.md is
    the guide.

    Args:
      tx: an optax `GradientTransformation`; with `layout="flat"` an elementwise one, as its trace shows (docs/zero.md).
      axis_name: the name of a mapped axis, or a sequence of names.
      stage: 2 gives each rank only the gradients of the partition that it updates (`ring_psum_scatter`); 1 gives every
        rank all, as `sync_gradients` does. 3 divides the parameters: in the flat layout params are then a
        `ShardedParams`, or a tree of such, and so are gradients of a `sharded_layer`; with whole parameters a
        `ParameterShards`.
      layout: "flat": parameters of each dtype are one vector, in the order of `jax.tree.leaves`, padded with zeros to a
        multiple of p elements; rank r updates the r-th part of it, its partition, which `tx` gets in a dictionary by
        dtype. "parameter": ranks own whole parameters, balanced by size, for masks, labels, LAMB, LARS, Adafactor and
        Muon. The state is a `ParameterState`.
      order: in which gradients are added: "rank", "ring", "any" or "tree" (`ring_psum` says what they are). With "tree"
        they may be a `ShardSums`, as `value_and_grad(..., num_shards=V, reduce_gradients=False)` returns it, and no bit
        of parameters or state depends on the number of ranks.
      overlap: whether GPUs run the collectives beside computation (docs/gpu.md). No effect on results or CPU devices.
      check_replicas: a number of steps: `jax_ring.check_replicas` of the parameters in the first step, and after so
        many each time. The state is then a `CheckedState` around the one that there would be without. Not in stage 3.
      num_shards: V, a multiple of all numbers of ranks that the training may run on. The flat vectors are then padded
        for V ranks, and their shapes do not depend on p. Needed there with stage=3 and order="tree".
      wire: a floating-point dtype, to which wider gradients and their sum are rounded; or "int8", for groups of 256
        integers with a common scale, rounded to the nearest, in stages 2 and 3 once, by the rank that sends them. Not
        with order="tree".
      param_wire: such a dtype for parameters that `gather` brings together, with stage=3, in all orders; with
        order="tree" int8 needs the flat layout. Parameters at rest are not rounded.

    Returns:
      A `ShardedOptimizer`. Its `update` takes this rank's gradients, not reduced yet, and applies `tx` to their mean.

    Raises:
      TypeError: if `tx` has no `init` and `update`, or for a `wire` that `sync_gradients` refuses.
      ValueError: if `stage`, `layout` or `order` is none of its choices, if `order`, `layout` or `stage` cannot have
        `wire` or `param_wire`, if stage=3 has `check_replicas`, or a tree without `num_shards`, if layout="parameter"
        has `num_shards`, if p does not divide V, or if `tx` cannot be sharded like this: also from `init`, `update` and
        `specs`. From `update`, if gradients do not have the tree and shapes of the parameters, or the state does not
        have those that `init` makes; for a `ShardSums` without order="tree"; and with vma tracking, if gradients are
        already the same on all ranks.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"sharded_optimizer: stage must be 1, 2 or 3, got {stage!r}")
    check_axis_name("sharded_optimizer", axis_name)
    check_every("sharded_optimizer", check_replicas)
    check_choice("sharded_optimizer", "order", order, ORDERS)
    check_transformation("sharded_optimizer", tx)
    if "lookahead" in all_names(tx):
        raise ValueError(
            "sharded_optimizer: optax.lookahead gets gradients of its fast parameters alone, and a sharded optimizer "
            "those of all parameters, in both layouts. Shard the fast optimizer, and every sync_period steps take "
            "slow = optax.incremental_update(params, slow, slow_step_size) and params = slow."
        )
    check_choice("sharded_optimizer", "layout", layout, get_args(Layout))
    _check_division(stage, layout, order, num_shards, check_replicas)
    wires = [wire_of("sharded_optimizer", "wire", wire), wire_of("sharded_optimizer", "param_wire", param_wire)]
    _check_wires(stage, layout, order, *wires)
    reduction = Reduction(
        order=order, overlap=overlap, wire=wires[0],
        axis_name=axis_name, num_shards=num_shards, param_wire=wires[1],
    )  # fmt: skip
    sharded = (flat_layout if layout == "flat" else parameter_layout)(tx, stage, reduction)
    return sharded if check_replicas is None else _checked(sharded, axis_name, check_replicas)


def _check_division(
    stage: Stage, layout: Layout, order: Order, num_shards: int | None, check_replicas: int | None
) -> None:
    """Raises ValueError for options that exclude each other."""
    if num_shards is not None and integer("sharded_optimizer", "num_shards", num_shards) < 1:
        raise ValueError(f"sharded_optimizer: num_shards must be positive, got {num_shards}")
    if layout == "parameter" and num_shards is not None:
        raise ValueError(
            f"sharded_optimizer: num_shards={num_shards} is for layout='flat', the default, where all ranks own equal "
            "parts of vectors; with layout='parameter' the parameters' sizes decide who updates them. Leave it out."
        )
    if stage == 3 and layout == "flat" and order == "tree" and num_shards is None:
        raise ValueError(
            "sharded_optimizer: stage=3 with order='tree' needs num_shards, the number of shards of the batch that "
            "value_and_grad has, so that the shapes of the shards do not depend on the number of ranks"
        )
    if stage == 3 and check_replicas is not None:
        raise ValueError(
            "sharded_optimizer: with stage=3 there is one copy of each parameter, and so nothing that check_replicas "
            "could compare. Leave it out."
        )


def _check_wires(stage: Stage, layout: Layout, order: Order, wire: Any, param_wire: Any) -> None:
    """Raises ValueError for a wire that another option excludes."""
    if wire != UNCHANGED and order == "tree":
        raise ValueError(
            "sharded_optimizer: order='tree' cannot have a wire, because rounding the sums of a rank's shards would "
            "make the bits depend on the number of ranks. Leave wire out, or order. param_wire, for the parameters "
            "that are gathered, is for all orders."
        )
    if isinstance(wire, Int8Wire) and order == "ring":
        raise ValueError(
            f"sharded_optimizer: order={order!r} cannot have wire='int8', whose blocks are added in rank order"
        )
    if param_wire != UNCHANGED and stage != 3:
        raise ValueError(
            f"sharded_optimizer: param_wire is for parameters that are gathered, and with stage={stage} every rank has "
            "them. Pass stage=3, or leave it out."
        )
    if isinstance(param_wire, Int8Wire) and order == "tree" and layout == "parameter":
        raise ValueError(
            "sharded_optimizer: param_wire='int8' with layout='parameter' has other blocks on another number of ranks, "
            "so order='tree' could not keep its promise. Pass a float, such as jnp.bfloat16, or layout='flat'."
        )


def _checked(optimizer: ShardedOptimizer, axis_name: AxisName, every: int) -> ShardedOptimizer:
    """`optimizer`, with `check_replicas` in its first step and after every so many. Its state is a `CheckedState`.

    The table of the digests is summed in a call of its own: gradients are scattered, so that no rank gets all sums.
    """
    name = "sharded_optimizer"

    def init(params):
        return CheckedState(jnp.zeros((), jnp.int32), optimizer.init(params))

    def update(gradients, state, params):
        check_counted(name, state)
        own = digests_every(name, params, axis_name, every, state.step)
        sums = collectives_here().psum(own.table, axis_name)
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


def replicated_optimizer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` for replicated parameters, with the bits that `sharded_optimizer(tx, ..., order="tree")` gives.

        optimizer = zero.replicated_optimizer(optax.adamw(1e-3))
        value, grads = value_and_grad(loss, "data", num_shards=24)(params, x, y)      # under shard_map
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    A training with it can go on with stage 1, 2 or 3 in the flat layout, and has the same parameters and the same
    state, `unsharded`, on any number of ranks. A plain optax update has other last bits (docs/zero.md). Derivatives
    through an update are those of `tx`, without that promise.

    Args:
      tx: an elementwise optax `GradientTransformation` (docs/zero.md). `zero.clip_by_global_norm` within
        it takes the norm of what each rank has.

    Returns:
      An optax `GradientTransformation` with the state of `tx`. It works on one device as well, without any mesh.

    Raises:
      TypeError: if `tx` has no `init` and `update`.
    """
    import optax

    check_transformation("replicated_optimizer", tx)

    def update(updates: Any, state: Any, params: Any = None):
        like = updates if params is None else params
        with order_given("tree"), norm_given_by(partial(norm_of_whole, like)):
            return each_rounded(tx.update, updates, state, params)

    return optax.GradientTransformation(tx.init, update)
