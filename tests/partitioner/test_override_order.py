"""override_lax(order=...): the bits of ring_psum in that order, for lax's sums and for those of the partitioner."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but

from jax_ring import override_lax, ring_psum, ring_psum_scatter
from jax_ring.options import ORDERS

MESH = make_mesh()
ROWS = np.random.default_rng(0).normal(size=(8, 24)).astype(np.float32)


def mapped(fun, mesh=MESH, out_specs=None):
    out_specs = P("i") if out_specs is None else out_specs
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=out_specs, check_vma=False))


@pytest.mark.parametrize("order", full_but(ORDERS, ["tree"]))
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
def test_bits_of_ring_psum(order, dtype):
    x = jnp.asarray(ROWS * 9, dtype)
    expected = mapped(lambda x: ring_psum(x, "i", order=order))(x)[0]
    scattered = mapped(lambda x: ring_psum_scatter(x[0], "i", tiled=True, order=order))(x)
    with override_lax(order=order):
        total = jax.jit(lambda x: x.sum(0, dtype=dtype), in_shardings=NamedSharding(MESH, P("i")))
        assert f'order = "{order}"' in total.lower(x).compile().as_text()
        assert_same_bits(total(x), expected)
        assert_same_bits(mapped(lambda x: lax.psum(x, "i"))(x)[0], expected)
        assert_same_bits(mapped(lambda x: lax.psum_scatter(x[0], "i", tiled=True))(x), scattered)
        largest = mapped(lambda x: (lax.pmax(x, "i"), x.max(0)))
        assert f'order = "{order}"' not in largest.lower(x).as_text() or order == "rank"


def pairs_added(x):
    """Sums of rows along the tree of a power of two."""
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def test_the_same_bits_on_any_number_of_devices():
    expected = pairs_added(jnp.asarray(ROWS))
    assert (np.asarray(expected) != np.add.accumulate(ROWS)[-1]).any()
    for size in (1, 2, 4, 8):
        mesh = Mesh(jax.devices()[:size], "i")
        rows, whole = NamedSharding(mesh, P("i")), NamedSharding(mesh, P())

        def total(x, size=size, rows=rows):
            of_devices = jax.vmap(pairs_added)(x.reshape(size, -1, x.shape[1]))
            return lax.with_sharding_constraint(of_devices, rows).sum(0)

        x = jax.device_put(ROWS, rows)
        with override_lax(order="tree"):
            assert_same_bits(jax.jit(total, out_shardings=whole)(x), expected)
            assert_same_bits(mapped(lambda x: lax.psum(pairs_added(x), "i"), mesh, P())(x), expected)


def test_programs_of_different_orders_never_mix():
    f = jax.jit(lambda x: x.sum(0), in_shardings=NamedSharding(MESH, P("i")))
    for _ in range(2):
        for order in ("tree", "rank", "ring"):
            with override_lax(order="any"), override_lax(order=order):
                assert re.findall(r'order = "(\w+)"', f.lower(ROWS).compile().as_text()) == [order]


@pytest.mark.parametrize("order", ["trees", None, ["tree"]])
def test_other_orders(order):
    message = f"override_lax: order must be one of 'rank', 'ring', 'any', 'tree'; got {order!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        override_lax(order=order)
