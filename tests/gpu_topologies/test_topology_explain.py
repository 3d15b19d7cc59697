"""`explain()` of programs for GPUs that are not there: who serves each call, and bytes predicted and counted."""

import jax
import jax.numpy as jnp
import pytest
from compiled_programs import FAMILY, ONE_HOST, TWO_HOSTS
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import assume_hosts, explain

pytestmark = pytest.mark.one_pair  # other modules cover what XLA's passes do with calls


def explained(mesh, fun, shape=(16 * 64,), dtype=jnp.float32):
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    return explain(mapped, jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P("i"))))


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    ("shape", "hosts", "served_by"),
    [
        ("1x1x8", {0: 0}, "jax_ring"),
        ("1x8x1", ONE_HOST, "jax_ring (CUDA IPC, 8 processes)"),
        ("1x2x8", {0: 0, 1: 1}, "jax_ring within hosts, XLA across 2 hosts"),
    ],
)
def test_family(mesh_of, name, shape, hosts, served_by):
    _, function = FAMILY[name]
    with assume_hosts(hosts):
        found = explained(mesh_of(shape), lambda x: function(x, "i"))
    (call,) = found.collectives
    assert (call.served_by, call.why) == (served_by, "")
    assert found.predicted_bytes == found.counted_bytes > 0


@pytest.mark.parametrize(("elements", "chosen"), [(1000, "one_shot"), (100_000, "two_shot")])
def test_algorithm(mesh_of, elements, chosen):
    found = explained(mesh_of("1x1x8"), lambda x: jax_ring.ring_psum(x, "i"), (8 * elements,))
    (call,) = found.collectives
    assert (call.algorithm, call.chosen) == ("auto", (chosen,))
    assert found.predicted_bytes == found.counted_bytes
    (instruction,) = found.instructions
    assert (instruction.name, instruction.group_sizes) == ("jax_ring_all_reduce", (8,))


def test_collectives_of_lax(mesh_of):
    def body(x):
        x = lax.psum(x, "i") + lax.ppermute(x, "i", [(0, 1), (1, 0)])
        x = lax.all_to_all(x, "i", 0, 0, tiled=True)
        return lax.all_gather(lax.psum_scatter(x, "i", tiled=True), "i", tiled=True)

    found = explained(mesh_of("1x1x8"), body)
    assert {call.why for call in found.collectives} == {"a collective of lax, not overridden"}
    counted = {instruction.name.removesuffix("-start") for instruction in found.instructions}
    assert counted == {"all-reduce", "collective-permute", "all-to-all", "reduce-scatter", "all-gather"}
    assert found.predicted_bytes == found.counted_bytes


def test_blocks_of_8_bits_cross_hosts(mesh_of):
    """A composed call, in which XLA exchanges packets between hosts."""

    def body(x):
        return jax_ring.sync_gradients(x, "i", wire="int8")

    with assume_hosts(TWO_HOSTS):
        found = explained(mesh_of("1x16x1"), body, (16 * 4096,))
    served = [call.served_by for call in found.collectives]
    assert served.count("XLA") == 2
    assert served.count("jax_ring (CUDA IPC, 8 processes)") == 2
    assert found.predicted_bytes == found.counted_bytes


def test_hosts_that_are_not_known(mesh_of):
    (call,) = explained(mesh_of("1x8x1"), lambda x: jax_ring.ring_psum(x, "i")).collectives
    assert call.served_by == "XLA"
    assert "unless jax_ring.assume_hosts() says which of them share one" in call.why
