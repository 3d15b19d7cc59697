"""Which GPU groups the CUDA engine serves, and what is lowered for them. Needs no GPU: programs are not run."""

import logging
import re
import types

import jax
import jax.numpy as jnp
import pytest
from fake_gpus import FakeKernels, pretend_gpus
from helpers import TARGET, as_printed, make_mesh, sharded
from jax.sharding import PartitionSpec as P

from jax_ring import _compat, ring_all_gather, ring_ppermute, ring_psum, runtime
from jax_ring.distributed import discovery
from jax_ring.lowering import topology
from jax_ring.lowering.topology import Member


@pytest.fixture
def engine(monkeypatch):
    return pretend_gpus(monkeypatch)


def lower(fun, *args, **options):
    return sharded(fun, **options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def psum(x):
    return ring_psum(x, "i")


@pytest.mark.usefixtures("engine")
def test_groups_are_attributes(check_vma):
    mesh = make_mesh((2, 2), ("i", "j"), devices=[jax.devices()[i] for i in (3, 1, 0, 2)])
    text = lower(psum, jnp.ones((4, 2)), mesh=mesh, in_specs=P("i", "j"), out_specs=P(None, "j"), check_vma=check_vma)
    assert TARGET in text
    assert "partition_id" not in text
    # Groups along the first axis: positions 0 and 2, and 1 and 3.
    assert "members = dense<[3, 0, 1, 2]>" in text
    assert "processes = dense<0>" in text
    assert "group_sizes = dense<2>" in text


@pytest.mark.usefixtures("engine")
def test_the_call_and_its_line_are_attributes():
    text = lower(psum, jnp.ones(8), check_vma=False)
    assert """call = "ring_psum of float32[1] over axis 'i'\"""" in text
    assert f'site = "{as_printed(__file__)}:{psum.__code__.co_firstlineno + 1} (psum)"' in text


@pytest.mark.usefixtures("engine")
def test_options_are_attributes():
    text = lower(lambda x: ring_psum(x, "i", algorithm="two_shot"), jnp.ones(8), check_vma=False)
    assert 'algorithm = "two_shot"' in text
    assert 'order = "rank"' in text


@pytest.mark.usefixtures("engine")
def test_vmap_over_the_axis_is_local():
    text = jax.jit(jax.vmap(psum, axis_name="i")).trace(jnp.ones(8)).lower(lowering_platforms=("cuda",)).as_text()
    assert TARGET not in text
    assert "all_reduce" not in text


@pytest.mark.usefixtures("engine")
def test_one_rank_needs_no_call():
    mesh = make_mesh((1,))
    text = lower(lambda x: ring_psum(x, "i") * 2, jnp.ones(4), mesh=mesh, check_vma=False)
    assert TARGET not in text
    assert "all_reduce" not in text


@pytest.fixture
def expect_fallback(caplog):
    def expect(why: str, *, ranks=8, **options):
        caplog.set_level(logging.INFO, "jax_ring")
        text = lower(psum, jnp.ones(ranks), check_vma=False, **options)
        assert TARGET not in text
        assert "all_reduce" in text
        assert why in caplog.text

    return expect


@pytest.mark.usefixtures("engine")
def test_without_the_kernels(monkeypatch, expect_fallback):
    monkeypatch.setattr(runtime, "cuda_kernels", None)
    monkeypatch.setattr(runtime, "why_no_cuda", "it was not built")
    expect_fallback("jax_ring was built without its CUDA kernels: it was not built")


def test_devices_that_are_not_gpus(monkeypatch, expect_fallback):
    monkeypatch.setattr(runtime, "cuda_kernels", FakeKernels())
    expect_fallback("the mesh is abstract or not of GPUs")


@pytest.mark.usefixtures("engine")
def test_an_abstract_mesh(caplog):
    caplog.set_level(logging.INFO, "jax_ring")
    mesh = make_mesh()
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, P("i")))
    assert TARGET not in lower(psum, x, mesh=mesh.abstract_mesh, check_vma=False)
    assert "the mesh is abstract" in caplog.text


def test_no_peer_access(engine, expect_fallback):
    engine.severed.add((2, 5))
    expect_fallback(
        "device 2 (GPU-2 at 0000:02:00.0, process 0) has no peer access to device 5 (GPU-5 at 0000:05:00.0, process 0)"
    )


def test_what_a_process_says_of_its_gpus_is_escaped():
    device, gpu = types.SimpleNamespace(id=2, process_index=1), discovery.Identity("0000\n", "\x1b[2J")
    assert topology._name_of(device, gpu) == r"device 2 (\x1b[2J at 0000\n, process 1)"


def test_no_peer_access_between_groups_does_not_matter(engine):
    engine.severed.add((0, 1))
    mesh = make_mesh((2, 2), ("i", "j"))  # the groups are GPUs 0 and 2, and 1 and 3
    assert TARGET in lower(psum, jnp.ones((2, 2)), mesh=mesh, in_specs=P("i", "j"), out_specs=P("i", "j"))


def test_ranks_on_one_gpu(engine, expect_fallback, monkeypatch):
    engine.gpus[6] = ("0000:03:00.0", "MIG-6")  # another slice of GPU 3
    expect_fallback(
        "device 3 (GPU-3 at 0000:03:00.0, process 0) is on the same GPU as device 6 (MIG-6 at 0000:03:00.0, process 0)"
    )
    monkeypatch.setattr(runtime, "SHARED_GPU", True)
    assert TARGET in lower(psum, jnp.ones(8), check_vma=False)


def test_gpus_that_jax_may_not_use(engine, expect_fallback, monkeypatch):
    """JAX numbers the GPUs that it may use, in the order of CUDA; the others do not count."""
    engine.severed |= {(2, 1), (2, 3)}
    engine.gpus.append(("0000:10:00.0", "GPU-16"))
    monkeypatch.setattr(_compat, "visible_gpus", lambda: (16, *range(2, 15), 0, 15))
    expect_fallback(
        "device 1 (GPU-2 at 0000:02:00.0, process 0) has no peer access to device 2 (GPU-3 at 0000:03:00.0, process 0)"
    )


def test_gpus_that_jax_does_not_know(engine, expect_fallback):
    engine.gpus.pop()
    expect_fallback("process 0 has 16 GPUs by JAX, and 15 by CUDA")


def test_a_broken_driver(engine, expect_fallback, monkeypatch):
    def identities():
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(engine, "identities", identities)
    expect_fallback("the CUDA runtime cannot list the GPUs: CUDA driver version is insufficient")


@pytest.mark.usefixtures("engine")
def test_too_many_ranks(monkeypatch, expect_fallback):
    monkeypatch.setattr(topology, "_MAX_RANKS", 7)
    expect_fallback("a group has 8 ranks, and the CUDA engine serves at most 7")


@pytest.fixture
def two_hosts(monkeypatch, engine):
    """Eight GPUs: 0, 1, 4 and 5 are on one host, the others on a second one."""
    gpus = lambda engine, mesh: [Member(d.id // 2 % 2, d.id) for d in mesh.devices.flat]  # noqa: E731
    monkeypatch.setattr(topology, "members_of", gpus)
    monkeypatch.setattr(discovery, "host_of", lambda process: f"host {process}")


@pytest.mark.usefixtures("two_hosts")
def test_all_reduce_across_hosts_is_two_level(caplog, monkeypatch):
    monkeypatch.setattr(runtime, "STRICT", True)  # the two-level form is not a fallback
    caplog.set_level(logging.INFO, "jax_ring")
    text = lower(psum, jnp.ones((8, 3)), check_vma=False)
    scatter, across, gather = re.findall(r"jax_ring_reduce_scatter|stablehlo.all_reduce|jax_ring_all_gather", text)
    assert (scatter, across, gather) == ("jax_ring_reduce_scatter", "stablehlo.all_reduce", "jax_ring_all_gather")
    assert text.count("members = dense<[0, 1, 4, 5, 2, 3, 6, 7]>") == 2
    assert text.count("group_sizes = dense<4>") == 2
    assert "replica_groups = dense<[[0, 2], [1, 3], [4, 6], [5, 7]]>" in text
    assert "tensor<1xf32>) -> tensor<1xf32>" in text  # 3 elements in 4 shards
    assert "'i' (reduce-scatter within a host)" in text
    assert "ring_psum over ('i',) is served by XLA between 2 hosts" in caplog.text


@pytest.mark.usefixtures("two_hosts")
def test_a_gather_across_hosts_is_two_level(caplog, monkeypatch):
    monkeypatch.setattr(runtime, "STRICT", True)
    caplog.set_level(logging.INFO, "jax_ring")
    text = lower(lambda x: ring_all_gather(x, "i"), jnp.ones(8), check_vma=False)
    across, gather = re.findall(r"stablehlo.all_gather|jax_ring_all_gather", text)
    assert (across, gather) == ("stablehlo.all_gather", "jax_ring_all_gather")
    assert "replica_groups = dense<[[0, 2], [1, 3], [4, 6], [5, 7]]>" in text
    assert "members = dense<[0, 1, 4, 5, 2, 3, 6, 7]>" in text
    assert "ring_all_gather over ('i',) is served by XLA between 2 hosts" in caplog.text


@pytest.mark.usefixtures("two_hosts")
def test_a_permutation_within_hosts_does_not_cross(caplog, monkeypatch):
    monkeypatch.setattr(runtime, "STRICT", True)
    caplog.set_level(logging.INFO, "jax_ring")
    text = lower(lambda x: ring_ppermute(x, "i", [(0, 5), (2, 7)]), jnp.ones(8), check_vma=False)
    assert text.count("@jax_ring_permute") == 1
    assert "sources = dense<[-1, -1, -1, 0]>" in text
    assert "stablehlo.collective_permute" not in text
    assert "across" not in caplog.text
    assert "between" not in caplog.text


@pytest.mark.usefixtures("two_hosts")
def test_a_permutation_of_hosts_is_served_by_xla(caplog):
    caplog.set_level(logging.INFO, "jax_ring")
    text = lower(lambda x: ring_ppermute(x, "i", [(0, 2), (3, 1)]), jnp.ones(8), check_vma=False)
    assert "@jax_ring" not in text
    assert "on 2 hosts, between which every pair of the permutation crosses" in caplog.text


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ([0, 1, 4, 2, 3], "with unequal numbers of ranks per host or of hosts per group"),
        ([0, 2], "the ranks of a group are on 2 hosts, one rank on each"),
    ],
)
def test_unequal_hosts(expect_fallback, devices, why):
    mesh = make_mesh((len(devices),), devices=[jax.devices()[i] for i in devices])
    expect_fallback(why, mesh=mesh, ranks=len(devices))


@pytest.mark.usefixtures("engine")
def test_several_processes_of_one_host(monkeypatch):
    gpus = lambda engine, mesh: [Member(d.id // 4, d.id) for d in mesh.devices.flat]  # noqa: E731
    monkeypatch.setattr(topology, "members_of", gpus)
    monkeypatch.setattr(discovery, "host_of", lambda process: "host")
    text = lower(psum, jnp.ones(8), check_vma=False)
    assert "processes = dense<[0, 0, 0, 0, 1, 1, 1, 1]>" in text
    assert "members = dense<[0, 1, 2, 3, 4, 5, 6, 7]>" in text


@pytest.mark.usefixtures("engine")
def test_strict_makes_the_fallback_an_error(monkeypatch):
    monkeypatch.setattr(runtime, "cuda_kernels", None)
    monkeypatch.setattr(runtime, "STRICT", True)
    with pytest.raises(NotImplementedError, match=r"without its CUDA kernels.*JAX_RING_STRICT=1 forbids it"):
        lower(psum, jnp.ones(8), check_vma=False)


def test_members_of_a_mesh(monkeypatch):
    mesh = make_mesh((2,), devices=[jax.devices()[i] for i in (3, 0)])
    assert topology.members_of("cuda", mesh) is None
    monkeypatch.setattr(topology, "_is_gpu", lambda device: True)
    assert topology.members_of("cuda", mesh) == [Member(0, 3), Member(0, 0)]
    monkeypatch.setattr(topology, "_is_gpu", lambda device: device.id == 3)
    assert topology.members_of("cuda", mesh) is None
