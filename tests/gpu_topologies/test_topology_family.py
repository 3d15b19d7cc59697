"""Each collective, compiled for GPUs that are not there: our custom calls, and XLA's collectives between hosts only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_programs import FAMILY, ONE_HOST, TWO_HOSTS, attribute, calls_in, collectives_of_xla, compiled_for

import jax_ring
from jax_ring import assume_hosts


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(("shape", "hosts"), [("1x1x8", {0: 0}), ("1x8x1", ONE_HOST)])
def test_on_one_host(mesh_of, name, shape, hosts):
    kind, function = FAMILY[name]
    with assume_hosts(hosts):
        hlo = compiled_for(mesh_of(shape), lambda x: function(x, "i"))
    assert calls_in(hlo) == [kind]
    assert collectives_of_xla(hlo) == []
    assert attribute("members", hlo) == list(range(8))
    assert attribute("processes", hlo) == ([0] * 8 if shape == "1x1x8" else list(range(8)))


@pytest.mark.parametrize("name", ["ring_psum", "ring_pmean", "ring_pmax", "ring_pmin"])
@pytest.mark.parametrize(("shape", "hosts"), [("1x2x8", {0: "a", 1: "b"}), ("1x16x1", TWO_HOSTS)])
def test_on_two_hosts(mesh_of, name, shape, hosts):
    _, function = FAMILY[name]
    with assume_hosts(hosts):
        hlo = compiled_for(mesh_of(shape), lambda x: function(x, "i"))  # 48 elements on each rank
    assert calls_in(hlo) == ["reduce_scatter", "all_gather"]
    element = "s32" if name in ("ring_pmax", "ring_pmin") else "f32"
    assert collectives_of_xla(hlo) == [("all-reduce", [f"{element}[6]"])]  # of 48
    assert attribute("group_sizes", hlo) == [8, 8]
    assert attribute("processes", hlo) == ([0] * 8 + [1] * 8 if shape == "1x2x8" else list(range(16)))


@pytest.mark.parametrize(
    ("function", "steps", "crossing"),
    [
        (
            lambda x: jax_ring.ring_psum_scatter(x, "i", tiled=True),
            ["reduce_scatter"],
            [("all-to-all", ["u32[2,3]"])],
        ),
        (lambda x: jax_ring.ring_all_gather(x, "i"), ["all_gather"], [("all-gather", ["u32[2,48]"])]),
        (
            lambda x: jax_ring.ring_all_to_all(x, "i", 0, 0, tiled=True),
            ["all_to_all"],
            [("all-to-all", ["u32[2,24]"])],
        ),
        (
            lambda x: jax_ring.ring_broadcast(x, "i", root=3),
            ["reduce_scatter", "all_gather"],
            [("all-reduce", ["u32[6]"])],
        ),
        (
            lambda x: jax_ring.ring_reduce(x, "i", root=3),
            ["reduce_scatter", "all_gather"],
            [("all-reduce", ["f32[6]"])],
        ),
        (
            lambda x: jax_ring.ring_ppermute(x, "i", [(i, (i + 1) % 16) for i in range(16)]),
            ["permute"],
            [("collective-permute", ["u32[48]"])],
        ),
        (lambda x: jax_ring.ring_ppermute(x, "i", [(0, 1), (9, 8)]), ["permute"], []),
        (
            lambda x: jax_ring.ring_ppermute(x, "i", [(i, (i + 8) % 16) for i in range(16)]),
            [],
            [("collective-permute", ["f32[48]"])],
        ),
    ],
    ids=["scatter", "gather", "exchange", "broadcast", "reduce", "shift", "permute within hosts", "permute hosts"],
)
@pytest.mark.parametrize(("shape", "hosts"), [("1x2x8", {0: "a", 1: "b"}), ("1x16x1", TWO_HOSTS)])
def test_the_rest_on_two_hosts(mesh_of, shape, hosts, function, steps, crossing):
    """Between hosts a rank moves its own operand, or an eighth of the message."""
    with assume_hosts(hosts):
        hlo = compiled_for(mesh_of(shape), function)  # 48 elements on each rank
    assert calls_in(hlo) == steps
    assert collectives_of_xla(hlo) == crossing
    if steps:
        assert attribute("group_sizes", hlo) == [8, 8]
        assert attribute("processes", hlo) == ([0] * 8 + [1] * 8 if shape == "1x2x8" else list(range(16)))


def test_groups_within_hosts_of_a_mesh_across_hosts(mesh_of):
    mesh = mesh_of("1x2x8", (2, 8), ("j", "i"))
    hlo = compiled_for(mesh, lambda x: jax_ring.ring_all_gather(x, "i"))
    assert calls_in(hlo) == ["all_gather"]
    assert collectives_of_xla(hlo) == []
    assert attribute("members", hlo) == list(range(16))


def test_permuted_devices(topology):
    devices = np.array(topology("1x1x8").devices)[[3, 1, 0, 2, 7, 5, 6, 4]]
    hlo = compiled_for(jax.sharding.Mesh(devices, "i"), lambda x: jax_ring.ring_psum(x, "i"))
    assert attribute("members", hlo) == [3, 1, 0, 2, 7, 5, 6, 4]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.int4, jnp.float8_e4m3fn])
def test_dtypes(mesh_of, dtype):
    hlo = compiled_for(mesh_of("1x1x8"), lambda x: jax_ring.ring_psum(x, "i"), dtype=dtype)
    assert calls_in(hlo) == ["all_reduce"]
    assert collectives_of_xla(hlo) == []


def test_loops_trees_derivatives_and_batches(mesh_of):
    def body(x):
        tree = {"a": x, "b": [x.astype(jnp.bfloat16), x[:3]]}
        summed = jax.tree.map(lambda leaf: leaf.sum(), jax_ring.ring_psum(tree, "i"))
        batched = jax.vmap(lambda row: jax_ring.ring_psum(row, "i"))(x.reshape(4, -1)).sum()
        looped = jax.lax.fori_loop(0, 3, lambda _, y: jax_ring.ring_pmean(y, "i"), x)
        grad = jax.grad(lambda x: (jax_ring.ring_psum(x, "i") ** 2).sum())(x)
        return looped + grad + batched + sum(jax.tree.leaves(summed)).astype(x.dtype)

    hlo = compiled_for(mesh_of("1x1x8"), body)
    # The sums of each dtype, which are joined; the loop's body; the transpose of a sum, which waits for it.
    assert len(calls_in(hlo)) == 4
    assert collectives_of_xla(hlo) == []


def test_another_gpu(mesh_of):
    hlo = compiled_for(mesh_of("1x1x8", gpu="a100"), lambda x: jax_ring.ring_psum(x, "i"))
    assert calls_in(hlo) == ["all_reduce"]


def test_too_many_ranks_on_a_host(mesh_of):
    hlo = compiled_for(mesh_of("1x1x72"), lambda x: jax_ring.ring_psum(x, "i"), (72 * 8,))
    assert calls_in(hlo) == []


def test_override_lax(mesh_of):
    with jax_ring.override_lax():
        hlo = compiled_for(mesh_of("1x1x8"), lambda x: jax.lax.psum(x, "i") * jax.lax.pmax(x, "i"))
    assert calls_in(hlo) == ["all_reduce", "all_reduce"]
    assert collectives_of_xla(hlo) == []
