"""Times programs of `jit` alone, whose collectives XLA's partitioner inserts, as they are and under override_lax().

    python benchmarks/ordinary_jit.py --devices 4
    python -m jax_ring.launch -n 2 --devices 2 benchmarks/ordinary_jit.py --models ""

Training steps of the models of train_step.py, with replicated parameters and a divided batch, and a loop of sums. For
the loop there is the same program by shard_map and ring_psum beside. The launcher runs it in several processes, where
XLA has Gloo. All are interleaved, and a ratio has a confidence interval of 95 %. "compile" is the time of the first
compilation under the override, over that without.
"""

import argparse
import contextlib
import os
import sys
import time
from functools import partial

import jax
import numpy as np
from harness import intervals, options, report
from harness.machine import describe, heading
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from workloads.models import MODELS

from jax_ring import override_lax, ring_psum

XLA, OVERRIDE, RING = "XLA", "override_lax()", "ring_psum"


def training_step(loss):
    def step(params, batch):
        grads = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), params, grads)

    return jax.jit(step)


def loop_of_sums(mesh, turns: int):
    """Sums over the rows of x, of which each device has one, by the partitioner."""
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def turn(_, x):
        total = lax.with_sharding_constraint(x.sum(0, keepdims=True), whole)
        return lax.with_sharding_constraint(x * 0.5 + total * (0.5 / mesh.size), rows)

    return jax.jit(lambda x: lax.fori_loop(0, turns, turn, x))


def loop_of_ring_psum(mesh, turns: int):
    def turn(_, x):
        return x * 0.5 + ring_psum(x, "data") * (0.5 / mesh.size)

    def loop(x):
        return lax.fori_loop(0, turns, turn, x)

    return jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))


def compiled(fun, *arguments, context=contextlib.nullcontext):
    """The executable, and the seconds that XLA took for it."""
    with context():
        lowered = fun.lower(*arguments)
        begin = time.perf_counter()
        return lowered.compile(), time.perf_counter() - begin


def interleaved(variants: dict, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call, by variant. variants: functions without arguments."""
    times, names = {name: [] for name in variants}, list(variants)
    for i in range(3 + rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            begin = time.perf_counter()
            jax.block_until_ready(variants[name]())
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: samples[3:] for name, samples in times.items()}


def line(what: str, times: dict[str, list[float]], turns: int, compile_ratio: float) -> str:
    medians = "".join(
        f"{np.median(times[name]) / turns:>12.1f}" if name in times else " " * 12 for name in (XLA, OVERRIDE, RING)
    )
    ratio = intervals.ratio(times[XLA], times[OVERRIDE])
    return f"{what:>16}{medians} {ratio!s:>26} {compile_ratio:>8.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=options.count, help="without the launcher (default: 8)")
    sizes = options.several(options.size)
    parser.add_argument("--sizes", type=sizes, default="4K,64K,256K,1M,4M,16M", help="messages of one rank in the loop")
    parser.add_argument("--models", type=options.several(options.one_of(MODELS)), default=",".join(MODELS))
    parser.add_argument("-n", "--iters", type=options.count, default=30, help="timed calls of each")
    arguments = parser.parse_args()
    if "JAX_NUM_PROCESSES" in os.environ:  # by the launcher
        jax.distributed.initialize()
    else:
        jax.config.update("jax_num_cpu_devices", arguments.devices or 8)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    machine = describe()
    if jax.process_index():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    where = f"{mesh.size} CPU devices in {jax.process_count()} processes"
    print(heading(machine, where))
    print(f"# {'microseconds':>14}{XLA:>12}{OVERRIDE:>15}{RING:>10} {'XLA / override':>24} {'compile':>9}")
    for model in arguments.models:
        params, loss, batch = MODELS[model]("float32")
        step, batch = training_step(loss), jax.device_put(np.concatenate([batch] * mesh.size), rows)
        params = jax.device_put(params, whole)
        executables, seconds = {}, {}
        for name, context in ((XLA, contextlib.nullcontext), (OVERRIDE, override_lax)):
            executables[name], seconds[name] = compiled(step, params, batch, context=context)
        calls = {name: partial(run, params, batch) for name, run in executables.items()}
        print(line(model, interleaved(calls, arguments.iters), 1, seconds[OVERRIDE] / seconds[XLA]), flush=True)
    for size in arguments.sizes:
        x = jax.device_put(np.ones((mesh.size, max(size // 4, 1)), np.float32), rows)
        turns = max(8, min(1000, (64 << 20) // (size * mesh.size)))
        executables, seconds = {}, {}
        for name, fun, context in (
            (XLA, loop_of_sums(mesh, turns), contextlib.nullcontext),
            (OVERRIDE, loop_of_sums(mesh, turns), override_lax),
            (RING, loop_of_ring_psum(mesh, turns), contextlib.nullcontext),
        ):
            executables[name], seconds[name] = compiled(fun, x, context=context)
        calls = {name: partial(run, x) for name, run in executables.items()}
        times = interleaved(calls, arguments.iters)
        print(line(f"sum of {report.size_name(size)}", times, turns, seconds[OVERRIDE] / seconds[XLA]), flush=True)


if __name__ == "__main__":
    main()
