"""Times a data-parallel training step on CPU devices, with gradients reduced by ring_psum or by lax.psum.

    python benchmarks/train_step.py --devices 8 --json train_step.json

"fused" reduces the tree of gradients in one call, "per leaf" with one call per gradient. XLA combines its own
all-reduces, so both are the same program with lax.psum. "no collective" is the same step with each device training by
itself: what lax.psum takes over it is the most that any all-reduce can gain. The models bn-ROWSxFEATURES are a step of
flax with synchronized BatchNorm, as it is and under override_lax(). The variants are interleaved, and a ratio has a
confidence interval of 95 %.
"""

import argparse
import contextlib
import importlib.util
import itertools
import time

import jax
import numpy as np
from harness import intervals
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from workloads import batch_norm

SUMS = {"ring": "ring_psum", "lax": "lax.psum"}
FLOOR, BASELINE = "no collective", "lax.psum"


def make_step(mesh, loss, psum, fused: bool):
    def step(params, batch):
        # A copy for each device, so that the gradients are local (see docs/sharp_bits.md).
        local = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), params)
        grads = jax.grad(loss)(local, batch)
        if not psum:
            grads = batch_norm.keep_in_memory(grads, batch)
        elif fused:
            grads = psum(grads, "data")
        else:
            grads = jax.tree.map(lambda g: psum(g, "data"), grads)
        return jax.tree.map(lambda p, g: p - (0.01 / mesh.size * g).astype(p.dtype), params, grads)

    # Without a sum, the results of the devices differ.
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=psum is not None)
    return jax.jit(mapped, donate_argnums=0)


def variants_of(mesh, model: str, dtype: str, layers: int):
    """The compiled steps by variant, the initial state, and the batch of one device."""
    from workloads.models import MODELS

    from jax_ring import override_lax, ring_psum

    if model in batch_norm.SIZES:
        rows, features = batch_norm.SIZES[model]
        state, batch = batch_norm.initial(dtype, features), batch_norm.make_batch(dtype, rows, features)
        plain = (True, contextlib.nullcontext)
        made = {"override_lax()": (True, override_lax), BASELINE: plain, FLOOR: (False, contextlib.nullcontext)}
        steps = {
            label: (batch_norm.make_step(mesh, dtype, features, synced), context)
            for label, (synced, context) in made.items()
        }
    else:
        state, loss, batch = MODELS[model](dtype, layers=layers)
        steps = {
            f"{SUMS[name]}, {'fused' if fused else 'per leaf'}": make_step(mesh, loss, psum, fused)
            for name, psum in (("ring", ring_psum), ("lax", lax.psum))
            for fused in (True, False)
        }
        steps = {label: (step, contextlib.nullcontext) for label, step in steps.items()}
        steps[FLOOR] = make_step(mesh, loss, None, True), contextlib.nullcontext
    batch = jax.device_put(np.concatenate([batch] * mesh.size), NamedSharding(mesh, P("data")))
    compiled = {}
    for label, (step, context) in steps.items():
        with context():
            compiled[label] = step.lower(on_devices(mesh, state), batch).compile()
    return compiled, state, batch


def on_devices(mesh, state):
    return jax.tree.map(lambda x: jax.device_put(np.array(x), NamedSharding(mesh, P())), state)


def measure(mesh, model: str, dtype: str, steps: int, layers: int) -> dict[str, list[float]]:
    """Milliseconds of each step, by variant."""
    compiled, initial, batch = variants_of(mesh, model, dtype, layers)
    states = {label: on_devices(mesh, initial) for label in compiled}
    times = {label: [] for label in compiled}
    labels, warmup = list(compiled), 3
    for i in range(warmup + steps):
        # Rotate, so that each variant follows every other one.
        for label in labels[i % len(labels) :] + labels[: i % len(labels)]:
            begin = time.perf_counter()
            states[label] = jax.block_until_ready(compiled[label](states[label], batch))
            if i >= warmup:
                times[label].append((time.perf_counter() - begin) * 1e3)
    return times


def row_of(label: str, times: dict[str, list[float]]) -> dict:
    """The times of a variant, and the ratios of lax.psum's time and of its own to the others'."""
    baseline = next(values for name, values in times.items() if name.startswith(BASELINE))
    p10, median, p90 = (float(x) for x in np.percentile(times[label], [10, 50, 90]))
    speedup, over_floor = intervals.ratio(baseline, times[label]), intervals.ratio(times[label], times[FLOOR])
    return {"median_ms": median, "p10_ms": p10, "p90_ms": p90} | {
        "speedup": speedup.value,
        "speedup_interval": [speedup.low, speedup.high],
        "verdict": speedup.verdict(),
        "over_floor": over_floor.value,
        "samples_ms": [round(x, 4) for x in times[label]],
    }


def line(row: dict) -> str:
    spread = f"({row['p10_ms']:.2f}-{row['p90_ms']:.2f})"
    ratio = str(intervals.Interval(row["speedup"], *row["speedup_interval"]))
    return (
        f"  {row['model']:>11} {row['dtype']:>9} {row['variant']:>20} {row['median_ms']:>12.2f} {spread:>17}"
        f" {ratio:>25} {row['over_floor']:>12.2f}x"
    )


def main() -> None:
    from harness import options, report
    from harness.machine import describe, heading
    from workloads.models import MODELS

    choices = [*MODELS, *batch_norm.SIZES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=options.count, default=8)
    parser.add_argument("--steps", type=options.count, default=40, help="timed steps of each variant (default: 40)")
    names = options.several(options.one_of(choices))
    parser.add_argument("--models", type=names, default=",".join(choices), help=f"of {', '.join(choices)} (all)")
    parser.add_argument("--layers", type=options.count, default=4, help="of mlp and of gpt (default: 4)")
    parser.add_argument("--dtypes", type=options.several(options.dtype), default="float32,bfloat16")
    parser.add_argument("--json", type=options.file, metavar="FILE")
    arguments = parser.parse_args()
    models = arguments.models
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))

    machine = describe()
    print(heading(machine, f"{arguments.devices} CPU devices"))
    if importlib.util.find_spec("flax") is None and set(models) & set(batch_norm.SIZES):
        models = [model for model in models if model not in batch_norm.SIZES]
        print("# BatchNorm: left out: flax not found; pip install flax")
    columns = f"{'model':>11} {'dtype':>9} {'gradients summed by':>20} {'ms per step':>12} {'(p10-p90)':>17}"
    print(f"# {columns} {'lax / this':>25} {'this / floor':>13}")
    with report.written_to(arguments.json, machine) as rows:
        for model, dtype in itertools.product(models, arguments.dtypes):
            times = measure(mesh, model, dtype, arguments.steps, arguments.layers)
            for label in times:
                rows.append({"model": model, "dtype": dtype, "variant": label, "ranks": mesh.size})
                rows[-1] |= row_of(label, times)
                print(line(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
