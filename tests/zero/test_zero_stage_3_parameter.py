"""Stage 3 with whole parameters: divided as their owners have them, with the bits of stage 2 on any number of ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_same_bits, make_mesh, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import assert_replicated, check_replicas, value_and_grad, zero
from jax_ring.training.wire import reduced_by

SHARDS, STEPS = 24, 4
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.standard_normal((70, 50)).astype(np.float32),
    "half": RNG.standard_normal((50, 3)).astype(jnp.bfloat16),
    "s": np.float32(1.5),
    "rest": [RNG.standard_normal(n).astype(np.float32) for n in (17, 1025)],
}
CLIPPED = zero.clip_by_global_norm(1.0, "i")


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def widened(updates, params):
    return jax.tree.map(lambda x: x.astype(jnp.float32), updates)


TX = {
    "adamw": optax.chain(CLIPPED, optax.adamw(1e-2, mask=matrices)),
    # float32 updates of bfloat16 parameters, too
    "sgd": optax.chain(optax.sgd(0.1, momentum=0.9), optax.stateless(widened)),
}


def loss(params, x):
    y = jnp.tanh(x @ params["w"]) @ params["half"].astype(x.dtype)
    return (y**2).mean() * params["s"] + sum((jnp.sin(r) * x[:, :1]).mean() for r in params["rest"])


def batches(steps):
    return np.stack([np.random.default_rng(i).standard_normal((2 * SHARDS, 70)).astype(np.float32) for i in steps])


class Training:
    """Some steps of one program with all optimizers, a scan that donates what it is given."""

    def __init__(self, stage, ranks, check_vma=True):
        self.mesh = make_mesh((ranks,))
        options = {"stage": stage, "layout": "parameter", "order": "tree"}
        self.optimizers = optimizers = {name: zero.sharded_optimizer(tx, "i", **options) for name, tx in TX.items()}
        of_mean = value_and_grad(loss, "i", num_shards=SHARDS, reduce_gradients=False)

        def specs(of):
            return (of.param_specs(PARAMS) if stage == 3 else P(), of.specs(PARAMS))

        def start(params):
            held = {name: of.shard(params) if stage == 3 else params for name, of in optimizers.items()}
            return {name: (held[name], of.init(held[name])) for name, of in optimizers.items()}

        def one(name, params, state, x):
            _, sums = of_mean(optimizers[name].gather(params) if stage == 3 else params, x)
            updates, state = optimizers[name].update(sums, state, params)
            return optax.apply_updates(params, updates), state

        def step(carry, x):
            return {name: one(name, *both, x) for name, both in carry.items()}, None

        self.specs = {name: specs(of) for name, of in optimizers.items()}
        common = {"mesh": self.mesh, "check_vma": check_vma}
        self.start = sharded(start, in_specs=P(), out_specs=self.specs, **common)
        steps = sharded(
            lambda carry, xs: lax.scan(step, carry, xs)[0],
            in_specs=(self.specs, P(None, "i")), out_specs=self.specs, jit=False, **common,
        )  # fmt: skip
        self.steps = jax.jit(steps, donate_argnums=0)

    def run(self, steps=range(STEPS), carry=None):
        if carry is not None:
            carry = jax.device_put(carry, jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs))
        return jax.device_get(self.steps(self.start(PARAMS) if carry is None else carry, batches(steps)))

    def whole(self, carry):
        """Parameters and state as optax has them."""
        return {
            name: (getattr(params, "whole", lambda p=params: p)(), self.optimizers[name].unsharded(state, params))
            for name, (params, state) in carry.items()
        }


@functools.cache
def of_stage_2():
    training = Training(2, 3)
    return training.whole(training.run())


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "check_vma"), [(1, True), (2, False), pytest.param(3, True, marks=pytest.mark.one_pair), (8, False)]
)
def test_the_bits_of_stage_2_on_any_number_of_ranks(ranks, check_vma):
    training = Training(3, ranks, check_vma)
    carry = training.run()
    assert_same_bits(training.whole(carry), of_stage_2())
    shares = training.optimizers["adamw"].shares(PARAMS, ranks)
    shards, state = carry["adamw"]
    assert shares.parameter_bytes == sum(x.nbytes for x in shards.own.values()) // ranks
    assert shares.allocated_bytes == sum(x.nbytes for x in state.own.values()) // ranks + shares.shared_bytes


@pytest.mark.full
def test_goes_on_with_another_number_of_ranks(tmp_path):
    first, second = Training(3, 8), Training(3, 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", first.run(range(2)))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(first.start, PARAMS))
    with ocp.StandardCheckpointer() as checkpointer:
        saved = jax.device_get(checkpointer.restore(tmp_path / "step", like))
    moved = {
        name: second.optimizers[name].repartition(state, shards, 3)[::-1] for name, (shards, state) in saved.items()
    }
    carry = second.run(range(2, STEPS), moved)
    assert_same_bits(second.whole(carry), of_stage_2())
    shards, state = carry["adamw"]
    of_eight = first.optimizers["adamw"].repartition(state, shards, 8)
    assert_same_bits(jax.device_get(second.optimizers["adamw"].repartition(*of_eight, 3)), (state, shards))


@pytest.mark.parametrize("impl", full_but(["ring", "lax"], ["ring"]))
def test_lamb_in_rank_order(impl):
    """Norms of whole parameters; and integers, which keep their value."""
    params = {"w": PARAMS["w"][:4, :6], "s": PARAMS["s"], "n": np.arange(3, dtype=np.int32)}
    results = {}
    for stage in (2, 3):
        optimizer = zero.sharded_optimizer(optax.lamb(0.1), "i", stage=stage, layout="parameter")

        def step(params, x, optimizer=optimizer, stage=stage):
            held = optimizer.shard(params) if stage == 3 else params
            own = jax.tree.map(
                lambda p: lax.pcast(p, "i", to="varying"), optimizer.gather(held) if stage == 3 else params
            )
            gradients = jax.grad(lambda p: (jnp.sin(p["w"] * p["s"]) * x.sum()).sum(), allow_int=True)(own)
            updates, _ = optimizer.update(gradients, optimizer.init(held), held)
            held = optax.apply_updates(held, updates)
            return optimizer.gather(held) if stage == 3 else held

        mapped = sharded(reduced_by(impl)(step), mesh=make_mesh((4,)), in_specs=(P(), P("i")), out_specs=P())
        results[stage] = jax.device_get(mapped(params, np.arange(8, dtype=np.float32)))
    assert_same_bits(results[3]["n"], params["n"])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), results[3], results[2])
    assert (results[3]["w"] != params["w"]).all()


def inside(f, *args, ranks=2):
    return sharded(f, mesh=make_mesh((ranks,)), in_specs=P(), out_specs=P())(*args)


def test_wrong_uses():
    options = {"stage": 3, "layout": "parameter"}
    optimizer = zero.sharded_optimizer(optax.lamb(1.0), "i", **options)
    tree = zero.sharded_optimizer(optax.sgd(1.0), "i", order="tree", **options)
    rank = zero.sharded_optimizer(optax.sgd(1.0), "i", **options)
    flat = zero.sharded_optimizer(optax.sgd(1.0), "i", stage=3)

    def decayed_by_the_largest(updates, params):
        return jax.tree.map(lambda g: g + jnp.max(params["w"]).astype(g.dtype), updates)

    needy = optax.stateless(decayed_by_the_largest)
    for message, use in {
        "parameters are a ParameterShards, got a dict": optimizer.gather,
        "are a ParameterShards, got a ShardedParams": lambda p: optimizer.gather(flat.shard(p)),
        "with stage=3 parameters are shards, a ShardedParams": lambda p: flat.gather(optimizer.shard(p)),
        "those of another optimizer or order have to be made again": lambda p: tree.gather(rank.shard(p)),
        "ParameterShards.whole: these are a rank's shards": lambda p: optimizer.shard(p).whole(),
        r"the update of \['half'\] needs \['w'\] on ranks that have not": (
            lambda p: zero.sharded_optimizer(needy, "i", **options).shard(p)
        ),
        r"what is at the root are shards, a ParameterShards": lambda p: check_replicas(optimizer.shard(p), "i"),
    }.items():
        with pytest.raises(ValueError, match=message):
            inside(use, PARAMS)

    mesh = make_mesh((2, 2), ("i", "copies"))
    specs = tree.param_specs(PARAMS)
    shards = sharded(tree.shard, mesh=mesh, in_specs=P(), out_specs=specs)(PARAMS)
    assert_replicated(shards)
    of_two = jax.device_get(shards)
    with pytest.raises(ValueError, match="another number of ranks have to pass through `repartition`"):
        sharded(tree.gather, mesh=make_mesh((4,)), in_specs=(specs,), out_specs=P())(
            jax.tree.map(lambda x: np.concatenate([x, x]), of_two)
        )
