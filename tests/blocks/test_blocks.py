"""block_sum, block_max, each_block: what they compute, of which arguments, and what they refuse."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import full_but

import jax_ring
from jax_ring import accumulate_gradients, block_index, block_max, block_sum, each_block, shard_index, value_and_grad

REPLICATED = P()
B = 6
RNG = np.random.default_rng(0)
W = {"up": RNG.standard_normal((B, 5, 7)), "down": RNG.standard_normal((B, 7, 5))}
W = jax.tree.map(lambda w: np.float32(w / 3), W)
X = RNG.standard_normal((3, 5)).astype(np.float32)
V = np.arange(1, B * 3 + 1, dtype=np.float32).reshape(B, 3)  # for sums that are exact
Y = np.arange(6, dtype=np.float32).reshape(2, 3)


def mlp(w, x):
    return jax.nn.gelu(x @ w["up"]) @ w["down"]


def product(w, x):
    return (w * x).sum()


def on_model(fun, *args, ranks=2, out=REPLICATED, check_vma=True):
    """fun of blocks, divided over "m", and of other arguments that are the same on all ranks."""
    specs = (P("m"), *[P()] * (len(args) - 1))
    return sharded(fun, mesh=make_mesh((ranks,), ("m",)), in_specs=specs, out_specs=out, check_vma=check_vma)(*args)


def all_of(total, w, x):
    """A sum over blocks, its gradients, and those of a function of these."""

    def loss(w, x):
        return (jnp.sin(total(w, x)) ** 2).sum()

    def of_gradients(w, x):
        return (jax.grad(loss, 1)(w, x) ** 2).sum()

    value, (dw, dx) = jax.value_and_grad(loss, (0, 1))(w, x)
    second_w, second_x = jax.grad(of_gradients, (0, 1))(w, x)
    return (total(w, x), value, dx, second_x), (dw, second_w)


@functools.cache
def expected_of_mlp():
    """What all cases expect, compiled as one program: one by one, the operations would take far longer."""

    def total(w, x):
        return sum(mlp(jax.tree.map(lambda leaf, i=i: leaf[i], w), x) for i in range(B))

    return jax.device_get(jax.jit(functools.partial(all_of, total))(W, X))


@pytest.mark.parametrize(
    "remat", [pytest.param(True, marks=pytest.mark.one_pair), pytest.param(False, marks=pytest.mark.full)]
)
def test_values_and_derivatives_on_any_number_of_ranks(remat, check_vma):
    def total(w, x):
        return block_sum(mlp, "m", B, remat=remat)(w, x)

    results = [
        on_model(lambda w, x: all_of(total, w, x), W, X, ranks=ranks, out=(P(), P("m")), check_vma=check_vma)
        for ranks in (1, 3)
    ]
    assert_same_bits(*results)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), results[0], expected_of_mlp())


@pytest.mark.one_pair
@pytest.mark.parametrize("remat", [True, False])
def test_a_checkpoint_of_what_is_the_same_on_all_ranks(remat):
    def f(v, x):
        return jax.checkpoint(lambda v, x, positions: v * x + positions * v**2)(v, x, jnp.arange(3.0)).sum()

    def both(v, x):
        return jax.grad(lambda v, x: block_sum(f, "m", B, remat=remat)(v, x), (0, 1))(v, x)

    expected = jax.grad(lambda v, x: sum(f(v[i], x) for i in range(B)), (0, 1))(V, V[0])
    assert_same_bits(on_model(both, V, V[0], out=(P("m"), P())), expected)


def test_what_the_backward_pass_computes_again():
    def counts(remat):
        def loss(w, x):
            return block_sum(lambda w, x: jnp.tanh(x @ w["up"]) @ w["down"], "m", B, remat=remat)(w, x).sum()

        fun = jax.shard_map(jax.grad(loss), mesh=make_mesh((2,), ("m",)), in_specs=(P("m"), P()), out_specs=P("m"))
        text = str(jax.make_jaxpr(fun)(W, X))
        return text.count("dot_general["), text.count(" tanh ")

    # Two products, of which the backward pass needs the first, and the four that transpose them.
    assert counts(remat=True) == (2 + 1 + 4, 2)
    assert counts(remat=False) == (2 + 4, 2)


def test_trees_integers_and_indices(check_vma):
    """One program: f returns a tree, gets integers, flags and a key, is jitted, and asks for its block."""

    @jax.jit
    def f(w, x):
        drawn = jax.random.randint(jax.random.fold_in(x["key"], block_index()), (), 0, 100)
        return {"sum": product(w, x["y"]), "index": block_index() * x["n"], "flag": x["n"] > 1, "drawn": drawn}

    def fun(w, y, n):
        return block_sum(f, "m", B)(w, {"y": y, "n": n, "key": jax.random.key(3)})

    results = [on_model(fun, V, Y, np.int32(2), ranks=ranks, check_vma=check_vma) for ranks in (1, 3)]
    assert_same_bits(*results)
    drawn = sum(jax.random.randint(jax.random.fold_in(jax.random.key(3), i), (), 0, 100) for i in range(B))
    assert_same_bits(
        results[0],
        {"sum": (V[:, None] * Y).sum(), "index": np.int32(30), "flag": np.int32(B), "drawn": np.asarray(drawn)},
    )


def test_with_other_transformations(check_vma):
    """vmap and jax.checkpoint of the sum, a scan over layers, and gradients beside integers."""
    total = block_sum(product, "m", B)

    def scanned(w, x):
        return lax.scan(lambda x, w: (x + jax.checkpoint(total)(w, x), None), x, jnp.stack([w, 2 * w]))[0].sum()

    def fun(w, y, n):
        mapped = jax.vmap(lambda x: total(w, x))(y)
        of_scan = jax.grad(scanned)(w, y)
        counted = jax.grad(lambda w: block_sum(lambda w, x: product(w, x[0]) * x[1], "m", B)(w, (y, n)))(w)
        return mapped, (of_scan, counted)

    mapped, (of_scan, counted) = on_model(fun, V, Y, np.int32(3), out=(P(), P("m")), check_vma=check_vma)
    assert_same_bits(mapped, (V[:, None] * Y).sum((0, 2)))
    np.testing.assert_array_equal(counted, np.tile(3 * Y.sum(0), (B, 1)))

    def by_hand(w, x):
        for factor in (1, 2):
            x = x + (factor * w[:, None] * x).sum()
        return x.sum()

    np.testing.assert_allclose(of_scan, jax.grad(by_hand)(V, Y), rtol=1e-5)


@pytest.mark.parametrize("microbatches", full_but([1, 2], [1]))
def test_inside_of_a_loss_with_shards(microbatches, check_vma):
    """Blocks over "m", shards over "d": the value and the gradients of one device."""
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)

    def loss(w, x):
        return block_sum(lambda w, x: product(w, x[0]) * x[1], "m", B)(w, (x, shard_index() + 1)) / 6

    def on(data, model):
        fun = accumulate_gradients(loss, microbatches) if microbatches > 1 else loss
        return sharded(
            value_and_grad(fun, "d", num_shards=4), mesh=make_mesh((data, model), ("d", "m")),
            in_specs=(P("m"), P("d")), out_specs=(P(), P("m")), check_vma=check_vma,
        )(V, rows)  # fmt: skip

    results = [on(1, 1), on(2, 3), on(4, 2)]
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])
    weights = np.arange(1, 5) / 24 / microbatches
    sums = rows.reshape(4, -1, 3).sum(1)
    np.testing.assert_allclose(results[0][1], np.tile((weights[:, None] * sums).sum(0), (B, 1)), rtol=1e-6)


def test_data_that_other_axes_divide():
    """With vma tracking JAX sums the gradients of blocks that other ranks have as well."""
    f = sharded(
        jax.grad(lambda w, x: block_sum(product, "m", B)(w, x)), mesh=make_mesh((2, 2), ("d", "m")),
        in_specs=(P("m"), P("d")), out_specs=P("m"),
    )  # fmt: skip
    np.testing.assert_array_equal(f(V, Y), np.tile(Y.sum(0), (B, 1)))


@pytest.mark.full
def test_over_several_axes_and_over_a_vmap_axis(check_vma):
    f = sharded(
        lambda w, x: block_sum(product, ("a", "b"), 12)(w, x), mesh=make_mesh((2, 3), ("a", "b")),
        in_specs=(P(("a", "b")), P()), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    both = np.concatenate([V, V])
    assert_same_bits(f(both, Y), (both[:, None] * Y).sum())
    mapped = jax.vmap(jax.value_and_grad(lambda x, w: block_sum(product, "v", B)(w, x)), (None, 0), axis_name="v")
    value, grads = mapped(Y, V.reshape(2, 3, 3))
    assert_same_bits(value, np.full(2, (V[:, None] * Y).sum()))
    np.testing.assert_array_equal(grads, np.tile(V.sum(0), (2, 2, 1)))


def test_narrow_floats_are_added_wide():
    """Of 257 ones, bfloat16 can add 256."""
    ones = np.ones((257 * 2, 1), jnp.bfloat16)
    total = on_model(lambda w, x: block_sum(product, "m", 514)(w, x), ones, np.ones(1, jnp.bfloat16))
    assert total.dtype == jnp.bfloat16
    assert total == jnp.bfloat16(514)


def test_the_maximum_is_a_constant(check_vma):
    def fun(w, x):
        largest = block_max(lambda w, x: (x @ w, block_index()), "m")
        return largest(w, x), jax.grad(lambda x: (largest(w, x)[0] * x.sum(1)).sum())(x)

    (values, index), grads = on_model(fun, V, Y, ranks=3, check_vma=check_vma)
    expected = (V @ Y.T).max(0)
    assert_same_bits((values, index), (expected, np.int32(B - 1)))
    np.testing.assert_array_equal(grads, np.tile(expected[:, None], (1, 3)))


def test_each_block_has_results_of_its_own(check_vma):
    def fun(w, c):
        return each_block(lambda w, c: {"scaled": w * c, "sum": w.sum(), "count": 3}, w, c)

    f = sharded(fun, mesh=make_mesh((3,), ("m",)), in_specs=(P("m"), P("m")), out_specs=P("m"), check_vma=check_vma)
    scale = np.arange(B, dtype=np.float32)
    assert_same_bits(f(V, scale), {"scaled": V * scale[:, None], "sum": V.sum(1), "count": np.full(B, 3, np.int32)})


def test_forward_mode_of_each_block_has_the_rules_of_the_function(check_vma):
    def fun(w):
        return jax.jvp(lambda w: each_block(lambda w: (w**2 + jax.nn.relu(w), 3), w)[0], (w,), (w + 1,))[1]

    expected = jax.jvp(lambda w: w**2 + jax.nn.relu(w), (V - 2,), (V - 1,))[1]  # one element is at the corner
    assert_same_bits(on_model(fun, V - 2, out=P("m"), check_vma=check_vma), expected)


def test_explain_names_the_function_and_the_line():
    mesh = make_mesh((2,), ("m",))

    def fun(w, x):
        return jax.grad(lambda x: block_sum(product, "m", B)(w, x + block_max(product, "m")(w, x)))(x)  # here

    explained = jax_ring.explain(jax.shard_map(fun, mesh=mesh, in_specs=(P("m"), P()), out_specs=P()), V, Y)
    assert {call.name for call in explained.collectives} == {"block_sum", "block_max"}
    lines = pathlib.Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# here"))
    assert all(f"test_blocks.py:{line}" in call.call_site for call in explained.collectives)


REFUSED = {
    "num_blocks must be a positive multiple of the number of ranks, 2, .* equally many blocks; got 5": (
        ValueError, lambda w, x: block_sum(product, "m", 5)(w, x)),
    r"first dimension for the rank's blocks, 4 here \(8 in all\); the one at \['a'\] has shape \(3, 3\)": (
        ValueError, lambda w, x: block_sum(lambda w, x: product(w["a"], x), "m", 8)({"a": w}, x)),
    "block_max: the first leaf must have a first dimension for blocks": (
        ValueError, lambda w, x: block_max(product, "m")(1.0, x)),
    r"each_block: every leaf of blocks .* 3 here \(3 in all\); the one at \[1\] has shape \(\)": (
        ValueError, lambda w, x: each_block(product, w, 2.0)),
    "asks for its index in, the axis m, .* jax_ring.block_index": (
        ValueError, lambda w, x: block_sum(lambda w, x: product(w, x) * lax.axis_index("m"), "m", B)(w, x)),
    r"inputs must be the same on all its ranks, and the one at \[0\] varies over m": (
        ValueError, lambda w, x: block_sum(lambda w, x: product(w, x[1]) + x[0].sum(), "m", B)(w, (w, x))),
    r"f closes over 1 traced arrays of floats, the first of type float32\[2,3\]": (
        TypeError, lambda w, x: block_sum(lambda w, _: product(w, x), "m", B)(w, x)),
    "block_sum: the leaf at the root of the result of f must be an array or a number, got 'text'": (
        TypeError, lambda w, x: block_sum(lambda w, x: "text", "m", B)(w, x)),
    "block_sum: f must be a function": (TypeError, lambda w, x: block_sum(w, "m", B)(w, x)),
    "block_sum: num_blocks must be an integer": (TypeError, lambda w, x: block_sum(product, "m", 2.5)(w, x)),
    "block_sum: unbound axis name 'n'": (NameError, lambda w, x: block_sum(product, "n", B)(w, x)),
    "each_block has no reverse mode": (
        NotImplementedError, lambda w, x: jax.grad(lambda w: each_block(jnp.sum, w).sum())(w)),
    "forward-mode": (TypeError, lambda w, x: jax.jvp(lambda x: block_sum(product, "m", B)(w, x), (x,), (x,))),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_errors(message):
    error, fun = REFUSED[message]
    with pytest.raises(error, match=message):
        on_model(fun, V, Y)


def test_an_index_outside_of_a_block():
    with pytest.raises(NameError, match=r"block_index: there is no block here.*jax\.lax\.axis_index"):
        block_index()
