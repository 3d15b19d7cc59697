"""The sharded optimizer with order="tree": the same bits of parameters and state on any number of ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import ShardSums, shard_tree, value_and_grad, zero

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # each number of ranks compiles anew, on code of other tests

SHARDS = 24
STEPS = 10
RNG = np.random.default_rng(0)
# Sizes with all kinds of remainders; leaves that are cut on many ranks, and leaves that are not.
SHAPES = {"a": (70, 50), "b": (17,), "c": (1025,), "s": (), "half": (37, 31)}
PARAMS = {k: np.asarray(RNG.standard_normal(v), jnp.bfloat16 if k == "half" else np.float32) for k, v in SHAPES.items()}
ADAMW = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 7), weight_decay=0.1)
CLIPPED = optax.chain(zero.clip_by_global_norm(1.0, "i"), ADAMW)
WAYS = {
    "flat_2_clipped": ({"layout": "flat", "stage": 2}, CLIPPED),
    "flat_1": ({"layout": "flat", "stage": 1}, ADAMW),
    "parameter_2": ({"layout": "parameter", "stage": 2}, ADAMW),
    "parameter_1_clipped": ({"layout": "parameter", "stage": 1}, CLIPPED),
}


@functools.cache
def shard_gradients(step):
    """For each leaf the gradients of all shards, of magnitudes that make every order of additions another sum."""
    rng = np.random.default_rng(step)
    scales = np.exp2(rng.integers(-9, 3, SHARDS))
    return {
        name: np.stack([np.asarray(s * rng.standard_normal(x.shape), x.dtype) for s in scales])
        for name, x in PARAMS.items()
    }


def terms(step, ranks):
    """The terms of all ranks, one rank after the other. Slots that a rank does not use hold NaN."""
    slots = shard_tree.num_slots(SHARDS, ranks)

    def of_leaf(values):
        wide = values.astype(np.float32)

        def total(node):
            if node.size == 1:
                return wide[node.first]
            left, right = node.children()
            return total(left) + total(right)

        found = np.full((ranks, slots, *values.shape[1:]), np.nan, np.float32)
        for rank in range(ranks):
            for slot, node in enumerate(shard_tree.terms_of(SHARDS, ranks, rank)):
                found[rank, slot] = total(node)
        return found.reshape(-1, *values.shape[1:])

    return {name: of_leaf(values) for name, values in shard_gradients(step).items()}


def sums(local):
    return ShardSums(local, SHARDS, tuple(x.dtype for x in jax.tree.leaves(PARAMS)))


@functools.cache
def training(way, ranks):
    """The optimizer, its first state on the host, and a compiled step."""
    options, tx = WAYS[way]
    optimizer = zero.sharded_optimizer(tx, "i", order="tree", **options)
    specs = optimizer.specs(PARAMS)

    def step(params, state, local):
        updates, state = optimizer.update(sums(local), state, params)
        return optax.apply_updates(params, updates), state

    mesh = make_mesh((ranks,))
    state = sharded(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs)(PARAMS)
    return (
        optimizer,
        jax.device_get(state),
        sharded(step, mesh=mesh, in_specs=(P(), specs, P("i")), out_specs=(P(), specs)),
    )


def trained(way, ranks, steps=range(STEPS), params=PARAMS, state=None):
    """Parameters and state after some steps, on the host."""
    _, first, step = training(way, ranks)
    state = first if state is None else state
    for i in steps:
        params, state = jax.device_get(step(params, state, terms(i, ranks)))
    return params, state


@functools.cache
def undisturbed(way, ranks):
    """Parameters after all steps, and the state in the form for one rank."""
    params, state = trained(way, ranks)
    return params, jax.device_get(training(way, ranks)[0].repartition(state, PARAMS, 1))


RANKS = {"flat_2_clipped": [1, 3, 6], "flat_1": [3], "parameter_2": [3], "parameter_1_clipped": [1, 3, 6]}


@pytest.mark.parametrize(("way", "ranks"), [(way, ranks) for way in RANKS for ranks in RANKS[way]])
def test_bits_do_not_depend_on_the_number_of_ranks(way, ranks):
    assert_same_bits(undisturbed(way, ranks), undisturbed(way, 8))


def loss(params, x):
    y = jnp.tanh(x @ params["a"]) @ params["half"][:, :3].astype(x.dtype).repeat(2, 0)[:50]
    return (y**2).mean() * params["s"] + sum((jnp.sin(params[name]) * x[:, :1]).mean() for name in "bc")


def test_within_a_loop_of_whole_steps():
    """What compilers contract in an update depends on what else is in the program, and on the number of ranks."""
    batches = np.stack(
        [np.random.default_rng(i).standard_normal((2 * SHARDS, 70)).astype(np.float32) for i in range(4)]
    )
    optimizers = {
        "clipped": zero.sharded_optimizer(CLIPPED, "i", stage=2, layout="parameter", order="tree"),
        "sgd": zero.sharded_optimizer(optax.sgd(0.1, momentum=0.9), "i", stage=2, layout="parameter", order="tree"),
    }
    of_mean = value_and_grad(loss, "i", num_shards=SHARDS, reduce_gradients=False)

    def one(optimizer, params, state, x):
        updates, state = optimizer.update(of_mean(params, x)[1], state, params)
        return optax.apply_updates(params, updates), state

    def run(ranks):
        mesh, specs = make_mesh((ranks,)), {name: of.specs(PARAMS) for name, of in optimizers.items()}
        start = sharded(
            lambda params: {name: of.init(params) for name, of in optimizers.items()},
            mesh=mesh, in_specs=P(), out_specs=specs,
        )  # fmt: skip
        steps = sharded(
            lambda states, params, xs: lax.scan(
                lambda carry, x: ({k: one(optimizers[k], *both, x) for k, both in carry.items()}, None),
                {k: (params, state) for k, state in states.items()}, xs,
            )[0],
            mesh=mesh, in_specs=(specs, P(), P(None, "i")), out_specs={k: (P(), specs[k]) for k in specs},
            check_vma=False,
        )  # fmt: skip
        found = jax.device_get(steps(start(PARAMS), PARAMS, batches))
        return {k: (params, optimizers[k].unsharded(state, params)) for k, (params, state) in found.items()}

    assert_same_bits(run(8), run(3))


@pytest.mark.parametrize("way", ["flat_2_clipped", "parameter_1_clipped"])
def test_eight_ranks_go_on_as_three(way):
    optimizer = training(way, 8)[0]
    params, state = trained(way, 8, range(STEPS // 2))
    state = jax.device_get(optimizer.repartition(state, PARAMS, 3))
    params, state = trained(way, 3, range(STEPS // 2, STEPS), params, state)
    assert_same_bits((params, optimizer.repartition(state, PARAMS, 1)), undisturbed(way, 8))


def test_a_state_of_another_order_is_converted():
    for layout in ("flat", "parameter"):
        in_rank_order, along_tree = (
            zero.sharded_optimizer(ADAMW, "i", layout=layout, order=order) for order in ("rank", "tree")
        )
        _, state = trained(f"{layout}_{2 if layout == 'parameter' else 1}", 3, range(2))
        there = in_rank_order.repartition(along_tree.repartition(state, PARAMS, 1), PARAMS, 1)
        there = in_rank_order.repartition(there, PARAMS, 8)
        back = along_tree.repartition(in_rank_order.repartition(there, PARAMS, 1), PARAMS, 3)
        assert_same_bits(jax.device_get(back), state)


def test_stages_agree():
    a, b = (WAYS[way][0] | {"stage": 3 - WAYS[way][0]["stage"]} for way in ("flat_1", "parameter_2"))
    for way, options in (("flat_1", a), ("parameter_2", b)):
        WAYS[f"other_{way}"] = (options, ADAMW)
        assert_same_bits(trained(f"other_{way}", 3, range(2)), trained(way, 3, range(2)))


def test_partial_sums_need_the_tree():
    for layout in ("flat", "parameter"):
        optimizer = zero.sharded_optimizer(ADAMW, "i", layout=layout)

        def step(params, local, optimizer=optimizer):
            return optimizer.update(sums(local), optimizer.init(params), params)[0]

        with pytest.raises(ValueError, match=r"a ShardSums of 24 shards, .* order is 'rank'\. Pass order='tree'"):
            sharded(step, mesh=make_mesh((3,)), in_specs=(P(), P("i")), out_specs=P())(PARAMS, terms(0, 3))


def test_partial_sums_of_other_parameters():
    optimizer = zero.sharded_optimizer(ADAMW, "i", order="tree")

    def step(params, local):
        return optimizer.update(sums(local), optimizer.init(params), params)[0]

    wrong = terms(0, 3) | {"b": terms(0, 3)["c"]}
    with pytest.raises(
        ValueError, match=r"in the gradients, the leaf at \['b'\] has shape \(1025,\); the shape .* \(17,\)"
    ):
        sharded(step, mesh=make_mesh((3,)), in_specs=(P(), P("i")), out_specs=P())(PARAMS, wrong)


@pytest.mark.parametrize("layout", ["flat", "parameter"])
def test_parameters_without_a_gradient(layout):
    params = {"w": np.ones(5, np.float32), "step": np.array([7, 8], np.int32)}
    optimizer = zero.sharded_optimizer(optax.sgd(1.0), "i", order="tree", layout=layout)

    def step(params, local):
        gradients = {"step": np.zeros(2, jax.dtypes.float0), "w": local}
        kinds = (np.dtype(jax.dtypes.float0), np.dtype(np.float32))
        updates, _ = optimizer.update(ShardSums(gradients, 4, kinds), optimizer.init(params), params)
        return updates

    updates = sharded(step, mesh=make_mesh((2,)), in_specs=(P(), P("i")), out_specs=P())(
        params, np.stack([np.full(5, 2, np.float32), np.full(5, 4, np.float32)])
    )
    np.testing.assert_array_equal(updates["step"], 0)
    assert_same_bits(updates["w"], np.full(5, -1.5, np.float32))
