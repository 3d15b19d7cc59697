"""Optimizers that the flat layout of a sharded optimizer would get wrong are refused, and no others are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh, run_python, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import allreduce_gradients, zero

jnp.zeros(())  # starts the backend, without which optimizers are checked at their first use


def ndim_mask(params):
    return jax.tree.map(lambda t: t.ndim > 1, params)


def size_mask(params):
    return jax.tree.map(lambda t: t.size > 1000, params)


def halved_on_average():
    """Not elementwise, in a way of its own."""
    return optax.stateless(lambda updates, _: jax.tree.map(lambda g: g - g.mean() / 2, updates))


def remembered(shape):
    """Elementwise, with state that has nothing to do with the parameters."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros(shape), lambda updates, state, _=None: (updates, state)
    )


def of_each(function):
    """A transformation that applies a function to each gradient."""
    return optax.stateless(lambda updates, _: jax.tree.map(function, updates))


def of_all(function):
    """A transformation that scales all gradients by a function of them."""
    return optax.stateless(lambda updates, _: jax.tree.map(lambda g: g * function(jax.tree.leaves(updates)), updates))


def summed(values):
    return lax.psum(sum(jnp.sum(x) for x in values), "i")


def of_leaves(function):
    """A transformation of the list of gradients."""

    def update(updates, _):
        leaves, structure = jax.tree.flatten(updates)
        return jax.tree.unflatten(structure, function(leaves))

    return optax.stateless(update)


def loop(g):
    return lax.fori_loop(0, 3, lambda _, x: x - x.mean(), g)


REFUSED = {
    "adafactor": (optax.adafactor(0.1), r"clip_by_block_rms \(in chain\) is not elementwise"),
    "lamb": (optax.lamb(0.1), r"scale_by_trust_ratio \(in chain\) is not elementwise"),
    "lars": (optax.lars(0.1), r"scale_by_trust_ratio \(in masked, in chain\) is not elementwise"),
    "muon": (optax.contrib.muon(0.1), "partition treats parameters by their names, number, places, shapes or sizes"),
    "clip_by_block_rms": (optax.clip_by_block_rms(1e6), "clip_by_block_rms is not elementwise"),
    "adaptive_grad_clip": (optax.adaptive_grad_clip(0.1), "adaptive_grad_clip is not"),
    "clip_by_global_norm": (optax.clip_by_global_norm(1.0), "clip_by_global_norm is not elementwise"),
    "large norms": (optax.clip_by_global_norm(1e6), "clip_by_global_norm is not"),
    "normalize_by_update_norm": (optax.normalize_by_update_norm(), "normalize_by_update_norm is not"),
    "add_noise": (optax.add_noise(0.1, 0.9, jax.random.key(0)), "add_noise is not"),
    "apply_if_finite": (optax.apply_if_finite(optax.sgd(0.1), 3), "apply_if_finite is not"),
    "ndim mask": (optax.adamw(0.1, mask=ndim_mask), r"masked \(in chain\) treats parameters by.*shapes"),
    "size mask": (optax.adamw(0.1, mask=size_mask), r"masked \(in chain\) treats parameters by.*sizes"),
    "mask of this tree": (
        optax.adamw(0.1, mask={"w": True}),
        r"masked \(in chain\) takes parameters of one tree alone, as with a mask or labels .* given as a tree",
    ),
    "labels of this tree": (
        optax.multi_transform({"a": optax.sgd(0.1), "b": optax.adam(0.1)}, {"w": "a", "b": "b"}),
        "partition takes parameters of one tree alone",
    ),
    "hyperparameters": (optax.inject_hyperparams(optax.clip_by_global_norm)(0.1), "inject_hyperparams is not"),
    "a part that is not used yet": (
        optax.chain(
            optax.clip(1.0), optax.MultiSteps(optax.normalize_by_update_norm(), 1000).gradient_transformation()
        ),
        r"normalize_by_update_norm \(in MultiSteps, in chain\) is not",
    ),
    "a part that is off at first": (
        optax.chain(halved_on_average(), optax.scale_by_schedule(lambda step: jnp.where(step > 1000, 1.0, 0.0))),
        r"halved_on_average \(in chain\) is not",
    ),
    "reduction of the parts": (allreduce_gradients("i"), "allreduce_gradients is not"),
    "scalars of a rank": (optax.zero_nans(), r"zero_nans keeps a scalar that differs between ranks.*found_nan"),
    "state of another shape": (remembered((3,)), "remembered has state that is not divided as the parameters are"),
    "order of elements": (of_each(lambda g: jnp.cumsum(g.ravel()).reshape(g.shape)), "its cumsum may give other"),
    "places of elements": (of_each(lambda g: g * jnp.arange(g.size).reshape(g.shape)), "its iota may give other"),
    "random numbers": (of_each(lambda g: g + jax.random.normal(jax.random.key(0), g.shape)), "its random_bits may"),
    "other parameters": (of_leaves(lambda leaves: leaves[::-1]), "its choice of parameters may"),
    "a sum as a condition": (of_each(lambda g: lax.cond(g.sum() > 0, lambda: g, lambda: 2 * g)), "its sum may"),
    "a sum in a loop": (of_each(loop), "its sum may"),
    "slices in a loop": (
        of_each(lambda g: lax.scan(lambda s, x: (s + x, s), 0.0, g.ravel())[1].reshape(g.shape)),
        "its condition may",
    ),
    "a sum that zeros change": (of_all(lambda leaves: summed(map(jnp.exp, leaves))), "its reduce_sum may"),
    "a sum of roots": (of_all(lambda leaves: lax.psum(optax.tree.norm(leaves), "i")), "its sum may"),
    "a norm that zeros change": (
        optax.chain(of_each(lambda g: g + 1), zero.clip_by_global_norm(1.0, "i")),
        "chain is not elementwise: its norm may",
    ),
    "ranks": (of_each(lambda g: g * lax.axis_index("i")), "its axis_index may"),
    "number of ranks": (of_each(lambda g: g / lax.axis_size("i")), "depends on the number of ranks"),
    "number of parameters": (of_leaves(lambda leaves: [g / len(leaves) for g in leaves]), "by their names, number"),
    "places of parameters": (of_leaves(lambda leaves: [2 * leaves[0], *leaves[1:]]), "by their names, number, places"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_elementwise_is_refused(name):
    tx, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"(?s)sharded_optimizer: .*{message}.*layout='parameter'.*zero\.clip_by"):
        zero.sharded_optimizer(tx, "i")


ELEMENTWISE = {
    "adamw": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100)),
    "lion": lambda: optax.lion(0.1),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.nadam)(optax.linear_schedule(0.1, 0.0, 10)),
    "object": lambda: optax.MultiSteps(optax.scale(-0.1), 1000),
    "norm": lambda: optax.chain(zero.clip_by_global_norm(1.0, "i"), optax.ema(0.9), optax.sgd(0.1)),
    "elementwise clipping": lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1), optax.keep_params_nonnegative()),
    "inert mask": lambda: optax.masked(optax.sgd(0.1), lambda params: jax.tree.map(lambda _: True, params)),
    "schedule-free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "nothing": optax.set_to_zero,
    "norm in a condition": lambda: optax.MultiSteps(zero.clip_by_global_norm(1.0, "i"), 2),
    "norm of clipped gradients": lambda: optax.chain(optax.clip(1.0), zero.clip_by_global_norm(1.0, "i")),
    "sums over ranks": lambda: of_all(lambda leaves: lax.rsqrt(1 + summed(g**2 for g in leaves))),
    "counts over ranks": lambda: of_all(lambda leaves: jnp.where(summed(~jnp.isfinite(g) for g in leaves) > 0, 0, 1)),
    "loops": lambda: of_each(lambda g: lax.fori_loop(0, 3, lambda i, x: i * g + jnp.where(x > 0, x, 0), g)),
    "other dimensions": lambda: of_each(lambda g: jnp.square(g.reshape(-1, 1)).reshape(g.shape)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_is_elementwise_is_not_refused(name):
    params = {"w": np.ones((3, 4), np.float32), "scale": np.float32(1), "deep": [np.ones((2, 1, 3, 1), jnp.bfloat16)]}
    zero.sharded_optimizer(ELEMENTWISE[name](), "i").specs(params)


def test_several_axes():
    tx = optax.chain(zero.clip_by_global_norm(1.0, ("i", "j")), optax.sgd(0.1))
    zero.sharded_optimizer(tx, ("i", "j"))
    for axes in ("i", "j"):
        with pytest.raises(ValueError, match=r"clip_by_global_norm is not elementwise.*over the same axes"):
            zero.sharded_optimizer(zero.clip_by_global_norm(1.0, axes), ("i", "j"))


def by_name(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "bias" not in jax.tree_util.keystr(path), params)


@pytest.mark.parametrize("call", ["specs", "init", "update"])
def test_masks_that_only_these_parameters_set_off(call):
    """The names are none of those that it is traced for first, so it passes until its parameters are known."""
    optimizer = zero.sharded_optimizer(optax.adamw(0.1, mask=by_name), "i")
    without = {"kernel": np.ones((2, 2), np.float32), "scale": np.ones(2, np.float32)}
    optimizer.specs(without)
    params = {**without, "bias": np.ones(2, np.float32)}
    calls = {
        "specs": lambda: optimizer.specs(params),
        "init": lambda: sharded(optimizer.init, mesh=make_mesh((2,)), in_specs=P())(params),
        "update": lambda: sharded(
            lambda p: optimizer.update(p, optimizer.init(without), p), mesh=make_mesh((2,)), in_specs=P()
        )(params),
    }
    with pytest.raises(ValueError, match=r"masked \(in chain\) treats parameters by their names"):
        calls[call]()


def test_shapes_of_these_parameters():
    """scale_by_factored_rms is elementwise below a size."""
    optimizer = zero.sharded_optimizer(optax.scale_by_factored_rms(min_dim_size_to_factor=10), "i")
    optimizer.specs({"w": jax.ShapeDtypeStruct((9, 9), jnp.float32)})
    with pytest.raises(ValueError, match="scale_by_factored_rms treats parameters by"):
        optimizer.specs({"w": jax.ShapeDtypeStruct((10, 10), jnp.float32)})


def over_another_axis():
    return optax.stateless(lambda updates, _: jax.tree.map(lambda g: lax.pmean(g, "j"), updates))


def test_other_axes_are_known_at_the_first_use():
    mesh = make_mesh((2, 2), ("i", "j"))

    def updates(tx):
        optimizer = zero.sharded_optimizer(tx, "i")

        def run(params, gradients):
            return optimizer.update(gradients, optimizer.init(params), params)[0]

        f = sharded(run, mesh=mesh, in_specs=(P(), P(("i", "j"))), out_specs=P())
        return f(np.zeros(4, np.float32), np.arange(16, dtype=np.float32))

    chain = functools.partial(optax.chain, over_another_axis())
    np.testing.assert_array_equal(updates(chain(optax.sgd(1.0))), [-6, -7, -8, -9])
    with pytest.raises(ValueError, match=r"normalize_by_update_norm \(in chain\)"):
        updates(chain(optax.normalize_by_update_norm()))


def test_reductions_over_another_axis_may_share_calls():
    """How leaves are grouped to buckets depends on their sizes, but not on the values."""
    optimizer = zero.sharded_optimizer(optax.chain(allreduce_gradients("j"), optax.sgd(0.1)), "i")
    params = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (4, 1 << 23, 1 << 23)]
    f = sharded(optimizer.init, mesh=make_mesh((2, 2), ("i", "j")), in_specs=P(), out_specs=P())
    jax.eval_shape(f, params)


def test_a_traced_learning_rate():
    with pytest.raises(ValueError, match=r"chain uses a value that is being traced.*inject_hyperparams"):
        jax.jit(lambda rate: zero.sharded_optimizer(optax.sgd(rate), "i") and rate)(0.1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_debug_nans", True),
        ("jax_numpy_rank_promotion", "raise"),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_transfer_guard", "disallow"),
    ],
)
def test_settings_of_jax(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        zero.sharded_optimizer(optax.sgd(0.1, momentum=0.8), "i")
        with pytest.raises(ValueError, match="normalize_by_update_norm is not elementwise"):
            zero.sharded_optimizer(optax.normalize_by_update_norm(), "i")
    finally:
        jax.config.update(name, before)


@pytest.mark.full
def test_the_backend_is_not_started():
    code = """
import optax
from jax_ring import zero
optimizer = zero.sharded_optimizer(optax.normalize_by_update_norm(), "i")
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count())
try:
    optimizer.specs({"w": jax.numpy.zeros(3)})
except ValueError as error:
    print(error)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3\nsharded_optimizer: ")


def sophia():
    return optax.contrib.sophia(0.1)


@pytest.mark.parametrize("tx", ["adam", optax.adam, None])
def test_what_is_no_optimizer(tx):
    with pytest.raises(TypeError, match="sharded_optimizer: tx must be an optax GradientTransformation"):
        zero.sharded_optimizer(tx, "i")


def test_a_mask_that_is_no_tree_of_the_users_is_not_blamed_on_keys():
    """The trees of a trial of one's own are nothing that a user has seen."""
    with pytest.raises(ValueError, match=r"^sharded_optimizer: masked takes") as caught:
        zero.sharded_optimizer(optax.masked(optax.sgd(0.1), {"w": True, "b": False}), "i")
    assert "key path" not in str(caught.value)
    assert "<class" not in str(caught.value)


@pytest.mark.parametrize("layout", ["flat", "parameter"])
def test_lookahead(layout):
    tx = optax.chain(optax.clip(1.0), optax.lookahead(optax.sgd(0.1), 2, 0.5))
    with pytest.raises(ValueError, match=r"lookahead.*fast parameters alone.*in both layouts.*incremental_update"):
        zero.sharded_optimizer(tx, "i", layout=layout)


@pytest.mark.parametrize("layout", ["flat", "parameter"])
@pytest.mark.parametrize(
    "make",
    [optax.polyak_sgd, optax.lbfgs, optax.contrib.momo_adam, optax.contrib.reduce_on_plateau, sophia],
    ids=["polyak_sgd", "lbfgs", "momo_adam", "reduce_on_plateau", "sophia"],
)
def test_optimizers_that_need_the_value_of_the_loss(make, layout):
    tx = optax.chain(optax.sgd(0.1), make())
    with pytest.raises(ValueError, match=r"(?s)in neither layout: .*('value'|obj_fn).* tx.update\(sync_gradients\("):
        zero.sharded_optimizer(tx, "i", layout=layout).specs({"w": np.ones(3, np.float32)})
