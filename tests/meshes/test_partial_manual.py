"""Calls in a shard_map that is manual over "dp" only: the compiler divides their operands over the other axis, "tp"."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET_PREFIX, assert_same_bits, run_python
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import (
    explain,
    override_lax,
    ring_all_gather,
    ring_all_to_all,
    ring_broadcast,
    ring_pmax,
    ring_pmean,
    ring_pmin,
    ring_ppermute,
    ring_psum,
    ring_psum_scatter,
    ring_reduce,
    runtime,
)
from jax_ring.training.wire import reduced_by

X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
AUTO = AxisType.Auto
ROWS = P("dp")
TARGETS_IN_HLO = rf'custom_call_target="{TARGET_PREFIX}\w+"'


def mesh_of(kind=AUTO):
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:8])


def partly(body, *, mesh=None, check_vma=False, in_specs=ROWS, out_specs=ROWS):
    mapped = jax.shard_map(
        body, mesh=mesh or mesh_of(), in_specs=in_specs, out_specs=out_specs, axis_names={"dp"}, check_vma=check_vma
    )
    return jax.jit(mapped)


def fully(body, spec, out_spec=None):
    """A body in a shard_map over all axes, where it sees its device's part alone."""
    return jax.jit(
        jax.shard_map(body, mesh=mesh_of(), in_specs=spec, out_specs=out_spec or spec, check_vma=False)
    )  # fmt: skip


def placed(x, spec, mesh=None):
    return jax.device_put(x, NamedSharding(mesh or mesh_of(), spec))


def text_of(f, *args):
    return f.lower(*args).compile().as_text()


def counts(text):
    """How many calls of jax_ring a compiled program has, and how many of XLA's collectives of each kind."""
    ours = len(re.findall(TARGETS_IN_HLO, text))
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    return ours, {kind: n for kind in kinds if (n := len(re.findall(rf" {kind}(?:-start)?\(", text)))}


REDUCTIONS = {"psum": ring_psum, "pmean": ring_pmean, "pmax": ring_pmax, "pmin": ring_pmin}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("spec", [P("dp", "tp"), P(("dp", "tp")), P("dp")], ids=str)
def test_reductions_have_the_bits_of_a_fully_manual_program(name, spec):
    body = lambda x: REDUCTIONS[name](x, "dp") * x  # noqa: E731
    x = placed(X, spec)
    f = partly(body)
    assert_same_bits(f(x), fully(body, spec)(x))
    assert counts(text_of(f, x)) == (1, {})
    assert f(x).sharding.is_equivalent_to(x.sharding, 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_types_of_axes_and_the_override(kind, check_vma):
    mesh = mesh_of(kind)
    x = placed(X, P("dp", "tp"), mesh)
    make = lambda psum: partly(lambda x: psum(x, "dp") + 2 * x, mesh=mesh, check_vma=check_vma)  # noqa: E731
    with jax.set_mesh(mesh):
        theirs = make(lax.psum)
        expected, (_, by_xla) = np.asarray(theirs(x)), counts(text_of(theirs, x))
        assert_same_bits(make(ring_psum)(x), expected)
        # With explicit axes JAX 0.10.2 gathers operands for its own reasons.
        rest = {name: n for name, n in by_xla.items() if name != "all-reduce"}
        assert counts(text_of(make(ring_psum), x)) == (1, rest)
        with override_lax(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same_bits(make(lax.psum)(x), expected)
            assert counts(text_of(make(lax.psum), x)) == (1 + sum(rest.values()), {})


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int4", "int8", "bool", "complex64"])
def test_dtypes(dtype):
    spec = P("dp", "tp")
    x = placed((X * 4).clip(-7, 7).astype(dtype), spec)
    body = (lambda x: ring_pmax(x, "dp")) if dtype == "bool" else (lambda x: ring_psum(x, "dp"))
    assert_same_bits(partly(body)(x), fully(body, spec)(x))


# Each keeps the shapes of a rank such that the compiler may divide the second dimension.
FAMILY = {
    "psum_scatter": lambda x: ring_psum_scatter(x, "dp", tiled=True),
    "psum_scatter, not tiled": lambda x: ring_psum_scatter(x.reshape(2, 8, -1), "dp"),
    "all_gather": lambda x: ring_all_gather(x, "dp", tiled=True),
    "all_gather, not tiled": lambda x: ring_all_gather(x, "dp").sum(0),
    "all_to_all": lambda x: ring_all_to_all(x, "dp", 0, 0, tiled=True),
    "ppermute": lambda x: ring_ppermute(x, "dp", [(0, 1)]),
    "broadcast": lambda x: ring_broadcast(x, "dp", root=1),
    "reduce": lambda x: ring_reduce(x, "dp", root=1),
}


@pytest.mark.parametrize("name", FAMILY)
def test_the_family(name):
    spec = P("dp", "tp")
    x = placed(X, spec)
    f = partly(FAMILY[name])
    assert_same_bits(f(x), fully(FAMILY[name], spec)(x))
    assert counts(text_of(f, x)) == (1, {})


@pytest.mark.parametrize("name", ["psum_scatter", "all_gather", "all_to_all"])
def test_blocks_along_a_divided_dimension(name):
    # The compiler has to gather something then. XLA's own collective gathers the operand as well.
    x = placed(X, P(("dp", "tp")))
    body = FAMILY[name]
    assert_same_bits(partly(body)(x), fully(body, P("dp"))(x))
    assert counts(text_of(partly(body), x))[0] == 1


def test_differently_divided_operands_of_one_call():
    specs = {"a": P("dp", "tp"), "b": P(("dp", "tp")), "c": P("dp"), "d": P("dp", None)}
    x = {name: placed(X + i, spec) for i, (name, spec) in enumerate(specs.items())}
    body = lambda x: ring_psum(jax.tree.map(lambda leaf: leaf * 3, x), "dp")  # noqa: E731
    f = partly(body, in_specs=(P("dp"),), out_specs=P())
    text = text_of(f, x)
    assert counts(text) == (1, {})
    (result,) = re.findall(rf"= \((.*?)\) custom-call\(.*{TARGETS_IN_HLO}", text)
    assert sorted(re.findall(r"f32\[[\d,]+\]", result)) == ["f32[16,32]", "f32[16,32]", "f32[16,8]", "f32[4,32]"]
    for name, total in f(x).items():
        local = np.asarray(x[name]) * np.float32(3)
        assert_same_bits(total, local[:16] + local[16:])


@pytest.mark.parametrize("columns", [30, 3])
def test_a_dimension_that_the_axis_does_not_divide(columns):
    def body(x):
        return ring_psum(lax.with_sharding_constraint(x * 2, P(None, "tp")), "dp") + x

    mesh = mesh_of()
    x = placed(X[:, :columns], P("dp"), mesh)
    with jax.set_mesh(mesh):
        assert_same_bits(partly(body, mesh=mesh)(x), fully(lambda x: ring_psum(x * 2, "dp") + x, P("dp"))(x))


@pytest.mark.parametrize("after", [P("tp", None), P(None, None)], ids=str)
def test_a_result_that_is_divided_in_another_way(after):
    def make(psum):
        def body(x):
            total = psum(lax.with_sharding_constraint(x * 2, P(None, "tp")), "dp")
            return lax.with_sharding_constraint(total, after) + x

        return partly(body, mesh=mesh)

    mesh = mesh_of()
    x = placed(X, P("dp", "tp"), mesh)
    with jax.set_mesh(mesh):
        assert_same_bits(make(ring_psum)(x), np.asarray(make(lax.psum)(x)))
        (_, moved), (_, by_xla) = counts(text_of(make(ring_psum), x)), counts(text_of(make(lax.psum), x))
    assert by_xla.pop("all-reduce") == 1
    assert moved == by_xla


def of_scan(psum):
    return lambda x: lax.scan(lambda c, _: (psum(c * 0.5, "dp") * 0.1 + x, None), x, None, length=3)[0]


PROGRAMS = {
    "scan": of_scan,
    "cond": lambda psum: lambda x: lax.cond(lax.axis_size("dp") > 1, lambda x: psum(x, "dp") + x, lambda x: x, x),
    "grad": lambda psum: lambda x: jax.grad(lambda x: (psum(x * x, "dp") * x).sum())(x),
    "vmap": lambda psum: lambda x: jax.vmap(lambda x: psum(x * x, "dp") + x, in_axes=1, out_axes=1)(x),
    "remat": lambda psum: (
        lambda x: jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(psum(jnp.sin(x), "dp")))(x).sum())(x)
    ),
    "nested jit": lambda psum: lambda x: jax.jit(lambda x: psum(x * 3, "dp"))(x) + x,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_programs(name, check_vma):
    x = placed(X, P("dp", "tp"))
    ours, theirs = (partly(PROGRAMS[name](psum), check_vma=check_vma) for psum in (ring_psum, lax.psum))
    assert_same_bits(ours(x), np.asarray(theirs(x)))
    num_calls, by_xla = counts(text_of(ours, x))
    assert num_calls > 0
    assert "all-gather" not in by_xla


def test_a_derivative_from_outside():
    x = placed(X, P("dp", "tp"))
    make = lambda psum: jax.jit(jax.grad(lambda x: (partly(lambda x: psum(x * x, "dp") + x)(x) ** 2).sum()))  # noqa: E731
    assert_same_bits(make(ring_psum)(x), np.asarray(make(lax.psum)(x)))


def test_equal_calls_of_two_lines_are_one():
    def body(x):
        one = ring_psum(x * 3, "dp")
        other = ring_psum(x * 3, "dp")
        return one + other * x

    x = placed(X, P("dp", "tp"))
    assert counts(text_of(partly(body), x)) == (1, {})


@pytest.mark.parametrize(("shape", "manual"), [((8, 1, 1), {"dp"}), ((2, 2, 2), {"dp"}), ((2, 2, 2), {"dp", "pp"})])
def test_other_meshes(shape, manual):
    mesh = jax.make_mesh(shape, ("dp", "pp", "tp"), axis_types=(AUTO,) * 3, devices=jax.devices()[:8])
    x = placed(X, P("dp", ("tp", "pp")), mesh)
    options = {"mesh": mesh, "in_specs": P("dp"), "out_specs": P("dp"), "check_vma": False}
    body = lambda x: ring_psum(x, "dp") + x  # noqa: E731
    f = jax.jit(jax.shard_map(body, axis_names=manual, **options))
    assert_same_bits(f(x), np.asarray(jax.jit(jax.shard_map(body, **options))(x)))
    assert counts(text_of(f, x))[0] == 1


def test_sums_along_the_tree():
    shards = 6  # three for each rank, which are two terms
    values = np.random.default_rng(1).normal(size=(shards, 4, 8)).astype(np.float32)

    def body(x):
        return ring_psum(jax_ring.ShardSums.of(x, "dp", num_shards=shards), "dp", order="tree", num_shards=shards)

    x = placed(values, P("dp", None, "tp"))
    f = partly(body, out_specs=P())
    halves = [(v[0] + v[1], v[2]) for v in (values[:3], values[3:])]
    expected = (halves[0][0] + (halves[0][1] + values[3])) + (values[4] + values[5])
    assert_same_bits(f(x), expected)
    assert counts(text_of(f, x)) == (1, {})


def test_an_automatic_axis_of_one_device_divides_nothing():
    mesh = jax.make_mesh((8, 1), ("dp", "tp"), axis_types=(AUTO,) * 2, devices=jax.devices()[:8])
    x = placed(X, P("dp"), mesh)
    (call,) = explain(partly(lambda x: ring_psum(x, "dp", order="ring"), mesh=mesh, out_specs=P()), x).collectives
    assert (call.served_by, call.order) == ("jax_ring", "ring")


# What XLA serves.


def test_the_blocks_of_a_ring_are_left_to_xla(monkeypatch):
    x = placed(X, P("dp", "tp"))
    f = partly(lambda x: ring_psum(x, "dp", order="ring"), out_specs=P())
    (call,) = explain(f, x).collectives
    assert call.served_by == "XLA"
    assert "leaves the axes ['tp'] to the compiler, and the blocks of order='ring'" in call.why
    monkeypatch.setattr(runtime, "STRICT", True)
    jax.clear_caches()
    with pytest.raises(NotImplementedError, match="the blocks of order='ring' would depend"):
        partly(lambda x: ring_psum(x, "dp", order="ring"), out_specs=P())(x)


def test_explain_says_that_jax_ring_serves_it():
    x = placed(X, P("dp", "tp"))
    found = explain(partly(lambda x: ring_psum(x, "dp"), out_specs=P()), x)
    assert [call.served_by for call in found.collectives] == ["jax_ring"]
    assert [(each.name, each.num_bytes) for each in found.instructions] == [("jax_ring_all_reduce", 16 * 8 * 4)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_without_shardy_xla_serves_it():
    x = placed(X, P("dp", "tp"))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        f = partly(lambda x: ring_psum(x, "dp"), out_specs=P())
        assert "jax_use_shardy_partitioner is off" in explain(f, x).collectives[0].why
        np.testing.assert_allclose(f(x), X[:16] + X[16:], rtol=1e-6)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


# Programs that are compiled later, or elsewhere.


def test_export():
    x = placed(X, P("dp", "tp"))
    f = partly(lambda x: ring_psum(x, "dp") + x)
    targets = [*runtime.TARGETS.values(), "jax_ring.partitioned"]
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    program = jax.export.deserialize(jax.export.export(f, disabled_checks=checks)(x).serialize())
    g = jax.jit(program.call)
    assert_same_bits(g(x), np.asarray(f(x)))
    assert counts(text_of(g, x)) == (1, {})


CACHED = """
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_ring import ring_psum
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
x = jnp.arange(64.0).reshape(8, 8)
x = jax.device_put(x, NamedSharding(mesh, P("dp", "tp")))
f = lambda x: ring_psum(x, "dp")
f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P(), axis_names={"dp"}))
hits.clear()
print(f(x).sum(), hits.count("/jax/compilation_cache/cache_hits") > 0)
"""


@pytest.mark.full
def test_the_persistent_cache_serves_another_process(tmp_path):
    outputs = [run_python(CACHED, JAX_COMPILATION_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert [each.stdout.split()[-2:] for each in outputs] == [["2016.0", "False"], ["2016.0", "True"]], outputs


# Training.


@pytest.mark.parametrize("impl", ["ring", "lax"])
def test_gradients_stay_divided(impl, check_vma):
    specs = {"up": P(None, "tp"), "bias": P("tp"), "down": P("tp", None)}
    rng = np.random.default_rng(2)
    weights = {"up": (8, 16), "bias": (16,), "down": (16, 4)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in weights.items()}
    loss = lambda w, x: jnp.mean((jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]) ** 2)  # noqa: E731
    batch = rng.normal(size=(8, 8)).astype(np.float32)
    step = reduced_by(impl)(jax_ring.value_and_grad(loss, axis_name="dp"))
    f = partly(step, in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=check_vma)
    args = {name: placed(w, specs[name]) for name, w in weights.items()}, placed(batch, P("dp"))
    value, gradients = f(*args)
    expected_value, expected = jax.value_and_grad(loss)(weights, batch)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-6)
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh_of(), specs[name]), gradient.ndim)
    num_calls, by_xla = counts(text_of(f, *args))
    assert num_calls == (impl == "ring")
    assert "all-gather" not in by_xla
