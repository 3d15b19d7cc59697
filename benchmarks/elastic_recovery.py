"""Prints how long an elastic job of one host takes from the kill of a process until all have made a step again.

    python benchmarks/elastic_recovery.py --processes 4 --repetitions 5

The job trains a small network. In each generation one process kills itself in the middle. "Others" is the slowest
but process 0, which alone writes to JAX's persistent compilation cache. "The rest" is the whole without the longest
import and the longest compilation: the launcher's part, the state, and the first step. Numbers are medians.
"""

import argparse
import functools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from harness import options

STEPS, WIDTH, LAYERS, NUM_SHARDS = 10, 512, 8, 24


def started() -> float:
    """When the kernel started this process, as time.time()."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        return time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")


def train(kills: int) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    import jax_ring

    jax.distributed.initialize()
    generation, stamps = int(os.environ["JAX_RING_RESTART"]), [started(), time.time()]
    params = [np.eye(WIDTH, dtype=np.float32)] * LAYERS
    state = jax_ring.elastic.State(params=params, step=0)

    def loss(params, x):
        return (functools.reduce(lambda x, layer: jnp.tanh(x @ layer), params, x) ** 2).mean()

    def step(params, x):
        _, grads = jax_ring.value_and_grad(loss, "data", num_shards=NUM_SHARDS)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    @jax_ring.elastic.run(num_shards=NUM_SHARDS)
    def go_on(state):
        stamps.append(time.time())
        mesh = jax.make_mesh((jax.device_count(),), ("data",))

        params = [jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P()), each) for each in state.params]
        ones = np.ones((4 * NUM_SHARDS // mesh.size, WIDTH), np.float32)
        x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P("data")), ones)
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        compiled = jax.jit(mapped).lower(params, x).compile()
        stamps.append(time.time())
        for number in range(STEPS):
            params = jax.block_until_ready(compiled(params, x))
            if number == 0:
                print("stamps", generation, jax.process_index(), *stamps, time.time(), flush=True)
            state.params, state.step = params, state.step + 1
            state.commit()
        if generation < kills:
            if jax.process_index() == generation % jax.process_count():
                time.sleep(0.5)  # the others are in the next step
                print("killed", generation, time.time(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            jax.block_until_ready(compiled(params, x))

    go_on(state)


def measure(processes: int, kills: int, cache: str | None) -> None:
    """Runs a job, and prints a line for each part of its recoveries."""
    cached = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} if cache else {}
    launcher = [sys.executable, "-m", "jax_ring.launch", "-n", str(processes), "--max-restarts", str(kills)]
    environment, worker = {**os.environ, "JAX_PLATFORMS": "cpu", **cached}, [__file__, "--worker", str(kills)]
    result = subprocess.run([*launcher, *worker], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    parts: dict[str, list[float]] = {}
    for generation, killed in re.findall(r"killed (\d+) ([\d.]+)", result.stdout):
        lines = re.findall(rf"stamps {int(generation) + 1} (\d+) (.*)", result.stdout)
        ranks = np.array(sorted([int(rank), *map(float, times.split())] for rank, times in lines))
        assert len(ranks) == processes, result.stdout
        began, initialized, entered, compiled, stepped = ranks[:, 1:].T
        row = {"kill to start": began.max() - float(killed)}
        for name, of in (("process 0", slice(1)), ("others", slice(1, None))):
            row[f"start to initialized, {name}"] = (initialized - began)[of].max()
            row[f"initialized to `train`, {name}"] = (entered - initialized)[of].max()
            row[f"compilation, {name}"] = (compiled - entered)[of].max()
        row["whole"] = stepped.max() - float(killed)
        row["the rest"] = row["whole"] - (initialized - began).max() - (compiled - entered).max()
        parts = {name: [*parts.get(name, []), seconds] for name, seconds in row.items()}
    for name, values in parts.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--processes", type=options.count, default=4)
    parser.add_argument("--repetitions", type=options.count, default=5)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        train(arguments.worker)
        return
    with tempfile.TemporaryDirectory() as cache:
        for title, folder in (("without a compilation cache", None), ("with one", cache)):
            print(f"\n| {arguments.processes} processes, {title} | seconds | from, to |\n|---|--:|---|")
            measure(arguments.processes, arguments.repetitions, folder)


if __name__ == "__main__":
    main()
