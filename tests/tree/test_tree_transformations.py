"""Sums along the tree under JAX's transformations: derivatives, batches, loops, vma tracking, export."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, compiled_text, make_mesh, tree_fold
from jax import lax
from jax.sharding import PartitionSpec as P
from shards import SAME, numbers, on_ranks, terms

from jax_ring import ShardSums, ring_psum, ring_psum_scatter, ring_reduce, shard_tree

V, RANKS = 24, 4  # each rank has two terms, over four shards and two
F32 = np.dtype(np.float32)


def used_slots(num_shards, num_ranks) -> np.ndarray:
    """By rank and slot: whether the rank has such a term."""
    slots = shard_tree.num_slots(num_shards, num_ranks)
    counts = [len(shard_tree.terms_of(num_shards, num_ranks, rank)) for rank in range(num_ranks)]
    return np.arange(slots) < np.array(counts)[:, None]


# ---- Derivatives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", [ring_psum, ring_psum_scatter, ring_reduce])
def test_jvp(reduction, check_vma):
    x, dx = terms(numbers((V, 4, 3)), RANKS), terms(numbers((V, 4, 3), seed=1), RANKS)

    def body(x, dx):
        out, tangent = jax.jvp(lambda t: reduction(ShardSums(t, V, (F32,)), "i", order="tree"), (x.terms,), (dx.terms,))
        return out[None], tangent[None]

    f = on_ranks(body, RANKS, check_vma=check_vma, out_specs=P(None) if reduction is ring_psum else P("i"))
    expected = [tree_fold(numbers((V, 4, 3))), tree_fold(numbers((V, 4, 3), seed=1))]
    for found, total in zip(f(x, dx), expected, strict=True):
        assert_same_bits(found.reshape(-1, 3)[:4], total)


# 20 shards on 4 ranks: the ranks have two or three terms.
@pytest.mark.parametrize("num_shards", [8, 20])
@pytest.mark.parametrize("reduction", [ring_psum, ring_psum_scatter, ring_reduce])
def test_vjp(reduction, num_shards, check_vma):
    own = terms(numbers((num_shards, 4, 3)), RANKS)
    weights = numbers((RANKS, 4, 3), seed=2)

    def body(own, weight):
        def loss(t):
            total = reduction(ShardSums(t, num_shards, (F32,)), "i", order="tree")
            return (weight[0, :1] * total).sum() if reduction is ring_psum_scatter else (weight[0] * total).sum()

        return jax.grad(loss)(own.terms)

    found = on_ranks(body, RANKS, check_vma=check_vma, out_specs=P("i"))(own, weights)
    # Every rank's sum depends on every term in use: by the weights of the ranks together, or of the one that has it.
    if reduction is ring_psum:
        cotangent = [tree_fold(weights)] * RANKS
    elif reduction is ring_psum_scatter:
        cotangent = [weights[:, 0]] * RANKS
    else:
        cotangent = [weights[0]] * RANKS
    used = used_slots(num_shards, RANKS)
    expected = used[:, :, None, None] * np.stack(cotangent)[:, None]
    np.testing.assert_allclose(np.asarray(found).reshape(expected.shape), expected, rtol=1e-6)
    assert not np.asarray(found).reshape(expected.shape)[~used].any()


def test_reverse_mode_over_the_sums_of_shards_is_refused_and_forward_mode_is_not(check_vma):
    x = numbers((8, 3))

    def total(x):
        return ring_psum(ShardSums.of({"x": x, "n": jnp.ones(len(x), int)}, "i", 8), "i", order="tree")["x"]

    with pytest.raises(NotImplementedError, match=r"^ShardSums\.of has no reverse mode.*num_shards=V"):
        on_ranks(jax.grad(lambda x: total(x).sum()), RANKS, check_vma=check_vma, out_specs=P("i"))(x)
    forward = on_ranks(lambda x: jax.jvp(total, (x,), (x,))[1], RANKS, check_vma=check_vma, out_specs=P())
    assert_same_bits(forward(x), tree_fold(x))


def test_the_transpose_of_one_value_on_each_rank(check_vma):
    x = numbers((RANKS, 5))
    f = on_ranks(
        lambda x: jax.grad(lambda x: ring_psum_scatter(x[0, :4], "i", order="tree").sum())(x),
        RANKS, check_vma=check_vma, out_specs=P("i"),
    )  # fmt: skip
    assert_same_bits(f(x), np.float32([[1, 1, 1, 1, 0]] * RANKS))


# ---- Batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axis", [0, 1, 2, 3])
def test_vmap_of_another_axis(in_axis, check_vma):
    x = numbers((V, 4, 8, 5))  # the last is the batch
    own = terms(x, RANKS)

    def body(own):
        moved = jnp.moveaxis(own.terms, -1, in_axis)

        def of_one(t):
            one = ShardSums({"a": t, "b": 2 * t}, V, (F32, F32))
            scattered = ring_psum_scatter(one, "i", order="tree", scatter_dimension=1, tiled=True)
            return ring_psum(one, "i", order="tree"), scattered

        return jax.vmap(of_one, in_axes=in_axis, out_axes=-1)(moved)

    total, scattered = on_ranks(body, RANKS, check_vma=check_vma, out_specs=(P(), P(None, "i")))(own)
    expected = {"a": tree_fold(x), "b": 2 * tree_fold(x)}
    assert_same_bits(total, expected)
    assert_same_bits(scattered, expected)


def test_an_operand_without_a_batch(check_vma):
    x, y = numbers((V, 4, 5)), numbers((V, 4))

    def body(x, y):
        one = lambda t: ring_psum(ShardSums((t, y.terms), V, (F32, F32)), "i", order="tree")  # noqa: E731
        return jax.vmap(one, in_axes=2, out_axes=(1, None))(x.terms)

    f = on_ranks(body, RANKS, check_vma=check_vma)
    assert_same_bits(f(terms(x, RANKS), terms(y, RANKS)), (tree_fold(x), tree_fold(y)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_over_a_vmap_axis(ranks):
    x = numbers((ranks, 7)), numbers((ranks, 3), jnp.bfloat16), numbers((ranks, 4), np.int8)
    f = jax.jit(jax.vmap(lambda x: ring_psum(x, "i", order="tree"), axis_name="i", out_axes=None))
    assert_same_bits(f(x), jax.tree.map(tree_fold, x))
    same = jax.vmap(lambda _: ring_psum(jnp.float32(0.1) * x[0].shape[0], "i", order="tree"), axis_name="i")
    assert same(x[0])[0] == np.float32(0.1) * ranks * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_over_a_vmap_axis(ranks):
    x = numbers((12, 12, 5))
    own = terms(x, ranks)

    def body(t):
        one = ShardSums(t, 12, (F32,))
        scattered = ring_psum_scatter(one, "i", order="tree", tiled=True)
        return ring_psum(one, "i", order="tree"), scattered, ring_reduce(one, "i", order="tree")

    by_rank = own.terms.reshape(ranks, -1, 12, 5)
    for in_axis in (0, 2):
        f = jax.vmap(body, axis_name="i", in_axes=in_axis, out_axes=(None, 0, 0))
        total, scattered, rooted = jax.jit(f)(np.moveaxis(by_rank, 0, in_axis))
        assert_same_bits(total, tree_fold(x))
        assert_same_bits(scattered.reshape(12, 5), tree_fold(x))
        assert_same_bits(rooted[0], tree_fold(x))
        assert not np.asarray(rooted[1:]).any()


def test_derivatives_over_a_vmap_axis():
    own = terms(numbers((20, 3)), 4).terms.reshape(4, -1, 3)
    loss = lambda t: ring_psum(ShardSums(t, 20, (F32,)), "i", order="tree").sum()  # noqa: E731
    found = jax.vmap(jax.grad(loss), axis_name="i")(own)
    expected = np.broadcast_to(used_slots(20, 4)[..., None], own.shape) * np.float32(4)
    assert_same_bits(found, expected)


def test_a_vmap_axis_and_a_mesh_axis_are_refused(check_vma):
    x = numbers((RANKS, 3, 5))
    body = lambda x: jax.vmap(lambda x: ring_psum(x, ("i", "b"), order="tree"), axis_name="b")(x[0])  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"over \('i', 'b'\) includes the vmap axis 'b'.* only axis"):
        on_ranks(body, RANKS, check_vma=check_vma)(x)
    with pytest.raises(NotImplementedError, match="order='tree'"):
        jax.vmap(jax.vmap(lambda x: ring_psum(x, ("a", "b"), order="tree"), axis_name="b"), axis_name="a")(x)


# ---- Loops, dead code, programs -------------------------------------------------------------------------------------


def test_scan_and_dead_code(check_vma):
    x = numbers((V, 4))
    own = terms((x, x), RANKS)

    def body(own):
        def step(carry, _):
            total, unused = ring_psum(ShardSums(own.terms, V, own.dtypes), "i", order="tree")
            del unused
            return carry + 1, total

        return lax.scan(step, 0, None, length=2)[1]

    f = on_ranks(body, RANKS, check_vma=check_vma)
    assert_same_bits(f(own), np.stack([tree_fold(x)] * 2))
    (call,) = [line for line in compiled_text(f, own).splitlines() if "jax_ring_all_reduce" in line]
    assert "f32[2,4]" in call
    assert call.count("f32[2,4]") == 1


def test_donation_and_pmap():
    x = numbers((RANKS, 64))
    f = on_ranks(lambda x: ring_psum(x * 2, "i", order="tree") + x, RANKS, out_specs=P("i"))
    assert_same_bits(jax.jit(f, donate_argnums=0)(jnp.asarray(x)), tree_fold(2 * x) + x)
    mapped = jax.pmap(lambda x: ring_psum(x, "i", order="tree"), axis_name="i", devices=jax.devices()[:RANKS])
    assert_same_bits(mapped(x)[1], tree_fold(x))


def test_the_vma_types():
    own = terms(numbers((V, 4)), RANKS)

    def body(own):
        total = ring_psum(own, "i", order="tree")
        block = ring_psum_scatter(own, "i", order="tree", tiled=True)
        assert not jax.typeof(total).mat.varying
        assert jax.typeof(block).mat.varying == {"i"}
        return total, block

    on_ranks(body, RANKS, out_specs=(P(), P("i")))(own)


def test_export():
    own = terms(numbers((V, 4)), RANKS)
    f = on_ranks(lambda own: ring_psum(own, "i", order="tree"), RANKS, check_vma=False)
    shape = jax.ShapeDtypeStruct(own.terms.shape, F32, sharding=jax.NamedSharding(make_mesh((RANKS,)), P("i")))
    exported = jax.export.export(jax.jit(lambda t: f(ShardSums(t, V, (F32,)))), platforms=("cpu", "cuda"))(shape)
    run = jax.export.deserialize(exported.serialize()).call
    assert_same_bits(run(jax.device_put(own.terms, shape.sharding)), tree_fold(numbers((V, 4))))


def test_shards_that_an_explicit_axis_divides(check_vma):
    mesh = jax.make_mesh((RANKS, 2), ("i", "j"))
    shards = numbers((V, 4))
    f = jax.shard_map(
        lambda own: ring_psum(ShardSums.of(own, "i", V), "i", order="tree"), in_specs=P("i"), out_specs=SAME,
        axis_names={"i"}, check_vma=check_vma,
    )  # fmt: skip
    with jax.set_mesh(mesh):
        total = jax.jit(f)(jax.device_put(shards, P("i", "j")))
    assert total.sharding.spec == P("j")
    assert_same_bits(total, tree_fold(shards))
