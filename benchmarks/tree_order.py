"""The price of order="tree" and of check_replicas on CPU devices, against the same program without them.

    python benchmarks/tree_order.py --json tree_order.json

Messages are summed in a jitted loop, in rank order and along the tree. Training steps of a small GPT with Adam reduce
their gradients in rank order, or along the tree over p or 4p shards, or in rank order and with check_replicas every ten
steps. What is compared runs interleaved. A ratio is the median of the ratios of neighbouring runs, with the 10th and
the 90th percentile.
"""

import argparse
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from allreduce import check_messages
from harness import options, report
from harness.implementations import AXIS
from harness.measure import Case
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

EVERY = 10  # steps between two comparisons of replicas


def compared(runs: dict[str, Callable[[], float]], times: int) -> list[dict]:
    """Seconds of each run, and their ratio to those of the first one, which `times` rounds measure interleaved."""
    names, seconds = list(runs), {name: [] for name in runs}
    for i in range(1 + times):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            duration = runs[name]()
            if i:
                seconds[name].append(duration)
    base = np.array(seconds[names[0]])
    rows = []
    for name in names:
        p10, ratio, p90 = np.percentile(np.array(seconds[name]) / base, [10, 50, 90])
        rows.append(
            {"variant": name, "us": float(np.median(seconds[name]) * 1e6)}
            | {"ratio": float(ratio), "p10": float(p10), "p90": float(p90)}
        )
    return rows


def loops(mesh, num_bytes: int, dtype: str, arguments: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Runs that return the seconds of one sum in a jitted loop."""
    from jax_ring import ring_psum

    orders = {order: lambda x, order=order: ring_psum(x, AXIS, order=order) for order in ("rank", "tree")}
    count = max(1, num_bytes // jax.numpy.dtype(dtype).itemsize)
    case = Case(mesh, count, dtype, orders, arguments.loop_seconds)

    def run(name: str) -> float:
        begin = time.perf_counter()
        case.loops[name](case.x).block_until_ready()
        return (time.perf_counter() - begin) / case.times

    return {name: lambda name=name: run(name) for name in orders}


def steps(mesh, dtype: str) -> dict[str, Callable[[], float]]:
    """Runs that return the seconds of a training step, the mean of ten."""
    from workloads.models import gpt

    from jax_ring import value_and_grad

    params, loss, batch = gpt(dtype, batch=4)
    batch = jax.device_put(np.concatenate([batch] * mesh.size), NamedSharding(mesh, P("data")))
    optimizer = optax.adam(1e-3)

    def variant(check: bool = False, **options) -> Callable[[], float]:
        def step(params, state, number, batch):
            due = {"check_replicas": number % EVERY == 0} if check else {}
            _, grads = value_and_grad(loss, "data", **options, **due)(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, number + 1

        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P(), P("data")), out_specs=P())
        jitted = jax.jit(mapped, donate_argnums=(0, 1, 2))
        start = (params, optimizer.init(params), np.int32(0))
        state = [jax.tree.map(lambda x: jax.device_put(np.array(x), NamedSharding(mesh, P())), start)]

        def run() -> float:
            begin = time.perf_counter()
            for _ in range(EVERY):
                state[0] = jax.block_until_ready(jitted(*state[0], batch))
            return (time.perf_counter() - begin) / EVERY

        return run

    return {
        "rank": variant(),
        "rank, check_replicas": variant(check=True),
        "tree, V = p": variant(num_shards=mesh.size),
        "tree, V = 4p": variant(num_shards=4 * mesh.size),
    }


def main() -> None:
    from harness.machine import describe, heading

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=options.several(options.count), default="2,4,8", help="(default: 2,4,8)")
    parser.add_argument("-b", "--minbytes", type=options.size, default="64K")
    parser.add_argument("-e", "--maxbytes", type=options.size, default="64M")
    parser.add_argument("-f", "--stepfactor", type=int, default=4)
    parser.add_argument("--dtypes", type=options.several(options.dtype), default="float32,bfloat16")
    parser.add_argument("--rounds", type=options.count, default=15, help="timed runs of each variant (default: 15)")
    parser.add_argument("--loop-seconds", type=options.seconds, default=0.05, help="duration of one jitted loop, about")
    parser.add_argument("--what", choices=["messages", "steps", "both"], default="both", help="(default: both)")
    parser.add_argument("--json", type=options.file, metavar="FILE")
    arguments = parser.parse_args()
    check_messages(parser, arguments)
    jax.config.update("jax_num_cpu_devices", max(arguments.ranks))
    jax.config.update("jax_platforms", "cpu")
    machine = describe()
    print(heading(machine))
    print(f"# {'ranks':>5} {'dtype':>9} {'what':>12} {'variant':>22} {'us':>12} {'/ rank':>7} (p10-p90)")

    def measure(what: str, dtype: str, size: int, runs: dict[str, Callable[[], float]]) -> None:
        for row in compared(runs, arguments.rounds):
            rows.append({"ranks": size, "dtype": dtype, "what": what} | row)
            print(
                f"  {size:>5} {dtype:>9} {what:>12} {row['variant']:>22} {row['us']:>12.1f} {row['ratio']:>7.3f} "
                f"({row['p10']:.3f}-{row['p90']:.3f})",
                flush=True,
            )

    with report.written_to(arguments.json, machine) as rows:
        for size in arguments.ranks:
            for dtype in arguments.dtypes:
                num_bytes = arguments.minbytes
                while num_bytes <= arguments.maxbytes and arguments.what != "steps":
                    mesh = jax.sharding.Mesh(jax.devices()[:size], (AXIS,))
                    measure(f"{num_bytes >> 10} KiB", dtype, size, loops(mesh, num_bytes, dtype, arguments))
                    num_bytes *= arguments.stepfactor
                if arguments.what == "messages":
                    continue
                mesh = jax.sharding.Mesh(jax.devices()[:size], ("data",))
                measure("step", dtype, size, steps(mesh, dtype))


if __name__ == "__main__":
    main()
