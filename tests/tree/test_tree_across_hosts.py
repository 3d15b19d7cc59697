"""Sums along the tree do not depend on how the ranks lie on hosts, which are pretended here, in one process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, sharded, tree_fold
from jax.sharding import PartitionSpec as P
from shards import numbers, terms
from tiers import full_but

from jax_ring import explain, ring_psum, ring_psum_scatter, ring_reduce
from jax_ring.lowering import topology
from jax_ring.lowering.passes import exchanges

RANKS = 8
HOST_OF = {
    "consecutive": [0, 0, 0, 0, 1, 1, 1, 1],
    "interleaved": [0, 1, 0, 1, 0, 1, 0, 1],
    "four hosts": [0, 0, 1, 1, 2, 2, 3, 3],
    "four hosts, interleaved": [0, 1, 2, 3, 3, 2, 1, 0],
    "irregular": [1, 1, 0, 1, 0, 0, 1, 0],
}


@pytest.fixture(params=full_but(HOST_OF, ["consecutive"]))
def hosts(request, monkeypatch):
    return pretend(HOST_OF[request.param], monkeypatch)


def pretend(host_of, monkeypatch):
    """Makes the lowering believe that the devices of a mesh are on these hosts. Everything else is as it is."""
    levels_of = lambda engine, mesh, groups, _: topology._split_by_host(host_of, groups, lambda host: host)  # noqa: E731
    monkeypatch.setattr(topology, "levels_of", levels_of)
    return host_of


@pytest.mark.parametrize("size", ["small", "not small"])
def test_the_bits_are_those_of_one_host(hosts, size, monkeypatch):
    if size == "not small":
        monkeypatch.setattr(exchanges, "SMALL_BYTES", 0)
    x = {"a": numbers((24, 16, 3)), "b": [numbers((24, 8), jnp.bfloat16), numbers((24, 0, 8))], "c": numbers((24, 8))}

    def body(own):
        scattered = ring_psum_scatter({"a": own.terms["a"][0]}, "i", order="tree", scatter_dimension=0, tiled=True)
        rooted = ring_reduce(own, "i", order="tree", root=5)
        of_shards = ring_psum_scatter(_of(own, ["a", "c"]), "i", order="tree", tiled=True)
        return ring_psum(own, "i", order="tree"), scattered, of_shards, jax.tree.map(lambda leaf: leaf[None], rooted)

    own = terms(x, RANKS)
    f = sharded(body, out_specs=(P(), P("i"), P("i"), P("i")))
    total, scattered, of_shards, rooted = f(own)
    expected = jax.tree.map(tree_fold, x)
    assert_same_bits(total, expected)
    first_terms = own.terms["a"].reshape(RANKS, -1, 16, 3)[:, 0]
    assert_same_bits(scattered["a"], tree_fold(first_terms))
    assert_same_bits(of_shards, {name: expected[name] for name in ("a", "c")})
    assert_same_bits(jax.tree.map(lambda leaf: leaf[5], rooted), expected)
    text = f.lower(own).compile().as_text()
    assert "jax_ring_reduce_scatter" in text
    assert "all-to-all" in text


def _of(own, names):
    dtypes = dict(zip(["a", "b", "b", "c"], own.dtypes, strict=True))
    return type(own)({name: own.terms[name] for name in names}, own.num_shards, tuple(dtypes[name] for name in names))


@pytest.mark.full
@pytest.mark.parametrize("name", ["int4", "int8", "float8_e8m0fnu", "float16", "complex64"])
def test_dtypes(name, monkeypatch):
    pretend(HOST_OF["irregular"], monkeypatch)
    dtype = np.dtype(getattr(jnp, name))
    x = np.asarray(jnp.abs(numbers((8, 16)) + 2).astype(dtype)) if "e8m0" in name else numbers((8, 16), dtype)

    def body(x):
        return ring_psum(x[0], "i", order="tree"), ring_psum_scatter(x[0], "i", order="tree", tiled=True)

    assert_same_bits(sharded(body, out_specs=(P(), P("i")))(x), (tree_fold(x), tree_fold(x)))


@pytest.mark.parametrize("along", full_but(["i", "j"], ["i"]))
def test_groups_that_lie_on_hosts_in_different_ways(along, monkeypatch):
    #      j: 0  1
    pretend([0, 0,
             1, 0,
             0, 1,
             1, 1,] if along == "i" else [0, 1, 0, 1, 1, 0, 0, 1], monkeypatch)  # fmt: skip
    mesh = make_mesh((4, 2), ("i", "j"))
    x = numbers((2, 12, 9, 4))
    own = [terms(values, 4) for values in x]
    both = type(own[0])(np.stack([one.terms for one in own], 1), 12, own[0].dtypes)

    def body(own):
        own = type(own)(own.terms[:, 0], 12, own.dtypes)
        total = ring_psum(own, "i", order="tree")
        return total[None], ring_psum_scatter(own, "i", order="tree", scatter_dimension=1)[:, None, None]

    f = sharded(body, mesh=mesh, in_specs=P("i", "j"), out_specs=(P("j"), P(None, "i", "j")), check_vma=True)
    total, scattered = f(both)
    expected = np.stack([tree_fold(values) for values in x])
    assert_same_bits(total, expected)
    assert_same_bits(np.moveaxis(np.asarray(scattered), (2, 1), (0, 2)), expected)


@pytest.mark.parametrize("size", ["small", "not small"])
@pytest.mark.parametrize("layout", full_but(["consecutive", "interleaved"], ["consecutive"]))
def test_bytes(layout, size, monkeypatch):
    pretend(HOST_OF[layout], monkeypatch)
    if size == "not small":
        monkeypatch.setattr(exchanges, "SMALL_BYTES", 0)
    values = numbers((8, 64)), numbers((8, 128))

    def body(x):
        return ring_psum([leaf[0] for leaf in x], "i", order="tree")

    found = explain(sharded(body, out_specs=P()), values)
    (call,) = found.collectives
    assert call.order == "tree"
    assert call.served_by == "jax_ring within hosts, XLA across 2 hosts"
    assert found.predicted_bytes == found.counted_bytes
    # A host's sums of a quarter of the message: all; or half, and then half of the quarter of the result.
    roots, num_bytes = (1 if layout == "consecutive" else 4), 192 * 4
    if size == "small":
        assert call.wire_bytes_across_hosts == roots * num_bytes / 4
    else:
        assert call.wire_bytes_across_hosts == roots * num_bytes / 8 + num_bytes / 8
