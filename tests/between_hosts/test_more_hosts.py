"""Three hosts, and two processes on each of two hosts: what test_two_level and test_narrow_wires check on two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, rank_fold
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_narrow_wires import LARGE, check_wire, gradients
from test_two_level import (
    ON_TWO_HOSTS,
    TWO_HOSTS,
    assert_local_shards,
    cut_small_parts,
    integers,
    local_shards,
    on_mesh,
)

from jax_ring import explain, ring_all_gather, ring_pmax, ring_ppermute, ring_psum, sync_gradients
from jax_ring.lowering.hierarchical import all_reduce
from jax_ring.lowering.passes import exchanges

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # jobs of several processes; tables of the same steps

RNG = np.random.default_rng(0)  # the same numbers in all processes


def two_processes_on_a_host():
    """The ranks of a host are in two processes, with an algorithm to choose between them."""
    mesh = Mesh(np.array(jax.devices()), ("i",))
    large = integers(8, 6 * all_reduce.PART_BYTES // 4 + 3)
    for dtype in (large.dtype, jnp.float16):
        fun, arrays = on_mesh(lambda x: ring_psum(x, "i"), mesh, large.astype(dtype), out_specs=P())
        for _ in range(2):
            assert_local_shards(fun(arrays), large.sum(0).astype(dtype)[None])
    values = integers(8, 5)
    for order in ("rank", "tree"):
        fun, arrays = on_mesh(lambda x, order=order: ring_psum(x, "i", order=order), mesh, values, out_specs=P())
        assert {call.served_by for call in explain(fun, arrays).collectives} == {ON_TWO_HOSTS}
        assert_local_shards(fun(arrays), values.sum(0)[None])

    def moved(x):
        return ring_ppermute(ring_all_gather(x[0], "i"), "i", [(0, 7), (2, 3), (3, 4), (5, 6)])

    fun, arrays = on_mesh(lambda x: moved(x)[None], mesh, values, check_vma=False)
    assert explain(fun, arrays).collectives[0].served_by == ON_TWO_HOSTS
    received = np.where(np.isin(np.arange(8), [7, 3, 4, 6]).reshape(8, 1, 1), values, 0)
    own = slice(2 * jax.process_index(), 2 * jax.process_index() + 2)
    assert_same_bits(local_shards(fun(arrays))[:, 0], received[own])


def narrow_wires_of_two_processes():
    """Steps between processes convert nothing, so that XLA does."""
    mesh = Mesh(np.array(jax.devices()), ("i",))
    values = gradients(8, LARGE)
    fun, arrays = on_mesh(
        lambda x: sync_gradients(x[0], "i", wire=jnp.bfloat16, mean=False), mesh, values, out_specs=P()
    )
    with np.errstate(over="ignore", invalid="ignore"):
        sent = values.astype(jnp.bfloat16).astype(np.float32)
        expected = (rank_fold(sent[:4]) + rank_fold(sent[4:])).astype(jnp.bfloat16).astype(np.float32)
    for part in local_shards(fun(arrays)):
        assert_same_bits(part, expected)


@pytest.mark.jax_processes(4, devices=2, environment=[host for host in TWO_HOSTS for _ in range(2)])
def test_two_hosts_of_two_processes():
    cut_small_parts()
    two_processes_on_a_host()
    narrow_wires_of_two_processes()


def small_floats_of_three_hosts():
    """Large sums of small floats are added in the order of the hosts, and rounded once. Shards are padded."""
    mesh = Mesh(np.array(jax.devices()), ("i",))
    values = RNG.standard_normal((6, 3 * all_reduce.PART_BYTES // 4 + 1)).astype(jnp.bfloat16)
    of_hosts = [rank_fold(values[2 * host : 2 * host + 2].astype(np.float32)) for host in range(3)]
    fun, arrays = on_mesh(lambda x: ring_psum(x, "i"), mesh, values, out_specs=P())
    found = explain(fun, arrays)
    assert [i.name for i in found.instructions].count("all-to-all") == 6
    assert found.predicted_bytes == found.counted_bytes
    for _ in range(2):
        assert_local_shards(fun(arrays), rank_fold(np.stack(of_hosts)).astype(jnp.bfloat16)[None])


def small_messages_of_three_hosts():
    """They are added in the order of the hosts, and sent to both others. In a joined exchange, too."""
    mesh = Mesh(np.array(jax.devices()), ("i",))
    limit = exchanges.SMALL_BYTES // 2 // 4  # elements of which two copies may leave each host
    for dtype, size in ((np.float32, limit), (jnp.bfloat16, limit), (np.float32, 7)):
        values = RNG.standard_normal((6, size)).astype(dtype)
        of_hosts = [rank_fold(values[2 * host : 2 * host + 2].astype(np.float32)) for host in range(3)]
        fun, arrays = on_mesh(lambda x: (ring_psum(x, "i"), ring_pmax(x[:, :5], "i")), mesh, values, out_specs=P())
        found = explain(fun, arrays)
        assert {i.name for i in found.instructions if not i.name.startswith("jax_ring")} == {"all-to-all"}
        assert found.predicted_bytes == found.counted_bytes
        total, largest = fun(arrays)
        assert_local_shards(total, rank_fold(np.stack(of_hosts)).astype(dtype)[None])
        assert_local_shards(largest, values[:, :5].max(0)[None])
    fun, arrays = on_mesh(lambda x: ring_psum(x, "i"), mesh, integers(6, limit + 2), out_specs=P())
    found = explain(fun, arrays)
    assert "all-reduce" in {i.name for i in found.instructions}
    assert found.predicted_bytes == found.counted_bytes


def narrow_wires_of_three_hosts():
    mesh = Mesh(np.array(jax.devices()), ("i",))
    for wire in (jnp.bfloat16, np.float16):
        check_wire(mesh, 3, LARGE + 77, wire, mean=False)


@pytest.mark.jax_processes(3, devices=2, environment=[{"JAX_RING_HOST_ID": host} for host in "abc"])
def test_three_hosts():
    small_messages_of_three_hosts()
    small_floats_of_three_hosts()
    cut_small_parts()
    narrow_wires_of_three_hosts()
