"""Discovery between the processes of a host: what each publishes, waits for, and passes to the engine."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import watched
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from job import client, job_token
from watched import Processes, as_text

from jax_ring.launcher.environment import reserved_address

pytestmark = pytest.mark.full  # jobs of several processes


def attributes(text: str) -> list[tuple[str, str]]:
    """For each call in a lowered program: the processes of its ranks, and the program's name without its digest."""
    found = re.findall(r'processes = dense<(.*?)>.*? program = "(.*?)/([0-9a-f]{16})(#\d+)"', text)
    assert len({digest for _, _, digest, _ in found}) == 1
    return [(processes, name + count) for processes, name, _, count in found]


def lowered(mesh, name="f"):
    from jax_ring import ring_psum

    def fun(x):
        return ring_psum(ring_psum(x, "i") * x, mesh.axis_names)

    fun.__name__ = name
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).as_text()


@pytest.mark.jax_processes(2, devices=2)
def test_only_one_process_lowers():
    """Process 1 only imports jax_ring, and waits until process 0 has lowered its programs."""
    from jax_ring import explain, ring_psum

    if jax.process_index() == 1:
        client().blocking_key_value_get("lowered", 60_000)
        return
    try:
        devices = np.array(jax.devices()).reshape(2, 2)
        assert attributes(lowered(Mesh(devices.T.reshape(4), "i"))) == [("[0, 1, 0, 1]", "jit_f#0")] * 2
        # Groups within each process, and a mesh of one process.
        assert attributes(lowered(Mesh(devices, ("j", "i")))) == [("[0, 0, 1, 1]", "jit_f#1")] * 2
        assert attributes(lowered(Mesh(devices[1], "i"), "g")) == [("1", "jit_g#0")] * 2

        mapped = jax.shard_map(
            lambda x: ring_psum(x, "i"), mesh=Mesh(devices.reshape(4), "i"), in_specs=P("i"), out_specs=P()
        )
        (call,) = explain(mapped, jax.ShapeDtypeStruct((8,), jnp.float32)).collectives
        assert (call.served_by, call.wire_bytes_across_hosts) == ("jax_ring (shared memory, 2 processes)", 0)
    finally:
        client().key_value_set("lowered", "")


def initialize_after_import():
    """Process 1 does no more than that."""
    import jax_ring  # noqa: F401

    jax.distributed.initialize(**watched.distributed)
    if jax.process_index() == 1:
        client().blocking_key_value_get("lowered", 60_000)
        return
    try:
        assert attributes(lowered(Mesh(np.array(jax.devices()), "i"))) == [("[0, 1]", "jit_f#0")] * 2
    finally:
        client().key_value_set("lowered", "")


def test_a_process_joins_when_it_initializes():
    with Processes(initialize_after_import, 2, environment={"JAX_RING_TIMEOUT_S": "20"}, distributed=None) as program:
        results = program.wait()
    assert [result.returncode for result in results] == [0, 0], as_text(results)


def initialize_twice(addresses):
    """jax_ring is imported before jax.distributed is initialized, and stays imported after its shutdown."""
    from jax_ring.distributed import discovery

    tokens = []
    for address in addresses:
        jax.distributed.initialize(**{**watched.distributed, "coordinator_address": address})
        assert attributes(lowered(Mesh(np.array(jax.devices()), "i"))) == [("[0, 1]", "jit_f#0")] * 2
        tokens.append(job_token())
        assert {discovery.host_of(0), discovery.host_of(1)} == {discovery.host_of(0)}
        jax.distributed.shutdown()
        jax.extend.backend.clear_backends()
    print("tokens", *tokens)


def test_each_runtime_has_its_own_token():
    with (
        reserved_address() as one,
        reserved_address() as other,
        Processes(initialize_twice, 2, arguments=[[one, other]], distributed=None) as program,
    ):
        results = program.wait()
    assert [result.returncode for result in results] == [0, 0], as_text(results)
    here, there = (re.search(r"tokens (\w{16,}) (\w{16,})", result.stdout).groups() for result in results)
    assert here == there
    assert here[0] != here[1]


def set_a_secret_of_its_own():
    os.environ["JAX_RING_SECRET"] = f"the secret of process {watched.distributed['process_id']}"
    jax.distributed.initialize(**watched.distributed)
    with pytest.raises(RuntimeError, match=r"^the value of jax_ring/host/\d .*: who wrote it has another secret"):
        lowered(Mesh(np.array(jax.devices()), "i"))
    client().wait_at_barrier("both have seen it", 60_000)


def test_processes_with_different_secrets_both_get_an_error():
    """At once, and not when they look for memory that the other one has under another name."""
    with Processes(set_a_secret_of_its_own, 2, distributed=None) as program:
        results = program.wait()
    assert [result.returncode for result in results] == [0, 0], as_text(results)
