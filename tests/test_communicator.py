"""Which GPU groups the CUDA engine serves, and what is lowered for them. No GPU is needed: programs are not run."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET, make_mesh, sharded
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ring import communicator, ring_psum, runtime
from jax_ring.communicator import Gpu


class Engine:
    """In the place of the native module."""

    def __init__(self, severed=()):
        self.severed = set(severed)

    def note_call_site(self, call, site):
        self.noted = call, site

    def unreachable(self, devices):
        return [(a, b) for a in devices for b in devices if (a, b) in self.severed]


@pytest.fixture
def engine(monkeypatch):
    """A CUDA engine, and CPU devices that pass for GPUs in reverse."""
    engine = Engine()
    monkeypatch.setattr(runtime, "ffi_cuda", engine)
    monkeypatch.setattr(
        communicator,
        "gpus_of",
        lambda mesh: [Gpu(0, 100 - d.id) for d in mesh.devices.flat] if isinstance(mesh, Mesh) else None,
    )
    return engine


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
    assert "devices = dense<[97, 100, 99, 98]>" in text
    assert "processes = dense<0>" in text
    assert "group_sizes = dense<2>" in text


def test_the_call_site_is_noted(engine):
    lower(psum, jnp.ones(8), check_vma=False)
    call, site = engine.noted
    assert call == "ring_psum of float32[1] over axis 'i'"
    assert "test_communicator.py" in site


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
    def expect(why: str, **options):
        caplog.set_level(logging.INFO, "jax_ring")
        text = lower(psum, jnp.ones(8), check_vma=False, **options)
        assert TARGET not in text
        assert "all_reduce" in text
        assert why in caplog.text

    return expect


def test_without_the_engine(monkeypatch, expect_fallback):
    monkeypatch.setattr(runtime, "ffi_cuda", None)
    monkeypatch.setattr(runtime, "why_no_cuda", "it was not built")
    expect_fallback("jax_ring was built without its CUDA engine: it was not built")


def test_devices_that_are_no_gpus(monkeypatch, expect_fallback):
    monkeypatch.setattr(runtime, "ffi_cuda", Engine())
    expect_fallback("the mesh is abstract, or not of GPUs")


@pytest.mark.usefixtures("engine")
def test_an_abstract_mesh(caplog):
    caplog.set_level(logging.INFO, "jax_ring")
    mesh = make_mesh()
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, P("i")))
    assert TARGET not in lower(psum, x, mesh=mesh.abstract_mesh, check_vma=False)
    assert "the mesh is abstract" in caplog.text


def test_no_peer_access(engine, expect_fallback):
    engine.severed.add((98, 95))
    expect_fallback("GPU 98 has no peer access to GPU 95")


def test_no_peer_access_between_groups_does_not_matter(engine):
    engine.severed.add((100, 99))
    mesh = make_mesh((2, 2), ("i", "j"))  # 100 and 98 reduce together, and 99 and 97
    assert TARGET in lower(psum, jnp.ones((2, 2)), mesh=mesh, in_specs=P("i", "j"), out_specs=P("i", "j"))


@pytest.mark.usefixtures("engine")
def test_too_many_ranks(monkeypatch, expect_fallback):
    monkeypatch.setattr(communicator, "_MOST_RANKS", 7)
    expect_fallback("a group has 8 ranks, more than 7")


@pytest.mark.usefixtures("engine")
def test_several_hosts(monkeypatch, expect_fallback):
    monkeypatch.setattr(communicator, "gpus_of", lambda mesh: [Gpu(d.id // 4, d.id % 4) for d in mesh.devices.flat])
    monkeypatch.setattr(communicator, "host_of", lambda process: f"host {process}")
    expect_fallback("the ranks of a group are on 2 hosts")


@pytest.mark.usefixtures("engine")
def test_several_processes_of_one_host(monkeypatch):
    monkeypatch.setattr(communicator, "gpus_of", lambda mesh: [Gpu(d.id // 4, d.id % 4) for d in mesh.devices.flat])
    monkeypatch.setattr(communicator, "host_of", lambda process: "host")
    text = lower(psum, jnp.ones(8), check_vma=False)
    assert "processes = dense<[0, 0, 0, 0, 1, 1, 1, 1]>" in text
    assert "devices = dense<[0, 1, 2, 3, 0, 1, 2, 3]>" in text


def test_strict_makes_the_fallback_an_error(monkeypatch):
    monkeypatch.setattr(runtime, "ffi_cuda", None)
    monkeypatch.setattr(runtime, "STRICT", True)
    with pytest.raises(NotImplementedError, match=r"without its CUDA engine.*JAX_RING_STRICT=1 forbids it"):
        lower(psum, jnp.ones(8), check_vma=False)


def test_gpus_of_a_mesh():
    device = lambda i, platform: SimpleNamespace(process_index=i // 2, local_hardware_id=i % 2, platform=platform)  # noqa: E731
    mesh = object.__new__(Mesh)
    devices = np.array([[device(3, "gpu"), device(0, "gpu")]])
    object.__setattr__(mesh, "devices", devices)
    assert communicator.gpus_of(mesh) == [Gpu(1, 1), Gpu(0, 0)]
    devices[0, 1] = device(0, "cpu")
    assert communicator.gpus_of(mesh) is None
