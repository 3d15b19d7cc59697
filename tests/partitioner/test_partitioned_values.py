"""Ordinary `jit` programs compute the same under override_lax() as by XLA's collectives, none of which are left."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh
from hook import FORMS, by_hook_alone
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import override_lax

MESH = make_mesh((2, 4), ("a", "b"))
RNG = np.random.default_rng(0)
BY_XLA = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(")
BY_ENGINE = re.compile(r'custom_call_target="jax_ring_(\w+)"')


def on(*spec, mesh=MESH) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def put(shape, *spec, mesh=MESH, dtype=np.float32):
    return jax.device_put(RNG.normal(size=shape).astype(dtype), on(*spec, mesh=mesh))


def calls(fun, *args, **options) -> tuple[collections.Counter, collections.Counter]:
    """The collectives of the compiled program: the engine's, by kind, and XLA's."""
    text = jax.jit(fun, **options).lower(*args).compile().as_text()
    return collections.Counter(BY_ENGINE.findall(text)), collections.Counter(BY_XLA.findall(text))


def check(fun, *args, left=(), **options) -> collections.Counter:
    """Compares with XLA, bit for bit, and returns the engine's calls. left: collectives that stay XLA's."""
    expected = jax.jit(fun, **options)(*args)
    with override_lax():
        actual = jax.jit(fun, **options)(*args)
        engine, xla = calls(fun, *args, **options)
    assert set(xla) == set(left)
    jax.tree.map(assert_same_bits, actual, expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    return engine


def test_tensor_parallel_products():
    def f(x, w, v):
        return {
            "replicated": x @ w,
            "divided": lax.with_sharding_constraint(x @ w, on("a", "b")),
            "bfloat16": (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32),
            "complex": ((x + 1j * x) @ w).real,
            "two sums": jnp.tanh(x @ w) @ v,
        }

    engine = check(f, put((16, 32), None, "b"), put((32, 8), "b", None), put((8, 24), None, "a"))
    assert engine["all_reduce"] >= 2


def test_reductions():
    def f(x, n):
        return {
            "sum": x.sum(0), "max": x.max(0), "min": x.min(1), "argmax": x.argmax(0), "any": (x > 2).any(),
            "all": (x > -9).all(1), "integers": n.sum(0), "int8": n.astype(jnp.int8).max(), "mean": x.mean(),
            "softmax": jax.nn.softmax(x, 1), "logsumexp": jax.nn.logsumexp(x, 0), "cumsum": jnp.cumsum(x, 0),
        }  # fmt: skip

    engine = check(f, put((16, 32), "a", "b"), put((16, 32), "b", "a", dtype=np.int32))
    assert engine["all_reduce"] >= 8


def test_a_product_stays_xlas():
    assert check(lambda x: x.prod(0), put((8, 4), "a"), left=["all-reduce"], out_shardings=on()) == {}


def test_beside_collectives_of_xla():
    """Those that stay and those that are replaced, in one program, several runs of which are in flight."""

    def f(x):
        return x.prod(0), x.sum(0), x.max(1), (x * 2).prod(1), (x * 3).sum(1), jnp.roll(x, 1, 0)

    x, options = jnp.abs(put((16, 32), "a", "b")), {"out_shardings": (on(),) * 6}
    assert check(f, x, left=["all-reduce"], **options).total() >= 6
    expected = jax.jit(f, **options)(x)
    with override_lax():
        g = jax.jit(f, **options)
        for results in [g(x) for _ in range(30)]:
            jax.tree.map(assert_same_bits, results, expected)


SPECS = [
    P(),
    P("a"),
    P(None, "b"),
    P("b", "a"),
    P(("a", "b")),
    P(None, ("b", "a")),
    P("a", None, "b"),
    P(None, None, "a"),
]


def test_every_sharding_becomes_every_other():
    def f(arrays):
        return {
            f"{one} to {other}": lax.with_sharding_constraint(x * 2, NamedSharding(MESH, other))
            for one, x in zip(SPECS, arrays, strict=True)
            for other in SPECS
        }

    engine = check(f, [put((8, 16, 8), *spec) for spec in SPECS])
    assert engine["all_gather"] > 10
    assert engine["all_to_all"] > 5


@pytest.mark.parametrize("size", [8, 3])
def test_exchanges_copy_each_element_once(size):
    """Each block goes from its operand into a result, whatever its size."""
    mesh = make_mesh((size,), ("a",), devices=jax.devices()[:size])
    arrays = {
        f"{shape} {dtype.__name__}": put(shape, "a", mesh=mesh, dtype=dtype)
        for shape in [(size, size), (3 * size, 5 * size), (size, 2 * size, 3)]
        for dtype in (np.float32, np.int8, np.complex64)
    }

    def move(arrays):
        return {name: lax.with_sharding_constraint(x, on(None, "a", mesh=mesh)) for name, x in arrays.items()}

    assert check(move, arrays) == {"all_to_all": len(arrays)}
    with override_lax():
        text = jax.jit(move).lower(arrays).compile().as_text()
    # Its own name, the position and a block for each rank.
    calls_of_engine = [line for line in text.splitlines() if 'custom_call_target="jax_ring_all_to_all"' in line]
    assert all(line.partition("), custom_call_target")[0].count("%") == size + 2 for line in calls_of_engine)


def test_moves():
    def f(x):
        return {
            "roll": jnp.roll(x, 3, 0), "sort": jnp.sort(x, 0), "take": x[jnp.argsort(x[:, 0])], "cat": jnp.flip(x, 0),
            "convolution": lax.conv(x[None, None], jnp.ones((1, 1, 3, 3)), (1, 1), "SAME"),
            "update": lax.dynamic_update_slice(x, x[:2, :2].sum(0, keepdims=True), (3, 5)),
            "fft": jnp.fft.fft(x, axis=0),
        }  # fmt: skip

    engine = check(f, put((32, 16), ("a", "b")))
    assert engine["permute"] >= 2
    assert engine["all_to_all"] >= 1


def test_loops_and_branches():
    def f(x, w):
        def step(carry, _):
            carry = jnp.tanh(carry @ w @ w.T)
            return carry, carry.sum()

        scanned, sums = lax.scan(jax.checkpoint(step), x, length=3)
        branch = lax.cond(x.sum() > 0, lambda: x - x.mean(0), lambda: x - x.max(1, keepdims=True))
        loop, _ = lax.while_loop(
            lambda c: c[1] < 4, lambda c: (c[0] - c[0].sum(0, keepdims=True) / 9, c[1] + 1), (x, 0)
        )
        rows = lax.fori_loop(0, 3, lambda i, c: (c * 0.5 + c.sum(1, keepdims=True) / 50).at[i].set(1.0), x)
        return scanned, sums, branch, loop, rows

    engine = check(f, put((16, 32), "a", "b"), put((32, 8), "b"))
    assert engine["all_reduce"] >= 6


def mlp_step(params, x, y):
    def loss(params):
        w, bias, v = params
        return jnp.mean((jnp.tanh(x @ w + bias) @ v - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param((P(), P(), P()), id="replicated"),
        pytest.param((P("b", "a"), P(("a", "b")), P("a")), id="divided"),
        pytest.param((P(None, "b"), P("b"), P("b")), id="tensor-parallel"),
    ],
)
def test_training_steps(specs):
    shapes = ((32, 64), (64,), (64, 8))
    params = tuple(put(shape, *spec) for shape, spec in zip(shapes, specs, strict=True))
    shardings = tuple(NamedSharding(MESH, spec) for spec in specs)
    x, y = (put((16, size), ("a", "b") if specs[0] == P() else "a") for size in (32, 8))
    engine = check(mlp_step, params, x, y, out_shardings=(on(), shardings))
    assert engine["all_reduce"] >= 1


@pytest.mark.parametrize("names", ["permuted", "half", "explicit"])
def test_other_meshes(names):
    devices = np.array(jax.devices()[:8])[[3, 1, 4, 0, 5, 7, 2, 6]]
    devices = devices[:4].reshape(2, 2) if names == "half" else devices.reshape(2, 4)
    explicit = {"axis_types": (jax.sharding.AxisType.Explicit,) * 2} if names == "explicit" else {}
    mesh = Mesh(devices, ("a", "b"), **explicit)
    x, w = put((16, 32), "a", "b", mesh=mesh), put((32, 8), None, "a", mesh=mesh)

    def f(x, w):
        if names == "explicit":
            return jnp.matmul(jnp.sin(x), w, out_sharding=on(None, None, mesh=mesh))
        return lax.with_sharding_constraint(jnp.sin(x) @ w, on(mesh=mesh))

    assert check(f, x, w)


@pytest.mark.parametrize(
    ("dtype", "without"),
    full_but([
        ("float32", ()), ("bfloat16", ()), ("int16", ()), ("uint32", ()),
        # XLA and lax have no such sums.
        ("bool", ("scatter",)), ("complex64", ("pmax",)), ("float8_e5m2", ("psum", "scatter")),
    ], [("float32", ())]),
)  # fmt: skip
def test_all_forms_of_collectives(dtype, without):
    x = jnp.asarray(RNG.integers(0, 9, (8, 16, 8)), dtype)

    def f(x):
        results = {name: body(x) for name, body in FORMS.items() if not any(map(name.startswith, without))}
        return jax.tree.map(lambda y: y[None], results)

    def make():
        mapped = jax.shard_map(f, mesh=MESH, in_specs=P("a", "b"), out_specs=P(("a", "b")), check_vma=False)
        return jax.jit(mapped)

    expected = make()(x)
    with by_hook_alone():
        actual = make()(x)
        engine, xla = calls(make(), x)
    assert not xla
    assert set(engine) >= {"all_gather", "all_to_all", "permute"}
    jax.tree.map(assert_same_bits, actual, expected)


def test_all_devices_take_the_same_branch():
    """What decides is made of divided data. Each device alone would decide otherwise."""

    def f(x):
        branch = lax.cond(x.sum() > 0, lambda: x - x.mean(0), lambda: x.max(0) - x)
        first = lax.cond(x[3, 3] > 0, lambda: jnp.roll(x, 1, 0), lambda: x + x.sum(0))
        steps = lax.while_loop(
            lambda carry: carry[1].sum() < 64, lambda carry: (carry[0] + 1, carry[1] * 2), (0, abs(x))
        )
        return branch, first, steps

    for sign in (1, -1):
        x = np.full((8, 4), -sign, np.float32)
        x[3] = 100 * sign  # on one device
        engine = check(f, jax.device_put(x, on(("a", "b"))))
        assert engine["all_reduce"] >= 4
        np.testing.assert_array_equal(jax.jit(f)(x)[1], np.roll(x, 1, 0) if sign > 0 else x + x.sum(0))
