"""A process compiles alone: neither the processes of the topology nor those of its own program need to take part."""

import pathlib

import pytest
from helpers import run_processes

pytestmark = pytest.mark.one_pair  # other modules cover what XLA's passes do with calls

PROGRAM = """
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize("{address}", {processes}, {process})
assert jax.process_count() == 2
client = jax._src.distributed.global_state.client
if {process} == 1:
    client.blocking_key_value_get("compiled", 100_000)  # without jax_ring
else:
    from jax_ring import assume_hosts, explain, ring_psum

    text = open({target!r}).read()
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x8x1")
    mesh = topologies.make_mesh(topology, (8,), ("i",))
    fun = jax.jit(jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=jax.NamedSharding(mesh, P("i")))
    with assume_hosts(dict.fromkeys(range(8), "node")):
        print(fun.lower(x).compile().as_text().count("custom_call_target=\\"jax_ring_all_reduce\\""))
        print(explain(fun, x).collectives[0].served_by)
    client.key_value_set("compiled", "")
"""


def test_compiling_waits_for_no_process():
    target = str(pathlib.Path(__file__).parent / "h100.txtpb")
    alone, _ = run_processes(PROGRAM, [{"target": target}] * 2, devices=1)
    assert alone.splitlines() == ["1", "jax_ring (CUDA IPC, 8 processes)"]
