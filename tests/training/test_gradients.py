"""Gradients of replicated parameters: reduced once, in the backward pass, accumulated, clipped and weighted."""

import contextlib
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SHARDED, TARGET, assert_same_bits, compiled_text, make_mesh, run_python, sharded, without_paths
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import (
    accumulate_gradients,
    allreduce_gradients,
    feedback_specs,
    grad,
    reduce_in_backward,
    ring_pmean,
    ring_psum,
    sync_gradients,
    sync_with_feedback,
    value_and_grad,
    weighted_pmean,
    zero,
)
from jax_ring.training.wire import reduced_by

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

RANKS, WIDTH, LAYERS = 4, 16, 3
MESH = make_mesh((RANKS,))
RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, WIDTH)).astype(np.float32)
PARAMS = {
    "layers": (RNG.standard_normal((LAYERS, WIDTH, WIDTH)) / 4).astype(np.float32),
    "bias": RNG.standard_normal((LAYERS, WIDTH)).astype(np.float32),
    "out": RNG.standard_normal(WIDTH).astype(np.float32),
}
REPLICATED = P()


def loss(params, x, *, hook=lambda p: p, layers=1):
    """A mean over the examples; `hook` is applied to parameters at their use."""
    for i in range(layers):
        layer = hook({"w": params["layers"][i], "b": params["bias"][i]})
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return ((x @ hook(params["out"])) ** 2).mean()


def scanned_loss(params, x, *, hook=lambda p: p):
    def layer(x, params):
        params = hook(params)
        return jnp.tanh(x @ params["w"] + params["b"]), None

    x, _ = lax.scan(layer, x, {"w": params["layers"], "b": params["bias"]})
    return ((x @ hook(params["out"])) ** 2).mean()


deep_loss = functools.partial(loss, layers=LAYERS)


def assert_close(actual, expected, rtol=2e-6):
    """Asserts equality up to rtol of the norm, which covers the rounding of sums of a few dozen terms."""
    chex.assert_trees_all_equal_shapes(actual, expected)
    norm = np.linalg.norm
    chex.assert_trees_all_equal_comparator(
        lambda a, e: norm(np.subtract(a, e)) <= rtol * norm(e),
        lambda a, e: f"norm of the difference {norm(np.subtract(a, e))}, norm {norm(e)}, {rtol=}",
        actual,
        expected,
    )


# Not at import, which every worker and rank does.
@functools.cache
def of_one_device():
    return jax.jit(jax.value_and_grad(loss))(PARAMS, X)


@functools.cache
def of_one_device_deep():
    return jax.jit(jax.value_and_grad(deep_loss))(PARAMS, X)


def on_ranks(fun, check_vma, out_specs=REPLICATED, in_specs=(REPLICATED, SHARDED), mesh=MESH):
    return sharded(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


# ---- value_and_grad -------------------------------------------------------------------------------------------------


@functools.cache
def plain(impl, check_vma, function=loss):
    """The HLO of value_and_grad(function), and its value and gradients."""
    compiled = on_ranks(reduced_by(impl)(value_and_grad(function, "i")), check_vma).lower(PARAMS, X).compile()
    return without_paths(compiled.as_text()), compiled(PARAMS, X)


def test_is_the_gradient_of_the_whole_batch(check_vma):
    (ring_text, ring), (lax_text, lax_) = plain("ring", check_vma), plain("lax", check_vma)
    assert_close(ring, of_one_device())
    assert_same_bits(ring, lax_)
    assert ring_text.count(f'"{TARGET}"') == 1
    assert TARGET not in lax_text
    assert "all-reduce" not in ring_text


@pytest.mark.one_pair
def test_grad_returns_no_value(check_vma):
    assert_same_bits(on_ranks(grad(loss, "i"), check_vma)(PARAMS, X), plain("ring", check_vma)[1][1])


def test_already_reduced_loss(check_vma):
    f = on_ranks(value_and_grad(lambda p, x: lax.pmean(loss(p, x), "i"), "i"), check_vma)
    assert_close(f(PARAMS, X), of_one_device())


@pytest.mark.one_pair
def test_partly_reduced_loss(check_vma):
    def with_penalty(params, x):
        return loss(params, x) + ring_psum((params["out"] ** 2).sum() / RANKS, "i")

    expected = jax.value_and_grad(lambda p, x: loss(p, x) + (p["out"] ** 2).sum())(PARAMS, X)
    assert_close(on_ranks(value_and_grad(with_penalty, "i"), check_vma)(PARAMS, X), expected)


@pytest.mark.one_pair
def test_several_axes(check_vma):
    mesh = make_mesh((2, 2), ("a", "b"))
    f = on_ranks(
        value_and_grad(loss, ("a", "b")), check_vma, mesh=mesh, in_specs=(P(), P(("a", "b")))
    )  # fmt: skip
    assert_close(f(PARAMS, X), of_one_device())
    # The loss itself reduces over one of the axes.
    half = on_ranks(
        value_and_grad(lambda p, x: lax.pmean(loss(p, x), "a"), ("a", "b")),
        check_vma, mesh=mesh, in_specs=(P(), P(("a", "b"))),
    )  # fmt: skip
    assert_close(half(PARAMS, X), of_one_device())


def test_with_a_model_parallel_axis(check_vma):
    """Data-parallel over one axis. The columns of a weight are sharded over the other, and so is their gradient."""
    mesh = make_mesh((2, 2), ("data", "model"))
    w = RNG.standard_normal((WIDTH, 6)).astype(np.float32)

    def columns(w, x):
        return ((x @ w) ** 2).mean()

    specs = (P(None, "model"), P("data"))
    f = on_ranks(grad(columns, "data"), check_vma, mesh=mesh, in_specs=specs, out_specs=P(None, "model"))
    # Each model-parallel rank takes the mean over its half of the columns.
    assert_close(f(w, X), 2 * jax.grad(columns)(w, X))


@pytest.mark.one_pair
def test_argnums_and_aux(check_vma):
    def fun(x, w, b, *, power):
        y = x @ w + b
        return (y**power).mean(), {"count": jnp.arange(3), "largest": y.max()[None]}

    w, b = PARAMS["layers"][0], PARAMS["bias"][0]
    (value, aux), grads = on_ranks(
        lambda x, w, b: value_and_grad(fun, "i", argnums=(1, -1), has_aux=True)(x, w, b, power=2),
        check_vma, in_specs=(P("i"), P(), P()), out_specs=((P(), {"count": P(), "largest": P("i")}), P()),
    )(X, w, b)  # fmt: skip
    (expected_value, _), expected = jax.value_and_grad(fun, (1, 2), has_aux=True)(X, w, b, power=2)
    assert_close((value, grads), (expected_value, expected))
    np.testing.assert_allclose(aux["largest"], (X @ w + b).reshape(RANKS, -1).max(1), rtol=1e-6)
    only, aux = on_ranks(
        lambda x, w, b: grad(fun, "i", argnums=1, has_aux=True)(x, w, b, power=2),
        check_vma, in_specs=(P("i"), P(), P()), out_specs=(P(), {"count": P(), "largest": P("i")}),
    )(X, w, b)  # fmt: skip
    assert_same_bits(only, grads[0])


@pytest.mark.one_pair
def test_unused_parameters_have_zero_gradients(check_vma):
    params = PARAMS | {"unused": np.ones(3, np.float32)}
    _, grads = on_ranks(value_and_grad(loss, "i"), check_vma)(params, X)
    np.testing.assert_array_equal(grads["unused"], np.zeros(3))


@pytest.mark.one_pair
def test_the_value_is_not_rounded_for_the_wire(check_vma):
    value, grads = on_ranks(value_and_grad(loss, "i", wire=jnp.bfloat16), check_vma)(PARAMS, X)
    assert_same_bits(value, plain("ring", check_vma)[1][0])
    chex.assert_trees_all_equal_dtypes(grads, PARAMS)
    assert_close(grads, of_one_device()[1], rtol=2**-7)


REDUCTIONS = {
    "sync_gradients": lambda g: sync_gradients(g, "i"),
    "sync_with_feedback": lambda g: sync_with_feedback(g, jax.tree.map(jnp.zeros_like, g), "i", wire=None)[0],
    "allreduce_gradients": lambda g: allreduce_gradients("i").update(g, optax.EmptyState())[0],
    "zero": lambda g: zero.sharded_optimizer(optax.sgd(-1.0), "i").update(g, optax.sgd(-1.0).init(g), g)[0],
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_plain_jax_grad_is_refused_or_correct(name, check_vma):
    f = on_ranks(lambda p, x: REDUCTIONS[name](jax.grad(loss)(p, x)), check_vma)
    if check_vma:
        with pytest.raises(ValueError, match=r"already the same on all ranks of \['i'\].*jax_ring\.value_and_grad"):
            f(PARAMS, X)
    else:
        assert_close(f(PARAMS, X), of_one_device()[1])


@pytest.mark.one_pair
@pytest.mark.parametrize("pmean", [ring_pmean, lax.pmean])
def test_pmean_after_plain_jax_grad(pmean, check_vma):
    """ring_pmean must do what lax.pmean does, although the result is wrong: the gradient is already summed.

    It cannot raise, because the type of a summed gradient is that of any replicated value, such as a metric or a
    reduced loss, whose mean is the value itself. It warns instead, and raises if jax_auto_pcast is off.
    """
    warns = pytest.warns(UserWarning, match=r"already the same on all 4 ranks.*jax_ring\.value_and_grad")
    f = on_ranks(lambda p, x: pmean(jax.grad(loss)(p, x), "i"), check_vma)
    g = on_ranks(lambda p, x: pmean(lax.pmean(x.sum(), "i"), "i"), check_vma)
    with warns if check_vma and pmean is ring_pmean else contextlib.nullcontext():
        summed_twice, mean = f(PARAMS, X), g(PARAMS, np.ones_like(X))
    assert_close(summed_twice, jax.tree.map(lambda g: RANKS * g if check_vma else g, of_one_device()[1]))
    assert mean == X.size / RANKS
    if check_vma:
        jax.config.update("jax_auto_pcast", False)
        try:
            with pytest.raises(ValueError):  # noqa: PT011, the message is JAX's
                on_ranks(lambda p, g: pmean(g, "i"), True, in_specs=(P(), P()))(PARAMS, X)
        finally:
            jax.config.update("jax_auto_pcast", True)


@pytest.mark.one_pair
def test_unknown_options_are_refused_at_once():
    with pytest.raises(TypeError, match="bucket_size"):
        value_and_grad(loss, "i", bucket_size=3)
    with pytest.raises(ValueError, match="order must be one of"):
        grad(loss, "i", order="mpi")


# ---- In the backward pass -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "impl"),
    [(deep_loss, "ring"), (scanned_loss, "ring"), (scanned_loss, "lax")],
    ids=["unrolled", "scanned", "scanned-lax"],
)
def test_reduced_in_backward(function, impl, check_vma):
    hooked = functools.partial(function, hook=lambda p: reduce_in_backward(p, "i"))
    f = on_ranks(reduced_by(impl)(value_and_grad(hooked, "i", reduced_in_backward=True)), check_vma)
    assert_close(f(PARAMS, X), of_one_device_deep())
    assert_same_bits(f(PARAMS, X), plain("ring", check_vma, function)[1])


def test_reduced_in_backward_of_a_reduced_loss(check_vma):
    hooked = functools.partial(loss, hook=lambda p: reduce_in_backward(p, "i"))
    f = on_ranks(value_and_grad(lambda p, x: lax.pmean(hooked(p, x), "i"), "i", reduced_in_backward=True), check_vma)
    assert_close(f(PARAMS, X), of_one_device())


@pytest.mark.one_pair
def test_a_missing_hook_is_correct_with_vma_tracking():
    hooked = functools.partial(loss, hook=lambda p: reduce_in_backward(p, "i") if isinstance(p, dict) else p)
    f = on_ranks(value_and_grad(hooked, "i", reduced_in_backward=True), True)
    assert_close(f(PARAMS, X), of_one_device())


def test_reduced_under_remat(check_vma):
    hooked = functools.partial(scanned_loss, hook=lambda p: reduce_in_backward(p, "i"))
    f = on_ranks(value_and_grad(jax.checkpoint(hooked), "i", reduced_in_backward=True), check_vma)
    assert_close(f(PARAMS, X), of_one_device_deep())


@pytest.mark.one_pair
def test_reducing_twice_is_refused():
    hooked = functools.partial(loss, hook=lambda p: reduce_in_backward(p, "i"))
    with pytest.raises(ValueError, match="pass reduced_in_backward=True"):
        on_ranks(value_and_grad(hooked, "i"), True)(PARAMS, X)


def order_of_matmuls_and_reductions(text: str) -> str:
    """The schedule of the compiled program: m for a matrix product, r for a reduction."""
    assert "is_scheduled=true" in text
    return "".join(
        "r" if f'"{TARGET}"' in line else "m" for line in text.splitlines() if f'"{TARGET}"' in line or " dot(" in line
    )


def test_reductions_are_among_the_products(check_vma):
    """Hooked reductions are scheduled among the products of the backward pass; plain ones follow all products."""
    hooked = functools.partial(deep_loss, hook=lambda p: reduce_in_backward(p, "i"))
    f = on_ranks(value_and_grad(hooked, "i", reduced_in_backward=True), check_vma)
    at_use = order_of_matmuls_and_reductions(compiled_text(f, PARAMS, X))
    at_end = order_of_matmuls_and_reductions(plain("ring", check_vma, deep_loss)[0])
    assert re.fullmatch("m+r", at_end)
    assert at_use.count("r") == LAYERS + 2  # the layers, `out`, and the value
    assert at_use.count("m") == at_end.count("m")
    before_the_last = at_use.rstrip("r")
    assert before_the_last.count("r") >= LAYERS - 1


def test_reductions_in_a_scan_are_in_its_loop(check_vma):
    hooked = functools.partial(scanned_loss, hook=lambda p: reduce_in_backward(p, "i"))
    f = on_ranks(value_and_grad(hooked, "i", reduced_in_backward=True), check_vma)
    in_loops = sum(
        f'"{TARGET}"' in computation
        for computation in re.split(r"\n\n", compiled_text(f, PARAMS, X))
        if not computation.startswith("ENTRY")
    )
    assert in_loops == 1


# ---- Micro-batches --------------------------------------------------------------------------------------------------


@pytest.mark.one_pair
@pytest.mark.parametrize("num", [1, 4])
def test_accumulated(num, check_vma):
    f = on_ranks(value_and_grad(accumulate_gradients(loss, num), "i"), check_vma)
    assert_close(f(PARAMS, X), of_one_device())
    loops, entry = compiled_text(f, PARAMS, X).split("\nENTRY")
    assert TARGET not in loops
    assert entry.count(f'"{TARGET}"') == 1


@pytest.mark.one_pair
def test_accumulated_without_a_mesh():
    f = jax.jit(jax.value_and_grad(accumulate_gradients(loss, 4)))
    assert_close(f(PARAMS, X), of_one_device())
    assert_close(accumulate_gradients(loss, 4)(PARAMS, X), of_one_device()[0])


@pytest.mark.one_pair
def test_accumulated_aux():
    fun = accumulate_gradients(lambda p, x, y: (loss(p, x), y.sum()), 4, has_aux=True)
    (value, aux), grads = jax.value_and_grad(fun, has_aux=True)(PARAMS, X, np.arange(8))
    assert_close((value, grads), of_one_device())
    np.testing.assert_array_equal(aux, [1, 5, 9, 13])


@pytest.mark.one_pair
def test_accumulated_in_float32():
    """512 micro-batches add 1/512 each. In bfloat16, the sum would stop growing after 256 of them."""
    w = jnp.ones((), jnp.bfloat16)
    assert jax.grad(accumulate_gradients(lambda w, x: (w * x).mean(), 512))(w, jnp.ones(512, jnp.bfloat16)) == 1


@pytest.mark.one_pair
def test_accumulation_uses_less_memory():
    wide = jax.tree.map(jnp.asarray, PARAMS)
    x = np.zeros((1 << 14, WIDTH), np.float32)

    def temporaries(fun):
        return jax.jit(jax.grad(fun)).lower(wide, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(accumulate_gradients(loss, 16)) < temporaries(loss) / 4


@pytest.mark.one_pair
def test_accumulate_rejects_invalid_sizes():
    with pytest.raises(ValueError, match=r"3 micro-batches do not divide .* of shape \(32, 16\)"):
        accumulate_gradients(loss, 3)(PARAMS, X)
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        accumulate_gradients(loss, 0)


# ---- optax ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.one_pair
def test_the_norm_of_the_mean_is_clipped(check_vma):
    limit = 0.5 * float(optax.tree.norm(of_one_device()[1]))
    optimizer = optax.chain(allreduce_gradients("i"), optax.clip_by_global_norm(limit), optax.sgd(1.0))

    def step(params, x):
        local = jax.tree.map(lambda p: lax.pcast(p, "i", to="varying"), params) if check_vma else params
        updates, _ = optimizer.update(jax.grad(loss)(local, x), optimizer.init(params), params)
        return updates

    updates = on_ranks(step, check_vma)(PARAMS, X)
    expected, _ = optax.clip_by_global_norm(limit).update(of_one_device()[1], optax.EmptyState())
    assert_close(updates, jax.tree.map(lambda g: -g, expected))
    assert float(optax.tree.norm(updates)) == pytest.approx(limit, rel=1e-6)


@pytest.mark.one_pair
def test_error_feedback_in_optax(check_vma):
    """Many steps with constant gradients, with and without error feedback.

    The figures are in benchmarks/LAB_BOOK.md: errors against float64, relative to the mean magnitude of the gradient.
    """
    ranks, steps = 8, 64
    x = np.random.default_rng(0).standard_normal((ranks, 1000)).astype(np.float32)
    exact = x.astype(np.float64).mean(0)
    mesh = make_mesh((ranks,))

    def mean_of_steps(*num_steps, **options):
        optimizer = optax.chain(allreduce_gradients("i", **options), optax.trace(1.0))  # trace sums the updates
        specs = feedback_specs(jax.eval_shape(optimizer.init, exact), "i")
        state = on_ranks(optimizer.init, check_vma, in_specs=REPLICATED, out_specs=specs, mesh=mesh)(x[0])
        common = {"mesh": mesh, "in_specs": (SHARDED, specs), "out_specs": (REPLICATED, specs)}
        step = on_ranks(lambda x, state: optimizer.update(x[0], state), check_vma, **common)
        sums = []
        for _ in range(max(num_steps)):
            total, state = step(x, state)
            sums.append(np.asarray(total, np.float64))
        return [np.abs(sums[n - 1] / n - exact).mean() / np.abs(exact).mean() for n in num_steps]

    rounded = {"wire": jnp.bfloat16}
    assert mean_of_steps(1) == pytest.approx([5e-8], rel=0.2)
    assert mean_of_steps(1, steps, **rounded) == pytest.approx([2.2e-3, 2.2e-3], rel=0.05)
    assert mean_of_steps(1, 8, steps, error_feedback=True, **rounded) == pytest.approx(
        [2.2e-3, 6.6e-4, 4.3e-4], rel=0.05
    )


@pytest.mark.full
@pytest.mark.one_pair
def test_optax_is_needed_only_when_used():
    result = run_python(
        "import sys\nsys.modules['optax'] = None\nimport jax_ring\n"
        "try:\n    jax_ring.allreduce_gradients('i')\nexcept ImportError as error:\n    print(error)"
    )
    assert "optax is not installed: pip install optax" in result.stdout, result.stderr


@pytest.mark.one_pair
def test_allreduce_gradients_refuses_wrong_options():
    with pytest.raises(ValueError, match="order must be one of"):
        allreduce_gradients("i", order="mpi")
    with pytest.raises(ValueError, match="error_feedback corrects the rounding to wire, and wire is None"):
        allreduce_gradients("i", error_feedback=True)


# ---- Uneven batches -------------------------------------------------------------------------------------------------


@pytest.mark.one_pair
def test_weighted_mean_of_uneven_batches(check_vma):
    """Ranks have 0 to 8 examples, padded to 8. The value and gradients equal those of the whole batch."""
    counts = np.array([8, 1, 0, 5])
    mask = (np.arange(8) < counts[:, None]).reshape(-1)

    def masked(params, x, mask):
        losses = jax.vmap(lambda row: loss(params, row[None]))(x)
        local_mean = jnp.where(mask, losses, 0).sum() / mask.sum()  # NaN on rank 2
        return reduced_by("ring" if check_vma else "lax")(weighted_pmean)(local_mean, mask.sum(), "i")

    f = on_ranks(value_and_grad(masked, "i"), check_vma, in_specs=(P(), P("i"), P("i")))
    value, grads = f(PARAMS, X, mask)
    assert_close(value, loss(PARAMS, X[mask]))
    chex.assert_tree_all_finite(grads)
    expected = jax.grad(loss)(PARAMS, X[mask])
    assert_close(grads, expected)


@pytest.mark.one_pair
def test_weighted_pmean_of_a_tree(check_vma):
    x, w = X[:RANKS], np.arange(RANKS, dtype=np.float32)
    f = on_ranks(
        lambda x, w: weighted_pmean({"x": x[0], "half": x[0].astype(jnp.bfloat16)}, w[0], "i"),
        check_vma, in_specs=P("i"),
    )  # fmt: skip
    mean = f(x, w)
    np.testing.assert_allclose(mean["x"], np.average(x, 0, w), rtol=1e-6)
    assert mean["half"].dtype == jnp.bfloat16
