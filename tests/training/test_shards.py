"""value_and_grad(num_shards=V): what it computes, of which arguments, and what it refuses. All sums here are exact."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

import jax_ring
from jax_ring import (
    ShardSums,
    accumulate_gradients,
    allreduce_gradients,
    grad,
    shard_index,
    sync_gradients,
    value_and_grad,
)

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

V = 8
RNG = np.random.default_rng(0)
X = RNG.integers(-3, 4, (16, 4)).astype(np.float32)
W = {"w": np.array([1, -2, 3, 1], np.float32), "b": np.float32(2)}


def loss(params, x, scale=1.0):
    return scale * ((x @ params["w"] + params["b"]) ** 2).mean()


def step(fun, *args, ranks=4, in_specs=None, check_vma=True, **options):
    """The result of value_and_grad on some ranks; the first argument is replicated, the others are cut."""
    f = sharded(
        lambda *args: value_and_grad(fun, "i", num_shards=V, **options)(*args), mesh=make_mesh((ranks,)),
        in_specs=in_specs or (P(), *[P("i")] * (len(args) - 1)), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    return f(*args)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_is_the_mean_over_the_shards(ranks, check_vma):
    assert_same_bits(step(loss, W, X, ranks=ranks, check_vma=check_vma), jax.jit(jax.value_and_grad(loss))(W, X))


@pytest.mark.one_pair
@pytest.mark.parametrize("ranks", [2, 8])
def test_reverse_mode_is_refused_and_forward_mode_is_not(ranks, check_vma):
    def gradient(scale, x):
        return grad(loss, "i", num_shards=V, in_axes=(0, None))(W, x, scale)["b"]

    f = {"mesh": make_mesh((ranks,)), "in_specs": (P(), P("i")), "out_specs": P(), "check_vma": check_vma}
    with pytest.raises(NotImplementedError, match=r"^grad: .* no reverse mode.*within a shard, by jax.grad"):
        sharded(jax.grad(gradient), **f)(1.0, X)
    forward = sharded(lambda scale, x: jax.jvp(lambda s: gradient(s, x), (scale,), (1.0,))[1], **f)(1.0, X)
    np.testing.assert_array_equal(forward, jax.grad(loss)(W, X)["b"])


def test_forward_mode_has_the_rules_of_the_loss(check_vma):
    @jax.custom_jvp
    def rounded(x):
        return jnp.round(x)

    rounded.defjvp(lambda primals, tangents: (rounded(*primals), *tangents))  # straight through

    def of_rounded(w, x):
        return (rounded(w) ** 3 * x).mean() + jax.nn.relu(w - 1.25) * jnp.sin(w), x.sum().astype(int)

    def derivatives(differentiated, w, x):
        """Of two orders, for a loss and its gradient, where relu has a corner."""

        def first(w):
            return jax.jvp(lambda w: differentiated(w, x), (w,), (1.0,))[1]

        (value, _), gradient = first(w)
        (of_value, _), of_gradient = jax.jvp(first, (w,), (1.0,))[1]
        return value, gradient, of_value, of_gradient

    found = [
        sharded(
            lambda w, x: derivatives(value_and_grad(of_rounded, "i", num_shards=V, has_aux=True), w, x),
            mesh=make_mesh((ranks,)), in_specs=(P(), P("i")), out_specs=P(), check_vma=check_vma,
        )(np.float32(1.25), X)
        for ranks in (1, 4)
    ]  # fmt: skip
    assert_same_bits(*found)
    expected = derivatives(jax.value_and_grad(of_rounded, has_aux=True), np.float32(1.25), X)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found[0], expected)


def test_checkpoints_of_what_is_the_same_on_all_ranks(check_vma):
    """Such as the positions of a sequence, and the number of a layer in a scan."""

    @jax.checkpoint
    def layer(params, x, i, positions):
        return x * params["w"] + (i + params["b"]) * positions

    def of_layers(params, x):
        def step(x, i):
            return layer(params, x, i, jnp.arange(4)), None

        return (lax.scan(step, x, jnp.arange(2.0))[0] ** 2).mean()

    assert_same_bits(step(of_layers, W, X, check_vma=check_vma), jax.value_and_grad(of_layers)(W, X))


@pytest.mark.one_pair
def test_over_several_axes():
    f = sharded(
        value_and_grad(loss, ("a", "b"), num_shards=V), mesh=make_mesh((2, 2), ("a", "b")),
        in_specs=(P(), P(("a", "b"))), out_specs=P(),
    )  # fmt: skip
    assert_same_bits(f(W, X), jax.value_and_grad(loss)(W, X))


@pytest.mark.one_pair
def test_grad_with_auxiliary_results_of_every_shard(check_vma):
    def with_aux(params, x):
        return loss(params, x), {"index": shard_index(), "key": jax.random.key(shard_index()), "rows": x}

    f = sharded(
        grad(with_aux, "i", num_shards=V, has_aux=True), mesh=make_mesh((4,)),
        in_specs=(P(), P("i")), out_specs=(P(), P("i")), check_vma=check_vma,
    )  # fmt: skip
    grads, aux = f(W, X)
    assert_same_bits(grads, jax.grad(loss)(W, X))
    np.testing.assert_array_equal(aux["index"], np.arange(V))
    np.testing.assert_array_equal(jax.random.key_data(aux["key"])[:, 1], np.arange(V))
    np.testing.assert_array_equal(aux["rows"], X.reshape(V, 2, 4))


def test_auxiliary_constants(check_vma):
    """What is the same on all ranks, such as a number or an argument that no rank cuts."""

    def with_aux(params, x, scale):
        return loss(params, x), {"number": 2.5, "flag": True, "scale": scale}

    f = sharded(
        value_and_grad(with_aux, "i", num_shards=V, has_aux=True, in_axes=(0, None)), mesh=make_mesh((4,)),
        in_specs=(P(), P("i"), P()), out_specs=((P(), P("i")), P()), check_vma=check_vma,
    )  # fmt: skip
    (value, aux), grads = f(W, X, np.float32(3))
    assert_same_bits((value, grads), jax.value_and_grad(loss)(W, X))
    assert_same_bits(
        aux, {"number": np.full(V, 2.5, np.float32), "flag": np.ones(V, bool), "scale": np.full(V, 3.0, np.float32)}
    )


def test_operations_keep_the_lines_of_the_loss():
    def with_a_collective(params, x):
        return loss(params, lax.psum(x, "j"))  # the line

    f = jax.shard_map(
        value_and_grad(with_a_collective, "i", num_shards=V), mesh=make_mesh((2, 2), ("i", "j")),
        in_specs=(P(), P("i", "j")), out_specs=P(),
    )  # fmt: skip
    x = np.concatenate([X, X], axis=1)
    (call,) = [call for call in jax_ring.explain(f, W, x).collectives if call.name == "psum"]
    lines = pathlib.Path(__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.endswith("# the line"))
    assert f"test_shards.py:{number}:" in call.call_site


def test_auxiliary_data_that_cannot_be_stacked():
    with pytest.raises(TypeError, match=r"value_and_grad: the leaf at \['name'\] of the auxiliary data.*'text'"):
        step(lambda params, x: (loss(params, x), {"name": "text"}), W, X, has_aux=True)


@pytest.mark.one_pair
def test_a_parameter_that_another_axis_divides():
    """The value and the other gradients stay the same over that axis."""
    columns = np.arange(1, 9, dtype=np.float32).reshape(4, 2)

    def of_columns(params, x):
        return (lax.psum((x @ params["columns"]).sum(-1), "j") * params["scale"]).mean()

    specs = {"columns": P(None, "j"), "scale": P()}
    f = sharded(
        value_and_grad(of_columns, "i", num_shards=V), mesh=make_mesh((4, 2), ("i", "j")),
        in_specs=(specs, P("i")), out_specs=(P(), specs),
    )  # fmt: skip
    params = {"columns": columns, "scale": np.float32(2)}
    expected = jax.value_and_grad(lambda p, x: ((x @ p["columns"]).sum(-1) * p["scale"]).mean())(params, X)
    assert_same_bits(f(params, X), expected)


@pytest.mark.one_pair
def test_arguments_that_are_not_cut():
    def of_two(x, scale, params, *, power):
        return loss(params, x["rows"].T, scale.sum()) ** power

    f = sharded(
        lambda x, scale, w: value_and_grad(
            of_two, "i", argnums=-1, num_shards=V, in_axes=({"rows": 1}, None)
        )({"rows": x}, scale, w, power=1),
        mesh=make_mesh((4,)), in_specs=(P(None, "i"), P(), P()), out_specs=P(),
    )  # fmt: skip
    assert_same_bits(f(X.T, np.ones(2, np.float32), W), jax.value_and_grad(loss)(W, X, 2.0))


def test_integer_parameters_and_narrow_ones():
    params = {"w": W["w"].astype(jnp.bfloat16), "n": np.int32(3), "h": np.float16(1)}

    def mixed(p, x):
        # The gradient of h is 2^15 for each shard, and 2^18 for all: more than float16 can hold.
        return (x @ p["w"].astype(np.float32)).mean() * p["n"] + p["h"] * np.float16(2**15)

    def body(p, x):
        value, grads = value_and_grad(mixed, "i", num_shards=V, allow_int=True)(p, x)
        sums = value_and_grad(mixed, "i", num_shards=V, allow_int=True, reduce_gradients=False)(p, x)[1]
        assert grads["n"].dtype == jax.dtypes.float0
        again = sync_gradients(sums, "i")
        assert again["n"].dtype == jax.dtypes.float0
        return value, *[{k: g[k] for k in ("w", "h")} for g in (grads, again)]

    value, grads, again = sharded(body, mesh=make_mesh((2,)), in_specs=(P(), P("i")), out_specs=P())(params, X)
    assert value == (X @ W["w"]).mean() * 3 + 2**15
    assert grads["h"] == 2**15
    assert_same_bits(grads["w"], (X.mean(0) * 3).astype(jnp.bfloat16))
    assert_same_bits(again, grads)


@pytest.mark.one_pair
def test_holomorphic():
    def square(z, x):
        return (z * z * x).sum()

    z = jnp.complex64(1 + 2j)
    got = step(square, z, X.astype(np.complex64), holomorphic=True)
    assert_same_bits(got, jax.value_and_grad(lambda z: square(z, X) / V, holomorphic=True)(z))


def test_shard_index_in_a_jitted_layer_of_two_losses():
    @jax.jit
    def layer(w, x):
        return (w * x).sum() * shard_index()

    def body(w, x):
        first = value_and_grad(layer, "i", num_shards=V)(w, x)
        return first, value_and_grad(lambda w, x: 2 * layer(w, x), "i", num_shards=V)(w, x)

    first, second = sharded(body, mesh=make_mesh((4,)), in_specs=(P(), P("i")), out_specs=P())(np.float32(1), X)
    expected = (X.reshape(V, -1).sum(1) * np.arange(V)).mean()
    assert first == (expected, expected)
    assert second == (2 * expected, 2 * expected)
    with pytest.raises(NameError, match=r"shard_index: there is no shard here.*num_shards"):
        shard_index()


@pytest.mark.one_pair
def test_accumulate_gradients_cuts_a_shard_further():
    f = accumulate_gradients(loss, 2)
    assert_same_bits(step(f, W, X), jax.value_and_grad(loss)(W, X))


@pytest.mark.one_pair
@pytest.mark.parametrize("ranks", [2, 8])
def test_gradients_that_are_reduced_later(ranks):
    optimizer = optax.chain(
        allreduce_gradients("i", order="tree"), optax.MultiSteps(optax.sgd(1.0), 1).gradient_transformation()
    )

    def body(w, x):
        value, sums = value_and_grad(loss, "i", num_shards=V, reduce_gradients=False)(w, x)
        assert isinstance(sums, ShardSums)
        assert sums.num_shards == V
        updates, _ = optimizer.update(sums, optimizer.init(w), w)
        narrow = sync_gradients(sums, "i", wire=jnp.bfloat16) if ranks == V else sync_gradients(sums, "i")
        return value, updates, sync_gradients(sums, "i", mean=False), narrow

    mesh = make_mesh((ranks,))
    value, updates, total, narrow = sharded(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())(W, X)
    expected, grads = jax.value_and_grad(loss)(W, X)
    assert value == expected
    assert_same_bits(updates, jax.tree.map(lambda g: -g, grads))
    assert_same_bits(total, jax.tree.map(lambda g: g * V, grads))
    if ranks != V:
        assert_same_bits(narrow, grads)


@pytest.mark.one_pair
def test_the_value_is_not_rounded_to_a_wire():
    x = X + np.float32(1 / 3)
    value, grads = step(loss, W, x, ranks=V, wire=jnp.bfloat16)
    exact_value, exact = step(loss, W, x, ranks=V)
    assert_same_bits(value, exact_value)
    assert_same_bits(step(loss, W, x, ranks=V, wire=jnp.bfloat16, check_replicas=np.bool_(True)), (value, grads))
    assert any((grads[name] != exact[name]).any() for name in W)


@pytest.mark.one_pair
def test_plain_gradients_along_the_tree():
    values = RNG.standard_normal((8, 33)).astype(np.float32)
    pairs = values
    while len(pairs) > 1:
        pairs = pairs[0::2] + pairs[1::2]
    f = sharded(lambda x: sync_gradients(x[0], "i", order="tree"), out_specs=P())
    assert_same_bits(f(values), pairs[0] / 8)


@pytest.mark.one_pair
def test_reduced_in_backward_with_one_shard_per_rank():
    def hooked(params, x):
        return loss(jax_ring.reduce_in_backward(params, "i", order="tree"), x) + 0 * shard_index()

    got = step(hooked, W, X, ranks=8, check_vma=False, reduced_in_backward=True)
    assert_same_bits(got, jax.value_and_grad(loss)(W, X))


@pytest.mark.one_pair
def test_memory_grows_with_the_logarithm_of_the_number_of_shards():
    num = 1 << 18

    def temporaries(shards):
        f = sharded(
            value_and_grad(lambda w, x: (w * x.sum()).sum(), "i", num_shards=shards), mesh=make_mesh((1,)),
            in_specs=(P(), P("i")), out_specs=P(),
        )  # fmt: skip
        compiled = f.lower(jnp.zeros(num), jnp.zeros((shards, 2))).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * num)

    assert temporaries(64) - temporaries(8) < 3.5  # 3 levels more


@pytest.mark.one_pair
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_shards": 6}, ValueError, r"num_shards=6 is not a multiple of the 4 ranks of 'i'"),
        ({"num_shards": 0}, ValueError, "num_shards must be positive"),
        ({"num_shards": 2.0}, TypeError, "num_shards must be a whole number"),
        ({"num_shards": 8, "order": "rank"}, ValueError, "order='tree'; got order='rank'"),
        ({"num_shards": 8, "wire": jnp.bfloat16}, ValueError, "bfloat16 with 8 shards on 4 ranks.*num_shards=4"),
        ({"num_shards": 8, "wire": "int8"}, ValueError, "order='tree' cannot have wire='int8'"),
        ({"num_shards": 8, "reduced_in_backward": True}, ValueError, "reduced_in_backward.*num_shards=4"),
        ({"num_shards": 8, "in_axes": None}, ValueError, "in_axes cuts no argument into shards"),
        ({"num_shards": 8, "in_axes": (0, 0)}, ValueError, "in_axes has 2 entries for the 1 arguments"),
        ({"num_shards": 8, "in_axes": "0"}, TypeError, "in_axes must be an int"),
        ({"num_shards": 32}, ValueError, r"8 shards of a rank \(32 in all\) do not divide dimension 0"),
        ({"in_axes": None}, ValueError, "in_axes=None is for shards"),
        ({"reduce_gradients": False}, ValueError, "reduce_gradients=False is for shards"),
    ],
)
def test_refused(options, error, message):
    f = sharded(
        lambda w, x: value_and_grad(loss, "i", **options)(w, x),
        mesh=make_mesh((4,)), in_specs=(P(), P("i")), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(error, match=message):
        jax.eval_shape(f, W, X)


@pytest.mark.parametrize("of_axis", [lax.axis_index, lambda axis: lax.psum(shard_index(), axis)])
def test_a_loss_that_asks_for_the_axis_is_refused(of_axis, check_vma):
    with pytest.raises(
        ValueError, match=r"in, the axis i, so that it would depend on the number of ranks.*shard_index"
    ):
        step(lambda w, x: loss(w, x) * of_axis("i"), W, X, check_vma=check_vma)
