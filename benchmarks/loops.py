"""Times whole loops that compute something beside an all-reduce, as the loops of programs do.

    python benchmarks/loops.py --devices 4,8 --sizes 4K,256K,1M

A turn is like a training step: a product of two matrices, a kernel that computes the message, and the sum, on which the
next product depends. "no collective" is the same loop without the sum, in which no rank waits for another. The loops
are interleaved; times are medians, and ratios have a confidence interval of 95 %.
"""

import argparse
import itertools
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from harness import against, intervals, options, report
from harness.implementations import AXIS, IMPLEMENTATIONS
from harness.machine import describe, heading
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

THIS, BASELINE, FLOOR = "ring_psum", "lax.psum", "no collective"


def make_loop(mesh, reduce, turns: int, width: int):
    """`turns` sums of x, each after a product of two matrices of `width` rows and columns that depends on the last."""

    def body(_, carry):
        x, matrix = carry
        dtype, bits = x.dtype, jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        # The compiler cannot know that neither condition holds, and cannot compute them per element.
        first = lax.bitcast_convert_type(x[0], bits)
        scale = lax.optimization_barrier(jnp.where(first == 123, 0.5, 1.0))
        matrix = scale * (matrix @ matrix)
        flipped = lax.optimization_barrier(jnp.where(matrix[0, 0] > 2, 3, 1).astype(bits))
        x = lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) ^ flipped, dtype)
        return reduce(x), matrix

    def loop(x):
        return lax.fori_loop(0, turns, body, (x, jnp.full((width, width), 1 / width, jnp.float32)))[0]

    return jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))


def seconds(loop, x) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(loop(x))
    return time.perf_counter() - begin


def measure(mesh, size: int, dtype: str, width: int, rounds: int, loop_seconds: float) -> dict[str, list[float]]:
    """Microseconds of a turn, by implementation and round."""
    count = max(1, size // jnp.dtype(dtype).itemsize)
    values = np.random.default_rng(0).standard_normal(mesh.size * count, np.float32).astype(jnp.dtype(dtype))
    x = jax.device_put(values, NamedSharding(mesh, P(AXIS)))
    reduces = {THIS: IMPLEMENTATIONS[THIS], BASELINE: IMPLEMENTATIONS[BASELINE], FLOOR: lambda x: x}
    few = make_loop(mesh, reduces[THIS], 8, width)
    seconds(few, x)
    turns = int(np.clip(loop_seconds / (seconds(few, x) / 8), 16, 5000))
    loops = {name: make_loop(mesh, reduce, turns, width) for name, reduce in reduces.items()}
    for loop in loops.values():
        # Compiles, and lets the ranks find their way of waiting.
        for _ in range(3):
            seconds(loop, x)
    times = {name: [] for name in loops}
    names = list(loops)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(seconds(loops[name], x) / turns * 1e6)
    return times


def row_of(size: int, dtype: str, ranks: int, times: dict[str, list[float]]) -> dict:
    ratio = intervals.ratio(times[BASELINE], times[THIS])
    return {
        "ranks": ranks,
        "bytes": size,
        "dtype": dtype,
        "median_us": {name: float(np.median(values)) for name, values in times.items()},
        "speedup": ratio.value,
        "speedup_interval": [ratio.low, ratio.high],
        "samples_us": {name: [round(x, 3) for x in values] for name, values in times.items()},
    }


def line(row: dict) -> str:
    ratio = intervals.Interval(row["speedup"], *row["speedup_interval"])
    times = "".join(f"{row['median_us'][name]:>15.1f}" for name in (THIS, BASELINE, FLOOR))
    return f"{row['ranks']:>7} {row['bytes']:>10} {row['dtype']:>10}{times} {ratio!s:>26}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    numbers = options.several(options.count)
    parser.add_argument("--devices", type=numbers, default="8", help="of CPU devices; each in a process of its own")
    sizes, dtypes = options.several(options.size), options.several(options.dtype)
    parser.add_argument("--sizes", type=sizes, default="4K,64K,256K,1M,4M", help="messages of one rank")
    parser.add_argument("-d", "--datatype", type=dtypes, default="float32", help="dtypes, separated by commas")
    parser.add_argument("--product", type=options.count, default=128, help="rows and columns of the matrices (128)")
    parser.add_argument("-n", "--iters", type=options.count, default=9, help="timed loops of each kind")
    parser.add_argument("--loop-seconds", type=options.seconds, default=0.1, help="approximate duration of one loop")
    parser.add_argument("--json", type=options.file, metavar="FILE", help="for one number of devices")
    against.add_options(parser)
    arguments = parser.parse_args()
    if arguments.against:
        against.run(__file__, sys.argv[1:], arguments.against, arguments.pairs, arguments.json)
        return
    numbers = arguments.devices
    if len(numbers) > 1:
        if arguments.json:
            parser.error("--json takes one number of devices")
        for number in numbers:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--devices", str(number)], check=True)
        return
    jax.config.update("jax_num_cpu_devices", numbers[0])
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), (AXIS,))
    machine = describe()
    print(heading(machine, "us per turn"))
    names = "".join(f"{name:>15}" for name in (THIS, BASELINE, FLOOR))
    print(f"# {'ranks':>5} {'bytes':>10} {'dtype':>10}{names} {'lax.psum / this':>26}")
    with report.written_to(arguments.json, machine) as rows:
        for dtype, size in itertools.product(arguments.datatype, arguments.sizes):
            times = measure(mesh, size, dtype, arguments.product, arguments.iters, arguments.loop_seconds)
            rows.append(row_of(size, dtype, mesh.size, times))
            print(line(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
