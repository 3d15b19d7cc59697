"""zero.clip_by_global_norm: the norm of gradients of which each rank has a part."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SHARDED, assert_same_bits, assert_same_trees, make_mesh, sharded
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import zero
from jax_ring.training.zero.clip import TILE

pytestmark = pytest.mark.one_pair  # plain JAX on code that other tests of ZeRO cover

RANKS = 2


def clipped(parts, limit, *, in_specs=SHARDED, check_vma=True):
    """The parts after clipping. They are cut over the ranks."""
    tx = zero.clip_by_global_norm(limit, "i")
    f = sharded(lambda g: tx.update(g, tx.init(g))[0], mesh=make_mesh((RANKS,)), in_specs=in_specs, check_vma=check_vma)
    return f(parts)


@pytest.mark.parametrize("dtype", full_but(["complex64", "float16", "bfloat16", "float32"], ["float32"]))
def test_the_norm_is_that_of_optax(dtype, check_vma):
    parts = {"a": jnp.array([300, 400], dtype), "b": jnp.array([0, 1200], dtype)}
    if dtype == "complex64":
        parts["b"] = parts["b"] * 1j
    tx = optax.clip_by_global_norm(13.0)
    # optax squares in the dtype of the gradients, which overflows in float16.
    wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(dtype, jnp.float32)), parts)
    expected = jax.tree.map(lambda x: x.astype(dtype), tx.update(wide, tx.init(wide))[0])
    rtol = float(4 * jnp.finfo(dtype).eps)
    assert_same_trees(clipped(parts, 13.0, check_vma=check_vma), expected, rtol=rtol)
    assert_same_trees(clipped(parts, 1400.0, check_vma=check_vma), parts)


def test_a_norm_of_float64():
    with jax.enable_x64(True):
        parts = np.array([3.0, 4 + 1e-10])
        limit = 5.0
        expected = parts / np.linalg.norm(parts) * limit
        np.testing.assert_allclose(clipped(parts, limit), expected, rtol=1e-15)


def test_gradients_that_are_not_cut_are_refused():
    whole = {"a": np.ones(4, np.float32)}
    with pytest.raises(
        ValueError, match=r"clip_by_global_norm: .*\['a'\].*same on all ranks.*optax.clip_by_global_norm"
    ):
        clipped(whole, 1.0, in_specs=P())


def test_gradients_that_one_of_the_axes_does_not_cut_are_refused():
    tx = zero.clip_by_global_norm(1.0, ("i", "j"))
    f = sharded(lambda g: tx.update(g, None)[0], mesh=make_mesh((2, 2), ("i", "j")))
    with pytest.raises(ValueError, match=r"clip_by_global_norm: .*at the root.*same on all ranks of \['j'\]"):
        f(np.ones(4, np.float32))


@pytest.mark.parametrize("layout", ["flat", "parameter"])
def test_parameters_without_elements(layout):
    params = {"w": jnp.arange(1.0, 7.0), "empty": jnp.zeros((0, 3)), "no_bfloat16": jnp.zeros((2, 0), jnp.bfloat16)}
    optimizer = zero.sharded_optimizer(
        optax.chain(zero.clip_by_global_norm(0.5, "i"), optax.sgd(1.0)), "i", layout=layout
    )

    def updates(params):
        grads = jax.tree.map(lambda x: jax.lax.pcast(x, "i", to="varying"), params)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    actual = sharded(updates, mesh=make_mesh((RANKS,)), in_specs=P(), out_specs=P())(params)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
    assert_same_trees(actual, tx.update(params, tx.init(params))[0], rtol=1e-6)


def test_outside_of_the_axis():
    tx = zero.clip_by_global_norm(1.0, "i")
    with pytest.raises(NameError, match="clip_by_global_norm: unbound axis name 'i'"):
        tx.update({"a": np.ones(4, np.float32)}, tx.init(None))


def test_a_norm_in_blocks_does_not_depend_on_the_cuts():
    x = np.random.default_rng(0).standard_normal(48 * TILE).astype(np.float32)
    x[-5000:] = 0  # as the end of a vector is that ranks fill up with zeros

    def clipped_on(ranks, x):
        tx = zero.clip_by_global_norm(1.0, "i", order="tree")
        return sharded(lambda g: tx.update(g, None)[0], mesh=make_mesh((ranks,)))(x)

    whole = clipped_on(1, x[: 44 * TILE])
    for ranks in (2, 8):
        assert_same_bits(np.asarray(clipped_on(ranks, x))[: 44 * TILE], np.asarray(whole))
    np.testing.assert_allclose(whole, x[: 44 * TILE] / np.linalg.norm(x.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("dtype", full_but(["complex64", "float16", "bfloat16", "float32"], ["float32"]))
def test_the_norm_in_blocks_is_that_of_optax(dtype):
    parts = {"a": jnp.array([300, 400], dtype), "b": jnp.array([0, 1200], dtype)}
    tx = zero.clip_by_global_norm(13.0, "i", order="tree")
    f = sharded(lambda g: tx.update(g, None)[0], mesh=make_mesh((RANKS,)))
    expected = jax.tree.map(lambda x: x / 100, parts)
    assert_same_trees(f(parts), expected, rtol=float(4 * jnp.finfo(dtype).eps))


def test_an_optimizer_that_is_not_along_the_tree():
    tx = optax.chain(zero.clip_by_global_norm(1.0, "i", order="tree"), optax.sgd(1.0))
    params = {"w": np.ones(4, np.float32)}
    optimizer = zero.sharded_optimizer(tx, "i", layout="parameter")
    with pytest.raises(ValueError, match=r"clip_by_global_norm has order='tree', within a .* with order='rank'"):
        optimizer.specs(params)


def test_wrong_orders():
    message = "order must be one of 'rank', 'ring', 'any', 'tree'; got 'sum'"
    with pytest.raises(ValueError, match=f"clip_by_global_norm: {message}"):
        zero.clip_by_global_norm(1.0, "i", order="sum")
    with pytest.raises(ValueError, match=f"sharded_optimizer: {message}"):
        zero.sharded_optimizer(optax.sgd(1.0), "i", order="sum")
