"""Random keys: moved as their bits by ring_broadcast, ring_all_gather and broadcast_params."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, num_calls, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import broadcast_params, ring_all_gather, ring_broadcast, ring_psum
from jax_ring.training.wire import reduced_by

RANKS = 4
MESH = make_mesh((RANKS,))
IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]
ROOT = 2


def keys(impl="threefry2x32", shape=(RANKS, 3)):
    bits = np.prod(shape) * jax.random.key_data(jax.random.key(0, impl=impl)).size
    return jax.random.wrap_key_data(np.arange(bits, dtype=np.uint32).reshape(*shape, -1), impl=impl)


def on_ranks(fun, *, check_vma=True, **options):
    """`fun` of each rank's keys, of shape (3,) by default."""
    return sharded(lambda k: fun(k[0]), mesh=MESH, check_vma=check_vma, **options)


def assert_same_keys(actual, expected):
    assert actual.dtype == expected.dtype
    assert_same_bits(jax.random.key_data(actual), jax.random.key_data(expected))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_broadcast(impl, check_vma):
    k = keys(impl)
    f = on_ranks(lambda k: ring_broadcast(k, "i", root=ROOT), out_specs=P(), check_vma=check_vma)
    assert_same_keys(f(k), k[ROOT])
    assert num_calls(f, k) == 1
    scalar = on_ranks(lambda k: ring_broadcast(k[1], "i", root=ROOT), out_specs=P(), check_vma=check_vma)
    assert_same_keys(scalar(k), k[ROOT, 1])


@pytest.mark.parametrize("impl", ["ring", "lax"])
def test_broadcast_params(impl, check_vma):
    def params(rank_keys):
        data = jax.random.key_data(rank_keys)
        return {"key": rank_keys, "w": data.astype(jnp.float32), "raw": data, "deep": [rank_keys[0]]}

    k = keys()
    sent = reduced_by(impl)(lambda k: broadcast_params(params(k), "i", root=ROOT))
    f = on_ranks(sent, out_specs=P(), check_vma=check_vma)
    out, expected = f(k), params(k[ROOT])
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    assert_same_keys(out["key"], expected["key"])
    assert_same_keys(out["deep"][0], expected["deep"][0])
    assert_same_bits((out["w"], out["raw"]), (expected["w"], expected["raw"]))
    if impl == "ring":
        assert num_calls(f, k) == 2  # keys travel with the other uint32


@pytest.mark.parametrize(
    ("impl", "axis", "tiled"),
    [("threefry2x32", 0, False), ("rbg", 1, False), ("threefry2x32", -1, False), ("unsafe_rbg", 0, True),
     ("threefry2x32", -1, True)],
)  # fmt: skip
def test_all_gather(impl, axis, tiled, check_vma):
    k = keys(impl, (RANKS, 3, 2))
    expected = jnp.concatenate(list(k), axis) if tiled else jnp.stack(list(k), axis)
    for to in ("varying", "invarying"):

        def gather(k, to=to):
            out = ring_all_gather(k, "i", axis=axis, tiled=tiled, to=to)
            return out if to == "invarying" else out[None]

        out = on_ranks(gather, out_specs=P() if to == "invarying" else P("i"), check_vma=check_vma)(k)
        for copy in [out] if to == "invarying" else out:
            assert_same_keys(copy, expected)


def test_tiled_all_gather_is_that_of_lax(check_vma):
    """The only one that lax.all_gather can lower for keys."""
    k = keys()
    ours, theirs = (
        on_ranks(lambda k, f=f: f(k, "i", tiled=True), check_vma=check_vma)(k)
        for f in (ring_all_gather, lax.all_gather)
    )
    assert_same_keys(ours, theirs)


def test_all_gather_of_one_key(check_vma):
    k = keys()
    out = on_ranks(lambda k: ring_all_gather(k[0], "i", to="invarying"), out_specs=P(), check_vma=check_vma)(k)
    assert_same_keys(out, k[:, 0])


def test_all_gather_in_groups():
    k = keys()
    groups = [[0, 3], [1, 2]]
    f = on_ranks(lambda k: ring_all_gather(k, "i", axis_index_groups=groups)[None], check_vma=False)
    expected = {rank: k[np.array(group)] for group in groups for rank in group}
    for rank, out in enumerate(f(k)):
        assert_same_keys(out, expected[rank])


def test_vmap_over_another_axis(check_vma):
    k = keys()
    broadcast = on_ranks(
        jax.vmap(lambda k: ring_broadcast(k, "i", root=ROOT)), out_specs=P(), check_vma=check_vma
    )  # fmt: skip
    assert_same_keys(broadcast(k), k[ROOT])
    gather = on_ranks(jax.vmap(lambda k: ring_all_gather(k, "i", to="invarying")), out_specs=P(), check_vma=check_vma)
    assert_same_keys(gather(k), k.T)


def test_over_a_vmap_axis():
    k = keys()
    assert_same_keys(jax.vmap(lambda k: ring_all_gather(k, "v", tiled=True), axis_name="v")(k)[1], k.reshape(-1))
    assert_same_keys(jax.vmap(lambda k: ring_broadcast(k, "v", root=ROOT), axis_name="v")(k)[0], k[ROOT])


def test_under_differentiation(check_vma):
    k = keys()

    def loss(w, k):
        drawn = jax.random.normal(ring_broadcast(k, "i", root=ROOT)[0]) + jax.random.normal(
            ring_all_gather(k, "i", tiled=True, to="invarying")[0]
        )
        return ring_psum(w, "i") * drawn

    f = sharded(
        lambda k: jax.grad(loss)(lax.pcast(1.0, "i", to="varying") if check_vma else 1.0, k[0])[None],
        mesh=MESH, check_vma=check_vma,
    )  # fmt: skip
    drawn = jax.random.normal(k[ROOT, 0]) + jax.random.normal(k[0, 0])
    np.testing.assert_allclose(f(k), drawn * (1 if check_vma else RANKS), rtol=1e-6)
