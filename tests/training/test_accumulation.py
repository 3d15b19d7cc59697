"""accumulate_gradients: arguments that every micro-batch needs whole, other axes, random keys, integer parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import accumulate_gradients, ring_psum, value_and_grad

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

NUM = 4
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 3)).astype(np.float32)
Y = RNG.standard_normal(16).astype(np.float32)
W = {"w": RNG.standard_normal(3).astype(np.float32), "b": np.float32(0.5)}


def loss(params, x, y, scale=1.0, *, step=0, squared=True):
    difference = x @ params["w"] + params["b"] - y
    per_example = difference**2 if squared else jnp.abs(difference)
    return scale * per_example.mean() + step


def assert_close(actual, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), actual, expected)


def accumulated(fun=loss, **options):
    return jax.value_and_grad(accumulate_gradients(fun, NUM, **options))


def micro_batches(x):
    return np.asarray(x).reshape(NUM, -1, *np.shape(x)[1:])


# ---- Whole arguments ------------------------------------------------------------------------------------------------


@pytest.mark.one_pair
def test_unbatched_positional_arguments():
    got = jax.jit(accumulated(in_axes=(0, 0, None)))(W, X, Y, jnp.float32(3))
    assert_close(got, jax.value_and_grad(loss)(W, X, Y, 3.0))


@pytest.mark.one_pair
def test_keyword_arguments_are_passed_whole():
    expected = jax.value_and_grad(loss)(W, X, Y, 3.0, step=2, squared=False)
    assert_close(accumulated()(W, X, Y, scale=3.0, step=jnp.int32(2), squared=False), expected)  # a Python boolean
    traced = jax.jit(lambda scale, step: accumulated()(W, X, Y, scale=scale, step=step, squared=False))
    assert_close(traced(3.0, 2), expected)


@pytest.mark.one_pair
def test_arguments_that_are_not_arrays():
    def with_text(params, x, activation, y):
        return ((getattr(jnp, activation["name"])(x @ params["w"]) - y) ** 2).mean()

    got = accumulated(with_text, in_axes=(0, None, 0))(W, X, {"name": "tanh", "unused": None}, Y)
    assert_close(got, jax.value_and_grad(with_text)(W, X, {"name": "tanh"}, Y))


@pytest.mark.one_pair
def test_axes_of_parts_of_an_argument():
    def of_batch(params, batch, more):
        return loss(params, batch["x"].T, batch["y"], batch["scale"][0]) + 0 * more[0].sum()

    batch = {"x": X.T, "y": Y, "scale": (jnp.float32(3), "text", None)}
    axes = ({"x": 1, "y": 0, "scale": None}, (-2, None))
    got = accumulated(of_batch, in_axes=axes)(W, batch, (X, None))
    assert_close(got, jax.value_and_grad(of_batch)(W, batch, (X, None)))
    as_list = accumulated(of_batch, in_axes=list(axes))(W, batch, (X, None))
    assert_same_bits(as_list, got)


@pytest.mark.one_pair
def test_in_a_data_parallel_step(check_vma):
    f = sharded(
        lambda w, x, y, scale, step: value_and_grad(accumulate_gradients(loss, 2, in_axes=(0, 0, None)), "i")(
            w, x, y, scale, step=step
        ),
        mesh=make_mesh((2,)), in_specs=(P(), P("i"), P("i"), P(), P()), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    assert_close(f(W, X, Y, 3.0, 2), jax.value_and_grad(loss)(W, X, Y, 3.0, step=2))


@pytest.mark.one_pair
def test_batched_arguments_have_the_bits_of_a_scan():
    def scan(w):
        def step(total, batch):
            value, grads = jax.value_and_grad(loss)(w, *batch)
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, w)
        total, values = lax.scan(step, zeros, (micro_batches(X), micro_batches(Y)))
        return values.mean(), jax.tree.map(lambda t: t / NUM, total)

    assert_same_bits(jax.jit(accumulated())(W, X, Y), jax.jit(scan)(W))
    assert_same_bits(jax.jit(accumulated(in_axes=(0, 0)))(W, X, Y), jax.jit(scan)(W))


@pytest.mark.one_pair
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "no_jit"])
def test_data_and_whole_arguments_have_no_gradient(jit):
    f = jit(accumulate_gradients(loss, NUM, in_axes=(0, 0, None)))
    for of_scale, place in (
        (lambda s: f(W, X, Y, s), r"\[2\]"),
        (lambda s: f(W, X, Y, 1.0, step=s), r"\['step'\]"),
        (lambda s: f(W, X, s * Y, 1.0), r"\[1\]"),
    ):
        for differentiate in (jax.grad(of_scale), lambda s, fun=of_scale: jax.jvp(fun, (s,), (s,))):
            with pytest.raises(NotImplementedError, match=rf"the argument at {place}, of type ~?f.*first argument"):
                differentiate(2.0)


@pytest.mark.one_pair
def test_only_parameters_can_be_differentiated_in_a_step(check_vma):
    f = value_and_grad(accumulate_gradients(loss, 2), "i", argnums=1)
    with pytest.raises(NotImplementedError, match=r"the argument at \[0\], of type float32\[8,3\]"):
        sharded(f, mesh=make_mesh((2,)), in_specs=(P(), P("i"), P("i")), out_specs=P("i"), check_vma=check_vma)(W, X, Y)


@pytest.mark.one_pair
def test_what_the_loss_closes_over_has_no_gradient():
    def of_scale(s):
        return accumulate_gradients(lambda *args: loss(*args, s), NUM)(W, X, Y)

    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"accumulate_gradients: .*closes over.*first argument"):
        jax.grad(of_scale)(2.0)


@pytest.mark.one_pair
def test_auxiliary_data_have_no_gradient():
    def with_aux(w, x, y):
        return loss(w, x, y), {"norm": (w["w"] ** 2).sum(), "count": len(x), "rows": x}

    f = accumulate_gradients(with_aux, NUM, has_aux=True)

    def of_norm(w, stopped=lambda x: x):
        value, aux = jax.jit(f)(w, X, Y)
        return value + stopped(aux["norm"]).mean()

    with pytest.raises(NotImplementedError, match=r"the leaf at \['norm'\] of the auxiliary data.*to the value"):
        jax.grad(of_norm)(W)
    assert_close(jax.grad(lambda w: of_norm(w, lax.stop_gradient))(W), jax.grad(loss)(W, X, Y))
    (_, aux), grads = jax.value_and_grad(f, has_aux=True)(W, X, Y)
    assert_close((aux["rows"], grads), (micro_batches(X), jax.grad(loss)(W, X, Y)))


@pytest.mark.parametrize("wrapped", [jax.jit, jax.checkpoint])
def test_jitted_or_rematerialised(wrapped):
    f = wrapped(accumulate_gradients(loss, NUM))
    assert_close(jax.value_and_grad(lambda w: f(w, X, Y, step=1))(W), jax.value_and_grad(loss)(W, X, Y, step=1))
    of_product = jax.grad(lambda w: jax.grad(f)(w, X, Y)["w"] @ Y[:3])
    assert_close(of_product(W), jax.grad(lambda w: jax.grad(loss)(w, X, Y)["w"] @ Y[:3])(W))


# ---- Random keys ----------------------------------------------------------------------------------------------------


def dropped(params, x, y, key):
    """`key` is one key, or an array of one."""
    mask = jax.random.bernoulli(key.reshape(-1)[0], 0.5, x.shape)
    return loss(params, x * mask, y), mask


@pytest.mark.one_pair
def test_one_key_gives_all_micro_batches_the_same_masks():
    key = jax.random.key(1)
    (value, masks), grads = accumulated_with_aux(in_axes=(0, 0, None))(W, X, Y, key)
    for mask in masks:
        assert_same_bits(mask, jax.random.bernoulli(key, 0.5, mask.shape))
    by_keyword = accumulated_with_aux()(W, X, Y, key=key)
    assert_same_bits(by_keyword, ((value, masks), grads))


def accumulated_with_aux(**options):
    return jax.value_and_grad(accumulate_gradients(dropped, NUM, has_aux=True, **options), has_aux=True)


@pytest.mark.one_pair
def test_a_key_for_each_micro_batch():
    keys = jax.random.split(jax.random.key(1, impl="rbg"), NUM)
    (value, masks), grads = jax.jit(accumulated_with_aux())(W, X, Y, keys)
    each = [
        jax.value_and_grad(dropped, has_aux=True)(W, *batch)
        for batch in zip(micro_batches(X), micro_batches(Y), keys, strict=True)
    ]
    assert len({mask.tobytes() for mask in np.asarray(masks)}) == NUM
    np.testing.assert_array_equal(masks, [mask for (_, mask), _ in each])
    assert_close(value, np.mean([value for (value, _), _ in each]))
    assert_close(grads, jax.tree.map(lambda *g: np.mean(g, 0), *(g for _, g in each)))


@pytest.mark.one_pair
def test_masks_of_their_own_on_each_rank(check_vma):
    """The example of docs/training.md."""

    def loss(params, x, y, keys, *, scale):
        kept = jax.random.bernoulli(keys[0], 0.9, x.shape)
        return scale * ((x * kept @ params["w"] - y) ** 2).mean()

    def step(params, x, y, key):
        key = jax.random.fold_in(key, lax.axis_index("data"))
        step = value_and_grad(accumulate_gradients(loss, NUM), "data")
        return step(params, x, y, jax.random.split(key, NUM), scale=128.0)

    key, mesh = jax.random.key(5), make_mesh((2,), ("data",))
    got = sharded(
        step, mesh=mesh, in_specs=(P(), P("data"), P("data"), P()), out_specs=P(), check_vma=check_vma
    )(W, X, Y, key)  # fmt: skip

    def whole(params):
        keys = jnp.concatenate([jax.random.split(jax.random.fold_in(key, rank), NUM) for rank in range(2)])
        parts = zip(X.reshape(2 * NUM, 2, 3), Y.reshape(2 * NUM, 2), keys[:, None], strict=True)
        return jnp.stack([loss(params, *part, scale=128.0) for part in parts]).mean()

    assert_close(got, jax.value_and_grad(whole)(W))


# ---- Integer parameters ---------------------------------------------------------------------------------------------


@pytest.mark.one_pair
def test_integer_parameters(check_vma):
    key = jax.random.key(0)
    params = W | {"table": np.arange(3), "key": key, "flag": np.array(True)}

    def of_table(params, x, y):
        return loss(params, x[:, params["table"]] * params["flag"], y) + 0 * jax.random.normal(params["key"])

    (value, grads), expected = (
        f(params, X, Y)
        for f in (
            jax.value_and_grad(accumulate_gradients(of_table, NUM), allow_int=True),
            jax.value_and_grad(of_table, allow_int=True),
        )
    )
    assert_close((value, grads["w"], grads["b"]), (expected[0], expected[1]["w"], expected[1]["b"]))
    for name in ("table", "key", "flag"):
        assert (grads[name].dtype, grads[name].shape) == (jax.dtypes.float0, expected[1][name].shape)
    with pytest.raises(TypeError, match="int"):
        accumulated(of_table)(params, X, Y)

    def in_shard_map(params, x, y):
        own = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params) if check_vma else params
        value, grads = jax.value_and_grad(accumulate_gradients(of_table, 2), allow_int=True)(own, x, y)
        return lax.pmean((value, grads["w"]), "i")

    f = sharded(in_shard_map, mesh=make_mesh((2,)), in_specs=(P(), P("i"), P("i")), out_specs=P(), check_vma=check_vma)
    assert_close(f(params, X, Y), (value, grads["w"]))


# ---- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_pair
@pytest.mark.parametrize(
    ("in_axes", "message"),
    [
        ((0,), r"in_axes has 1 entries for the 2 arguments after the parameters"),
        ((None, 0, 0), r"in_axes has 3 entries for the 2 arguments after the parameters"),
        ((0, {"y": 0}), r"in_axes\[1\] is \{'y': 0\}, which is not a prefix of the argument"),
        (None, "in_axes splits no argument"),
        (
            (1, 0),
            r"4 micro-batches do not divide dimension 1 of the argument at \[0\] after the first, of shape \(16, 3\)",
        ),
        ((2, 0), r"in_axes\[0\]: 2 is out of bounds for an array of dimension 2"),
        (-3, r"in_axes\[0\]: -3 is out of bounds for an array of dimension 2"),
    ],
    ids=str,
)
def test_axes_that_do_not_fit(in_axes, message):
    with pytest.raises(ValueError, match=f"accumulate_gradients: {message}"):
        accumulate_gradients(loss, NUM, in_axes=in_axes)(W, X, Y)


@pytest.mark.one_pair
@pytest.mark.parametrize("number", [2.0, "2", None])
def test_a_number_of_micro_batches_that_is_no_integer(number):
    with pytest.raises(TypeError, match="accumulate_gradients: num_microbatches must be an integer, got"):
        accumulate_gradients(lambda params, x: x.sum(), number)


@pytest.mark.one_pair
@pytest.mark.parametrize("in_axes", ["x", (0, 1.0), (True, 0)], ids=str)
def test_axes_of_wrong_types(in_axes):
    with pytest.raises(TypeError, match="in_axes must be an int, None, or a tuple"):
        accumulate_gradients(loss, NUM, in_axes=in_axes)


@pytest.mark.one_pair
@pytest.mark.parametrize("scalar", [3.0, np.float32(3), jax.random.key(0)], ids=["float", "array", "key"])
def test_scalars_must_be_whole(scalar):
    with pytest.raises(
        ValueError, match=r"the argument at \[2\] after the first is a scalar.*None in in_axes.*keyword argument"
    ):
        accumulate_gradients(loss, NUM)(W, X, Y, scalar)


@pytest.mark.one_pair
def test_without_data():
    with pytest.raises(ValueError, match="in_axes splits no argument"):
        accumulate_gradients(loss, NUM)(W, x=X, y=Y)


@pytest.mark.one_pair
@pytest.mark.parametrize(
    "fun", [jax.value_and_grad(loss), jax.grad(loss), lambda params, x, y: y, lambda params, x, y: [y.mean()]]
)
def test_what_is_no_loss(fun):
    with pytest.raises(TypeError, match=r"fun must return a scalar.*value_and_grad\(accumulate_gradients\(loss, 2\)"):
        accumulate_gradients(fun, NUM)(W, X, Y)


@pytest.mark.one_pair
def test_auxiliary_data_that_cannot_be_stacked():
    f = accumulate_gradients(lambda *args: (loss(*args), {"name": "text"}), NUM, has_aux=True)
    with pytest.raises(TypeError, match=r"accumulate_gradients: the leaf at \['name'\] of the auxiliary data.*'text'"):
        f(W, X, Y)


def test_the_mean_over_all_tokens(check_vma):
    """As the docstring has it. One rank has no token, and micro-batches have unlike numbers of them."""
    mask = (np.arange(16) % 3 > 0) * (np.arange(16) < 12).astype(np.float32)

    def errors(params, x):
        return (x @ params["w"] + params["b"]) ** 2

    def step(params, x, mask):
        parts = lax.axis_size("i") * 2
        count = ring_psum(mask.sum(), "i")

        def of_tokens(params, x, mask, count):
            return parts * (mask * errors(params, x)).sum() / count

        return value_and_grad(accumulate_gradients(of_tokens, 2, in_axes=(0, 0, None)), "i")(params, x, mask, count)

    f = sharded(
        step, mesh=make_mesh((4,)), in_specs=(P(), P("i"), P("i")), out_specs=P(), check_vma=check_vma
    )  # fmt: skip
    expected = jax.value_and_grad(lambda params: (mask * errors(params, X)).sum() / mask.sum())(W)
    assert_close(f(W, X, mask), expected)
