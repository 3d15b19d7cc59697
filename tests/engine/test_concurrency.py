"""Concurrent calls in one program, in several programs and from several threads must not mix their operands."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, num_calls, run_python, sharded
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum
from jax_ring.lowering.passes import combiner

MESH = make_mesh((4,))


def values(seed, size=8):
    return np.random.default_rng(seed).integers(-1000, 1000, size).astype(np.float32)


def expected(x, ranks=4):
    return x.reshape(ranks, -1).sum(0)


def total_on(mesh, scale=1.0):
    """A sum, compiled to a different program for each scale."""
    return sharded(lambda x: ring_psum(x * scale, "i"), mesh=mesh, out_specs=P())


def run_concurrently(*jobs):
    """Starts all jobs at the same time, and returns their results or raises their first error."""
    start = threading.Barrier(len(jobs))

    def run(job):
        start.wait(timeout=60)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(run, job) for job in jobs]]


def test_different_calls_in_flight(check_vma):
    # The calls are independent, so ranks may arrive at them in different orders.
    def body(x):
        return [ring_psum(x * k, "i") for k in range(1, 21)]

    f = sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma)
    for seed in range(20):
        x = values(seed)
        for k, total in enumerate(f(x), 1):
            np.testing.assert_array_equal(total, k * expected(x))


def test_calls_of_different_sizes_in_flight(check_vma, monkeypatch):
    monkeypatch.setattr(combiner, "COMBINE_THRESHOLD_COUNT", 1)  # no calls are joined

    def body(x):
        return [ring_psum(jnp.tile(x, n), "i") for n in (1, 100_000, 3, 20_000, 500)]

    f = sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma)
    assert num_calls(f, values(0)) == 5
    for seed in range(5):
        x = values(seed)
        for total in f(x):
            np.testing.assert_array_equal(total, np.tile(expected(x), total.size // 2))


def test_identical_calls_do_not_mix(check_vma):
    # All calls share one lowering, because `step` is not inlined.
    step = jax.jit(lambda x: jnp.mod(ring_psum(x, "i"), 1024))

    def body(x):
        for _ in range(8):
            x = step(x) + x
        return x

    def reference(x):
        x = x.reshape(4, 2)
        for _ in range(8):
            x = np.mod(x.sum(0), 1024) + x
        return x.reshape(-1)

    f = sharded(body, mesh=MESH, check_vma=check_vma)
    for seed in range(10):
        np.testing.assert_array_equal(f(values(seed)), reference(values(seed)))


def test_identical_independent_calls(check_vma):
    step = jax.jit(lambda x: ring_psum(x, "i"))

    def body(x):
        return [step(x + k) for k in range(12)]

    f = sharded(body, mesh=MESH, out_specs=P(), check_vma=check_vma)
    for seed in range(20):
        x = values(seed)
        for k, total in enumerate(f(x)):
            np.testing.assert_array_equal(total, expected(x + k))


def test_calls_over_different_axes_in_flight(check_vma):
    mesh = make_mesh((2, 4), ("i", "j"))

    def body(x):
        over = [ring_psum(x, "i"), ring_psum(x, "j"), ring_psum(x, ("i", "j"))]
        return [v + 0 * x for v in over]

    f = sharded(body, mesh=mesh, in_specs=P(("i", "j")), out_specs=P(("i", "j")), check_vma=check_vma)
    for seed in range(10):
        x = values(seed, 16)
        grid = x.reshape(2, 4, 2)
        sums = [grid.sum(0, keepdims=True), grid.sum(1, keepdims=True), grid.sum((0, 1), keepdims=True)]
        for total, want in zip(f(x), sums, strict=True):
            np.testing.assert_array_equal(total, np.broadcast_to(want, grid.shape).reshape(-1))


def test_several_executions_in_flight():
    # Only a few in flight: JAX itself stalls after hundreds of launches whose results are not awaited.
    f = total_on(MESH)
    xs = [values(seed) for seed in range(40)]
    for start in range(0, len(xs), 8):
        batch = xs[start : start + 8]
        for x, total in zip(batch, [f(x) for x in batch], strict=True):
            np.testing.assert_array_equal(total, expected(x))


def repeat(f, seeds, ranks=4, scale=1):
    def job():
        for seed in seeds:
            x = values(seed)
            np.testing.assert_array_equal(f(x), scale * expected(x, ranks))

    return job


def test_two_programs_at_once():
    f, g = total_on(MESH, 1), total_on(MESH, 2)
    run_concurrently(repeat(f, range(300)), repeat(g, range(1000, 1300), scale=2))


def test_one_program_from_several_threads():
    f = total_on(MESH)
    f(values(0))
    run_concurrently(*(repeat(f, range(k * 1000, k * 1000 + 150)) for k in range(4)))


def test_compiling_in_several_threads():
    # Each job compiles new programs, so that compilation and execution of different programs overlap.
    def job(k):
        def run():
            for n in range(6):
                repeat(total_on(MESH, k * 10 + n), range(3), scale=k * 10 + n)()

        return run

    run_concurrently(*map(job, range(1, 4)))


def test_disjoint_meshes_at_once():
    devices = jax.devices()
    f = total_on(make_mesh((4,), devices=devices[:4]))
    g = total_on(make_mesh((4,), devices=devices[4:8]))
    run_concurrently(repeat(f, range(300)), repeat(g, range(1000, 1300)))


def test_overlapping_meshes_at_once():
    devices = jax.devices()
    meshes = [make_mesh((4,), devices=devices[k : k + 4]) for k in range(3)]
    run_concurrently(*(repeat(total_on(mesh), range(100 * k, 100 * k + 100)) for k, mesh in enumerate(meshes)))


def test_loops_at_once():
    def looped(scale):
        def body(x):
            step = lambda k, v: jnp.mod(ring_psum(v, "i"), 64) * scale + x  # noqa: E731
            return lax.fori_loop(0, 100, step, x)

        return sharded(body, mesh=MESH)

    def reference(x, scale):
        x = v = x.reshape(4, 2)
        for _ in range(100):
            v = np.mod(v.sum(0), 64) * scale + x
        return v.reshape(-1)

    def job(scale):
        def run():
            f = looped(scale)
            for seed in range(10):
                np.testing.assert_array_equal(f(values(seed)), reference(values(seed), scale))

        return run

    run_concurrently(job(1), job(2), job(3))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 16])
def test_ten_thousand_calls(ranks):
    # Each call sums the counters of the ranks, which agree only if every rank has made every earlier call.
    def body(x):
        def step(k, v):
            return ring_psum(v, "i") / ranks + 1 + 0 * v

        return lax.fori_loop(0, 10_000, step, x)

    mesh = make_mesh((ranks,))
    x = jax.device_put(np.zeros(ranks, np.float32), NamedSharding(mesh, P("i")))
    np.testing.assert_array_equal(sharded(body, mesh=mesh)(x), np.full(ranks, 10_000))


@pytest.mark.full
def test_hundreds_of_steps_in_flight():
    # As docs/sharp_bits.md has it: with JAX 0.10.2 and one thread for each device, a rank of a step can find none.
    code = """
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_ring import ring_psum
mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
step = jax.jit(jax.shard_map(lambda x: ring_psum(x, "i") / 8, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
x = jax.device_put(jnp.ones(64), NamedSharding(mesh, P("i")))
for _ in range(300):
    x = step(x)
assert (x == 1).all()
"""
    result = run_python(code, NPROC="16", JAX_RING_TIMEOUT_S="20")
    assert result.returncode == 0, result.stderr
