"""Programs for the GPUs of several processes, as each process lowers them. CPU devices stand in for the GPUs."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from job import client, of_all_processes

pytestmark = pytest.mark.full  # jobs of several processes


class FakeKernels:
    """A fake of the native module of kernels. The process sees these GPUs, by PCI address and UUID."""

    def __init__(self, gpus, severed=()):
        self.gpus = gpus
        self.severed = severed

    def identities(self):
        return self.gpus

    def unreachable(self, ordinals):
        return [(a, b) for a in ordinals for b in ordinals if (a, b) in self.severed]


def name_of(gpu: int) -> tuple[str, str]:
    return f"0000:{gpu:02x}:00.0", f"GPU-{gpu}"


def pretend(kernels) -> None:
    """Makes the CPU devices of this process GPUs, which JAX is about to use."""
    from jax_ring import runtime
    from jax_ring.distributed import discovery
    from jax_ring.lowering import topology

    topology._is_gpu = lambda device: True
    runtime.cuda_kernels = kernels
    runtime.why_no_cuda = "it was not built"
    discovery.publish_with_plugins()  # as JAX calls it


def lowered() -> str:
    from jax_ring import ring_psum

    mesh = Mesh(np.array(jax.devices()), "i")
    mapped = jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    shape = jax.ShapeDtypeStruct((mesh.size,), jnp.float32)
    return jax.jit(mapped).trace(shape).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.jax_processes(2, devices=2)
def test_members_are_ids_that_every_process_knows():
    process = jax.process_index()
    pretend(FakeKernels([name_of(2 * process), name_of(2 * process + 1)]))
    ids = [device.id for device in jax.devices()]
    # What a process does not know of the others' devices, so that groups cannot be made of it.
    theirs = [device.local_hardware_id for device in jax.devices() if device.process_index != process]
    assert theirs == [None, None]
    text = lowered()
    assert text.count("@jax_ring_all_reduce") == 1
    assert f"members = dense<{ids}>" in text
    assert "processes = dense<[0, 0, 1, 1]>" in text


@pytest.mark.jax_processes(2)
def test_one_process_lowers_alone():
    """Process 1 imports jax_ring and starts JAX, and then waits until process 0 has lowered."""
    import jax_ring  # noqa: F401, before JAX starts its backend

    pretend(FakeKernels([name_of(jax.process_index())]))
    if jax.process_index() == 1:
        client().blocking_key_value_get("lowered", 60_000)
        return
    try:
        assert "@jax_ring_all_reduce" in lowered()
    finally:
        client().key_value_set("lowered", "")


@pytest.mark.jax_processes(2)
@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("one GPU", r"device 0 \(GPU-7 at .*, process 0\) is on the same GPU as device \d+ \(GPU-7 at .*, process 1\)"),
        # One reason stands for all: a process publishes text in JAX's service.
        pytest.param(
            "slices",
            r"device 0 \(MIG-0 at .*, process 0\) is on the same GPU as device \d+ \(MIG-1 at .*, process 1\)",
            marks=pytest.mark.one_pair,
        ),
        pytest.param(
            "no peer access",
            r"device 0 \(GPU-0 at .*, process 0\) has no peer access to device \d+ \(GPU-1 at .*process 1",
            marks=pytest.mark.one_pair,
        ),
        pytest.param(
            "no kernels",
            r"in process 1, jax_ring was built without its CUDA kernels: it was not built",
            marks=pytest.mark.one_pair,
        ),
    ],
)
def test_all_processes_fall_back_for_the_same_reason(scenario, why):
    process = jax.process_index()
    kernels = {
        "one GPU": FakeKernels([name_of(7)]),
        "slices": FakeKernels([("0000:07:00.0", f"MIG-{process}")]),
        # Process 1 sees both GPUs, but may use the second only, and process 0 sees the first only.
        "no peer access": FakeKernels([name_of(0), name_of(1)][: process + 1], [(0, 1), (1, 0)]),
        "no kernels": None if process == 1 else FakeKernels([name_of(0)]),
    }[scenario]
    if scenario == "no peer access" and process == 1:
        jax.config.update("jax_cuda_visible_devices", "1")
    pretend(kernels)
    logging.getLogger("jax_ring").setLevel(logging.INFO)
    records = []
    logging.getLogger("jax_ring").addFilter(lambda record: records.append(record.getMessage()) or True)
    assert "@jax_ring" not in lowered()
    (message,) = [text for text in records if "uses XLA's" in text]
    here, there = of_all_processes(message)
    assert here == there
    assert re.search(why, here)


@pytest.mark.jax_processes(2, environment={"JAX_RING_TIMEOUT_S": "1"})
def test_a_process_that_does_not_publish_its_gpus():
    import jax_ring  # noqa: F401, which process 1 does not use

    if jax.process_index() == 1:
        client().key_value_set("imported", "")
        client().blocking_key_value_get("failed", 60_000)
        return
    client().blocking_key_value_get("imported", 60_000)
    pretend(FakeKernels([name_of(0)]))
    try:
        with pytest.raises(RuntimeError, match=r"process 1 did not publish its GPUs within 1 s.*GPU backend"):
            lowered()
    finally:
        client().key_value_set("failed", "")
