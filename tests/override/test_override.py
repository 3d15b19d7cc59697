"""override_lax(): JAX's own collectives use the engine while it is active, and only then and in that thread."""

import contextlib
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET, make_mesh, run_python, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import _compat, override_lax, ring_psum, runtime
from jax_ring.lowering import override

RANKS = 8
MESH = make_mesh((RANKS,))

# The total shows what served the call: the engine rounds once, XLA after each addition, where 2048 + 1 is 2048.
X = np.array([2048] + [1] * (RANKS - 1), np.float16)
ENGINE_TOTAL, XLA_TOTAL = 2056, 2048


def psum_i(x):
    return lax.psum(x, "i")


def total(check_vma=True, body=psum_i):
    return sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma)


def served_by(text: str) -> tuple[int, int]:
    """The number of calls of the engine, and of XLA's all-reduce, in the text of a program."""
    by_engine = text.count(f'"{TARGET}"') + text.count(f"@{TARGET}")
    return by_engine, text.count(" all-reduce(") + text.count('"stablehlo.all_reduce"')


# What is lowered while the override is active.


def test_a_compiled_function_does_not_outlive_the_override(check_vma):
    f = total(check_vma)
    for _ in range(3):
        assert f(X) == XLA_TOTAL
        with override_lax():
            assert f(X) == ENGINE_TOTAL
            assert served_by(f.lower(X).compile().as_text()) == (1, 0)
        assert served_by(f.lower(X).compile().as_text()) == (0, 1)


def test_traces_are_cached():
    chex.clear_trace_counter()
    f = total(body=chex.assert_max_traces(psum_i, n=2))
    for _ in range(3):
        f(X)
        with override_lax():
            f(X)


def test_open_and_close():
    f = total()
    handle = override_lax()
    try:
        assert f(X) == ENGINE_TOTAL
    finally:
        handle.close()
    assert f(X) == XLA_TOTAL
    handle.close()
    assert f(X) == XLA_TOTAL


@pytest.mark.parametrize("mean", [False, True], ids=["psum", "pmean"])
def test_trees(mean, check_vma):
    def body(x):
        reduce = lax.pmean if mean else lax.psum
        return reduce({"f": x, "n": x.astype(jnp.int32), "b": x > 1, "z": x + 1j, "one": 1.0}, "i")

    f = total(check_vma, body)
    with override_lax():
        # One call per dtype, as with ring_psum. Booleans are summed as int32.
        assert served_by(f.lower(X).compile().as_text()) == (3, 0)
        out = f(X)
    scale = 1 / RANKS if mean else 1
    expected = {"f": ENGINE_TOTAL, "n": 2055, "b": 1, "z": 2055 + 8j, "one": RANKS}
    chex.assert_trees_all_equal(out, {name: scale * value for name, value in expected.items()})


def test_sums_that_differentiation_inserts():
    # The gradient of a replicated value is summed by the transpose of a cast, without a call of lax.psum.
    def body(w, x):
        return jax.grad(lambda w: (w * x).sum())(w)

    f = sharded(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P())
    one = jnp.ones((), X.dtype)
    assert f(one, X) == XLA_TOTAL
    with override_lax():
        assert f(one, X) == ENGINE_TOTAL
        assert served_by(f.lower(one, X).compile().as_text()) == (1, 0)


def test_within_control_flow_and_transformations(check_vma):
    def body(x):
        def step(carry, _):
            return carry + jax.checkpoint(psum_i)(x * carry[0]), None

        out, _ = lax.scan(step, jnp.ones(1, x.dtype), length=3)
        return out + jax.vmap(psum_i)(jnp.stack([x, x]))[0] + jax.jit(psum_i)(x)

    f = total(check_vma, body)
    with override_lax():
        by_engine, by_xla = served_by(f.lower(X).compile().as_text())
    assert by_engine
    assert not by_xla


COLLECTIVES = {
    "pmax": lambda x: lax.pmax(x, "i"),
    "pmin": lambda x: lax.pmin(x, "i"),
    "psum_scatter": lambda x: lax.psum_scatter(jnp.outer(jnp.arange(16, dtype=x.dtype), x), "i", tiled=True),
    "psum_scatter_second": lambda x: lax.psum_scatter(jnp.outer(x, x[:1] + jnp.arange(8, dtype=x.dtype)), "i",
                                                      scatter_dimension=1),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "all_gather_tiled_second": lambda x: lax.all_gather(jnp.outer(x, x), "i", axis=1, tiled=True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("body", COLLECTIVES.values(), ids=COLLECTIVES.keys())
def test_the_family(body, dtype, check_vma):
    x = (np.arange(16) % 3).astype(dtype)
    f = sharded(body, mesh=MESH, check_vma=check_vma)
    expected = f(x)
    with override_lax():
        np.testing.assert_array_equal(f(x), expected)
        text = f.lower(x).compile().as_text()
    assert "jax_ring_" in text
    assert not any(f" {name}(" in text for name in ("all-reduce", "reduce-scatter", "all-gather"))


def test_invariant_all_gather():
    gather = _compat.all_gather_invariant_p

    def body(x):
        return gather.bind(x, axis_name=("i",), axis_size=RANKS, all_gather_dimension=0, tiled=True)

    f = total(body=body)
    with override_lax():
        text = f.lower(X).compile().as_text()
        np.testing.assert_array_equal(f(X), X)
    assert "jax_ring_all_gather" in text
    assert "all-gather(" not in text


def test_gathered_keys():
    # The engine does not support extended dtypes.
    def body(x):
        keys = jax.random.split(jax.random.key(x[0].astype(int)), 1)
        return jax.random.key_data(lax.all_gather(keys, "i", tiled=True))

    f = sharded(body, mesh=MESH, check_vma=False)
    expected = f(X)
    with override_lax():
        np.testing.assert_array_equal(f(X), expected)


@pytest.mark.parametrize("axes", [0, (0, 1), ("i", 0), (1, "i"), (0, "i", 1)], ids=str)
def test_positional_axes(axes):
    x = np.arange(RANKS * 6, dtype=np.float32).reshape(RANKS * 2, 3)
    f = sharded(lambda x: lax.psum(x, axes)[None], mesh=MESH, check_vma=False)
    expected = f(x)
    with override_lax():
        np.testing.assert_array_equal(f(x), expected)
        assert served_by(f.lower(x).compile().as_text()) == (int("i" in np.atleast_1d(axes)), 0)


def test_groups():
    groups = [[0, 1, 4, 5], [2, 3, 6, 7]]
    f = sharded(lambda x: lax.psum(x, "i", axis_index_groups=groups), mesh=MESH, check_vma=False)
    x = np.arange(8, dtype=np.float32)
    with override_lax():
        np.testing.assert_array_equal(f(x), [10, 10, 18, 18, 10, 10, 18, 18])
        assert served_by(f.lower(x).compile().as_text()) == (1, 0)


def test_without_jit(check_vma):
    mapped = jax.shard_map(psum_i, mesh=MESH, in_specs=P("i"), out_specs=P(), check_vma=check_vma)
    for _ in range(2):
        assert mapped(X) == XLA_TOTAL
        with override_lax():
            assert mapped(X) == ENGINE_TOTAL


def test_pmap():
    f = jax.pmap(psum_i, axis_name="i")
    for _ in range(2):
        assert f(X)[3] == XLA_TOTAL
        with override_lax():
            assert f(X)[3] == ENGINE_TOTAL


def test_over_a_vmap_axis_nothing_is_lowered():
    f = jax.jit(jax.vmap(psum_i, axis_name="i"))
    expected = f(X)
    with override_lax():
        np.testing.assert_array_equal(f(X), expected)


def partly_manual(body):
    mesh = make_mesh((2, 2, 2), ("i", "j", "auto"))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(("i", "j")), out_specs=P("j"), axis_names={"i", "j"}))


@pytest.mark.usefixtures("left_to_xla")
def test_partly_manual_stays_with_xla_and_warns_once(monkeypatch):
    monkeypatch.setattr(override, "_has_warned", False)
    x = np.arange(8, dtype=np.float32)
    with override_lax():
        # Replaced when XLA compiles the program.
        assert served_by(partly_manual(psum_i).lower(x).compile().as_text()) == (1, 0)
    with override_lax(partitioner=False):
        f = partly_manual(psum_i)
        with pytest.warns(UserWarning, match=r"lax.psum over \('i',\)") as caught:
            text = f.lower(x).compile().as_text()
        assert served_by(text)[0] == 0
        np.testing.assert_array_equal(f(x), x.reshape(2, 4).sum(0))
        # Not for other calls: warnings are errors in these tests.
        np.testing.assert_array_equal(partly_manual(lambda x: lax.pmax(x, "i"))(x), x[4:])
    (warning,) = caught
    assert "manual over ['i', 'j'] and leaves the axes ['auto'] to the compiler" in str(warning.message)
    lines, first = inspect.getsourcelines(psum_i)
    assert warning.filename == __file__
    assert lines[warning.lineno - first] == '    return lax.psum(x, "i")\n'


def test_no_warning_for_what_is_served_or_of_jax_ring(monkeypatch):
    monkeypatch.setattr(override, "_has_warned", False)
    x = np.arange(8, dtype=np.float32)
    partly_manual(psum_i)(x)
    with override_lax():
        total()(X)
        partly_manual(lambda x: ring_psum(x, "i"))(x)
        jax.export.export(total(), platforms=("cpu", "cuda"))(jax.device_put(X, NamedSharding(MESH, P("i"))))


@pytest.mark.usefixtures("left_to_xla")
def test_strict_makes_partly_manual_an_error(monkeypatch):
    monkeypatch.setattr(override, "_has_warned", False)
    monkeypatch.setattr(runtime, "STRICT", True)
    with (
        override_lax(),
        pytest.raises(NotImplementedError, match=r"lax.psum over \('i',\) .*leaves the axes \['auto'\].*STRICT"),
    ):
        partly_manual(psum_i)(np.arange(8, dtype=np.float32))


# Programs that are lowered, compiled or exported, and called later.


def test_ahead_of_time_programs_do_not_change():
    f = total()
    traced = f.trace(X)
    with override_lax():
        by_engine = traced.lower().compile()
        assert traced.lower().compile()(X) == ENGINE_TOTAL
    by_xla = traced.lower().compile()
    for context in (contextlib.nullcontext, override_lax):
        with context():
            assert by_engine(X) == ENGINE_TOTAL
            assert by_xla(X) == XLA_TOTAL


def test_export():
    x = jax.device_put(X, NamedSharding(MESH, P("i")))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    with override_lax():
        by_engine = jax.export.export(total(), disabled_checks=allowed)(x)
        # A program for several platforms, of which only some have an engine, uses XLA's all_reduce on all of them.
        both = jax.export.export(total(), platforms=("cpu", "cuda"))(x)
        other = jax.export.export(total(), platforms=("tpu",))(x)
    assert served_by(by_engine.mlir_module()) == (1, 0)
    assert served_by(both.mlir_module()) == served_by(other.mlir_module()) == (0, 1)
    assert jax.jit(by_engine.call)(x) == ENGINE_TOTAL
    with override_lax(partitioner=False):
        assert jax.jit(both.call)(x) == XLA_TOTAL
    with override_lax():
        assert jax.jit(both.call)(x) == ENGINE_TOTAL  # replaced when XLA compiles it


def test_a_pullback_is_lowered_where_it_is_called(check_vma):
    def body(x):
        return psum_i(x) * x

    f = sharded(body, mesh=MESH, check_vma=check_vma)
    x = np.arange(8.0, dtype=np.float32)
    expected = jax.vjp(f, x)[1](x)
    with override_lax():
        _, pullback = jax.vjp(f, x)
        np.testing.assert_array_equal(pullback(x)[0], expected[0])
    np.testing.assert_array_equal(pullback(x)[0], expected[0])


# Closing restores the previous state.


def lowerings():
    """Of JAX's primitives: the lowerings, and what else decides about them. Some have none for CPUs."""
    return [
        (
            _compat._common_lowerings.get(p),
            p in _compat._uncacheable_primitives,
            [_compat._platform_lowerings[platform].get(p) for platform in ("cpu", "cuda")],
        )
        for p in override._RULES
    ]


def test_nothing_is_left_behind():
    before = lowerings()
    text = total().lower(X).as_text()
    with override_lax():
        assert lowerings() != before
    assert lowerings() == before
    assert total().lower(X).as_text() == text


def test_an_exception_leaves_nothing_behind():
    before = lowerings()
    f = total()
    with pytest.raises(ValueError, match="evenly divisible"), override_lax():
        f(X[:3])
    assert lowerings() == before
    assert f(X) == XLA_TOTAL


def test_nesting():
    before = lowerings()
    f = total()
    with override_lax():
        with override_lax():
            assert f(X) == ENGINE_TOTAL
        assert f(X) == ENGINE_TOTAL
    assert f(X) == XLA_TOTAL
    assert lowerings() == before


def test_closed_in_any_order():
    f = total()
    first, second = override_lax(), override_lax()
    first.close()
    first.close()
    assert f(X) == ENGINE_TOTAL
    second.close()
    assert f(X) == XLA_TOTAL


def test_a_closed_override_cannot_be_reentered():
    handle = override_lax()
    with handle:
        pass
    with pytest.raises(RuntimeError, match=r"closed: call override_lax\(\) again"), handle:
        pass


def test_refused_while_tracing():
    def body(x):
        with override_lax():
            return psum_i(x)

    with pytest.raises(RuntimeError, match="being traced"):
        total(body=body)(X)
    with override_lax() as handle:

        def closing(x):
            handle.close()
            return psum_i(x)

        with pytest.raises(RuntimeError, match="being traced"):
            total(body=closing)(X)
        assert total()(X) == ENGINE_TOTAL
    assert total()(X) == XLA_TOTAL


# Threads.


def in_thread(job):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(job).result(timeout=120)


def test_active_in_one_thread_only():
    f = total()
    with override_lax() as handle:
        assert f(X) == ENGINE_TOTAL
        assert in_thread(lambda: f(X)) == XLA_TOTAL
        with pytest.raises(RuntimeError, match="was opened in thread 'MainThread'"):
            in_thread(handle.close)
        assert f(X) == ENGINE_TOTAL


@pytest.mark.full
def test_concurrent_lowerings_do_not_mix():
    # Some threads toggle the override while others lower programs with many sums.
    start = threading.Barrier(4)

    def lower_many(context, expected):
        start.wait(timeout=60)
        for seed in range(6):
            f = total(body=lambda x, seed=seed: [psum_i(x * (1 + k * seed)) for k in range(20)])
            with context():
                text = f.lower(X).as_text()
                assert f(X)[0] == expected
            assert served_by(text) == ((1, 0) if expected == ENGINE_TOTAL else (0, 20))

    before = lowerings()
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(lower_many, override_lax if on else contextlib.nullcontext, ENGINE_TOTAL if on else XLA_TOTAL)
            for on in (True, False, True, False)
        ]
        for job in jobs:
            job.result(timeout=240)
    assert lowerings() == before


# Errors.


@pytest.mark.full
def test_a_missing_rank_is_named_with_the_call_site():
    result = run_python(
        """
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jax_ring import override_lax

def loss(x):
    def in_a_branch(x):
        return lax.psum(x, "i")
    return lax.cond(lax.axis_index("i") == 3, lambda x: x, in_a_branch, x)

f = jax.shard_map(loss, mesh=Mesh(jax.devices(), ("i",)), in_specs=P("i"), out_specs=P("i"), check_vma=False)
with override_lax():
    jax.block_until_ready(jax.jit(f)(jnp.arange(8.0)))
""",
        JAX_RING_TIMEOUT_S="1.5",
    )
    assert "Missing: rank 3 (mesh position 3)" in result.stderr
    assert "(loss.<locals>.in_a_branch)" in result.stderr
