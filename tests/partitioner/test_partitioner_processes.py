"""Ordinary `jit` programs of several processes: the same bits as in one, and errors for programs that differ."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from job import client, merged

RANKS = 8


def mesh_of(devices) -> Mesh:
    return Mesh(np.array(devices).reshape(2, 4), ("a", "b"))


def program(mesh):
    """(a function, its operands, the shardings of its results), with all kinds of collectives."""

    def on(*spec):
        return NamedSharding(mesh, P(*spec))

    def put(shape, *spec):
        whole = np.random.default_rng(len(spec)).normal(size=shape).astype(np.float32)
        return jax.make_array_from_callback(shape, on(*spec), lambda index: whole[index])

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def f(x, w):
        value, grads = jax.value_and_grad(loss)(w, x)
        moved = lax.with_sharding_constraint(x, on(None, ("b", "a")))
        scanned, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w @ w.T), None), x, length=3)
        return value, w - grads, moved * 2, jnp.roll(x, 1, 0), scanned.max(0), jnp.sort(x, 0), (x > 2).any(0)

    rows, whole = on("a", "b"), on()
    return f, (put((16, 32), "a", "b"), put((32, 8), "b")), (whole, on("b"), None, rows, whole, rows, whole)


def digests(mesh) -> dict[str, str]:
    """Of the parts of the results that this process holds."""
    fun, operands, shardings = program(mesh)
    results = jax.jit(fun, out_shardings=shardings)(*operands)
    return {
        f"{i} {shard.index}": hashlib.md5(np.asarray(shard.data).tobytes()).hexdigest()
        for i, result in enumerate(results)
        for shard in result.addressable_shards
    }


@pytest.mark.jax_processes(2, devices=RANKS)
def test_same_bits_as_one_process():
    from jax_ring import override_lax

    mesh = mesh_of([*jax.local_devices(process_index=0)[:4], *jax.local_devices(process_index=1)[:4]])
    with override_lax():
        # XLA has other collectives in a program of several processes, also between the devices of one.
        expected = digests(mesh_of(jax.local_devices()))
        fun, operands, shardings = program(mesh)
        text = jax.jit(fun, out_shardings=shardings).lower(*operands).compile().as_text()
        assert not any(f" {name}(" in text for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))
        assert merged(digests(mesh)) == expected


@pytest.mark.full
@pytest.mark.jax_processes(2, devices=2, environment={"JAX_RING_TIMEOUT_S": "10"})
def test_programs_that_differ():
    from jax_ring import override_lax

    mesh = Mesh(np.array(jax.devices()), ("i",))
    rows = NamedSharding(mesh, P("i"))
    whole = np.ones((4, 3), np.float32)
    x = jax.make_array_from_callback(whole.shape, rows, lambda index: whole[index])

    def total(x):
        return (x * (jax.process_index() + 1)).sum(0)

    with override_lax():
        f = jax.jit(total, out_shardings=NamedSharding(mesh, P())).lower(x).compile()
        client().wait_at_barrier("compiled", 120_000)
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="all-reduce") as raised:
            jax.block_until_ready(f(x))
    waiting = f"process {1 - jax.process_index()} makes another call", "the program differs, by a constant, say"
    assert any(text in str(raised.value).lower() for text in waiting)
