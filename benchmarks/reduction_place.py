"""Times training steps on CPU devices with gradients reduced after the backward pass or within it.

    python benchmarks/reduction_place.py --devices 8 --json reduction_place.json

"one call" reduces all gradients at once, "buckets" in buckets of 1 MiB, "in backward" those of each layer as soon as
they exist. The variants are interleaved. CPU devices compute and reduce on the same cores, so there is little to
overlap: the figures show the cost or gain on CPU devices, not on GPUs.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, ROWS = 512, 32
VARIANTS = {
    "one call": {"bucket_bytes": 1 << 40, "first_bucket_bytes": 1 << 40},
    "buckets": {"bucket_bytes": 1 << 20},
    "in backward": {},
}


def unrolled(params, x, hook):
    for weight in params:
        x = jnp.tanh(x @ hook(weight))
    return (x**2).mean()


def scanned(params, x, hook):
    x, _ = jax.lax.scan(lambda x, weight: (jnp.tanh(x @ hook(weight)), None), x, params)
    return (x**2).mean()


def make_step(mesh, loss, variant: str, impl: str):
    from jax_ring import reduce_in_backward, value_and_grad
    from jax_ring.training.wire import reduced_by

    options = VARIANTS[variant]
    inside = variant == "in backward"
    hook = functools.partial(reduce_in_backward, axis_name="data", **options) if inside else lambda weight: weight

    def step(params, x):
        fun = functools.partial(loss, hook=hook)
        _, grads = value_and_grad(fun, "data", reduced_in_backward=inside, **options)(params, x)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    mapped = jax.shard_map(reduced_by(impl)(step), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(mapped, donate_argnums=0)


def measure(mesh, model: str, steps: int, layers: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of each step, by implementation and variant."""
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((layers, WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
    loss, params = (scanned, weights) if model == "scanned" else (unrolled, list(weights))
    x = rng.standard_normal((ROWS * mesh.size, WIDTH)).astype(np.float32)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    runs = {
        (impl, variant): [make_step(mesh, loss, variant, impl), jax.device_put(params, NamedSharding(mesh, P()))]
        for impl in ("ring", "lax")
        for variant in VARIANTS
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    warmup = 3
    for i in range(warmup + steps):
        for key, run in runs.items():
            begin = time.perf_counter()
            run[1] = jax.block_until_ready(run[0](run[1], x))
            if i >= warmup:
                times[key].append((time.perf_counter() - begin) * 1e3)
    return times


def main() -> None:
    from harness import options, report
    from harness.machine import describe, heading

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=options.count, default=8)
    parser.add_argument("--steps", type=options.count, default=40, help="timed steps of each variant (default: 40)")
    parser.add_argument("--layers", type=options.count, default=8, help="of 1 MiB of parameters each (default: 8)")
    parser.add_argument("--json", type=options.file, metavar="FILE")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    machine = describe()
    print(heading(machine, f"{arguments.devices} CPU devices"))
    print(f"# {'layers':>8} {'impl':>5} {'gradients summed':>17} {'ms per step':>12} {'(p10-p90)':>17}")
    with report.written_to(arguments.json, machine) as rows:
        for model in ("unrolled", "scanned"):
            for (impl, variant), values in measure(mesh, model, arguments.steps, arguments.layers).items():
                p10, median, p90 = (float(x) for x in np.percentile(values, [10, 50, 90]))
                rows.append({"model": model, "impl": impl, "variant": variant, "ranks": mesh.size})
                rows[-1] |= {"median_ms": median, "p10_ms": p10, "p90_ms": p90}
                spread = f"({p10:.2f}-{p90:.2f})"
                print(f"  {model:>8} {impl:>5} {variant:>17} {median:>12.2f} {spread:>17}", flush=True)


if __name__ == "__main__":
    main()
