"""The sharded optimizer with layout="parameter": exact for every optimizer that updates each parameter by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import SHARDED, assert_same_bits, make_mesh, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import explain, ring_psum, zero
from jax_ring.training.wire import reduced_by

pytestmark = pytest.mark.one_pair  # plain JAX on code that other tests of ZeRO cover

REPLICATED = P()
RNG = np.random.default_rng(0)
PARAMS = {
    "embedding": RNG.standard_normal((24, 4)).astype(np.float32),
    "layer": {"w": RNG.standard_normal((4, 6)).astype(np.float32), "b": RNG.standard_normal(6).astype(np.float32)},
    "half": RNG.standard_normal((3, 4)).astype(jnp.bfloat16),
    "scale": np.float32(1),
}


NAMES = tuple(PARAMS)
SOME_NAMES = ("embedding", "layer")  # for optimizers that take long to compile


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "first" if "embedding" in str(path) else "rest", params)


def decayed(mask):
    return optax.chain(optax.add_decayed_weights(0.5, mask), optax.sgd(0.1, momentum=0.9))


OPTIMIZERS = {
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "lars": optax.lars(0.1, weight_decay=0.1, momentum=0.9),
    "muon": optax.contrib.muon(0.1, weight_decay=0.1),
    "mask by shape": decayed(matrices),
    "mask by tree": decayed(matrices(PARAMS)),
    "labels": optax.partition({"first": optax.sgd(0.1), "rest": optax.lars(0.1)}, labels),
    "block rms": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1, momentum=0.9)),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1, momentum=0.9)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1, impl="rbg")), optax.sgd(0.1)),
    "schedule": optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.01, 3), momentum=0.9),
    "every other step": optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
}


BATCH = np.random.default_rng(1).uniform(0.5, 1, 16).astype(np.float32)


def gradients_of(params, x):
    """Stands for the gradients of a rank's examples: cheap to compile, and different for all ranks and elements."""
    return jax.tree.map(lambda p: (jnp.sin(p * (1 + x[0])) * x[-1]).astype(p.dtype), params)


@functools.cache
def expected_steps(tx, ranks=4, names=NAMES):
    """Three steps of the optimizer itself, with the mean of the ranks' gradients."""

    @jax.jit
    def step(params, state):
        grads = [gradients_of(params, x) for x in BATCH.reshape(ranks, -1)]
        mean = jax.tree.map(lambda *g: (sum(x.astype(jnp.float32) for x in g) / ranks).astype(g[0].dtype), *grads)
        updates, state = tx.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    params = {name: PARAMS[name] for name in names}
    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state)
    return params


class Sharded:
    def __init__(self, tx, ranks, check_vma=True, batch=BATCH, names=NAMES, **options):
        self.batch = batch
        self.mesh = make_mesh((ranks,))
        self.optimizer = zero.sharded_optimizer(tx, "i", layout="parameter", **options)
        initial = {name: PARAMS[name] for name in names}
        self.specs = self.optimizer.specs(initial)

        def step(params, state, x):
            own = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params) if check_vma else params
            updates, state = self.optimizer.update(gradients_of(own, x), state, params)
            return optax.apply_updates(params, updates), state

        common = {"mesh": self.mesh, "check_vma": check_vma}
        specs = (REPLICATED, self.specs, SHARDED)
        self.step = sharded(step, in_specs=specs, out_specs=specs[:2], **common)
        self.params = jax.device_put(initial, NamedSharding(self.mesh, REPLICATED))
        self.state = sharded(self.optimizer.init, in_specs=REPLICATED, out_specs=self.specs, **common)(initial)

    def run(self, steps=3):
        for _ in range(steps):
            self.params, self.state = self.step(self.params, self.state, self.batch)
        return self.params


def assert_close(actual, expected):
    """Asserts equality up to rounding, as compilers may fuse the operations differently."""

    def close(actual, expected):
        unit = float(jnp.finfo(expected.dtype).eps)
        actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
        assert np.linalg.norm(actual - expected) <= 20 * unit * np.linalg.norm(expected)

    jax.tree.map(close, actual, expected)


# Each optimizer runs once: the four combinations of stage and impl take turns, and so do both modes of vma.
@pytest.mark.parametrize(
    ("number", "name"), full_but(enumerate(OPTIMIZERS), [(4, "mask by shape"), (8, "adaptive clip")])
)
def test_updates_match_the_unsharded_optimizer(number, name):
    options = {"check_vma": number % 2 == 0, "stage": 1 + number // 2 % 2}
    names = SOME_NAMES if name in ("adafactor", "lamb", "lars", "muon", "noise", "adaptive clip") else NAMES
    tx = OPTIMIZERS[name]
    with reduced_by(("ring", "lax")[number // 4 % 2]):
        assert_close(Sharded(tx, 4, names=names, **options).run(), expected_steps(tx, names=names))


@pytest.mark.parametrize(
    ("ranks", "stage", "impl", "check_vma"),
    full_but(
        [(1, 2, "ring", True), (2, 1, "lax", False), (8, 1, "ring", True), (8, 2, "lax", True), (8, 2, "ring", False)],
        [(8, 1, "ring", True)],
    ),
)
def test_any_number_of_ranks(ranks, stage, impl, check_vma):
    tx = OPTIMIZERS["labels"]
    with reduced_by(impl):
        assert_close(Sharded(tx, ranks, check_vma, stage=stage).run(), expected_steps(tx, ranks))


def clip_in_float32(limit):
    """`optax.clip_by_global_norm` adds squares in the dtypes of the leaves, which are too coarse to compare with."""

    def update(updates, _):
        norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), updates))
        return jax.tree.map(lambda x: jnp.where(norm < limit, x, x / norm.astype(x.dtype) * limit), updates)

    return optax.stateless(update)


@pytest.mark.parametrize(("place", "check_vma"), [("first", True), ("first", False), ("some parameters", True)])
def test_norm_of_the_whole_gradient_is_clipped(place, check_vma):
    def tx(clip):
        rest = optax.sgd(0.5, momentum=0.9)
        if place == "some parameters":
            return optax.chain(optax.masked(clip, matrices), rest)
        return optax.chain(clip, rest)

    ours, theirs = tx(zero.clip_by_global_norm(0.1, "i")), tx(clip_in_float32(0.1))
    assert_close(Sharded(ours, 4, check_vma).run(), expected_steps(theirs))


@pytest.mark.full
def test_two_norms():
    def tx(clip):
        return optax.chain(clip(0.1), optax.sgd(0.5, momentum=0.9), clip(0.01))

    ours = tx(lambda limit: zero.clip_by_global_norm(limit, "i"))
    assert_close(Sharded(ours, 4).run(), expected_steps(tx(clip_in_float32)))


@pytest.mark.parametrize(
    ("tx", "what"),
    [
        (optax.clip_by_global_norm(1.0), "clip_by_global_norm"),
        (optax.normalize_by_update_norm(), "normalize_by_update_norm"),
        (optax.apply_if_finite(optax.sgd(0.1), 2), "apply_if_finite"),
        (optax.contrib.prodigy(), "prodigy"),
        (optax.contrib.dadapt_adamw(0.1), "dadapt_adamw"),  # several steps later, through the state
        (optax.MultiSteps(optax.clip_by_global_norm(1.0), 2).gradient_transformation(), "clip_by_global_norm"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_needs_several_gradients_is_refused(tx, what):
    message = rf"layout='parameter'.* needs the gradients of \['embedding'\], .*in ({what}) \(.*optax.*zero.clip_by"
    optimizer = zero.sharded_optimizer(optax.chain(optax.identity(), tx, optax.adam(0.1)), "i", layout="parameter")
    with pytest.raises(ValueError, match=message):
        optimizer.specs(PARAMS)


def test_collectives_within_the_optimizer_are_refused():
    summed = optax.stateless(lambda updates, _: jax.tree.map(lambda x: ring_psum(x, "i"), updates))
    message = "tx.update has a collective.*zero.clip_by_global_norm may be"
    with pytest.raises(ValueError, match=message):
        zero.sharded_optimizer(summed, "i", layout="parameter").specs(PARAMS)
    init = zero.sharded_optimizer(summed, "i", layout="parameter").init
    for check_vma in (True, False):
        with pytest.raises(ValueError, match=message):
            sharded(init, mesh=make_mesh((4,)), in_specs=REPLICATED, check_vma=check_vma)(PARAMS)


def test_norm_under_a_condition_is_refused():
    steps = optax.MultiSteps(zero.clip_by_global_norm(1.0, "i"), 2).gradient_transformation()
    with pytest.raises(
        ValueError, match=r"clip_by_global_norm: with .* cannot be within .*MultiSteps.*accumulate_gradients"
    ):
        zero.sharded_optimizer(steps, "i", layout="parameter").specs(PARAMS)


def test_norm_over_another_axis_is_refused():
    tx = zero.clip_by_global_norm(1.0, "j")
    with pytest.raises(ValueError, match="clip_by_global_norm is over 'j', within a sharded_optimizer over 'i'"):
        zero.sharded_optimizer(tx, "i", layout="parameter").specs(PARAMS)


def test_whole_parameters_unless_elementwise():
    muon = zero.sharded_optimizer(optax.contrib.muon(0.1), "i", layout="parameter").shares(PARAMS, 4)
    lamb = zero.sharded_optimizer(optax.lamb(0.1), "i", layout="parameter").shares(PARAMS, 4)
    adam = zero.sharded_optimizer(optax.adam(0.1), "i", layout="parameter").shares(PARAMS, 4)
    for shares in (muon, lamb):
        assert shares.parameters == (
            ("['embedding']",), ("['layer']['w']",), ("['half']", "['scale']"), ("['layer']['b']",),
        )  # fmt: skip
        assert shares.elements == (96, 24, 12 + 1, 6)
        assert shares.padding == 4 * (96 + 12) / 139
    # Two float32 moments for the embedding with lamb, one with muon.
    assert lamb.state_bytes == (2 * 96 * 4, 2 * 24 * 4, 2 * (12 * 2 + 4), 2 * 6 * 4)
    assert lamb.allocated_bytes == 2 * (96 * 4 + 12 * 2) + 4
    assert muon.state_bytes == (96 * 4, 24 * 4, 12 * 2 + 2 * 4, 2 * 6 * 4)
    # The embedding is cut into three pieces, and the bfloat16 elements into four.
    assert adam.elements == (32 + 3, 32 + 3, 32 + 3, 31 + 3)
    assert "['embedding'][32:64 of 96]" in str(adam)
    assert adam.allocated_bytes == 2 * (32 * 4 + 3 * 2) + 4


def test_cut_parameters_update_as_whole_ones():
    def tx(clip):
        return optax.chain(clip(0.1), optax.MultiSteps(decayed(matrices), 2).gradient_transformation())

    training = Sharded(tx(lambda limit: zero.clip_by_global_norm(limit, "i")), 8)
    cut = [path for paths in training.optimizer.shares(PARAMS, 8).parameters for path in paths if "embedding" in path]
    assert len(cut) == 6
    assert_close(training.run(), expected_steps(tx(clip_in_float32), 8))


def test_state_and_bytes_per_rank():
    training = Sharded(optax.chain(optax.trace(0.9), optax.clip_by_block_rms(1.0)), 4)
    shares = training.optimizer.shares(PARAMS, 4)
    state = jax.tree.leaves(training.state)
    assert sum(leaf.addressable_shards[0].data.nbytes for leaf in state) == shares.allocated_bytes
    # A reduce-scatter and an all-gather of p blocks: each rank sends p - 1.
    block_bytes = 96 * 4 + 12 * 2
    explanation = explain(training.step, training.params, training.state, BATCH)
    assert explanation.predicted_bytes == explanation.counted_bytes == 2 * 3 * block_bytes


FROZEN = {"embedding": True, "layer": {"w": False, "b": True}}
BEFORE_ADAM = {
    "masked": optax.masked(optax.set_to_zero(), FROZEN),
    "freeze": optax.transforms.freeze(FROZEN),
    "all": optax.set_to_zero(),
}


@pytest.mark.parametrize("check_vma", full_but([True, False], [True]), ids=["vma", "no_vma"])
@pytest.mark.parametrize("name", BEFORE_ADAM)
def test_the_state_of_frozen_parameters_is_divided(name, check_vma):
    tx = optax.chain(BEFORE_ADAM[name], optax.adam(0.1))
    run = Sharded(tx, 4, check_vma, names=SOME_NAMES)
    assert_close(run.run(2), unsharded_steps(tx, 2))
    shares = run.optimizer.shares({name: PARAMS[name] for name in SOME_NAMES}, 4)
    assert shares.shared_bytes == 4  # the step count
    assert sum(shares.state_bytes) == 2 * sum(x.nbytes for x in jax.tree.leaves([PARAMS[n] for n in SOME_NAMES]))


def unsharded_steps(tx, steps):
    params = {name: PARAMS[name] for name in SOME_NAMES}
    state = tx.init(params)
    for _ in range(steps):
        grads = [gradients_of(params, x) for x in BATCH.reshape(4, -1)]
        updates, state = tx.update(jax.tree.map(lambda *g: sum(g) / 4, *grads), state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_scalars_that_are_called_like_a_parameter_are_shared():
    scheduled, noisy = optax.inject_hyperparams(optax.sgd)(0.1), optax.add_noise(0.1, 0.5, 0)  # has a random key
    for tx, params in (
        (scheduled, {"learning_rate": np.ones(3, np.float32)}),
        (scheduled, np.ones(3, np.float32)),
        (scheduled, {"count": np.float32(1), "b": BATCH}),
        (noisy, {"rng_key": np.ones(3, np.float32)}),
    ):
        shared = jax.eval_shape(tx.init, params)
        assert zero.sharded_optimizer(tx, "i", layout="parameter").shares(params, 2).shared_bytes == sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(shared)
        )


@pytest.mark.full
def test_state_of_another_number_of_ranks():
    """The state moves between numbers of ranks without a change, and training goes on as if it had not moved."""
    tx = OPTIMIZERS["schedule"]  # cuts some parameters on 8 ranks
    batch = np.ones_like(BATCH)  # the same gradients on all ranks
    first, second = Sharded(tx, 2, batch=batch), Sharded(tx, 8, batch=batch)
    first.run()
    moved = second.optimizer.repartition(first.state, PARAMS, 8)
    assert_same_bits(first.optimizer.repartition(moved, PARAMS, 2), first.state)
    assert jax.tree.map(jnp.shape, moved) == jax.tree.map(jnp.shape, second.state)
    second.state = jax.device_put(moved, jax.tree.map(lambda spec: NamedSharding(second.mesh, spec), second.specs))
    second.params = jax.device_put(first.params, NamedSharding(second.mesh, REPLICATED))
    assert_close(second.run(1), first.run(1))
    first.state = second.state
    with pytest.raises(ValueError, match=r"state.*shape.*pass through `repartition` first"):
        first.run(1)


def test_hyperparameters_can_be_set():
    training = Sharded(optax.inject_hyperparams(optax.sgd)(0.1), 2)
    training.state = optax.tree.set(training.state, learning_rate=jnp.float32(0))
    before = training.params
    assert_same_bits(training.run(1), before)


def test_saved_and_restored(tmp_path):
    training = Sharded(OPTIMIZERS["block rms"], 2)
    training.run(1)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", training.state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", training.state)
    assert_same_bits(restored, training.state)


@pytest.mark.parametrize("stage", [1, 2])
def test_bfloat16_gradients_of_float32_parameters(stage):
    params = {name: PARAMS[name] for name in ("embedding", "scale")}
    tx = optax.chain(optax.trace(0.9), optax.scale_by_trust_ratio(), optax.scale(-0.1))
    optimizer = zero.sharded_optimizer(tx, "i", layout="parameter", stage=stage)
    grads = jax.tree.map(lambda x: jnp.sin(x).astype(jnp.bfloat16), params)

    def step(params):
        local = jax.tree.map(lambda x: lax.pcast(x, "i", to="varying"), grads)
        return optimizer.update(local, optimizer.init(params), params)[0]

    updates = sharded(step, mesh=make_mesh((2,)), in_specs=REPLICATED, out_specs=REPLICATED)(params)
    expected, _ = jax.jit(lambda p: tx.update(grads, tx.init(p), p))(params)
    assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, expected)
    assert_close(updates, expected)


def test_float32_gradients_of_bfloat16_parameters_are_refused():
    optimizer = zero.sharded_optimizer(optax.adam(0.1), "i", layout="parameter")

    def step(params):
        grads = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    f = sharded(step, mesh=make_mesh((2,)), in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)
    with pytest.raises(TypeError, match=r"state of \['half'\] from bfloat16\[3,4\] to float32.*Cast the gradients"):
        f(PARAMS)


def test_parameters_without_gradients_keep_their_values():
    params = {"w": PARAMS["embedding"], "steps": np.arange(5)}
    optimizer = zero.sharded_optimizer(optax.lamb(0.1), "i", layout="parameter")

    def step(params):
        loss = jax.grad(lambda params: (params["w"] ** 2).sum(), allow_int=True)
        own = params | {"w": lax.pcast(params["w"], "i", to="varying")}
        state = optimizer.init(params)
        updates, state = optimizer.update(loss(own), state, params)
        return optax.apply_updates(params, updates), state

    specs = optimizer.specs(params)
    f = sharded(step, mesh=make_mesh((2,)), in_specs=REPLICATED, out_specs=(REPLICATED, specs))
    new, _ = f(params)
    np.testing.assert_array_equal(new["steps"], params["steps"])
    assert (new["w"] != params["w"]).all()


def test_gradients_of_another_tree_are_refused():
    optimizer = zero.sharded_optimizer(optax.lamb(0.1), "i", layout="parameter")

    def step(params):
        transposed = params | {"half": params["half"].T}
        return optimizer.update(transposed, optimizer.init(params), params)[0]

    f = sharded(step, mesh=make_mesh((2,)), in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)
    with pytest.raises(ValueError, match=r"gradients, the leaf at \['half'\] has shape \(4, 3\)"):
        f(PARAMS)


@pytest.mark.parametrize("params", [{}, {"none": np.zeros((0, 3), np.float32), "w": np.ones(3, np.float32)}])
def test_empty_trees_and_parameters(params):
    optimizer = zero.sharded_optimizer(optax.lamb(0.1), "i", layout="parameter")

    def step(params):
        return optimizer.update(params, optimizer.init(params), params)

    out_specs = (REPLICATED, optimizer.specs(params))
    f = sharded(step, mesh=make_mesh((2,)), in_specs=REPLICATED, out_specs=out_specs, check_vma=False)
    updates, _ = f(params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


@pytest.mark.full
def test_two_axes():
    params = {name: PARAMS[name] for name in ("embedding", "layer")}
    tx = optax.lamb(0.1)
    optimizer = zero.sharded_optimizer(tx, ("i", "j"), layout="parameter")

    def step(params):
        own = jax.tree.map(lambda x: lax.pcast(x, ("i", "j"), to="varying"), params)
        return optimizer.update(own, optimizer.init(params), params)[0]

    updates = sharded(step, mesh=make_mesh((2, 2), ("i", "j")), in_specs=REPLICATED, out_specs=REPLICATED)(params)
    assert_close(updates, jax.jit(lambda p: tx.update(p, tx.init(p), p)[0])(params))


def test_beside_an_axis_that_is_left_to_the_compiler():
    params = {name: PARAMS[name] for name in SOME_NAMES}
    tx = decayed(matrices)
    optimizer = zero.sharded_optimizer(tx, "i", layout="parameter")

    def step(params):
        own = jax.tree.map(lambda x: lax.pcast(x, "i", to="varying"), params)
        return optimizer.update(own, optimizer.init(params), params)[0]

    mesh = make_mesh((2, 2), ("i", "m"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, axis_names={"i"})
    assert_close(jax.jit(mapped)(params), jax.jit(lambda p: tx.update(p, tx.init(p), p)[0])(params))


def test_wrong_layout():
    with pytest.raises(ValueError, match=r"layout must be one of .*flat.*parameter.*got 'rows'"):
        zero.sharded_optimizer(optax.sgd(1.0), "i", layout="rows")
