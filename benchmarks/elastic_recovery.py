"""Prints how long an elastic job of one host takes from the kill of a process until all have made a step again.

    python benchmarks/elastic_recovery.py --processes 4 --repetitions 5

The job trains a small network. In each generation one process kills itself in the middle. Processes print the times of
what they do; "others" is the slowest but process 0, which alone writes to JAX's persistent compilation cache. "The
rest" is what remains of the whole without the longest import and the longest compilation: the launcher's part, the
state, and the first step. Numbers are medians of the repetitions, with the smallest and the largest.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from harness import options

STEPS = 10  # of a generation, before it is killed
WIDTH, LAYERS, NUM_SHARDS = 512, 8, 24
STAMPS = ("started", "initialized", "entered", "compiled", "stepped")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--processes", type=options.count, default=4)
    parser.add_argument("--repetitions", type=options.count, default=5)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def started() -> float:
    """When the kernel started this process, as time.time()."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        return time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")


def train(kills: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    import jax_ring

    jax.distributed.initialize()
    generation, stamps = int(os.environ["JAX_RING_GENERATION"]), [started(), time.time()]
    params = [np.eye(WIDTH, dtype=np.float32)] * LAYERS
    state = jax_ring.elastic.State(params=params, step=0)

    def loss(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer)
        return (x**2).mean()

    def step(params, x):
        _, grads = jax_ring.value_and_grad(loss, "data", num_shards=NUM_SHARDS)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    @jax_ring.elastic.run(num_shards=NUM_SHARDS)
    def go_on(state):
        stamps.append(time.time())
        mesh = jax.make_mesh((jax.device_count(),), ("data",))

        def on_devices(spec, x):
            return jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, spec), lambda i: x[i])

        params = [on_devices(P(), layer) for layer in state.params]
        x = on_devices(P("data"), np.ones((4 * NUM_SHARDS, WIDTH), np.float32))
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        compiled = jax.jit(mapped).lower(params, x).compile()
        stamps.append(time.time())
        for number in range(STEPS):
            params = jax.block_until_ready(compiled(params, x))
            if number == 0:
                print("stamps", generation, jax.process_index(), *[f"{s:.3f}" for s in (*stamps, time.time())])
                sys.stdout.flush()
            state.params, state.step = params, state.step + 1
            state.commit()
        if generation < kills and jax.process_index() == generation % jax.process_count():
            time.sleep(0.5)  # others wait in the next step
            print("killed", generation, f"{time.time():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if generation < kills:
            jax.block_until_ready(compiled(params, x))

    go_on(state)


def measure(processes: int, kills: int, cache: str | None) -> None:
    """Runs a job, and prints a line for each part of its recoveries."""
    never = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    cached = {"JAX_COMPILATION_CACHE_DIR": cache, **never} if cache else {}
    command = [sys.executable, "-m", "jax_ring.launch", "-n", str(processes), "--max-restarts", str(kills), __file__]
    result = subprocess.run(
        [*command, "--worker", str(kills)], env={**os.environ, "JAX_PLATFORMS": "cpu", **cached}, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    parts: dict[str, list[float]] = {}
    for generation, killed in re.findall(r"killed (\d+) ([\d.]+)", result.stdout):
        lines = re.findall(rf"stamps {int(generation) + 1} (\d+) (.*)", result.stdout)
        ranks = {int(rank): dict(zip(STAMPS, map(float, times.split()), strict=True)) for rank, times in lines}
        assert len(ranks) == processes, result.stdout

        def longest(begin: str, end: str, of=lambda rank: True, ranks=ranks) -> float:
            return max(stamp[end] - stamp[begin] for rank, stamp in ranks.items() if of(rank))

        whole = max(stamp["stepped"] for stamp in ranks.values()) - float(killed)
        row = {"kill to start": max(stamp["started"] for stamp in ranks.values()) - float(killed)}
        for name, of in (("process 0", lambda rank: rank == 0), ("others", lambda rank: rank > 0)):
            row[f"start to initialized, {name}"] = longest("started", "initialized", of)
            row[f"initialized to `train`, {name}"] = longest("initialized", "entered", of)
            row[f"compilation, {name}"] = longest("entered", "compiled", of)
        row["the rest"] = whole - longest("started", "initialized") - longest("entered", "compiled")
        row["whole"] = whole
        for name, seconds in row.items():
            parts.setdefault(name, []).append(seconds)
    for name, values in parts.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} |")


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker is not None:
        train(arguments.worker)
        return
    for title, folder in (("without a compilation cache", None), ("with one", tempfile.TemporaryDirectory())):
        print(f"\n| {arguments.processes} processes, {title} | median, s | of {arguments.repetitions} |\n|---|--:|---|")
        measure(arguments.processes, arguments.repetitions, folder and folder.name)


if __name__ == "__main__":
    main()
