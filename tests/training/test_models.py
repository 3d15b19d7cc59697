"""Models of flax and equinox in `value_and_grad`: the recipes of docs/training.md, and the error of a whole model."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_trees, make_mesh, sharded
from jax.sharding import PartitionSpec as P
from tiers import full_but, vma_fixture

import jax_ring
from jax_ring import grad, value_and_grad

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

RANKS = 4
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((16, 3)).astype(np.float32), RNG.standard_normal(16).astype(np.float32)
MESH = make_mesh((RANKS,), ("data",))


def on_ranks(f, *replicated, check_vma=True):
    specs = (*[P()] * len(replicated), P("data"), P("data"))
    return sharded(f, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=check_vma)(*replicated, X, Y)


def assert_close(found, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)  # a bias before a norm has the gradient 0


def test_flax_linen(check_vma):
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        axis_name: str | None

        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(nn.Dense(8)(x))
            return nn.Dense(1)(jnp.tanh(x))[:, 0]

    def loss(params, stats, x, y, axis_name="data"):
        variables = {"params": params, "batch_stats": stats}
        out, updated = Net(axis_name).apply(variables, x, mutable=["batch_stats"])
        return ((out - y) ** 2).mean(), updated["batch_stats"]

    variables = Net(None).init(jax.random.key(0), X)
    given = variables["params"], variables["batch_stats"]
    found = on_ranks(value_and_grad(loss, "data", has_aux=True), *given, check_vma=check_vma)
    of_one = jax.jit(jax.value_and_grad(lambda *args: loss(*args, axis_name=None), has_aux=True))
    assert_close(found, of_one(*given, X, Y))


def nnx_model(axis_name):
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.first, self.last = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
            self.norm = nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs)
            self.dropout = nnx.Dropout(0.0, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))[:, 0]

    return Net()


def test_flax_nnx(check_vma):
    nnx = pytest.importorskip("flax.nnx")

    def loss_of(graphdef):
        def loss(params, rest, x, y):
            model = nnx.merge(graphdef, params, rest, copy=True)
            return ((model(x) - y) ** 2).mean(), nnx.state(model, nnx.Not(nnx.Param))

        return loss

    graphdef, *given = nnx.split(nnx_model("data"), nnx.Param, ...)
    found = on_ranks(value_and_grad(loss_of(graphdef), "data", has_aux=True), *given, check_vma=check_vma)
    graphdef, *_ = nnx.split(nnx_model(None), nnx.Param, ...)
    expected = jax.jit(jax.value_and_grad(loss_of(graphdef), has_aux=True))(*given, X, Y)
    numbers = [
        [
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in jax.tree.leaves(t)
        ]
        for t in (found, expected)
    ]
    assert_close(*numbers)
    assert np.any(found[0][1]["norm"]["mean"].get_value())  # the statistics have been updated


def test_equinox(check_vma):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, "scalar", 8, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x, y):
        return ((jax.vmap(eqx.combine(params, static))(x) - y) ** 2).mean()

    optimizer = optax.adam(1e-3)

    def step(params, state, x, y, differentiate=lambda loss: value_and_grad(loss, "data")):
        value, grads = differentiate(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    given = params, optimizer.init(params)
    found = on_ranks(step, *given, check_vma=check_vma)
    assert_close(found, jax.jit(lambda *args: step(*args, differentiate=jax.value_and_grad))(*given, X, Y))


@pytest.mark.parametrize("function", [value_and_grad, grad])
@pytest.mark.parametrize("options", [{}, {"num_shards": 8}, {"reduced_in_backward": True}], ids=str)
def test_a_whole_model_of_equinox(function, options):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, "scalar", 8, 1, key=jax.random.key(0))

    def loss(x, model, y):
        return ((jax.vmap(model)(x) - y) ** 2).mean()

    message = rf"{function.__name__}: the leaf at \.activation of argument 1 must be an array.*eqx\.partition\(model"
    with pytest.raises(TypeError, match=message):
        on_ranks(lambda x, y: function(loss, "data", argnums=1, **options)(x, model, y))


def test_a_whole_model_of_nnx():
    pytest.importorskip("flax.nnx")
    model = nnx_model(None)
    message = r"grad requires real- or complex-valued inputs .*got .* at \.dropout.* of argument 0.*nnx\.split\(model"
    with pytest.raises(TypeError, match=message):
        on_ranks(lambda x, y: value_and_grad(lambda model, x, y: ((model(x) - y) ** 2).mean(), "data")(model, x, y))


@pytest.mark.parametrize("ranks", full_but([1, 2, 8], [2]))
def test_the_mean_over_tokens_and_of_auxiliary_data_with_num_shards(ranks):
    """The recipe of docs/training.md: bits of value and gradients do not depend on ranks, of which one has no token."""
    mask = ((np.arange(16) % 3 > 0) * (np.arange(16) < 13)).astype(np.float32)
    params = {"w": np.float32([0.3, -0.7, 0.2])}

    def loss(params, x, mask, count):
        errors = (jnp.tanh(x @ params["w"]) - 0.5) ** 2
        return 8 * (mask * errors).sum() / count, {"error": errors.mean()}

    def step(params, x, mask):
        count = jax_ring.ring_psum(mask.sum(), "data")
        (value, aux), grads = value_and_grad(loss, "data", has_aux=True, num_shards=8, in_axes=(0, 0, None))(
            params, x, mask, count
        )
        sums = jax_ring.ring_psum(jax_ring.ShardSums.of(aux, "data", 8), "data", order="tree")
        return value, grads, jax.tree.map(lambda x: x / 8, sums)

    def on(ranks):
        specs = (P(), P("data"), P("data"))
        return sharded(step, mesh=make_mesh((ranks,), ("data",)), in_specs=specs, out_specs=P())(params, X, mask)

    def of_all(params):
        errors = (jnp.tanh(X @ params["w"]) - 0.5) ** 2
        return (mask * errors).sum() / mask.sum(), {"error": errors.mean()}

    (value, aux), grads = jax.value_and_grad(of_all, has_aux=True)(params)
    found = on(ranks)
    assert_close(found, (value, grads, aux))
    assert_same_trees(found[:2], on(4)[:2])
