"""Stage 3 of the sharded optimizer: divided parameters, with the bits of the other stages on any number of ranks."""

import dataclasses
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

from jax_ring import (
    ShardSums,
    assert_replicated,
    check_replicas,
    elastic,
    ring_pmean,
    shard_index,
    value_and_grad,
    zero,
)
from jax_ring.training.wire import reduced_by

SHARDS, STEPS = 6, 4
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.standard_normal((70, 50)).astype(np.float32),
    "half": RNG.standard_normal((50, 3)).astype(jnp.bfloat16),
    "s": np.float32(1.5),
}
TX = optax.chain(zero.clip_by_global_norm(1.0, "i"), optax.adamw(1e-2))


def loss(params, x):
    return ((jnp.tanh(x @ params["w"]) @ params["half"].astype(x.dtype)) ** 2).mean() * params["s"]


def batches(steps):
    return np.stack([np.random.default_rng(i).standard_normal((2 * SHARDS, 70)).astype(np.float32) for i in steps])


class Training:
    """Some steps of one program, a scan that donates what it is given."""

    def __init__(self, stage, ranks, check_vma=True, **options):
        self.mesh = make_mesh((ranks,))
        options = {"order": "tree", "num_shards": SHARDS} | options
        self.optimizer = optimizer = zero.sharded_optimizer(TX, "i", stage=stage, **options)
        self.specs = (optimizer.param_specs(PARAMS) if stage == 3 else P(), optimizer.specs(PARAMS))
        of_mean = value_and_grad(loss, "i", num_shards=SHARDS, reduce_gradients=False)

        def start(params):
            params = optimizer.shard(params) if stage == 3 else params
            return params, optimizer.init(params)

        def step(carry, x):
            params, state = carry
            value, sums = of_mean(optimizer.gather(params) if stage == 3 else params, x)
            updates, state = optimizer.update(sums, state, params)
            return (optax.apply_updates(params, updates), state), value

        common = {"mesh": self.mesh, "check_vma": check_vma}
        self.start = sharded(start, in_specs=P(), out_specs=self.specs, **common)
        steps = sharded(
            lambda carry, xs: lax.scan(step, carry, xs),
            in_specs=(self.specs, P(None, "i")), out_specs=(self.specs, P()), jit=False, **common,
        )  # fmt: skip
        self.steps = jax.jit(steps, donate_argnums=0)

    def put(self, carry):
        return jax.device_put(carry, jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs))

    def run(self, steps=range(STEPS), carry=None):
        return self.steps(self.start(PARAMS) if carry is None else self.put(carry), batches(steps))


@functools.cache
def undisturbed():
    """The shards, their state and the values of the last steps on three devices."""
    return jax.device_get(Training(3, 3).run())


@pytest.mark.one_pair
def test_the_bits_of_stage_2():
    training = Training(2, 3)
    (params, state), values = training.run()
    (shards, of_shards), of_stage_3 = undisturbed()
    assert_same_bits(jax.device_get(shards.whole()), jax.device_get(params))
    unsharded = Training(3, 3).optimizer.unsharded(of_shards, shards)
    assert_same_bits(jax.device_get(unsharded), jax.device_get(training.optimizer.unsharded(state, params)))
    assert_same_bits(of_stage_3, jax.device_get(values))


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "check_vma"), [(1, True), (2, False), (6, True)])
def test_bits_do_not_depend_on_the_number_of_ranks(ranks, check_vma):
    assert_same_bits(jax.device_get(Training(3, ranks, check_vma).run()), undisturbed())


@pytest.mark.full
def test_goes_on_with_other_numbers_of_ranks(tmp_path):
    first, second, third = (Training(3, ranks) for ranks in (6, 3, 2))
    carry, _ = first.run(range(1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", carry)
    like = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(second.mesh, spec)),
        jax.eval_shape(second.start, PARAMS), second.specs,
    )  # fmt: skip
    with ocp.StandardCheckpointer() as checkpointer:
        carry = checkpointer.restore(tmp_path / "step", like)
    carry, _ = second.run(range(1, 2), carry)
    state = elastic.State(carry=jax.device_get(carry))
    carry, _ = third.run(range(2, STEPS), state.carry)
    assert_same_bits(jax.device_get(carry), undisturbed()[0])
    shards, state = carry
    assert_same_bits(jax.device_get(third.optimizer.repartition(state, shards, 6)), jax.device_get((state, shards)))


@pytest.mark.parametrize("impl", full_but(["ring", "lax"], ["ring"]))
def test_rank_order(impl):
    """Without num_shards the padding depends on the number of ranks, and the results are those of stage 2."""
    trained = {}
    for stage in (2, 3):
        optimizer = zero.sharded_optimizer(optax.adamw(1e-2), "i", stage=stage)

        def step(params, x, optimizer=optimizer, stage=stage):
            held = optimizer.shard(params) if stage == 3 else params
            state = optimizer.init(held)
            whole = optimizer.gather(held) if stage == 3 else params
            gradients = jax.grad(loss)(jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), whole), x)
            updates, _ = optimizer.update(gradients, state, held)
            held = optax.apply_updates(held, updates)
            return held

        specs = optimizer.param_specs(PARAMS) if stage == 3 else P()
        trained[stage] = sharded(reduced_by(impl)(step), mesh=make_mesh((4,)), in_specs=(P(), P("i")), out_specs=specs)(
            PARAMS, batches([0])[0][:8]
        )
    shards = trained[3]
    for name, x in shards.whole().items():
        np.testing.assert_array_almost_equal_nulp(
            np.asarray(x, np.float32), np.asarray(trained[2][name], np.float32), nulp=1 if name != "half" else 1 << 16
        )
    state, moved = optimizer.repartition(optax.adamw(1e-2).init(shards), shards, 8)
    assert {name: x.size for name, x in moved.vectors.items()} == {"bfloat16": 152, "float32": 3504}
    assert jax.tree.leaves(state)[1].shape == (152,)
    assert_same_bits(jax.device_get(moved.whole()), jax.device_get(shards.whole()))


@pytest.mark.full
def test_integers_keep_their_value():
    params = {"w": np.ones(5, np.float32), "step": np.array([7, 8], np.int32)}
    optimizer = zero.sharded_optimizer(optax.sgd(1.0), "i", stage=3, order="tree", num_shards=4)

    def step(params, x):
        shards = optimizer.shard(params)
        local = value_and_grad(
            lambda p, x: (p["w"] * x).sum(), "i", num_shards=4, reduce_gradients=False, allow_int=True
        )
        _, sums = local(optimizer.gather(shards), x)
        updates, _ = optimizer.update(sums, optimizer.init(shards), shards)
        return optimizer.gather(optax.apply_updates(shards, updates))

    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    got = sharded(step, mesh=make_mesh((2,)), in_specs=(P(), P("i")), out_specs=P())(params, x)
    assert_same_bits(jax.device_get(got), {"w": 1 - x.mean(0), "step": params["step"]})


WORDS, WIDTH, LENGTH, LAYERS = 11, 6, 5, 2
LAYERED = {
    "embed": {"words": RNG.standard_normal((WORDS, WIDTH)).astype(np.float32)},
    "blocks": {
        "up": RNG.standard_normal((LAYERS, WIDTH, 3 * WIDTH)).astype(np.float32) / 3,
        "down": RNG.standard_normal((LAYERS, 3 * WIDTH, WIDTH)).astype(np.float32) / 3,
        "scale": np.ones((LAYERS,), np.float32),
        "kind": np.arange(LAYERS, dtype=np.int32),
    },
    "head": {"out": RNG.standard_normal((WIDTH, WORDS)).astype(jnp.bfloat16)},
}


def embedded(params, tokens):
    return params["words"][tokens]


def block(params, h, key):
    hidden = jax.nn.gelu(h @ params["up"]) + params["kind"]
    kept = jax.random.bernoulli(jax.random.fold_in(key, shard_index()), 0.9, hidden.shape)
    return h + (hidden * kept) @ params["down"] * params["scale"]


def loss_of(params, given):
    h, tokens = given
    logits = h @ params["out"].astype(h.dtype)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


LAYER_SPECS = {"embed": P("i"), "blocks": P(None, "i"), "head": P("i")}


@functools.cache
def of_layers(ranks, check_vma=True, stacked=False):
    """Shards, state, gradients and the value after two steps with divided layers: in a scan, or as one stack."""
    optimizer = zero.sharded_optimizer(optax.sgd(0.1, momentum=0.9), "i", stage=3, order="tree", num_shards=SHARDS)
    layer = functools.partial(zero.sharded_layer, axis_name="i", num_shards=SHARDS)

    def start(params):
        blocks = jax.vmap(optimizer.shard)(params["blocks"])
        return {name: optimizer.shard(params[name]) for name in ("embed", "head")} | {"blocks": blocks}

    def local(shards, tokens, key):
        one_block = layer(functools.partial(block, key=key))
        h = layer(embedded)(shards["embed"], tokens[..., :-1])
        if stacked:
            h = one_block(shards["blocks"], h)
        else:
            h, _ = lax.scan(lambda h, own: (one_block(own, h), None), h, shards["blocks"])
        values = layer(loss_of)(shards["head"], (h, tokens[..., 1:]))
        return values.sum() / SHARDS, values

    def step(shards, state, tokens, key):
        gradients, values = jax.grad(local, has_aux=True, allow_int=True)(shards, tokens, key)
        updates, state = optimizer.update(gradients, state, shards)
        value = ring_pmean(ShardSums.of(values, "i", SHARDS), "i", order="tree")
        floats = [x for x in jax.tree.leaves(gradients) if x.dtype != jax.dtypes.float0]
        return optax.apply_updates(shards, updates), state, floats, value

    common = {"mesh": make_mesh((ranks,)), "check_vma": check_vma}
    shards = sharded(start, in_specs=P(), out_specs=LAYER_SPECS, **common)(LAYERED)
    specs = optimizer.specs(shards)
    state = sharded(optimizer.init, in_specs=(LAYER_SPECS,), out_specs=specs, **common)(shards)
    of_gradients = [P(None, "i"), P("i"), P("i")]
    steps = sharded(
        step, in_specs=(LAYER_SPECS, specs, P("i"), P()), out_specs=(LAYER_SPECS, specs, of_gradients, P()), **common
    )
    first = None
    for i in range(2):
        tokens = np.random.default_rng(i).integers(0, WORDS, (SHARDS, 2, LENGTH + 1)).astype(np.int32)
        shards, state, gradients, value = steps(shards, state, tokens, jax.random.key(0))
        first = first or gradients
    return jax.device_get((shards, state, first, value))


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "check_vma", "stacked"), [(1, True, False), (2, False, True), (6, True, True)])
def test_layers_have_the_same_bits_on_any_number_of_ranks(ranks, check_vma, stacked):
    assert_same_bits(of_layers(ranks, check_vma, stacked), of_layers(3))


@pytest.mark.one_pair
def test_stacked_layers_with_inputs_that_have_no_cotangent():
    """Integers, and a layer that leaves its inputs alone."""
    optimizer = zero.sharded_optimizer(optax.sgd(1.0), "i", stage=3, order="tree", num_shards=SHARDS)
    layer = zero.sharded_layer(lambda w, given: (given[0] * w["s"], given[1] + 1, given[2]), "i", num_shards=SHARDS)

    def gradients(stack, x):
        def local(shards):
            y, count, same = layer(shards, (x, jnp.zeros((len(x),), jnp.int32), x))
            return (y * count[:, None] + same).sum()

        return optimizer.gather(jax.grad(local)(jax.vmap(optimizer.shard)(stack)))["s"]

    s, x = np.array([2, 3, 4], np.float32), np.ones((SHARDS, 2), np.float32)
    mapped = sharded(gradients, mesh=make_mesh((2,)), in_specs=(P(), P("i")), out_specs=P())
    assert mapped({"s": s}, x).tolist() == (3 * 2 * SHARDS * s.prod() / s).tolist()


@pytest.mark.parametrize("stacked", [False, True])
def test_a_layer_beside_an_axis_that_is_left_to_the_compiler(stacked):
    optimizer = zero.sharded_optimizer(optax.sgd(1.0), "i", stage=3, order="tree", num_shards=SHARDS)
    layer = zero.sharded_layer(lambda w, x: w["s"] * x, "i", num_shards=SHARDS)

    def gradients(params, x):
        shards = (jax.vmap(optimizer.shard) if stacked else optimizer.shard)(params)
        return optimizer.gather(jax.grad(lambda own: layer(own, x).sum())(shards))["s"]

    s, x = np.array([2, 3] if stacked else 2, np.float32), np.ones((SHARDS, 5), np.float32)
    mesh = make_mesh((2, 2), ("i", "m"))
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), axis_names={"i"})
    assert jax.jit(mapped)({"s": s}, x).tolist() == (5 * SHARDS * s.prod() / s).tolist()


@pytest.mark.full
def test_gradients_of_layers_are_those_of_the_mean():
    _, _, (blocks, embed, head), _ = of_layers(3)
    tokens = np.random.default_rng(0).integers(0, WORDS, (SHARDS, 2, LENGTH + 1)).astype(np.int32)

    def one(params, tokens):
        h = embedded(params["embed"], tokens[..., :-1])
        for i in range(LAYERS):
            own = {name: x[i] for name, x in params["blocks"].items()}
            h = block(own | {"kind": LAYERED["blocks"]["kind"][i]}, h, jax.random.key(0))
        return loss_of(params["head"], (h, tokens[..., 1:]))

    floats = LAYERED | {"blocks": {k: v for k, v in LAYERED["blocks"].items() if k != "kind"}}
    of_mean = value_and_grad(lambda p, t: one(p, t[0]), "i", num_shards=SHARDS)
    _, want = sharded(of_mean, mesh=make_mesh((2,)), in_specs=(P(), P("i")), out_specs=P())(floats, tokens)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    close(embed[: WORDS * WIDTH], np.ravel(want["embed"]["words"]))
    parts = [np.reshape(want["blocks"][name], (LAYERS, -1)) for name in ("down", "scale", "up")]
    flat = np.concatenate(parts, axis=1)
    close(blocks[:, : flat.shape[1]], flat)
    of_head = np.asarray(want["head"]["out"], np.float32).ravel()
    rounding = 4 * np.abs(of_head).max() * 2**-9  # in bfloat16, on both sides: of the shards' gradients, and of the sum
    np.testing.assert_allclose(np.asarray(head[: WORDS * WIDTH], np.float32), of_head, rtol=0, atol=rounding)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "tree"}, "stage=3 with order='tree' needs num_shards"),
        ({"stage": 2, "layout": "parameter", "num_shards": 6}, "num_shards=6 is for layout='flat'"),
        ({"num_shards": 0}, "num_shards must be positive, got 0"),
        ({"check_replicas": 10}, "with stage=3 there is one copy of each parameter"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        zero.sharded_optimizer(optax.sgd(1.0), "i", **({"stage": 3} | options))


@pytest.mark.one_pair
def test_copies_are_compared_and_shards_are_not():
    optimizer = zero.sharded_optimizer(optax.adam(1.0), "i", stage=3, order="tree", num_shards=SHARDS)

    def compared(params, what):
        shards = optimizer.shard(params)
        return check_replicas(what(shards, optimizer.init(shards)), "i")

    with pytest.raises(ValueError, match=r"check_replicas: what is at \['of'\] are shards, a ShardedParams"):
        inside(lambda p: compared(p, lambda shards, _: {"of": shards}), PARAMS)
    with pytest.raises(ValueError, match=r"check_replicas: what is at \[0\]\.mu are shards"):
        inside(lambda p: compared(p, lambda _, state: state), PARAMS)
    assert inside(lambda p: compared(p, lambda _, state: state[0].count), PARAMS) == 0
    assert_same_bits(jax.device_get(inside(lambda p: compared(p, lambda x, _: optimizer.gather(x)), PARAMS)), PARAMS)

    # On a mesh with copies of shards, outside: those are compared, and what has no copies passes.
    mesh = make_mesh((2, 2), ("i", "copies"))
    shards = sharded(optimizer.shard, mesh=mesh, in_specs=P(), out_specs=optimizer.param_specs(PARAMS))(PARAMS)
    assert_replicated(shards)
    like = shards.vectors["float32"]
    parts = enumerate(like.addressable_shards)
    own = [jax.device_put(np.asarray(part.data) + (i == 1), part.device) for i, part in parts]
    damaged = jax.make_array_from_single_device_arrays(like.shape, like.sharding, own)
    with pytest.raises(AssertionError, match=r"float32.* is not the same on all ranks"):
        assert_replicated(dataclasses.replace(shards, vectors=shards.vectors | {"float32": damaged}))


def inside(f, *args, ranks=2):
    return sharded(f, mesh=make_mesh((ranks,)), in_specs=P(), out_specs=P())(*args)


def test_wrong_uses():
    optimizer = zero.sharded_optimizer(optax.sgd(1.0), "i", stage=3, order="tree", num_shards=SHARDS)
    of_others = zero.sharded_optimizer(optax.sgd(1.0), "i", stage=3, order="tree", num_shards=12)
    layer = zero.sharded_layer(lambda w, x: x * w["s"], "i", num_shards=SHARDS)

    def updated(params):
        shards = {"a": optimizer.shard(params)}
        return optimizer.update({"a": params}, optimizer.init(shards), shards)

    x = np.ones((6, 3), np.float32)
    for message, use in {
        "for parameters that are divided: pass stage=3": lambda p: zero.sharded_optimizer(TX, "i").gather(p),
        "num_shards must be a positive multiple of the number of ranks": None,
        "with stage=3 parameters are shards": lambda p: optimizer.gather(p),
        r"have 3072 elements of bfloat16 here, and these have 6144\. Shards of another": lambda p: optimizer.gather(
            of_others.shard(p)
        ),
        "these are a rank's shards, 3072 of 3501 elements": lambda p: optimizer.shard(p).whole(),
        "the shards are several ShardedParams": updated,
        "takes the ShardedParams of one layer": lambda p: layer({"a": optimizer.shard(p)}, x[:3]),
        r"first dimension for the rank's shards, 3 here \(6 in all\); the one at the root": lambda p: layer(
            optimizer.shard(p), x
        ),
        "communicates over, or asks": lambda p: zero.sharded_layer(
            lambda w, x: lax.psum(x, "i"), "i", num_shards=SHARDS
        )(optimizer.shard(p), x[:3]),
    }.items():
        with pytest.raises(ValueError, match=message):
            inside(use or optimizer.shard, PARAMS, ranks=2 if use else 4)

    def closes_over(params):
        s = jnp.asarray(params["s"]) * 2
        return zero.sharded_layer(lambda w, x: x * s, "i", num_shards=SHARDS)(optimizer.shard(params), x[:3])

    with pytest.raises(TypeError, match="f closes over 1 traced arrays of floats"):
        inside(closes_over, PARAMS)

    def of_a_stack(params):
        grows = zero.sharded_layer(lambda w, x: jnp.append(x, w["s"]), "i", num_shards=SHARDS)
        return grows(jax.vmap(optimizer.shard)(jax.tree.map(lambda x: x[None], params)), x[:3])

    with pytest.raises(TypeError, match=r"inputs\. These are float32\[3\], and the result's are float32\[4\]"):
        inside(of_a_stack, PARAMS)
