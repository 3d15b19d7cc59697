"""ring_psum under vmap: over other axes, over the vmap axis, and over the vmap axis together with a mesh axis."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import RANKS, assert_matches_lax, assert_same_trees, make_mesh, num_calls, rank_fold, sharded
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import ring_psum

MESH = make_mesh((4,))
X = np.arange(48, dtype=np.float32).reshape(4, 2, 6) - 20
Y = X[::-1] + 1


def assert_same_as_lax(make):
    """Asserts that make(psum) gives the same tree with ring_psum and lax.psum."""
    assert_same_trees(make(ring_psum), make(lax.psum))


# The collective does not name the vmap axis.


@pytest.mark.parametrize(
    ("out_axes", "in_axes"),
    full_but(
        itertools.product([0, 1], [0, 1, -1, (0, None), (None, 1), (2, 0)]),
        [(0, 0), (0, (2, 0)), (1, -1), (1, (None, 1))],
    ),
    ids=str,
)
def test_in_and_out_axes(in_axes, out_axes, check_vma):
    both = in_axes if isinstance(in_axes, tuple) else (in_axes, in_axes)
    x = np.arange(4 * 2 * 2 * 2, dtype=np.float32).reshape(4 * 2, 2, 2)

    def body(psum, x, y):
        def f(x, y):
            a, b = psum((x * y.sum(), y + 1), "i")
            return a + b.sum(), b

        return jax.tree.map(lambda leaf: leaf + x.sum(), jax.vmap(f, both, out_axes)(x, y))

    assert_matches_lax(body, x, x - 9, mesh=MESH, check_vma=check_vma)


def test_nested(check_vma):
    def body(psum, x):
        f = lambda v: psum(v * v, "i") + v  # noqa: E731
        return jax.vmap(jax.vmap(f, in_axes=1), in_axes=1, out_axes=2)(x)

    assert_matches_lax(body, X, mesh=MESH, check_vma=check_vma)


def test_an_unbatched_operand_is_not_broadcast(check_vma):
    def f(x, y):
        return jax.vmap(lambda a: a + ring_psum(y, "i"))(x)

    mapped = sharded(f, mesh=MESH, check_vma=check_vma)
    text = mapped.lower(X, X[:, 0, 0]).as_text()
    assert text.count('call = "ring_psum of float32[1] over axis') == 1
    np.testing.assert_array_equal(mapped(X, X[:, 0, 0]), X + X[:, 0, 0].sum())


def test_batched_leaves_stay_one_call(check_vma):
    f = sharded(
        lambda x: jax.vmap(lambda v: ring_psum((v, v + 1, v * 2), "i"))(x),
        mesh=MESH, out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    assert num_calls(f, X) == 1


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[3], [0, 2, 1]]], ids=str)
def test_groups_under_vmap_of_another_axis(groups):
    def body(psum, x):
        return jax.vmap(lambda v: psum(v, "i", axis_index_groups=groups), 1, 1)(x)

    assert_matches_lax(body, X, mesh=MESH, check_vma=False)


@pytest.mark.parametrize("in_axes", [1, 2])
def test_vmap_outside_of_shard_map(in_axes, check_vma):
    def make(psum):
        f = sharded(lambda v: psum(v * v, "i") + v, mesh=MESH, check_vma=check_vma)
        return jax.vmap(f, in_axes)(X)

    assert_same_as_lax(make)


def test_spmd_axis_name(check_vma):
    mesh = make_mesh((2, 4), ("b", "i"))

    def make(psum):
        f = jax.shard_map(
            lambda x: psum(x * x, "i") + x, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma
        )  # fmt: skip
        out = jax.jit(jax.vmap(f, spmd_axis_name="b"))(X.transpose(1, 0, 2))
        assert "b" in str(out.sharding.spec)
        return out

    assert_same_as_lax(make)


# The collective names the vmap axis: a reduction on the device.


@pytest.mark.parametrize("in_axes", [0, 1, 2, -1])
def test_named_axis(in_axes):
    f = jax.vmap(lambda v: ring_psum(v, "b"), in_axes, axis_name="b")
    np.testing.assert_array_equal(f(X), np.broadcast_to(X.sum(in_axes), f(X).shape))
    assert_same_as_lax(lambda psum: jax.vmap(lambda v: psum((v, v * v), "b"), in_axes, axis_name="b")(X))
    assert num_calls(f, X) == 0


def test_named_axis_out_axes_none():
    assert_same_as_lax(lambda psum: jax.vmap(lambda v: psum(v, "b"), axis_name="b", out_axes=None)(X))


def test_named_axis_with_unbatched_operand():
    assert_same_as_lax(lambda psum: jax.vmap(lambda v, w: v + psum(w, "b"), (0, None), axis_name="b")(X, X[0]))
    assert_same_as_lax(lambda psum: jax.vmap(lambda v, w: psum((v, w), "b"), (0, None), axis_name="b")(X, X[0]))


def test_two_named_axes():
    for axes in ("a", "b", ("a", "b"), ("b", "a")):

        def make(psum, axes=axes):
            inner = jax.vmap(lambda v: psum(v * v, axes) + v, axis_name="b")
            return jax.vmap(inner, axis_name="a")(X)

        assert_same_as_lax(make)


def test_collectives_over_both_of_two_named_axes():
    def make(psum):
        def f(v):
            return psum(psum(v, "a") * v, "b") - psum(v, "b") * psum(v, "a")

        return jax.jit(jax.vmap(jax.vmap(f, axis_name="b"), axis_name="a", in_axes=1))(X)

    assert_same_as_lax(make)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64, jnp.float16, jnp.bfloat16], ids=str)
def test_named_axis_dtypes(dtype):
    x = (np.arange(12).reshape(4, 3) % 5).astype(dtype)
    assert_same_as_lax(lambda psum: jax.vmap(lambda v: psum(v, "b"), axis_name="b")(x))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_low_precision_sums_in_a_wide_accumulator(dtype):
    # Each addend is below half a ULP of 1 and would be lost in the dtype itself.
    tiny = jnp.finfo(dtype).eps / 4
    x = np.full(17, tiny, dtype)
    x[0] = 1
    total = jax.vmap(lambda v: ring_psum(v, "b"), axis_name="b", out_axes=None)(x)
    expected = rank_fold(x)
    assert expected.astype(np.float32) > 1
    assert_same_trees(total, expected)


def test_small_integers_wrap_around():
    x = np.full(5, 100, np.int8)
    total = jax.vmap(lambda v: ring_psum(v, "b"), axis_name="b", out_axes=None)(x)
    assert_same_trees(total, np.int8(500 - 512))


def test_groups_over_a_named_axis_raise():
    groups = [[0, 1], [2, 3]]
    for psum in (ring_psum, lax.psum):
        f = jax.vmap(lambda v, psum=psum: psum(v, "b", axis_index_groups=groups), axis_name="b")
        with pytest.raises(NotImplementedError):
            f(X)
    with pytest.raises(NotImplementedError, match=r"'b'.*axis_index_groups.*shard_map"):
        jax.vmap(lambda v: ring_psum(v, "b", axis_index_groups=groups), axis_name="b")(X)


# Named vmap axes within shard_map.


def assert_matches_untracked_lax(fun, check_vma):
    """Compares with lax.psum without vma tracking; with it, lax.psum fails with an AssertionError for vmap axes."""
    ours = sharded(lambda x: fun(ring_psum, x), mesh=MESH, check_vma=check_vma)
    theirs = sharded(lambda x: fun(lax.psum, x), mesh=MESH, check_vma=False)
    assert_same_trees(ours(X), theirs(X))


def test_named_axis_within_shard_map(check_vma):
    def body(psum, x):
        return jax.vmap(lambda v: psum(v * v, "b") + v, 1, 1, axis_name="b")(x)

    assert_matches_untracked_lax(body, check_vma)


def test_named_axis_within_shard_map_needs_no_call(check_vma):
    f = sharded(
        lambda x: jax.vmap(lambda v: ring_psum(v, "b"), 1, 1, axis_name="b")(x), mesh=MESH, check_vma=check_vma
    )  # fmt: skip
    assert num_calls(f, X) == 0
    np.testing.assert_array_equal(f(X), np.broadcast_to(X.sum(1, keepdims=True), X.shape))


@pytest.mark.parametrize("axes", [("b", "i"), ("i", "b")], ids=str)
def test_named_axis_together_with_a_mesh_axis(axes, check_vma):
    f = sharded(
        lambda x: jax.vmap(lambda v: ring_psum(v, axes), 1, axis_name="b", out_axes=None)(x),
        mesh=MESH, out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    np.testing.assert_array_equal(f(X), X.sum((0, 1), keepdims=True)[0])
    assert num_calls(f, X) == 1


@pytest.mark.parametrize("axes", [("b", "i"), ("i", "b")], ids=str)
def test_named_and_mesh_axis_matches_lax(axes):
    # lax.psum rejects this under vma tracking.
    def body(psum, x):
        return jax.vmap(lambda v: psum(v * v, axes) + v, 1, 1, axis_name="b")(x)

    assert_matches_lax(body, X, mesh=MESH, check_vma=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_axes_of_low_precision(dtype):
    x = (np.arange(RANKS * 3).reshape(RANKS, 3) % 5).astype(dtype)
    f = sharded(
        lambda x: jax.vmap(lambda v: ring_psum(v, ("b", "i")), 1, axis_name="b", out_axes=None)(x),
        out_specs=P(), check_vma=False,
    )  # fmt: skip
    assert_same_trees(f(x), x.astype(np.float32).sum(keepdims=True)[0].astype(x.dtype))


# Derivatives.


def loss(psum, axes, v, w):
    return jnp.sum(psum(v * w, axes) * v + psum(w, axes))


def vmap_of_grad(psum, axes, x):
    return jax.vmap(jax.grad(lambda v: loss(psum, axes, v, v)), 1, 1, axis_name="b")(x)


def grad_of_vmap(psum, axes, x):
    f = jax.vmap(lambda v, w: loss(psum, axes, v, w), (1, None), axis_name="b")
    return jax.grad(lambda x: jnp.sum(f(x, x[:, 0])))(x)


both_orders = pytest.mark.parametrize("transform", [vmap_of_grad, grad_of_vmap])


@both_orders
def test_grad_and_vmap_over_a_mesh_axis(transform, check_vma):
    assert_matches_lax(lambda psum, x: transform(psum, "i", x), X, mesh=MESH, check_vma=check_vma)


@both_orders
def test_grad_and_vmap_over_a_named_axis(transform, check_vma):
    assert_matches_untracked_lax(lambda psum, x: transform(psum, "b", x), check_vma)


@both_orders
@pytest.mark.parametrize("axes", [("i", "b"), ("b", "i")], ids=str)
def test_grad_and_vmap_over_both(transform, axes, check_vma):
    if not check_vma:
        assert_matches_untracked_lax(lambda psum, x: transform(psum, axes, x), check_vma)
    # A sum over both axes equals the sum over the batch and then over the mesh. lax supports neither under vma.
    in_turn = lambda v, _: ring_psum(ring_psum(v, "b"), "i")  # noqa: E731
    f, g = (
        sharded(lambda x, psum=psum: transform(psum, axes, x), mesh=MESH, check_vma=check_vma)
        for psum in (ring_psum, in_turn)
    )
    assert_same_trees(f(X), g(X))


def test_vmap_of_grad_over_a_named_axis_outside_of_shard_map():
    assert_same_as_lax(lambda psum: jax.vmap(jax.grad(lambda v: loss(psum, "b", v, v)), axis_name="b")(X))
    assert_same_as_lax(lambda psum: jax.vmap(jax.grad(lambda v: loss(psum, "b", v, X[0])), axis_name="b")(X))


def test_jvp_over_a_named_axis():
    def make(psum):
        f = lambda v, t: jax.jvp(lambda v: psum(v * v, "b") * v, (v,), (t,))  # noqa: E731
        return jax.vmap(f, axis_name="b")(X, Y)

    assert_same_as_lax(make)
