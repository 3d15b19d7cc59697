"""Sums along the tree where no engine serves the call: XLA moves the data, and the bits are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, compiled_text, make_mesh, sharded, tree_fold
from jax import lax
from jax.sharding import PartitionSpec as P
from shards import numbers, terms

from jax_ring import (
    _compat,
    explain,
    override_lax,
    ring_all_gather,
    ring_pmax,
    ring_psum,
    ring_psum_scatter,
    ring_reduce,
    runtime,
)
from jax_ring.lowering import plan, topology
from jax_ring.lowering.call import ALL_REDUCE, Service
from jax_ring.options import Options

V, RANKS = 12, 4


def partly_manual(body, out_specs, check_vma=True):
    """`body` on four ranks, each of which the compiler may divide over two devices."""
    mesh = make_mesh((RANKS, 2), ("i", "auto"))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P("i"), out_specs=out_specs, axis_names={"i"}, check_vma=check_vma
    )  # fmt: skip
    return jax.jit(mapped)


def all_sums(own):
    scattered = ring_psum_scatter(own, "i", order="tree", scatter_dimension=1)
    rooted = ring_reduce(own, "i", order="tree", root=3)
    return ring_psum(own, "i", order="tree"), scattered[None], rooted[None]


@pytest.mark.usefixtures("left_to_xla")
def test_partly_manual(check_vma, caplog):
    x = numbers((V, 3, 4), jnp.bfloat16)
    f = partly_manual(all_sums, (P(), P("i"), P("i")), check_vma)
    with caplog.at_level("INFO", logger="jax_ring"):
        total, scattered, rooted = f(terms(x, RANKS))
    expected = tree_fold(x)
    assert_same_bits(total, expected)
    assert_same_bits(np.asarray(scattered), np.moveaxis(expected, 1, 0))
    assert_same_bits(rooted[3], expected)
    assert not np.asarray(rooted[:3]).astype(np.float32).any()
    assert "XLA's all_to_all: the enclosing shard_map leaves the axes ['auto'] to the compiler" in caplog.text
    assert "ignores" not in caplog.text
    assert "all-reduce" not in compiled_text(f, terms(x, RANKS))


@pytest.mark.filterwarnings("ignore:override_lax")
def test_the_override_does_not_reach_into_it():
    x = numbers((RANKS, 6))
    with override_lax():
        f = partly_manual(lambda x: ring_psum(x[0], "i", order="tree"), P())
        assert_same_bits(f(x), tree_fold(x))


@pytest.mark.usefixtures("left_to_xla")
def test_strict(monkeypatch):
    monkeypatch.setattr(runtime, "STRICT", True)
    f = partly_manual(lambda x: ring_psum(x[0], "i", order="tree"), P())
    with pytest.raises(NotImplementedError, match="would use XLA's all_to_all: the enclosing"):
        f(numbers((RANKS, 6)))


def test_an_exported_program_for_several_platforms():
    x = numbers((RANKS, 6))
    mesh = make_mesh((RANKS,))
    f = sharded(lambda x: ring_psum(x[0], "i", order="tree"), mesh=mesh, out_specs=P(), check_vma=False)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, P("i")))
    exported = jax.export.export(f, platforms=("cpu", "cuda"))(shape)
    run = jax.export.deserialize(exported.serialize()).call
    assert_same_bits(run(jax.device_put(x, shape.sharding)), tree_fold(x))


def test_a_symbolic_shape_is_refused():
    mesh = make_mesh((3,))
    f = sharded(lambda x: ring_psum(x[0], "i", order="tree"), mesh=mesh, out_specs=P(), check_vma=False)
    (n,) = jax.export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((3, n, 3), np.float32, sharding=jax.NamedSharding(mesh, P("i")))
    with pytest.raises(NotImplementedError, match=r"of the symbolic shape \(n, 3\).* Export with static shapes"):
        jax.export.export(f)(shape)


EVEN, UNEVEN = {"axis_index_groups": [[0, 1], [3, 2]]}, {"axis_index_groups": [[0, 1, 3], [2]]}
CALLS = {
    "psum": lambda own: ring_psum(own, "i", order="tree"),
    "psum_scatter": lambda own: ring_psum_scatter(own, "i", order="tree"),
    "reduce": lambda own: ring_reduce(own, "i", order="tree"),
    "psum in groups": lambda own: ring_psum(own.terms[0], "i", order="tree", **EVEN),
    "psum_scatter in groups": lambda own: ring_psum_scatter(own.terms[0, :2], "i", order="tree", **EVEN),
    "psum in uneven groups": lambda own: ring_psum(own.terms[0], "i", order="tree", **UNEVEN),
}


@pytest.mark.parametrize("name", CALLS)
def test_predicted_bytes(name, monkeypatch):
    monkeypatch.setattr(plan, "who_serves", lambda *args: Service(None, why_not="of the test"))
    own = terms(numbers((V, 4, 3)), RANKS)
    body = lambda own: CALLS[name](own)[None]  # noqa: E731

    found = explain(sharded(body, mesh=make_mesh((RANKS,)), out_specs=P("i"), check_vma=False), own)
    (call,) = found.collectives
    assert (call.order, call.served_by, call.wire_bytes_across_hosts) == ("tree", "XLA", None)
    assert found.predicted_bytes == found.counted_bytes > 0


@pytest.mark.parametrize(
    ("num_shards", "ranks", "fits"),
    [(8, 8, True), (64, 64, True), (24, 8, True), (128, 64, True), (24, 1, True), (1536, 8, True), (9600, 64, False)],
)
def test_trees_beyond_the_cuda_kernels(num_shards, ranks, fits, monkeypatch):
    groups = [tuple(range(ranks))]
    monkeypatch.setattr(topology, "levels_of", lambda *args: (topology.Levels(groups), ""))
    context = _compat.SPMDAxisContext(make_mesh(), frozenset({"i"}))
    options = Options(order="tree", num_shards=num_shards)
    found = plan.who_serves(("cuda",), context, groups, ALL_REDUCE, options)
    assert (found.levels is not None) == fits
    assert ("the CUDA kernels cannot add" in found.why_not) != fits
    assert plan.who_serves(("cpu",), context, groups, ALL_REDUCE, options).levels is not None


def test_explain_says_the_order_of_each_call():
    x = numbers((8, 8, 2))

    def body(x):
        sums = ring_psum(x, "i", order="tree"), ring_psum(x, "i"), ring_psum(x, "i", order="any"), lax.psum(x, "i")
        return sums, ring_psum_scatter(x[0], "i", order="ring"), ring_pmax(x, "i"), ring_all_gather(x, "i")

    found = explain(sharded(body, out_specs=P(None), check_vma=False), x)
    orders = [call.order for call in found.collectives]
    assert orders == ["tree", "rank", "any", "XLA", "ring", "", ""]
    assert " tree " in str(found).replace("|", " ")
