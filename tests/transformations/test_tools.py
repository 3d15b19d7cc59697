"""JAX's tools: export, checkify, NaN debugging, donation, eval_shape, jaxprs and ahead-of-time compilation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET, assert_matches_lax, assert_same_trees, make_mesh, num_calls, sharded, without_paths
from jax import lax
from jax.experimental import checkify
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum

RANKS = 4
MESH = make_mesh((RANKS,))
X = np.arange(8, dtype=np.float32) - 3
SUM = X.reshape(RANKS, 2).sum(0)

# jax.export rejects custom calls without a stability guarantee.
ALLOWED = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]


def on_device():
    return jax.device_put(X, NamedSharding(MESH, P("i")))


def total(check_vma, psum=ring_psum):
    return sharded(lambda x: psum(x, "i"), mesh=MESH, out_specs=P(), check_vma=check_vma)


# Export.


def test_export(check_vma):
    exported = jax.export.export(total(check_vma), disabled_checks=ALLOWED)(on_device())
    assert TARGET in exported.mlir_module()
    assert exported.nr_devices == RANKS
    np.testing.assert_array_equal(jax.jit(exported.call)(on_device()), SUM)


def test_export_round_trip(check_vma):
    f = sharded(lambda x: ring_psum(x * x, "i") * x, mesh=MESH, check_vma=check_vma)
    exported = jax.export.export(f, disabled_checks=ALLOWED)(on_device())
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    np.testing.assert_array_equal(jax.jit(again.call)(on_device()), f(X))
    gradient = jax.jit(jax.grad(lambda x: again.call(x).sum()))(on_device())
    np.testing.assert_array_equal(gradient, jax.grad(lambda x: f(x).sum())(X))


def test_export_for_several_platforms(check_vma):
    # A program for several platforms, of which only some have an engine, uses XLA's all_reduce on all of them.
    exported = jax.export.export(total(check_vma), platforms=("cpu", "cuda"))(on_device())
    assert exported.platforms == ("cpu", "cuda")
    module = without_paths(exported.mlir_module())
    assert TARGET not in module
    assert "stablehlo.all_reduce" in module
    np.testing.assert_array_equal(jax.jit(exported.call)(on_device()), SUM)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_export_for_another_platform_alone(platform, check_vma):
    exported = jax.export.export(total(check_vma), platforms=(platform,))(on_device())
    module = without_paths(exported.mlir_module())
    assert TARGET not in module
    assert "stablehlo.all_reduce" in module


def test_export_without_permission_names_the_call():
    with pytest.raises(ValueError, match=TARGET):
        jax.export.export(total(True))(on_device())


# Checks.


def test_checkify_within_shard_map(check_vma):
    def body(x):
        def check(x):
            y = ring_psum(x, "i")
            checkify.check(y.sum() > 0, "the sum is {s}", s=y.sum())
            return y

        error, out = checkify.checkify(check)(x)
        # Only whether there is an error can leave the shard_map, not the error itself.
        failed = jax.tree.leaves(error)[0]
        return out + 0 * x, failed[None] | (x[:1] > 1e9)

    f = sharded(body, mesh=MESH, check_vma=check_vma)
    for x, fails in ((X, SUM.sum() <= 0), (-X, -SUM.sum() <= 0)):
        expected = np.tile(x.reshape(RANKS, 2).sum(0), RANKS), np.array([fails] * RANKS)
        chex.assert_trees_all_equal(f(x), expected, strict=True)


def test_checkify_around_shard_map():
    f = sharded(lambda x: jnp.log(ring_psum(x, "i")) + x, mesh=MESH)
    error, _ = checkify.checkify(f, errors=checkify.nan_checks)(np.abs(X))
    assert error.get() is None
    error, _ = checkify.checkify(f, errors=checkify.nan_checks)(-np.abs(X) - 1)
    assert "nan" in error.get()


def test_debug_nans(check_vma):
    # The sum of infinities of both signs is NaN, although no operand holds a NaN.
    x = X.copy()
    x[0], x[2] = np.inf, -np.inf
    f = total(check_vma)
    assert np.isnan(f(x)[0])
    with jax.debug_nans(True):
        np.testing.assert_array_equal(f(X), SUM)
        with pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(f(x))


# Buffers.


def test_donated_operand_is_deleted(check_vma):
    f = jax.jit(sharded(lambda x: ring_psum(x, "i") + x, mesh=MESH, check_vma=check_vma, jit=False), donate_argnums=0)
    x = on_device()
    out = f(x)
    assert x.is_deleted()
    np.testing.assert_array_equal(out, X + np.tile(SUM, RANKS))


def test_donated_operand_of_the_call_itself():
    f = jax.jit(
        jax.shard_map(lambda x: ring_psum(x, "i"), mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_vma=False),
        donate_argnums=0,
    )  # fmt: skip
    for _ in range(20):
        x = on_device()
        out = f(x)
        assert x.is_deleted()
        np.testing.assert_array_equal(out, np.tile(SUM, RANKS))
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(x)


def test_an_operand_that_is_not_donated_is_kept(check_vma):
    x = on_device()
    f = sharded(lambda x: (ring_psum(x, "i") + x, x + 1), mesh=MESH, check_vma=check_vma)
    f(x), total(check_vma)(x)
    assert not x.is_deleted()
    np.testing.assert_array_equal(x, X)


def test_the_operand_is_used_after_the_call(check_vma):
    # Fails if a result is written into a buffer that is still needed.
    def body(x):
        y = x * 2
        a = ring_psum(y, "i")
        return y - a, ring_psum(y * y, "i") + y

    expected = 2 * X - np.tile(2 * SUM, RANKS), np.tile((4 * X * X).reshape(RANKS, 2).sum(0), RANKS) + 2 * X
    chex.assert_trees_all_equal(sharded(body, mesh=MESH, check_vma=check_vma)(X), expected, strict=True)


# Inspection of programs without running them.


def test_eval_shape(check_vma):
    tree = {"a": jax.ShapeDtypeStruct((8, 3), jnp.bfloat16), "b": jax.ShapeDtypeStruct((4,), jnp.bool_)}
    ours, theirs = (jax.eval_shape(total(check_vma, psum), tree) for psum in (ring_psum, lax.psum))
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    assert ours["b"].dtype == jnp.int32


def test_jaxpr(check_vma):
    text = str(jax.make_jaxpr(total(check_vma))({"a": X, "b": X + 1}))
    name = "ring_psum_invariant" if check_vma else "ring_psum"
    assert text.count(f" {name}[") == 1
    assert "axes=('i',)" in text
    assert "axis_index_groups=None" in text


def test_make_jaxpr_with_an_axis_environment():
    jaxpr = jax.make_jaxpr(lambda x: ring_psum(x, "i"), axis_env=[("i", 4)])(X)
    assert "ring_psum[axes=('i',)" in "".join(str(jaxpr).split())
    assert jaxpr.effects


def test_ahead_of_time(check_vma):
    lowered = total(check_vma).lower(on_device())
    assert f"@{TARGET}" in lowered.as_text()
    compiled = lowered.compile()
    for _ in range(3):
        np.testing.assert_array_equal(compiled(on_device()), SUM)
    assert compiled.memory_analysis() is not None
    assert compiled.cost_analysis() is not None


def test_description_in_the_program(check_vma):
    x = {"w": X, "n": X.astype(np.int32).reshape(4, 2), "v": X.reshape(8, 1)}
    text = total(check_vma).lower(x).as_text()
    assert "call = \"ring_psum of float32[2,1], float32[2] over axis 'i'" in text
    assert "call = \"ring_psum of int32[1,2] over axis 'i'" in text


def test_disable_jit(check_vma):
    with jax.disable_jit():
        f = jax.shard_map(
            lambda x: ring_psum(x * x, "i"), mesh=MESH, in_specs=P("i"), out_specs=P(), check_vma=check_vma
        )  # fmt: skip
        np.testing.assert_array_equal(f(X), (X * X).reshape(RANKS, 2).sum(0))


def test_recompiling_does_not_change_the_sum(check_vma):
    for _ in range(3):
        jax.clear_caches()
        np.testing.assert_array_equal(total(check_vma)(X), SUM)


def test_named_scopes_reach_the_program():
    def body(x):
        with jax.named_scope("my_layer"):
            return ring_psum(x, "i")

    text = sharded(body, mesh=MESH, out_specs=P()).lower(X).compile().as_text()
    (line,) = [line for line in text.splitlines() if f'custom_call_target="{TARGET}"' in line]
    assert "my_layer" in line


def test_debug_print_with_a_call(check_vma, capfd):
    def body(x):
        y = ring_psum(x, "i")
        jax.debug.print("sum {}", y[0])
        return y

    np.testing.assert_array_equal(sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma)(X), SUM)
    jax.effects_barrier()
    assert capfd.readouterr().out.count(f"sum {SUM[0]}") == RANKS


OTHERS = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "all_gather": lambda x: lax.all_gather(x, "i").sum(0),
    "ppermute": lambda x: lax.ppermute(x, "i", [(k, (k + 1) % 8) for k in range(8)]),
}


def mixed_with(other):
    """A function that mixes psum with a collective of XLA, which blocks the thread it runs on."""

    def body(psum, x):
        y = psum(x, "i") + x
        z = other(y) + x
        return psum(z, "i") * x + other(z * x)

    return body


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_together_with_a_collective_of_xla(other, check_vma):
    assert_matches_lax(mixed_with(other), X, mesh=make_mesh((8,)), check_vma=check_vma)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_a_collective_of_xla_is_not_replaced(other, check_vma):
    f = sharded(lambda x: mixed_with(other)(ring_psum, x), mesh=make_mesh((8,)), check_vma=check_vma)
    assert num_calls(f, X) == 2


def test_together_with_a_collective_of_xla_in_a_loop(check_vma):
    def body(x):
        return lax.fori_loop(0, 100, lambda k, v: jnp.mod(lax.psum(ring_psum(v, "i") + x, "i"), 5) + x, x)

    def reference(x):
        return lax.fori_loop(0, 100, lambda k, v: jnp.mod(lax.psum(lax.psum(v, "i") + x, "i"), 5) + x, x)

    mesh = make_mesh((8,))
    ours, theirs = (sharded(f, mesh=mesh, check_vma=check_vma)(X) for f in (body, reference))
    assert_same_trees(ours, theirs)
