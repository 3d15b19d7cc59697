"""override_lax(): exchanges, broadcasts and asynchronous collectives of JAX."""

import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from collectives import PERM, SHAPE, exchange, permutation
from helpers import RANKS, compiled_text, make_mesh, sharded
from jax import lax
from jax._src.lax import parallel  # has the asynchronous collectives that jax.lax does not
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import explain, override_lax, runtime
from jax_ring.lowering import override

pytestmark = pytest.mark.full  # the whole family, and programs that others cover
check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

X = np.random.default_rng(0).standard_normal((RANKS * SHAPE[0], SHAPE[1])).astype(np.float32)
VALUES = X.reshape(RANKS, *SHAPE)
XLA_OPS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "collective-broadcast")


def served_by(fun, *args) -> tuple[list[str], list[str]]:
    """The targets of custom calls, and XLA's collectives, in a compiled program."""
    text = compiled_text(fun, *args)
    targets = [part.partition('"')[0] for part in text.split('custom_call_target="')[1:]]
    return sorted(targets), [op for op in XLA_OPS if f" {op}(" in text or f" {op}-start(" in text]


CALLS = {
    "all_to_all": (lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True), exchange(1, 0, tiled=True).oracle),
    "all_to_all untiled": (lambda x: lax.all_to_all(x, "i", 0, 1), exchange(0, 1, tiled=False).oracle),
    "pswapaxes": (lambda x: lax.pswapaxes(x, "i", 0), exchange(0, 0, tiled=False).oracle),
    "ppermute": (lambda x: lax.ppermute(x, "i", PERM), permutation(PERM).oracle),
    "ppermute from the end": (lambda x: lax.ppermute(x, "i", [(-1, 2)]), permutation([(7, 2)]).oracle),
    "pshuffle": (lambda x: lax.pshuffle(x, "i", [1, 2, 3, 4, 5, 6, 7, 0]), lambda x: np.roll(x, -1, 0)),
    "pbroadcast": (lambda x: lax.pbroadcast(x, "i", 3), lambda x: np.stack([x[3]] * RANKS)),
}
DYNAMIC = jax.__version_info__ >= (0, 12)
if DYNAMIC:
    CALLS["pbroadcast from an array"] = lambda x: lax.pbroadcast(x, "i", jnp.int32(3)), CALLS["pbroadcast"][1]


@pytest.mark.parametrize("case", CALLS)
def test_results_and_derivatives(case, check_vma):
    call, oracle = CALLS[case]
    one_call = sharded(call, check_vma=check_vma)

    def body(x):
        # JAX's own rules are wrong for all_to_all with two dimensions and no tiles, and for pbroadcast of arrays.
        has_rule = "untiled" not in case and "pbroadcast" not in case
        gradient = jax.grad(lambda x: jnp.sum(call(x) ** 2)) if has_rule else lambda x: 2 * x
        return call(x), call(x.astype(jnp.int8)), jax.vmap(call, 2, 2)(jnp.stack([x, 2 * x], 2))[..., 1], gradient(x)

    f = sharded(body, check_vma=check_vma)
    with override_lax():
        out, integers, batched, gradient = f(X)
        targets, ops = served_by(one_call, X)
        assert len(targets) == 1
        assert targets[0].startswith("jax_ring_")
        assert not ops
        assert not served_by(f, X)[1]
    expected = oracle(VALUES)
    np.testing.assert_array_equal(np.reshape(out, expected.shape), expected)
    np.testing.assert_array_equal(np.reshape(batched, expected.shape), 2 * expected)
    np.testing.assert_array_equal(np.reshape(integers, expected.shape), oracle(VALUES.astype(np.int8)))
    if "ppermute" not in case:
        np.testing.assert_array_equal(gradient, 2 * X)


def test_bits_are_unchanged(check_vma):
    # All NaN patterns.
    codes = np.arange(RANKS * 32, dtype=np.uint16).reshape(RANKS, 32) * 255 + 0x7F00
    codes = codes.astype(np.uint16)
    for name, (call, oracle) in CALLS.items():
        if "all_to_all" in name or name == "pswapaxes":
            continue
        with override_lax():
            moved = np.asarray(sharded(call, check_vma=check_vma)(codes.view(ml_dtypes.bfloat16)))
        np.testing.assert_array_equal(moved.view(np.uint16), oracle(codes), err_msg=name)


def test_random_keys_stay_with_jax():
    def body(x):
        keys = jax.random.wrap_key_data(lax.bitcast_convert_type(x, jnp.uint32).reshape(RANKS, -1, 2))
        return jax.random.key_data(lax.ppermute(lax.all_to_all(keys, "i", 0, 0, tiled=True), "i", PERM))

    f = sharded(body, check_vma=False)
    expected = f(X)
    with override_lax():
        np.testing.assert_array_equal(f(X), expected)


@pytest.mark.parametrize("perm", [[(0, 1), (0, 2)], [(1, 3), (2, 3)], [(8, 0)], [(0, -9)]], ids=str)
def test_permutations_are_refused_as_by_jax(perm):
    f = sharded(lambda x: lax.ppermute(x, "i", perm))
    errors = []
    for context in (override_lax, lambda: jax.disable_jit(disable=False)):
        with context(), pytest.raises((ValueError, IndexError)) as raised:
            f.lower(X)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("source", [-1, RANKS])
def test_a_source_that_is_no_rank(source):
    with override_lax(), pytest.raises(ValueError, match=rf"lax.pbroadcast over \('i',\): .* 0 to 7, got {source}"):
        sharded(lambda x: lax.pbroadcast(x, "i", source)).lower(X)


def test_axes_of_a_permutation_in_another_order_than_the_mesh():
    mesh = make_mesh((2, 4), ("i", "j"))
    spec = P(("i", "j"))
    f = sharded(lambda x: lax.ppermute(x, ("j", "i"), [(1, 0), (2, 4)]), mesh=mesh, in_specs=spec, out_specs=spec)
    if jax.__version_info__ >= (0, 12):
        with override_lax(), pytest.raises(RuntimeError, match="order"):
            f(X)
        return
    expected = f(X)
    with override_lax():
        np.testing.assert_array_equal(f(X), expected)


def test_partly_manual(monkeypatch):
    # Whoever serves it, the results are those of all devices by hand.
    monkeypatch.setattr(override, "_has_warned", True)
    mesh = make_mesh((RANKS, 2), ("i", "auto"))
    for name in ("all_to_all", "ppermute", "pbroadcast"):
        call, oracle = CALLS[name]
        mapped = jax.shard_map(call, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"})
        with override_lax():
            out = jax.jit(mapped)(X)
        expected = oracle(VALUES)
        np.testing.assert_array_equal(np.reshape(out, expected.shape), expected)


def test_without_the_override_there_is_no_broadcast_on_cpus():
    for call in [call for name, (call, _) in CALLS.items() if "pbroadcast" in name]:
        f = sharded(call)
        with override_lax():
            f(X)
        with pytest.raises(NotImplementedError, match=r"MLIR translation rule for primitive 'pbroadcast"):
            f(X)


# Asynchronous collectives. Of these jax.lax has psum_scatter_start, in JAX 0.12; the others are in JAX's sources.

ASYNC = {
    "psum": (parallel.psum_start, lax.psum, ("i",), {}),
    "psum_scatter": (parallel.psum_scatter_start, lax.psum_scatter, ("i",), {"tiled": True}),
    "all_gather": (parallel.all_gather_start, lax.all_gather, ("i",), {"tiled": True, "axis": 1}),
    "all_to_all": (parallel.all_to_all_start, lax.all_to_all, ("i", 0, 0), {"tiled": True}),
    "ppermute": (parallel.ppermute_start, lax.ppermute, ("i", PERM), {}),
}
if hasattr(parallel, "pbroadcast_start"):
    ASYNC["pbroadcast"] = (parallel.pbroadcast_start, lax.pbroadcast, ("i", 3), {})


@pytest.mark.parametrize("name", ASYNC)
def test_asynchronous(name, check_vma):
    start, call, args, options = ASYNC[name]
    out_specs = P() if name == "psum" else P("i")

    def body(x):
        future = start(x, *args, **options)
        between = jnp.sin(x) @ x.T
        # Without vma tracking psum_start of JAX 0.12 is a psum.
        return future.done() if hasattr(future, "done") else future, between

    f = sharded(body, check_vma=check_vma, out_specs=(out_specs, P("i")))
    synchronous = sharded(lambda x: call(x, *args, **options), check_vma=check_vma, out_specs=out_specs)
    with override_lax():
        result, between = f(X)
        targets, ops = served_by(f, X)
        assert len([target for target in targets if target.startswith("jax_ring_")]) == 1
        assert not ops
        np.testing.assert_array_equal(result, synchronous(X))
        (found,) = explain(f, X).collectives
        assert found.name.removesuffix("_start") == name
        assert found.served_by == "jax_ring"
    assert between.shape == (RANKS * SHAPE[0], SHAPE[0])
    if name != "pbroadcast":
        np.testing.assert_allclose(f(X)[0], result, rtol=1e-5, atol=1e-5)
        assert not any(target.startswith("jax_ring_") for target in served_by(f, X)[0])


def test_work_between_start_and_done_runs_meanwhile():
    # Rank 1 joins the collective only when rank 0 has done the work that its program has between start and done.
    has_worked = threading.Event()
    in_time = []

    def wait(x, rank):
        if rank == 1:
            in_time.append(has_worked.wait(timeout=60))
        return x

    def note(rank, _):
        if rank == 0:
            has_worked.set()

    def body(x):
        rank = lax.axis_index("i")
        x = jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x, rank)
        future = parallel.psum_scatter_start(x, "i", tiled=True)
        between = jnp.sin(x + 1 - x)  # does not wait for the future
        jax.debug.callback(note, rank, between[0])
        return future.done(), between

    f = sharded(body, mesh=make_mesh((2,)), check_vma=False)
    with override_lax():
        result, _ = f(np.arange(8.0, dtype=np.float32))
        np.testing.assert_array_equal(result, [4, 6, 8, 10])
    assert in_time == [True]


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap], ids=["grad", "vmap"])
def test_asynchronous_calls_have_the_rules_of_jax(transform):
    # JAX has neither derivatives nor batching rules of them.
    body = transform(lambda x: parallel.psum_scatter_start(x, "i", tiled=True).done().sum())
    f = sharded(lambda x: body(x[..., None] if transform is jax.vmap else x))
    for context in (override_lax, lambda: jax.disable_jit(disable=False)):
        with context(), pytest.raises(NotImplementedError, match=r"rule for 'reduce_scatter_start' not implemented"):
            f(X)


def test_asynchronous_gathers_to_reduced_values():
    """They stay JAX's, and so does what awaits them."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))

    def gathered(x):
        return parallel.all_gather_start(x, "i", tiled=True, to="reduced").done()

    with jax.set_mesh(mesh), override_lax():
        x = jnp.arange(8.0, out_sharding=P("i"))
        result = jax.jit(jax.shard_map(gathered, out_specs=P(None, reduced={"i"})))(x)
    np.testing.assert_array_equal(jax.device_get(result.addressable_shards[1].data), np.arange(8.0))


def test_strict_makes_xla_an_error(monkeypatch):
    monkeypatch.setattr(runtime, "STRICT", True)
    mesh = make_mesh((RANKS, 2), ("i", "auto"))
    call = lambda x: lax.all_to_all(x.sum() * jnp.ones((8, 3)), "i", 0, 0)  # noqa: E731
    f = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P(("i", "auto")), out_specs=P(("i", "auto"))))
    with override_lax(), pytest.raises(NotImplementedError, match=r"lax.all_to_all over \('i',\) would use XLA's"):
        f.trace(X).lower(lowering_platforms=("cpu", "tpu"))


def ragged(x):
    return lax.ragged_all_to_all(x, x, *[jnp.arange(4)] * 4, axis_name="i")


TWICE = ("i", "i")
OVER_AN_AXIS_TWICE = {
    "psum": lambda x: lax.psum(x, TWICE),
    "pmax": lambda x: lax.pmax(x, TWICE),
    "psum_scatter": lambda x: lax.psum_scatter(x, TWICE),
    "all_gather": lambda x: lax.all_gather(x, TWICE),
    "all_to_all": lambda x: lax.all_to_all(x, TWICE, 0, 0),
    "ppermute": lambda x: lax.ppermute(x, TWICE, [(0, 1)]),
    "pbroadcast": lambda x: lax.pbroadcast(x, TWICE, 0),
    "ragged_all_to_all": lambda x: lax.ragged_all_to_all(x, x, *[jnp.arange(RANKS**2)] * 4, axis_name=TWICE),
}


@pytest.mark.parametrize("name", OVER_AN_AXIS_TWICE)
def test_an_axis_that_is_named_twice(name):
    f = sharded(OVER_AN_AXIS_TWICE[name], in_specs=P(), out_specs=P(), check_vma=False)
    with override_lax(), pytest.raises(ValueError, match=rf"^lax.{name}: each axis may be named once, got"):
        f.lower(jnp.zeros(RANKS**2))


NOT_TAKEN = {
    "pmax of complex numbers": (lambda x: lax.pmax(x, "i"), jnp.complex64),
    "pmin of complex numbers": (lambda x: lax.pmin(x, "i"), jnp.complex64),
    "psum_scatter of booleans": (lambda x: lax.psum_scatter(x, "i", tiled=True), jnp.bool_),
    "psum_scatter_start of booleans": (lambda x: parallel.psum_scatter_start(x, "i", tiled=True).done(), jnp.bool_),
    "psum_scatter of float0": (lambda x: lax.psum_scatter(no_values(), "i", tiled=True), jnp.float32),
    "pmax of float0": (lambda x: lax.pmax(no_values(), "i"), jnp.float32),
    "ragged_all_to_all of keys": (lambda x: jax.random.key_data(ragged(jax.random.split(jax.random.key(0)))), jnp.int8),
}


def no_values():
    return np.zeros(RANKS, jax.dtypes.float0)


@pytest.mark.parametrize("axis_names", [{"i", "k"}, {"i"}], ids=["manual", "partly manual"])
@pytest.mark.parametrize("case", NOT_TAKEN)
def test_dtypes_are_refused_as_by_jax(case, axis_names, check_vma):
    call, dtype = NOT_TAKEN[case]
    if "start" in case and not hasattr(parallel, "psum_scatter_start"):
        pytest.skip("this JAX has no psum_scatter_start")
    mesh = make_mesh((4, 2), ("i", "k"))
    f = jax.shard_map(
        call, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names=axis_names, check_vma=check_vma
    )  # fmt: skip
    errors = []
    for context in (override_lax, lambda: jax.disable_jit(disable=False)):
        with context(), pytest.raises((TypeError, jax.errors.JaxRuntimeError)) as raised:
            jax.jit(f).lower(jnp.zeros(4 * RANKS, dtype)).compile()
        errors.append((raised.type, str(raised.value)[:50]))
    assert errors[0] == errors[1]
