"""The sharded optimizer with `wire` and `param_wire`: what is rounded, how often, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, make_mesh, sharded
from jax.sharding import PartitionSpec as P

from jax_ring import explain, value_and_grad, zero
from jax_ring.collectives import scale_groups as int8
from jax_ring.training.wire import reduced_by

RANKS, SHARDS = 4, 6
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.standard_normal((35, 41)).astype(np.float32), "n": np.arange(3, dtype=np.int32)}
GRADIENTS = RNG.standard_normal((RANKS, 35, 41)).astype(np.float32)


def updates_of(ways, ranks=RANKS):
    """By way the updates of SGD, which are the means negated."""

    def step(params, gradients):
        found = {}
        for way, options in ways.items():
            optimizer = zero.sharded_optimizer(optax.sgd(1.0), "i", **options)
            is_divided = options["stage"] == 3
            held = optimizer.shard(params) if is_divided else params
            grads = {"w": gradients[0], "n": np.zeros(3, jax.dtypes.float0)}
            updates, _ = optimizer.update(grads, optimizer.init(held), held)
            found[way] = optimizer.gather(updates) if is_divided else updates
        return found

    mapped = sharded(step, mesh=make_mesh((ranks,)), in_specs=(P(), P("i")), out_specs=P(), check_vma=False)
    return jax.device_get(mapped(PARAMS, GRADIENTS[:ranks]))


def in_blocks(x):
    blocks = np.pad(np.ravel(x), (0, -x.size % 256)).reshape(-1, 256)
    return np.asarray(int8.decode(int8.encode(jnp.asarray(blocks)))).reshape(-1)[: x.size].reshape(x.shape)


@pytest.mark.one_pair
def test_gradients_are_rounded_by_their_rank():
    by_stage = {f"bfloat16 {stage}": {"stage": stage, "wire": jnp.bfloat16} for stage in (1, 2, 3)}
    by_layout = {f"int8 {layout}": {"stage": 3, "wire": "int8", "layout": layout} for layout in ("flat", "parameter")}
    found = updates_of(by_stage | by_layout | {"int8 ring": {"stage": 2, "wire": "int8"}})
    with reduced_by("lax"):
        found |= updates_of({"int8 lax": {"stage": 2, "wire": "int8"}})
    total = sum(GRADIENTS.astype(jnp.bfloat16).astype(np.float32)).astype(jnp.bfloat16).astype(np.float32)
    for way in by_stage:
        assert_same_bits(found[way], {"w": -total / RANKS, "n": np.zeros(3, np.int32)})
    # A rank's part of the vector is a quarter, 359 elements, which has blocks of its own.
    parts = np.pad(GRADIENTS.reshape(RANKS, -1), ((0, 0), (0, 1))).reshape(RANKS, RANKS, -1)
    total = sum(np.stack([in_blocks(part) for part in of_rank]) for of_rank in parts)
    expected = -total.reshape(-1)[:-1].reshape(35, 41) / RANKS
    for way in ("int8 flat", "int8 ring", "int8 lax"):
        assert_same_bits(found[way]["w"], expected)
    errors = np.abs(found["int8 parameter"]["w"] + GRADIENTS.mean(0))  # cut elsewhere, so in other blocks
    assert 0 < errors.max() <= np.abs(GRADIENTS).max() / 252 * 1.01


@pytest.mark.one_pair
def test_parameters_are_rounded_as_they_are_gathered():
    whole = PARAMS | {"half": RNG.standard_normal(300).astype(jnp.bfloat16)}
    ways = {
        "bfloat16": {"param_wire": jnp.bfloat16}, "int8": {"param_wire": "int8"},
        "whole bfloat16": {"param_wire": jnp.bfloat16, "layout": "parameter"},
    }  # fmt: skip

    def gathered(params):
        found = {}
        for way, options in ways.items():
            optimizer = zero.sharded_optimizer(optax.sgd(1.0), "i", stage=3, **options)
            found[way] = optimizer.gather(optimizer.shard(params))
        return found

    mapped = sharded(gathered, mesh=make_mesh((2,)), in_specs=P(), out_specs=P())
    found = jax.device_get(mapped(whole))
    narrow = whole | {"w": whole["w"].astype(jnp.bfloat16).astype(np.float32)}
    assert_same_bits(found["bfloat16"], narrow)
    assert_same_bits(found["whole bfloat16"], narrow)
    parts = np.pad(np.ravel(whole["w"]), (0, 1)).reshape(2, -1)
    assert_same_bits(found["int8"]["w"], np.stack([in_blocks(x) for x in parts]).reshape(-1)[:-1].reshape(35, 41))
    of_half = np.stack([in_blocks(np.asarray(x, np.float32)) for x in whole["half"].reshape(2, -1)])
    assert_same_bits(found["int8"]["half"], of_half.reshape(-1).astype(jnp.bfloat16))
    assert_same_bits(found["int8"]["n"], whole["n"])


def loss(params, x):
    return (jnp.tanh(x @ params["w"]) ** 2).mean()


def trained(ranks):
    """Parameters after two steps along the tree: gathered whole, and layer by layer."""
    common = {"stage": 3, "order": "tree", "num_shards": SHARDS}
    ways = {wire: zero.sharded_optimizer(optax.adam(0.1), "i", param_wire=wire, **common) for wire in (None, "int8")}
    ways[jnp.bfloat16] = zero.sharded_optimizer(optax.adam(0.1), "i", param_wire=jnp.bfloat16, **common)

    def run(params, x):
        found = []
        for wire, optimizer in ways.items():
            for by_layer in (False, True):
                shards = optimizer.shard(params)
                state = optimizer.init(shards)
                layer = zero.sharded_layer(loss, "i", num_shards=SHARDS, param_wire=wire)
                for _ in range(2):
                    if by_layer:
                        shape = (-1, len(x) * ranks // SHARDS, x.shape[1])
                        sums = jax.grad(
                            lambda own, layer=layer, shape=shape: layer(own, x.reshape(shape)).sum() / SHARDS
                        )(shards)
                    else:
                        of_mean = value_and_grad(loss, "i", num_shards=SHARDS, reduce_gradients=False)
                        _, sums = of_mean(optimizer.gather(shards), x)
                    updates, state = optimizer.update(sums, state, shards)
                    shards = optax.apply_updates(shards, updates)
                found.append(shards)
        return found

    x = np.random.default_rng(1).standard_normal((2 * SHARDS, 35)).astype(np.float32)
    params = {"w": PARAMS["w"]}
    mapped = sharded(run, mesh=make_mesh((ranks,)), in_specs=(P(), P("i")), out_specs=P("i"))
    return [jax.device_get(shards.whole()["w"]) for shards in mapped(params, x)]


@pytest.mark.full
@pytest.mark.one_pair
def test_bits_of_rounded_parameters_do_not_depend_on_the_number_of_ranks():
    one, three = trained(1), trained(3)
    assert_same_bits(one, three)
    assert len({w.tobytes() for w in three[::2]}) == len({w.tobytes() for w in three[1::2]}) == 3


def test_bytes_on_the_wire():
    def bytes_of(**options):
        optimizer = zero.sharded_optimizer(optax.sgd(1.0), "i", stage=3, **options)

        def step(shards, gradients):
            params = optimizer.gather(shards)
            updates, _ = optimizer.update({"w": gradients[0] * params["w"]}, optimizer.init(shards), shards)
            return optax.apply_updates(shards, updates)

        mesh, params = make_mesh((RANKS,)), {"w": PARAMS["w"]}
        shards = sharded(optimizer.shard, mesh=mesh, in_specs=P(), out_specs=P("i"))(params)
        return explain(sharded(step, mesh=mesh, in_specs=P("i"), out_specs=P("i")), shards, GRADIENTS).counted_bytes

    whole = bytes_of()
    assert bytes_of(wire=jnp.bfloat16, param_wire=jnp.bfloat16) == whole // 2
    assert bytes_of(wire="int8", param_wire="int8") < 0.4 * whole  # two blocks of 260 bytes for 359 elements


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "order='tree' cannot have a wire", {"order": "tree", "wire": jnp.bfloat16}),
        (ValueError, "order='ring' cannot have wire='int8'", {"order": "ring", "wire": "int8"}),
        (ValueError, "with stage=2 every rank has them", {"param_wire": "int8"}),
        (
            ValueError, "has other blocks on another number of ranks",
            {"stage": 3, "order": "tree", "layout": "parameter", "param_wire": "int8"},
        ),
        (TypeError, "param_wire must be a floating-point dtype or 'int8'", {"stage": 3, "param_wire": jnp.int16}),
        (TypeError, "wire must have a zero, a sign and NaN", {"wire": jnp.float8_e8m0fnu}),
    ],
)  # fmt: skip
def test_wrong_wires(error, message, options):
    with pytest.raises(error, match=message):
        zero.sharded_optimizer(optax.sgd(1.0), "i", **options)
