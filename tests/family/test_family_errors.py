"""Invalid arguments of the collectives: exceptions and messages."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import COLLECTIVES, SHAPE, a_subtest_for_each_collective, every_collective, vary
from helpers import RANKS, assert_same_trees, make_mesh, num_calls, run_python, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import ring_all_gather, ring_broadcast, ring_pmax, ring_pmin, ring_psum_scatter, ring_reduce

pytestmark = pytest.mark.one_pair  # the values of the family cover all of its code

X = (np.arange(RANKS * np.prod(SHAPE)) % 7 - 3).astype(np.float32).reshape(RANKS * SHAPE[0], SHAPE[1])
MOVES = ("all_to_all", "ppermute")
# An engine has several algorithms for these: that of GPUs for sums, that between processes for extrema as well.
HAVE_ALGORITHMS = ("psum", "pmean", "pmax", "pmin", "reduce")
LAX_EQUIVALENTS = {
    jax_ring.ring_psum: lax.psum,
    jax_ring.ring_pmean: lax.pmean,
    jax_ring.ring_pmax: lax.pmax,
    jax_ring.ring_pmin: lax.pmin,
    jax_ring.ring_psum_scatter: lax.psum_scatter,
    jax_ring.ring_all_gather: lax.all_gather,
    jax_ring.ring_all_to_all: lax.all_to_all,
    jax_ring.ring_pswapaxes: lax.pswapaxes,
    jax_ring.ring_ppermute: lax.ppermute,
    jax_ring.ring_pshuffle: lax.pshuffle,
    jax_ring.ring_ragged_all_to_all: lax.ragged_all_to_all,
    jax_ring.ring_pbroadcast: lax.pbroadcast,
}


@pytest.mark.parametrize(("ours", "theirs"), LAX_EQUIVALENTS.items(), ids=lambda f: f.__name__)
def test_signatures(ours, theirs):
    name = theirs.__name__
    ours, theirs = (list(inspect.signature(f).parameters.values()) for f in (ours, theirs))
    own = ours[len(theirs) :]
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert [p.name for p in own] == [
        *(["algorithm"] if name in HAVE_ALGORITHMS else []),
        *(["order", "num_shards"] if name in ("psum", "pmean", "psum_scatter") else []),
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in own)


def rejects(fun, exception, message, check_vma):
    with pytest.raises(exception, match=message):
        jax.make_jaxpr(sharded(fun, check_vma=check_vma))(X)


@a_subtest_for_each_collective()
def test_unbound_axis(collective, check_vma):
    rejects(lambda x: collective.ring(x, "k"), NameError, r"ring_.*: unbound axis name 'k'.*bound here: 'i'", check_vma)


@a_subtest_for_each_collective()
def test_axis_named_twice(collective, check_vma):
    rejects(lambda x: collective.ring(x, ("i", "i")), ValueError, "ring_.*named once", check_vma)


@a_subtest_for_each_collective(lambda name, pair: not name.startswith(("psum", "pm")) or "scatter" in name)
def test_positional_axes(collective, check_vma):
    rejects(lambda x: collective.ring(x, ("i", 0)), ValueError, r"ring_.*over named axes.*\(0,\)", check_vma)


@a_subtest_for_each_collective(lambda name, pair: name not in MOVES)
def test_no_axes_return_the_tree(collective):
    tree = {"x": X, "text": "left alone"}
    if collective is not COLLECTIVES["pmean"]:
        assert collective.ring(tree, ()) is tree


@a_subtest_for_each_collective(lambda name, pair: name in HAVE_ALGORITHMS)
def test_unknown_algorithm(collective, check_vma):
    rejects(lambda x: collective.ring(x, "i", algorithm="best"), ValueError, "ring_.*algorithm must be one", check_vma)


@a_subtest_for_each_collective(lambda name, pair: name not in HAVE_ALGORITHMS)
def test_no_algorithm_where_it_would_have_no_effect(collective, check_vma):
    rejects(lambda x: collective.ring(x, "i", algorithm="auto"), TypeError, "argument 'algorithm'", check_vma)


@a_subtest_for_each_collective(
    lambda name, pair: name not in ("pmax", "pmin", "broadcast", *MOVES) and "gather" not in name
)
def test_unknown_order(collective, check_vma):
    rejects(lambda x: collective.ring(x, "i", order="best"), ValueError, "ring_.*order must be one", check_vma)


@pytest.mark.parametrize("root", [-1, RANKS, 100])
@pytest.mark.parametrize("fun", [ring_reduce, ring_broadcast])
def test_root_out_of_range(fun, root, check_vma):
    rejects(
        lambda x: fun(x, "i", root=root), ValueError, rf"root must be a rank of \('i',\), that is 0 to 7, got {root}",
        check_vma,
    )  # fmt: skip


@pytest.mark.parametrize("fun", [ring_reduce, ring_broadcast])
def test_root_must_be_a_python_integer(fun, check_vma):
    rejects(lambda x: fun(x, "i", root=1.5), TypeError, "integer", check_vma)
    rejects(lambda x: fun(x, "i", root=lax.axis_index("i")), TypeError, "index", check_vma)


@pytest.mark.parametrize("dimension", [2, 7, -3])
def test_dimension_out_of_range(dimension, check_vma):
    for fun in (ring_psum_scatter, lax.psum_scatter):
        rejects(lambda x, f=fun: f(x, "i", scatter_dimension=dimension), (ValueError, IndexError), "out of", check_vma)
    rejects(
        lambda x: ring_psum_scatter(x, "i", scatter_dimension=dimension), ValueError,
        f"scatter_dimension {dimension} is out of bounds for an array of dimension 2", check_vma,
    )  # fmt: skip
    for fun in (ring_all_gather, lax.all_gather):
        rejects(lambda x, f=fun: f(x, "i", axis=dimension, tiled=True), ValueError, "out of bounds", check_vma)


def test_dimension_of_the_wrong_size(check_vma):
    untiled = rf"ring_psum_scatter: scatter_dimension 0 must have as many .*, {RANKS}; got .*5, .*use tiled=True"
    tiled = rf"ring_psum_scatter: with tiled=True the size of scatter_dimension 0, 5, must be a multiple .*, {RANKS};"
    rejects(lambda x: ring_psum_scatter(x[:5], "i"), ValueError, untiled, check_vma)
    rejects(lambda x: ring_psum_scatter(x[:5], "i", tiled=True), ValueError, tiled, check_vma)
    rejects(lambda x: lax.psum_scatter(x[:5], "i"), ValueError, "size 5 must match", check_vma)
    rejects(lambda x: lax.psum_scatter(x[:5], "i", tiled=True), ValueError, "size 5 must be divisible", check_vma)


def test_dimension_of_the_wrong_size_in_shard_sums(check_vma):
    def scattered(x):
        sums = jax_ring.ShardSums.of(x[:3, None, :3], "i", 3 * RANKS)  # the dimension of the shards is not counted
        return ring_psum_scatter(sums, "i", order="tree", scatter_dimension=1, tiled=True)

    rejects(scattered, ValueError, r"scatter_dimension 1, 3, must be a multiple .*; got float32\[1, 3\]", check_vma)


def test_scatter_of_booleans(check_vma):
    for fun in (ring_psum_scatter, lax.psum_scatter):
        with pytest.raises(TypeError, match="bool"):
            sharded(lambda x, f=fun: f(x > 0, "i"), check_vma=check_vma)(X)


def test_extrema_of_complex_numbers(check_vma):
    for fun in (ring_pmax, ring_pmin):
        rejects(lambda x, f=fun: f(x + 1j, "i"), TypeError, r"complex numbers have no order, got complex64", check_vma)


def test_unknown_gather_destination(check_vma):
    for fun in (ring_all_gather, lax.all_gather):
        rejects(lambda x, f=fun: f(x, "i", to="elsewhere"), ValueError, "to", check_vma)


@pytest.mark.parametrize("leaf", ["text", object()], ids=["str", "object"])
@a_subtest_for_each_collective()
def test_leaf_that_is_not_an_array(collective, leaf, check_vma):
    rejects(lambda x: collective.ring({"a": x, "b": leaf}, "i"), TypeError, "valid JAX", check_vma)


@a_subtest_for_each_collective(lambda name, pair: name in ("psum", "psum_scatter", "reduce"))
def test_sum_of_a_partly_varying_operand(collective):
    mesh = make_mesh((4, 2), ("i", "j"))
    f = sharded(lambda x: collective.ring(x[:8], ("i", "j")), mesh=mesh)
    with pytest.raises(ValueError, match=r"the same on all ranks of \('j',\).*lax.pcast"):
        f(X)


@every_collective(lambda name, pair: name in ("pmax", "pmin", "all_gather", "broadcast", *MOVES))
def test_operands_that_are_not_summed_may_vary_over_some_axes(collective):
    mesh = make_mesh((4, 2), ("i", "j"))
    axes = ("i", "j")
    out = sharded(lambda x: vary(collective.ring(x, axes), axes), mesh=mesh, out_specs=P(axes))(X)
    ranks = np.repeat(X.reshape(4, -1, SHAPE[1]), 2, axis=0)
    np.testing.assert_array_equal(
        np.asarray(out).reshape(8, *np.shape(collective.oracle(ranks))[1:]), collective.oracle(ranks)
    )


def test_sum_of_random_keys():
    rejects(lambda x: ring_reduce(jax.random.key(x[0, 0].astype(int)), "i"), TypeError, "key_data", False)


# Fallback to XLA.


@pytest.mark.usefixtures("left_to_xla")
@every_collective()
def test_partly_manual_falls_back(collective, check_vma, caplog):
    mesh = make_mesh((8, 2), ("i", "j"))

    def make(fun):
        f = jax.shard_map(
            lambda x: vary(fun(x, "i"), "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"},
            check_vma=check_vma,
        )  # fmt: skip
        return jax.jit(f)

    with caplog.at_level("INFO", logger="jax_ring"):
        ours = make(collective.ring)(X)
    assert "uses XLA's" in caplog.records[-1].getMessage()
    assert_same_trees(ours, make(collective.lax)(X))
    assert num_calls(make(collective.ring), X) == 0


@pytest.mark.usefixtures("left_to_xla")
@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float32", "complex64"])
def test_broadcast_by_xla_keeps_negative_zeros(dtype):
    # The fallback is a sum, in which the other ranks must not change -0.
    mesh = make_mesh((8, 2), ("i", "j"))
    x = np.where(X > 0, 1.0, -0.0).astype(jnp.dtype(dtype))
    f = jax.shard_map(
        lambda x: ring_broadcast(x, "i", root=2), mesh=mesh, in_specs=P("i"), out_specs=P(), axis_names={"i"}
    )  # fmt: skip
    result = np.asarray(jax.jit(f)(x))
    assert result.tobytes() == x.reshape(RANKS, *SHAPE)[2].tobytes()


@pytest.mark.full
def test_a_missing_rank_is_named():
    result = run_python(
        """
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jax_ring import ring_all_gather
mesh = Mesh(jax.devices(), ("i",))
def body(x):
    gather = lambda x: ring_all_gather(x, "i", tiled=True)
    return lax.cond(lax.axis_index("i") == 2, lambda x: jnp.tile(x, 4), gather, x)
f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
try:
    jax.block_until_ready(f(jnp.arange(8.0)))
except jax.errors.JaxRuntimeError as error:
    print(error)
""",
        devices=4,
        JAX_RING_TIMEOUT_S="1",
    )
    assert "ring_all_gather of float32[2] over axis 'i'" in result.stdout
    assert "Missing: rank 2 " in result.stdout
