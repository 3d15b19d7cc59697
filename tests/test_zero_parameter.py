"""The sharded optimizer with layout="parameter": exact for every optimizer that updates each parameter by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SHARDED, make_mesh, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum, zero

REPLICATED = P()
RNG = np.random.default_rng(0)
PARAMS = {
    "embedding": RNG.standard_normal((24, 4)).astype(np.float32),
    "layer": {"w": RNG.standard_normal((4, 6)).astype(np.float32), "b": RNG.standard_normal(6).astype(np.float32)},
    "half": RNG.standard_normal((3, 4)).astype(jnp.bfloat16),
    "scale": np.float32(1),
}


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "first" if "embedding" in str(path) else "rest", params)


OPTIMIZERS = {
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "lars": optax.lars(0.1, weight_decay=0.1, momentum=0.9),
    "muon": optax.contrib.muon(0.1, weight_decay=0.1),
    "mask by shape": optax.adamw(0.1, weight_decay=0.1, mask=matrices),
    "mask by tree": optax.adamw(0.1, weight_decay=0.1, mask=matrices(PARAMS)),
    "labels": optax.partition({"first": optax.sgd(0.1, momentum=0.9), "rest": optax.lamb(0.1)}, labels),
    "block rms": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1, momentum=0.9)),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.adam(0.1)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.adam(0.1)),
    "schedule": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.01, 3)),
    "every other step": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


BATCH = np.random.default_rng(1).uniform(0.5, 1, 16).astype(np.float32)


def gradients_of(params, x):
    """Stands for the gradients of a rank's examples: cheap to compile, and different for all ranks and elements."""
    return jax.tree.map(lambda p: (jnp.sin(p * (1 + x[0])) * x[-1]).astype(p.dtype), params)


@functools.cache
def expected_steps(tx, ranks=4):
    """Three steps of the optimizer itself, with the mean of the ranks' gradients."""

    @jax.jit
    def step(params, state):
        grads = [gradients_of(params, x) for x in BATCH.reshape(ranks, -1)]
        mean = jax.tree.map(lambda *g: (sum(x.astype(jnp.float32) for x in g) / ranks).astype(g[0].dtype), *grads)
        updates, state = tx.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        params, state = step(params, state)
    return params


class Sharded:
    def __init__(self, tx, ranks, check_vma=True, **options):
        self.mesh = make_mesh((ranks,))
        self.optimizer = zero.sharded_optimizer(tx, "i", layout="parameter", **options)
        self.specs = self.optimizer.specs(PARAMS)

        def step(params, state, x):
            own = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params) if check_vma else params
            updates, state = self.optimizer.update(gradients_of(own, x), state, params)
            return optax.apply_updates(params, updates), state

        common = {"mesh": self.mesh, "check_vma": check_vma}
        specs = (REPLICATED, self.specs, SHARDED)
        self.step = sharded(step, in_specs=specs, out_specs=specs[:2], **common)
        self.params = jax.device_put(PARAMS, NamedSharding(self.mesh, REPLICATED))
        self.state = sharded(self.optimizer.init, in_specs=REPLICATED, out_specs=self.specs, **common)(PARAMS)

    def run(self, steps=3):
        for _ in range(steps):
            self.params, self.state = self.step(self.params, self.state, BATCH)
        return self.params


def assert_close(actual, expected):
    """Asserts equality up to rounding, as compilers may fuse the operations differently."""

    def close(actual, expected):
        unit = float(jnp.finfo(expected.dtype).eps)
        actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
        assert np.linalg.norm(actual - expected) <= 20 * unit * np.linalg.norm(expected)

    jax.tree.map(close, actual, expected)


# Each optimizer runs once: the four combinations of stage and impl take turns, and so do both modes of vma.
@pytest.mark.parametrize(("number", "name"), list(enumerate(OPTIMIZERS)))
def test_updates_match_the_unsharded_optimizer(number, name):
    options = {"check_vma": number % 2 == 0, "stage": 1 + number // 2 % 2, "impl": ("ring", "lax")[number // 4 % 2]}
    assert_close(Sharded(OPTIMIZERS[name], 4, **options).run(), expected_steps(OPTIMIZERS[name]))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("impl", ["ring", "lax"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_any_number_of_ranks(ranks, stage, impl, check_vma):
    tx = OPTIMIZERS["labels"]
    assert_close(Sharded(tx, ranks, check_vma, stage=stage, impl=impl).run(), expected_steps(tx, ranks))


def clip_in_float32(limit):
    """`optax.clip_by_global_norm` adds squares in the dtypes of the leaves, which are too coarse to compare with."""

    def update(updates, _):
        norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), updates))
        return jax.tree.map(lambda x: jnp.where(norm < limit, x, x / norm.astype(x.dtype) * limit), updates)

    return optax.stateless(update)


@pytest.mark.parametrize("place", ["first", "last", "some parameters"])
def test_norm_of_the_whole_gradient_is_clipped(place, check_vma):
    def tx(clip):
        rest = optax.sgd(0.5, momentum=0.9)
        if place == "some parameters":
            return optax.chain(optax.masked(clip, matrices), rest)
        return optax.chain(*(clip, rest) if place == "first" else (rest, clip))

    ours, theirs = tx(zero.clip_by_global_norm(0.1, "i")), tx(clip_in_float32(0.1))
    assert_close(Sharded(ours, 4, check_vma).run(), expected_steps(theirs))


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
        (optax.contrib.prodigy(), "scale_by_prodigy|prodigy"),
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
    with pytest.raises(ValueError, match="clip_by_global_norm: with .* cannot be within .*MultiSteps.*accumulate_gradients"):
        zero.sharded_optimizer(steps, "i", layout="parameter").specs(PARAMS)


def test_norm_over_another_axis_is_refused():
    tx = zero.clip_by_global_norm(1.0, "j")
    with pytest.raises(ValueError, match="clip_by_global_norm is over 'j', within a sharded_optimizer over 'i'"):
        zero.sharded_optimizer(tx, "i", layout="parameter").specs(PARAMS)
