"""Exchanges, compiled for GPUs that are not there: all-to-alls and permutations are ours, ragged ones are XLA's."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_buffers import Recorded, recorded
from compiled_programs import ONE_HOST, attribute, calls_in, collectives_of_xla, compiled_for, optimized
from jax import lax
from jax.experimental import compute_on as compute_on_module
from jax.sharding import PartitionSpec as P
from timeline import EXCHANGE, MAIN, timeline

import jax_ring
from jax_ring import assume_hosts

pytestmark = pytest.mark.one_pair  # other modules cover what XLA's passes do with calls

SHIFT = [(rank, (rank + 1) % 8) for rank in range(8)]
PAIRS = [(0, 7), (5, 2)]

# The kind of custom call of each function, the function, and its namesake in jax.lax. Each rank has 96 elements.
EXCHANGES = {
    "ring_all_to_all": (
        "all_to_all",
        lambda x: jax_ring.ring_all_to_all(x.reshape(8, 12), "i", 0, 1),
        lambda x: lax.all_to_all(x.reshape(8, 12), "i", 0, 1),
    ),
    "tiled": (
        "all_to_all",
        lambda x: jax_ring.ring_all_to_all(x, "i", 0, 0, tiled=True),
        lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
    ),
    "ring_pswapaxes": (
        "all_to_all",
        lambda x: jax_ring.ring_pswapaxes(x.reshape(12, 8), "i", 1),
        lambda x: lax.pswapaxes(x.reshape(12, 8), "i", 1),
    ),
    "ring_ppermute": (
        "permute",
        lambda x: jax_ring.ring_ppermute(x, "i", SHIFT),
        lambda x: lax.ppermute(x, "i", SHIFT),
    ),
    "pairs": (
        "permute",
        lambda x: jax_ring.ring_ppermute(x, "i", PAIRS),
        lambda x: lax.ppermute(x, "i", PAIRS),
    ),
    "ring_pshuffle": (
        "permute",
        lambda x: jax_ring.ring_pshuffle(x, "i", [2, 0, 1, 3, 4, 7, 5, 6]),
        lambda x: lax.pshuffle(x, "i", [2, 0, 1, 3, 4, 7, 5, 6]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("overridden", [False, True])
def test_exchanges_are_ours(mesh_of, name, overridden):
    kind, ours, of_lax = EXCHANGES[name]
    if overridden:
        with jax_ring.override_lax():
            hlo = compiled_for(mesh_of("1x1x8"), lambda x: of_lax(x).reshape(-1))
    else:
        hlo = compiled_for(mesh_of("1x1x8"), lambda x: ours(x).reshape(-1))
    assert calls_in(hlo) == [kind]
    assert collectives_of_xla(hlo) == []
    assert attribute("members", hlo) == list(range(8))


def test_between_processes_of_a_host(mesh_of):
    with assume_hosts(ONE_HOST):
        hlo = compiled_for(
            mesh_of("1x8x1"),
            lambda x: jax_ring.ring_ppermute(jax_ring.ring_all_to_all(x, "i", 0, 0, tiled=True), "i", SHIFT),
        )
    assert calls_in(hlo) == ["all_to_all", "permute"]
    assert collectives_of_xla(hlo) == []


def test_the_sources_of_a_permutation(mesh_of):
    """For each rank the one that sends to it. Rank 3 has nobody, and gets zeros."""
    hlo = compiled_for(mesh_of("1x1x8"), lambda x: jax_ring.ring_ppermute(x, "i", PAIRS))
    assert attribute("sources", hlo) == [-1, -1, 5, -1, -1, -1, -1, 0]
    hlo = compiled_for(mesh_of("1x1x8"), lambda x: jax_ring.ring_psum(x, "i"))
    assert "sources = dense<> : tensor<0xi64>" in hlo


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int4, jnp.bfloat16, jnp.float8_e8m0fnu, jnp.complex64])
def test_dtypes(mesh_of, dtype):
    def both(x):
        return jax_ring.ring_ppermute(jax_ring.ring_all_to_all(x, "i", 0, 0, tiled=True), "i", SHIFT)

    hlo = compiled_for(mesh_of("1x1x8"), both, dtype=dtype)
    assert calls_in(hlo) == ["all_to_all", "permute"]
    assert collectives_of_xla(hlo) == []


def test_in_loops_and_backwards(mesh_of):
    def body(x):
        def rotate(_, y):
            return jax_ring.ring_ppermute(jnp.sin(y), "i", SHIFT)

        looped = lax.fori_loop(0, 8, rotate, x)
        grad = jax.grad(lambda x: (jax_ring.ring_all_to_all(x, "i", 0, 0, tiled=True) ** 2).sum())(x)
        return looped + grad

    hlo = compiled_for(mesh_of("1x1x8"), body)
    assert sorted(calls_in(hlo)) == ["all_to_all", "all_to_all", "permute"]
    assert collectives_of_xla(hlo) == []


def test_on_a_stream_of_the_user(mesh_of):
    """Beside the main stream, in a lane of its own, and between a start and a done."""
    wrap = getattr(compute_on_module, "compute_on2", compute_on_module.compute_on)

    def body(x):
        def rotate(x):
            return jax_ring.ring_ppermute(x, "i", SHIFT)

        sent = wrap(rotate, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)(x)
        return rotate(sent) + jax_ring.ring_all_to_all(x, "i", 0, 0, tiled=True)

    mesh = mesh_of("1x1x8")
    x = jax.ShapeDtypeStruct((16 * 48,), jnp.float32, sharding=jax.NamedSharding(mesh, P("i")))
    lowered = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)).lower(x)
    assert sorted(int(lane) for lane in re.findall(r"\blane = (\d+) : i64", lowered.as_text())) == [0, 0, 2]
    hlo = optimized(lowered)
    assert sorted(calls_in(hlo)) == ["all_to_all", "permute", "permute"]
    assert hlo.count('custom_call_target="jax_ring_permute_async"') == 1
    assert collectives_of_xla(hlo) == []
    assert sorted(each.stream != MAIN for each in timeline(hlo) if each.kind == EXCHANGE) == [False, False, True]


def test_recorded_in_cuda_graphs(mesh_of, tmp_path):
    def body(x):
        for _ in range(3):
            x = jax_ring.ring_all_to_all(jnp.sin(jax_ring.ring_ppermute(x, "i", SHIFT)), "i", 0, 0, tiled=True)
        return x

    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True, "xla_gpu_graph_min_graph_size": 1}
    mesh = mesh_of("1x1x8")
    x = jax.ShapeDtypeStruct((16 * 48,), jnp.float32, sharding=jax.NamedSharding(mesh, P("i")))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    jax.jit(mapped).lower(x).compile(compiler_options=options)
    assert recorded(tmp_path, "jit_body") == Recorded(inside=6, outside=0, loops=0)


@pytest.mark.parametrize("overridden", [False, True])
def test_ragged_exchanges_are_those_of_xla(mesh_of, caplog, overridden):
    mesh = mesh_of("1x1x8")

    def body(operand, output, *numbers):
        if overridden:
            return lax.ragged_all_to_all(operand, output, *numbers, axis_name="i")
        return jax_ring.ring_ragged_all_to_all(operand, output, *numbers, axis_name="i")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    rows = jax.ShapeDtypeStruct((8 * 16, 4), jnp.float32, sharding=jax.NamedSharding(mesh, P("i")))
    numbers = jax.ShapeDtypeStruct((8 * 8,), np.int32, sharding=jax.NamedSharding(mesh, P("i")))
    with caplog.at_level(logging.INFO, "jax_ring"), jax_ring.override_lax() if overridden else assume_hosts({0: 0}):
        lowered = jax.jit(mapped).lower(rows, rows, *[numbers] * 4)
    hlo = optimized(lowered)
    assert calls_in(hlo) == []
    assert "ragged-all-to-all" in hlo
    function = "lax.ragged_all_to_all" if overridden else "ring_ragged_all_to_all"
    assert [each for each in caplog.messages if each.startswith(function)] == [
        f"{function} over ('i',) uses XLA's ragged_all_to_all: the CUDA engine has no ragged all-to-all"
    ]
