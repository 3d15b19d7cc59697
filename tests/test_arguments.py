"""Arguments that are integers: what `operator.index` takes is accepted, the rest is refused at the call by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_mesh, sharded
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import zero

MESH = make_mesh((4,))
X = np.arange(64, dtype=np.float32).reshape(16, 4)
PARAMS = {"w": jnp.ones((3, 5)), "b": jnp.ones(2)}


class Index:
    """An integer of somebody else's."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def run(fun):
    return np.asarray(sharded(fun, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check_vma=False)(X))


def perm_of(rank):
    return [(0, rank), (1, 0)]


CALLS = {
    "ring_psum_scatter: scatter_dimension": lambda x, k: jax_ring.ring_psum_scatter(x, "i", scatter_dimension=k),
    "ring_all_gather: axis": lambda x, k: jax_ring.ring_all_gather(x, "i", axis=k),
    "ring_all_to_all: split_axis": lambda x, k: jax_ring.ring_all_to_all(x, "i", k, 0),
    "ring_all_to_all: concat_axis": lambda x, k: jax_ring.ring_all_to_all(x, "i", 0, k, tiled=True),
    "ring_ppermute: a rank in perm": lambda x, k: jax_ring.ring_ppermute(x, "i", perm_of(k)),
    "ring_reduce: root": lambda x, k: jax_ring.ring_reduce(x, "i", root=k),
    "ring_broadcast: root": lambda x, k: jax_ring.ring_broadcast(x, "i", root=k),
    "ring_pbroadcast: source": lambda x, k: jax_ring.ring_pbroadcast(x, "i", k),
    "broadcast_params: root": lambda x, k: jax_ring.broadcast_params(x, "i", root=k),
    "ring_psum: a rank in groups": lambda x, k: jax_ring.ring_psum(x, "i", axis_index_groups=[[0, k], [2, 3]]),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_integers_are_accepted(name):
    expected = run(lambda x: CALLS[name](x, 1))
    for value in (np.int64(1), np.array(1), Index(1)):
        np.testing.assert_array_equal(run(lambda x, value=value: CALLS[name](x, value)), expected)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", ["1", 1.0, float("nan"), None, (1,)], ids=repr)
def test_what_is_no_integer_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be an integer, got "):
        run(lambda x: CALLS[name](x, value))


@pytest.mark.parametrize("name", [name for name in CALLS if "source" not in name])
def test_what_is_traced_is_refused_as_by_jax(name):
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        run(lambda x: CALLS[name](x, x[0, 0].astype(int)))


@pytest.mark.parametrize("impl", ["ring", "lax"])
def test_parameters_are_sent_from_a_rank_that_exists(impl):
    with pytest.raises(ValueError, match=r"broadcast_params: root must be a rank of .*, that is 0 to 3, got 4"):
        run(lambda x: jax_ring.broadcast_params(x, "i", root=4, impl=impl))


def test_a_source_is_called_source():
    with pytest.raises(ValueError, match=r"ring_pbroadcast: source must be a rank of .*, that is 0 to 3, got -1"):
        run(lambda x: jax_ring.ring_pbroadcast(x, "i", -1))


@pytest.mark.parametrize("number", [np.int64(8), np.array(8), Index(8)])
def test_a_number_of_shards(number):
    def total(num_shards):
        return run(lambda x: jax_ring.ring_psum(jax_ring.ShardSums.of(x[:2], "i", num_shards), "i", order="tree")[None])

    np.testing.assert_array_equal(total(number), total(8))


@pytest.mark.parametrize("number", ["8", 8.0, None, [8]], ids=repr)
def test_a_number_of_shards_that_is_no_integer(number):
    with pytest.raises(TypeError, match=r"^ShardSums.of: num_shards must be an integer, got "):
        run(lambda x: jax_ring.ShardSums.of(x[:2], "i", number).terms)


@pytest.mark.parametrize("number", ["4", 4.0, [4]], ids=repr)
def test_a_number_of_shards_of_a_plain_sum(number):
    with pytest.raises(TypeError, match=r"^ring_psum: num_shards must be an integer, got "):
        run(lambda x: jax_ring.ring_psum(x, "i", order="tree", num_shards=number))


@pytest.mark.parametrize("kind", [iter, np.array, set, tuple])
def test_pairs_may_come_from_anything_that_lists_them(kind):
    pairs = [(i, (i + 1) % 4) for i in range(4)]
    expected = run(lambda x: jax_ring.ring_ppermute(x, "i", pairs))
    np.testing.assert_array_equal(run(lambda x: jax_ring.ring_ppermute(x, "i", kind(pairs))), expected)
    sources = [3, 0, 1, 2]
    np.testing.assert_array_equal(run(lambda x: jax_ring.ring_pshuffle(x, "i", iter(sources))), expected)


@pytest.mark.parametrize("perm", [3, None, [0, 1]], ids=repr)
def test_what_is_no_pairs(perm):
    with pytest.raises(TypeError, match=r"^ring_ppermute: perm must consist of pairs"):
        run(lambda x: jax_ring.ring_ppermute(x, "i", perm))


@pytest.mark.parametrize("layout", ["flat", "parameter"])
def test_a_number_of_ranks_to_shard_over(layout):
    optimizer = zero.sharded_optimizer(optax.adam(0.1), "i", layout=layout)
    init = jax.shard_map(optimizer.init, mesh=MESH, in_specs=P(), out_specs=optimizer.specs(PARAMS), check_vma=False)
    state = jax.jit(init)(PARAMS)
    functions = [lambda count: optimizer.repartition(state, PARAMS, count)]
    if optimizer.shares is not None:
        functions.append(lambda count: optimizer.shares(PARAMS, count))
    for function in functions:
        for count in (2.0, "2", None):
            with pytest.raises(TypeError, match=r"sharded_optimizer: num_ranks must be an integer, got "):
                function(count)
        for count in (0, -1):
            with pytest.raises(ValueError, match=f"sharded_optimizer: num_ranks must be positive, got {count}"):
                function(count)
        expected, got = function(2), function(Index(2))
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("residual", [None, 0.0, {"v": jnp.zeros((4, 4))}], ids=repr)
def test_a_residual_of_another_tree(residual):
    with pytest.raises(ValueError, match=r"^sync_with_feedback: residual must be a tree like that of the gradients"):
        run(lambda x: jax_ring.sync_with_feedback({"w": x}, residual, "i")[0]["w"])
