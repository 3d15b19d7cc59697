"""All collectives under vmap: batched calls, and collectives over the vmap axis."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import (
    COLLECTIVES,
    SHAPE,
    a_subtest_for_each_collective,
    assert_family_matches_lax,
    every_collective,
    vary,
)
from helpers import RANKS, assert_matches_lax, assert_same_bits, assert_same_trees, make_mesh, num_calls, sharded
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import ring_broadcast, ring_pbroadcast, ring_psum, ring_reduce

pytestmark = pytest.mark.one_pair  # the values of the family cover all of its code

X = (np.arange(3 * RANKS * np.prod(SHAPE)) % 7 - 3).astype(np.float32).reshape(RANKS * SHAPE[0], SHAPE[1], 3)


def batches_with_lax(name, pair):
    """Untiled lax.psum_scatter drops a batch dimension after the scattered one."""
    return name != "psum_scatter"


@pytest.mark.parametrize(("in_axis", "out_axis"), full_but([(0, 0), (1, -1), (2, 0)], [(0, 0)]))
def test_batch_of_calls(subtests, in_axis, out_axis, check_vma):
    def body(fun, x, pair):
        x = jnp.moveaxis(x, 2, in_axis)
        return jax.vmap(lambda x: vary(fun(x, "i"), "i"), in_axis, out_axis)(x).reshape(-1, 3)

    where = batches_with_lax if in_axis else lambda name, pair: True
    assert_family_matches_lax(subtests, body, X, where, check_vma=check_vma)


@pytest.mark.parametrize("in_axis", [0, 1, 2])
def test_batch_of_scatters(in_axis, check_vma):
    # Compared with unbatched calls, because lax is wrong here.
    fun = COLLECTIVES["psum_scatter"].ring

    def body(x):
        batched = jax.vmap(lambda x: fun(x, "i"), in_axis)(jnp.moveaxis(x, 2, in_axis))
        return batched - jnp.stack([fun(x[:, :, k], "i") for k in range(3)])

    assert not np.any(sharded(body, check_vma=check_vma)(X))


@every_collective()
def test_one_call_for_a_batch_of_trees(collective, check_vma):
    def body(x):
        one = lambda x: collective.ring({"a": x, "b": 2 * x}, "i")  # noqa: E731
        return jax.tree.map(lambda y: vary(y, "i"), jax.vmap(one, 2, -1)(x))

    assert num_calls(sharded(body, check_vma=check_vma), X) == 1


def test_batched_and_unbatched_operands(subtests, check_vma):
    def body(fun, x, pair):
        def one(x, y):
            return jax.tree.map(lambda leaf: vary(leaf, "i"), fun({"x": x, "y": y, "z": x}, "i"))

        return jax.vmap(one, (2, None), {"x": -1, "y": None, "z": -1})(x, x[:, :, 0])

    assert_family_matches_lax(subtests, body, X, batches_with_lax, check_vma=check_vma)


# Over the vmap axis: no communication.

BATCH = X[: RANKS * RANKS, :, 0].reshape(RANKS, *SHAPE)


@pytest.mark.parametrize("in_axis", [0, 1, 2])
@every_collective(plain=[name for name in COLLECTIVES if re.search("psum|all_gather|all_to_all", name)])
def test_over_the_batch(collective, in_axis):
    batch = jnp.moveaxis(BATCH, 0, in_axis)
    f = lambda batch: jax.vmap(lambda x: collective.ring(x, "v"), in_axis, axis_name="v")(batch)  # noqa: E731
    np.testing.assert_array_equal(f(batch), collective.oracle(BATCH))
    assert num_calls(f, batch) == 0


# lax.ppermute over a vmap axis takes full permutations only.
@every_collective(lambda name, pair: "all_gather" not in name and name != "ppermute")
def test_over_the_batch_matches_lax(collective):
    results = [jax.vmap(lambda x, fun=fun: fun(x, "v"), axis_name="v")(BATCH) for fun in collective[:2]]
    assert_same_trees(*results)


@every_collective()
def test_unbatched_operand(collective):
    f = jax.vmap(lambda x, y: (x, collective.ring(y, "v")), (0, None), axis_name="v")
    np.testing.assert_array_equal(f(BATCH, BATCH[0])[1], collective.oracle(np.stack([BATCH[0]] * RANKS)))


@every_collective(lambda name, pair: pair.differentiable, plain=["psum", "all_to_all", "all_gather_last"])
def test_gradient_over_the_batch(collective):
    # Equal to the gradient of the same function over devices.
    def total(x, axis):
        y = collective.ring(x * x, axis)
        return jnp.sum(y * y)

    on_devices = sharded(lambda x: jax.grad(lambda x: total(x[0], "i"))(x), check_vma=False)(BATCH)
    np.testing.assert_array_equal(jax.vmap(jax.grad(lambda x: total(x, "v")), axis_name="v")(BATCH), on_devices)


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin"])
def test_over_the_batch_and_a_mesh_axis(name):
    def body(fun, x):
        f = jax.vmap(lambda x: fun(x, ("v", "i")), 2, axis_name="v")
        g = jax.vmap(lambda x: fun(x, ("i", "v")), 2, axis_name="v")
        return f(x) - g(x) + f(x)

    assert_matches_lax(body, X, pair=COLLECTIVES[name][:2], out_specs=jax.P(None, "i"), check_vma=False)


@every_collective()
def test_over_the_batch_with_vma_tracking(collective):
    # Not compared with lax, which fails with an AssertionError for some of these.
    def body(x):
        y = jax.vmap(lambda x: collective.ring(x, "v"), axis_name="v")(x)
        assert jax.typeof(y).mat.varying == {"i"}
        return y

    x = np.concatenate([BATCH, BATCH + 1])
    result = np.asarray(sharded(body, mesh=make_mesh((2,)))(x))
    np.testing.assert_array_equal(result[:RANKS], collective.oracle(BATCH))
    np.testing.assert_array_equal(result[RANKS:], collective.oracle(BATCH + 1))


ON_A_DIVIDED_BATCH = {
    "tree": lambda x: ring_psum(x, "v", order="tree"),
    "reduce": lambda x: ring_reduce(jnp.round(8 * x), "v", root=2) - x,
    "broadcast": lambda x: ring_broadcast(x, "v", root=2) - x,
    "pbroadcast": lambda x: ring_pbroadcast(x, "v", 2),
    "gradient": lambda x: jax.grad(lambda x: jnp.sum(ring_broadcast(x * x, "v", root=2)))(x),
}


@pytest.mark.parametrize("dim", [0, 1])
def test_over_a_batch_that_explicit_axes_divide(dim):
    mesh = jax.make_mesh((RANKS // 2,), ("m",))
    x = np.sin(np.arange(4.0 * RANKS * RANKS, dtype=np.float32)).reshape(RANKS, RANKS, 4)
    x[2, 2, 0] = -0.0

    def every(x):
        return jax.vmap(lambda x: {name: f(x) for name, f in ON_A_DIVIDED_BATCH.items()}, dim, axis_name="v")(x)

    with jax.set_mesh(mesh), jax.numpy_rank_promotion("raise"):
        for spec in (P("m"), P(None, "m")):
            divided = jax.jit(every)(jax.device_put(x, spec))
            assert_same_bits(divided, every(x))


@a_subtest_for_each_collective(lambda name, pair: not name.startswith(("psum", "pm")) or "scatter" in name)
def test_batch_and_mesh_axis_together_are_refused(collective):
    f = sharded(lambda x: jax.vmap(lambda x: collective.ring(x, ("i", "v")), 2, axis_name="v")(x), check_vma=False)
    with pytest.raises((NotImplementedError, ValueError), match="ring_"):
        f(X)


@a_subtest_for_each_collective(lambda name, pair: name in ("pmax", "pmin", "psum_scatter", "all_gather", "all_to_all"))
def test_groups_over_the_batch_are_refused(collective):
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    for fun in collective[:2]:
        f = jax.vmap(
            lambda x, fun=fun: fun(x[: (4 if "scatter" in str(fun) else 8)], "v", axis_index_groups=groups),
            axis_name="v",
        )
        with pytest.raises(NotImplementedError, match=r"groups|Please open a feature request"):
            f(BATCH)
