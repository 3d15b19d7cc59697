"""Data parallelism beside an axis that divides some of the parameters, with vma tracking: types say what varies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, assert_same_trees, make_mesh, sharded
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_ring import (
    accumulate_gradients,
    allreduce_gradients,
    block_sum,
    each_block,
    reduce_in_backward,
    sync_gradients,
    value_and_grad,
)

MESH = make_mesh((4, 2), ("i", "j"))
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 3)).astype(np.float32)
PARAMS = {"in": RNG.standard_normal((3, 4)), "out": RNG.standard_normal((4, 2)), "scale": np.array(0.5)}
PARAMS = jax.tree.map(np.float32, PARAMS)
SPECS = {"in": P(None, "j"), "out": P("j"), "scale": P()}


def whole_loss(params, x, total=lambda y: y):
    return ((total(jnp.tanh(x @ params["in"]) @ params["out"]) * params["scale"]) ** 2).mean()


def loss(params, x):
    return whole_loss(params, x, lambda y: lax.psum(y, "j"))


def hooked(**options):
    def of_hooked(params, x):
        return loss(reduce_in_backward(params, "i", **options), x)

    return value_and_grad(of_hooked, "i", reduced_in_backward=True)


STEPS = {
    "plain": value_and_grad(loss, "i"),
    "accumulated": value_and_grad(accumulate_gradients(loss, 2), "i"),
    "int8": value_and_grad(loss, "i", wire="int8"),
    "in backward": hooked(),
    "in backward, int8": hooked(wire="int8"),
    "shards": value_and_grad(loss, "i", num_shards=8),
}


@pytest.mark.parametrize("name", STEPS)
def test_value_and_gradients(name):
    f = sharded(STEPS[name], mesh=MESH, in_specs=(SPECS, P("i")), out_specs=(P(), SPECS))
    value, grads = f(PARAMS, X)
    expected, wanted = jax.value_and_grad(whole_loss)(PARAMS, X)
    assert_same_trees(value, expected, rtol=1e-5)
    for name_of, g in wanted.items():
        unit = 2e-2 if "int8" in name else 1e-5
        np.testing.assert_allclose(grads[name_of], g, rtol=unit, atol=unit * np.abs(g).max())


def own(params):
    return jax.tree.map(lambda x: lax.pcast(x, "i", to="varying"), params)


@pytest.mark.one_pair
def test_optimizers_that_compare_replicas():
    tx = optax.chain(allreduce_gradients("i", check_replicas=2), optax.sgd(1.0))
    specs = jax.tree.map(lambda _: P(), jax.eval_shape(tx.init, PARAMS))

    def step(params, x):
        return tx.update(jax.grad(loss)(own(params), x), tx.init(params), params)

    f = sharded(step, mesh=MESH, in_specs=(SPECS, P("i")), out_specs=(SPECS, specs))
    updates, state = f(PARAMS, X)
    wanted = jax.tree.map(jnp.negative, jax.grad(whole_loss)(PARAMS, X))
    assert_same_trees(updates, wanted, rtol=1e-4)
    assert optax.tree.get(state, "step") == 1


@pytest.mark.one_pair
def test_plain_gradients_of_accumulated_losses_are_refused():
    """They work for parameters that have been cast."""

    def step(params, x):
        return sync_gradients(jax.grad(accumulate_gradients(loss, 2))(params, x), "i")

    f = {"mesh": MESH, "in_specs": (SPECS, P("i")), "out_specs": SPECS}
    message = (
        r"accumulate_gradients: the loss varies over \['i'\].*jax_ring\.value_and_grad.*lax\.pcast\(params, \('i',\)"
    )
    with pytest.raises(ValueError, match=message):
        sharded(step, **f)(PARAMS, X)
    found = sharded(lambda params, x: step(own(params), x), **f)(PARAMS, X)
    assert_same_trees(found, jax.grad(whole_loss)(PARAMS, X), rtol=1e-4)
    in_backward = value_and_grad(
        accumulate_gradients(lambda params, x: loss(reduce_in_backward(params, "i"), x), 2), "i",
        reduced_in_backward=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"accumulate_gradients: .*without reduce_in_backward in the loss"):
        sharded(in_backward, **(f | {"out_specs": (P(), SPECS)}))(PARAMS, X)


# ---- Axes that the compiler divides ---------------------------------------------------------------------------------


def on_mesh_of(kind, function, ranks):
    """The function of divided parameters and a batch, in a shard_map over "i" alone."""
    mesh = jax.make_mesh((ranks, 2), ("i", "j"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        params, x = (
            {name: jax.device_put(p, P(*SPECS[name])) for name, p in PARAMS.items()},
            jax.device_put(X, P("i")),
        )
        mapped = jax.shard_map(function, in_specs=(P(), P("i")), out_specs=P(), axis_names={"i"})
        return jax.device_get(jax.jit(mapped)(params, x))


@pytest.mark.one_pair
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shards_and_blocks_beside_axes_of_the_compiler(kind):
    def of_block(x, w):
        return jnp.tanh(x @ w)

    def of_rows(params, x):
        return ((of_block(x, params["in"]) * params["out"].sum(1)).sum(1) * params["scale"]).mean()

    def step(params, x):
        of_mean = value_and_grad(of_rows, "i", num_shards=8)(params, x)
        return of_mean, block_sum(of_block, "i", 16)(x, params["in"]), each_block(jnp.sin, params["in"])

    results = [on_mesh_of(kind, step, ranks) for ranks in (1, 4)]
    assert_same_bits(*results)
    (value, grads), sums, each = results[0]
    expected = jax.value_and_grad(of_rows)(PARAMS, X), of_block(X, PARAMS["in"]).sum(0), np.sin(PARAMS["in"])
    assert_same_trees(((value, grads), sums, each), expected, rtol=1e-5)


@pytest.mark.one_pair
@pytest.mark.parametrize(
    "options", [{"check_replicas": True}, {"num_shards": 8, "audit": 2, "step": 0}], ids=["check_replicas", "audit"]
)
def test_callbacks_beside_axes_of_the_compiler_are_refused(options):
    with pytest.raises(NotImplementedError, match=r"^value_and_grad: .* to the compiler, here j\. .*assert_replicated"):
        on_mesh_of(AxisType.Auto, value_and_grad(whole_loss, "i", **options), 4)
