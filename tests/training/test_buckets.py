"""Gradient buckets: plans, bit-identical results, and errors when the plans of processes differ."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET, assert_same_bits, compiled_text, make_mesh, rank_fold, run_processes, sharded
from jax.sharding import PartitionSpec as P
from tiers import vma_fixture

from jax_ring import plan_buckets, sync_gradients, sync_with_feedback
from jax_ring.distributed import discovery, store
from jax_ring.training.wire import reduced_by

check_vma = vma_fixture(without_vma=pytest.mark.one_pair)  # plain JAX on top of the collectives

RANKS = 8
KIB = 1 << 10


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradients(seed=0):
    """Leaves of several sizes and dtypes, of shape (ranks, ...)."""
    rng = np.random.default_rng(seed)
    shapes = [(300,), (7, 11), (), (1024,), (0, 3), (2, 3, 5)]
    tree = {f"f{i}": rng.standard_normal((RANKS, *shape)).astype(np.float32) for i, shape in enumerate(shapes)}
    return tree | {"half": rng.standard_normal((RANKS, 33)).astype(jnp.bfloat16)}


REPLICATED = P()


def on_ranks(fun, *, check_vma=True, out_specs=REPLICATED):
    """`fun` on each rank's part of trees with leaves of shape (ranks, ...)."""
    return sharded(lambda *trees: fun(*jax.tree.map(lambda x: x[0], trees)), check_vma=check_vma, out_specs=out_specs)


# ---- Plans ----------------------------------------------------------------------------------------------------------


def test_reverse_order_and_sizes():
    tree = [struct(256), struct(256), struct(128), struct(1000), struct(128), struct(128)]
    plan = plan_buckets(tree, bucket_bytes=2 * KIB, first_bucket_bytes=KIB)
    assert [bucket.leaves for bucket in plan.buckets] == [(5, 4), (3,), (2, 1), (0,)]
    assert [bucket.num_bytes for bucket in plan.buckets] == [KIB, 4000, 1536, KIB]


def test_one_dtype_in_a_bucket():
    tree = [struct(4), struct(4, dtype=jnp.bfloat16), struct(4), struct(4, dtype=jnp.bfloat16)]
    plan = plan_buckets(tree)
    assert [(bucket.dtype.name, bucket.leaves) for bucket in plan.buckets] == [
        ("bfloat16", (3, 1)),
        ("float32", (2, 0)),
    ]


def test_every_leaf_is_in_one_bucket():
    tree = [struct(n * 37 % 101, dtype=(jnp.float32, jnp.float16)[n % 2]) for n in range(50)]
    for size in (1, 64, KIB, 1 << 40):
        plan = plan_buckets(tree, size, size)
        assert sorted(i for bucket in plan.buckets for i in bucket.leaves) == list(range(50))
        assert all(bucket.num_bytes <= size or len(bucket.leaves) == 1 for bucket in plan.buckets if size > 1)


def test_plan_as_text():
    assert str(plan_buckets({"w": struct(2, 3), "b": struct(3)})).splitlines() == [
        "leaves: 2, bytes: 36, buckets: 1",
        "bucket 0: 36 bytes of float32",
        "  ['w']: float32[2,3]",
        "  ['b']: float32[3]",
    ]


def test_fingerprints():
    tree = {"w": struct(2, 3), "b": struct(3)}
    same = plan_buckets({"b": np.ones(3, np.float32), "w": jnp.ones((2, 3))})
    assert plan_buckets(tree).fingerprint == same.fingerprint
    others = [
        plan_buckets(tree, bucket_bytes=16),
        plan_buckets(tree | {"w": struct(3, 2)}),
        plan_buckets(tree | {"w": struct(2, 3, dtype=jnp.int32)}),
        plan_buckets({"w": tree["w"], "c": tree["b"]}),
    ]
    assert len({same.fingerprint} | {plan.fingerprint for plan in others}) == 5


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 5)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(ValueError, match=f"bytes must be positive, got {min(sizes)}"):
        plan_buckets([struct(2)], *sizes)


# ---- Sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [True, False])
def test_means_and_sums(mean, check_vma):
    tree = gradients()
    synced = on_ranks(lambda g: sync_gradients(g, "i", mean=mean), check_vma=check_vma)(tree)
    expected = jax.tree.map(lambda values: rank_fold(values) / np.asarray(RANKS if mean else 1, values.dtype), tree)
    assert_same_bits(synced, expected)


@pytest.mark.parametrize("impl", ["ring", "lax"])
def test_bucket_size_does_not_change_bits(impl, check_vma):
    tree = gradients()
    results, calls = [], []
    for size in (1, KIB, 1 << 20, 1 << 40):
        sizes = {"bucket_bytes": size, "first_bucket_bytes": size}
        f = on_ranks(reduced_by(impl)(lambda g, sizes=sizes: sync_gradients(g, "i", **sizes)), check_vma=check_vma)
        results.append(f(tree))
        calls.append(compiled_text(f, tree).count(f'"{TARGET}"'))
    for result in results[1:]:
        assert_same_bits(result, results[0])
    # The leaf without elements needs no call.
    assert calls == ([6, 5, 2, 2] if impl == "ring" else [0] * 4)


def test_impls_agree(check_vma):
    tree = {name: values for name, values in gradients().items() if values.dtype == np.float32}
    ring, lax_ = (
        on_ranks(reduced_by(impl)(lambda g: sync_gradients(g, "i")), check_vma=check_vma)(tree)
        for impl in ("ring", "lax")
    )
    assert_same_bits(ring, lax_)


def test_nothing_is_concatenated():
    text = compiled_text(on_ranks(lambda g: sync_gradients(g, "i")), gradients())
    assert " concatenate(" not in text


def test_several_axes(check_vma):
    mesh = make_mesh((2, 4), ("a", "b"))
    x = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)
    f = sharded(
        lambda x: sync_gradients(x, ("a", "b")), mesh=mesh, in_specs=P(("a", "b")), out_specs=P(), check_vma=check_vma
    )
    assert_same_bits(f(x)[0], rank_fold(x) / np.float32(8))


def test_over_a_vmap_axis():
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(
        jax.vmap(lambda x: sync_gradients(x, "v"), axis_name="v")(x), np.tile(x.mean(0), (4, 1))
    )


def test_an_axis_of_one_rank(check_vma):
    f = sharded(lambda x: sync_gradients(x, "i"), mesh=make_mesh((1,)), out_specs=P(), check_vma=check_vma)
    np.testing.assert_array_equal(f(np.arange(3.0)), np.arange(3.0))


# ---- Wire dtype and error feedback ----------------------------------------------------------------------------------


def test_wire(check_vma):
    tree = gradients()
    synced = on_ranks(lambda g: sync_gradients(g, "i", wire=jnp.bfloat16), check_vma=check_vma)(tree)

    def mean_of(values):
        return rank_fold(values.astype(jnp.bfloat16)).astype(values.dtype) / np.asarray(RANKS, values.dtype)

    assert_same_bits(synced, jax.tree.map(mean_of, tree))


def test_buckets_are_sent_as_the_wire_says():
    f = on_ranks(lambda g: sync_gradients(g, "i", wire=jnp.bfloat16))
    call = next(line for line in compiled_text(f, gradients()).splitlines() if f'"{TARGET}"' in line)
    assert "bf16[300]" in call
    assert "f32[" not in call


def test_feedback_compensates_rounding():
    """The relative error of one rounded mean is about 2^-9. With feedback, the error of a sum stays bounded."""
    steps, x = 64, np.random.default_rng(0).standard_normal((RANKS, 1000)).astype(np.float32)
    exact = x.astype(np.float64).mean(0)

    def with_feedback(x):
        def step(residual, _):
            synced, residual = sync_with_feedback(x, residual, "i")
            return residual, (synced, sync_gradients(x, "i", wire=jnp.bfloat16))

        return jax.lax.scan(step, jnp.zeros_like(x), None, steps)[1]

    fed, plain = (np.asarray(g, np.float64) for g in on_ranks(with_feedback)(x))
    scale = np.abs(exact).mean()
    one_step = np.abs(plain[0] - exact).mean() / scale
    assert one_step < 2**-8
    # Without feedback, each step is rounded in the same way, so the relative error does not shrink.
    assert np.abs(plain.mean(0) - exact).mean() / scale == pytest.approx(one_step)
    assert np.abs(fed.mean(0) - exact).mean() / scale < one_step / 2


def test_residual_is_what_was_not_sent(check_vma):
    tree = gradients()
    residuals = jax.tree.map(lambda x: (x * 2**-9).astype(x.dtype), tree)

    def local(g, r):
        return jax.tree.map(lambda x: x[None], sync_with_feedback(g, r, "i")[1])

    kept = on_ranks(local, check_vma=check_vma, out_specs=P("i"))(tree, residuals)
    wanted = jax.tree.map(np.add, tree, residuals)
    assert_same_bits(kept, jax.tree.map(lambda x: x - x.astype(jnp.bfloat16).astype(x.dtype), wanted))


# ---- Errors ---------------------------------------------------------------------------------------------------------


def test_summed_gradients_are_refused():
    def step(w, x):
        grads = jax.grad(lambda w: (x @ w["w"]).sum())(w)  # already summed, because w is replicated
        return sync_gradients(grads, "i")

    f = sharded(step, in_specs=(P(), P("i")), out_specs=P())
    with pytest.raises(ValueError, match=r"the leaf at \['w'\].*is already the same on all ranks of \['i'\]") as error:
        f({"w": np.ones(4, np.float32)}, np.ones((16, 4), np.float32))
    assert "Use jax_ring.value_and_grad" in str(error.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"order": "nccl"}, ValueError, "order must be one of 'rank', 'ring', 'any', 'tree'; got 'nccl'"),
        ({"wire": jnp.int16}, TypeError, "wire must be a floating-point dtype or 'int8', got"),
        ({"bucket_bytes": 0}, ValueError, "must be positive"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        on_ranks(lambda g: sync_gradients(g, "i", **options))(gradients())


def test_unbound_axis():
    with pytest.raises(NameError, match="sync_gradients: unbound axis name 'x'"):
        on_ranks(lambda g: sync_gradients(g, "x"))(gradients())


# ---- Processes ------------------------------------------------------------------------------------------------------


def test_agreement(monkeypatch):
    values = {"k/1": b"a\nb\nc"}  # published by the other process

    def get(key):
        if key not in values:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
        return values[key]

    monkeypatch.setattr(store, "current", lambda: types.SimpleNamespace(put=values.__setitem__, get=get))
    discovery.compare("f", "a\nb\nc", "k", range(2))
    with pytest.raises(
        ValueError, match=r"process 0 \(here\) and process 1 \(there\) were given different data: 'x' here, 'b' there"
    ):
        discovery.compare("f", "a\nx\nc", "k", range(2))
    with pytest.raises(ValueError, match="'d' here, 'nothing' there"):
        discovery.compare("f", "a\nb\nc\nd", "k", range(2))
    with pytest.raises(ValueError, match="process 2 did not reach this call within 60 s"):
        discovery.compare("f", "a\nb\nc", "k", range(3))


PROCESS = """
import sys, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from jax_ring import sync_gradients
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("{address}", 2, {process})
def step(x):
    shape = {shape}
    return sync_gradients({{"w": jnp.full(shape, 1 + x[0])}}, "i")["w"].sum()
def over(devices, step=step):
    f = jax.jit(jax.shard_map(step, mesh=Mesh(devices, ("i",)), in_specs=P("i"), out_specs=P()))
    return f.trace(jax.ShapeDtypeStruct((len(devices),), jnp.float32))
over(jax.local_devices())  # local meshes are not compared
try:
    over(jax.devices())
    print("agreed")
except ValueError as error:
    print(error)
jax.distributed.shutdown()
"""


@pytest.mark.full
@pytest.mark.parametrize("shapes", [((3,), (3,)), ((3,), (4,))], ids=["alike", "different"])
def test_processes_compare_plans(shapes):
    results = run_processes(PROCESS, [{"shape": shape} for shape in shapes], devices=2)
    for i, text in enumerate(results):
        if shapes[0] == shapes[1]:
            assert text.strip() == "agreed"
        else:
            assert f"process {i} (here) and process {1 - i} (there) were given different data" in text
            assert "['w']: float32[3]" in text
