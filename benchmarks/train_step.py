"""Times a data-parallel training step on CPU devices, with gradients reduced by ring_psum or by lax.psum.

    python benchmarks/train_step.py --devices 8 --json train_step.json

"fused" reduces the tree of gradients in one call, "per leaf" with one call per gradient. XLA combines its own
all-reduces, so both are the same program with lax.psum. The variants are interleaved.
"""

import argparse
import json
import os
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SUMS = {"ring": "ring_psum", "lax": "lax.psum"}


def make_step(mesh, loss, psum, fused: bool):
    def step(params, batch):
        # A copy for each device, so that the gradients are local (see docs/sharp_bits.md).
        local = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), params)
        grads = jax.grad(loss)(local, batch)
        grads = psum(grads, "data") if fused else jax.tree.map(lambda g: psum(g, "data"), grads)
        return jax.tree.map(lambda p, g: p - (0.01 / mesh.size * g).astype(p.dtype), params, grads)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(mapped, donate_argnums=0)


def measure(mesh, model: str, dtype: str, steps: int) -> dict[str, list[float]]:
    """Milliseconds of each step, by variant."""
    from models import MODELS

    from jax_ring import ring_psum

    params, loss, batch = MODELS[model](dtype)
    batch = jax.device_put(np.concatenate([batch] * mesh.size), NamedSharding(mesh, P("data")))
    variants = {}
    for name, psum in (("ring", ring_psum), ("lax", lax.psum)):
        for fused in (True, False):
            state = jax.tree.map(lambda x: jax.device_put(np.array(x), NamedSharding(mesh, P())), params)
            label = f"{SUMS[name]}, {'fused' if fused else 'per leaf'}"
            variants[label] = [make_step(mesh, loss, psum, fused), state]
    times = {label: [] for label in variants}
    warmup = 3
    for i in range(warmup + steps):
        for label, variant in variants.items():
            step, state = variant
            begin = time.perf_counter()
            variant[1] = jax.block_until_ready(step(state, batch))
            if i >= warmup:
                times[label].append((time.perf_counter() - begin) * 1e3)
    return times


def main() -> None:
    import report

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each variant (default: 40)")
    parser.add_argument("--models", default="mlp,gpt")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))

    machine = report.machine()
    print(f"# {machine['cpu']}, {machine['cores']} cores; JAX {machine['jax']}; {arguments.devices} CPU devices")
    columns = f"{'model':>5} {'dtype':>9} {'gradients summed by':>20} {'ms per step':>12} {'(p10-p90)':>17}"
    print(f"# {columns} {'lax / this':>10}")
    rows = []
    for model in arguments.models.split(","):
        for dtype in arguments.dtypes.split(","):
            times = measure(mesh, model, dtype, arguments.steps)
            baseline = np.median(times["lax.psum, fused"])
            for label, values in times.items():
                p10, median, p90 = (float(x) for x in np.percentile(values, [10, 50, 90]))
                rows.append(
                    {"model": model, "dtype": dtype, "variant": label, "ranks": mesh.size}
                    | {"median_ms": median, "p10_ms": p10, "p90_ms": p90, "speedup": baseline / median}
                )
                spread = f"({p10:.2f}-{p90:.2f})"
                print(
                    f"  {model:>5} {dtype:>9} {label:>20} {median:>12.2f} {spread:>17} {baseline / median:>9.2f}x",
                    flush=True,
                )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine | {"cores": os.cpu_count()}, "rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
