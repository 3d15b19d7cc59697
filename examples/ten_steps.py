"""Runs ten steps of the GPT with Adam on eight devices, and compares the ways to reduce the gradients.

    python examples/ten_steps.py [--devices 8] [--steps 10] [--width 128] [--layers 4]

All runs start from the same parameters and see the same batches of text. In float32, neither buckets nor `lax.psum`
change a bit. A single device with the whole batch adds the gradients of the examples in a different order, so its
result differs by rounding; Adam divides each gradient by its size, so these differences do not shrink. With the
reductions in the backward pass, the compiler sees a different program, which may round differently.
"""

import argparse
import sys

import jax
import numpy as np
import optax
import train_gpt
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jax_ring import plan_buckets

OPTIMIZER = optax.adam(1e-3)
BATCH, CONTEXT = 16, 64


def sizes(num_bytes: int) -> dict:
    return {"bucket_bytes": num_bytes, "first_bucket_bytes": num_bytes}


RUNS = {
    "all in one bucket": sizes(1 << 40),
    "buckets of 1 MiB": sizes(1 << 20),
    "buckets of 1 KiB": sizes(1 << 10),
    "in the backward pass": {"in_backward": True},
    "lax.psum": {"is_by_lax": True} | sizes(1 << 40),
}


def make_batches(steps: int, context: int) -> np.ndarray:
    """For each step, consecutive rows of the text."""
    return train_gpt.load_text()[: steps * BATCH * (context + 1)].reshape(steps, BATCH, -1).astype(np.int32)


def num_buckets(params, in_backward=False, is_by_lax=False, **sizes) -> int:
    """The number of planned buckets; 0 if gradients are reduced in the backward pass."""
    return 0 if in_backward else len(plan_buckets(params, **sizes).buckets)


def by_lax(params, tokens):
    """The mean loss and its gradients, by `lax.psum`."""
    local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
    return jax.lax.pmean(jax.value_and_grad(train_gpt.loss)(local, tokens), "data")


def train(params, batches, num_devices: int, in_backward=False, is_by_lax=False, **reduction):
    """The loss of each step, and the parameters after the last."""
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("data",))
    if is_by_lax:
        train_step = train_gpt.train_step_of(mesh, OPTIMIZER, by_lax)
    else:
        train_step = train_gpt.make_train_step(mesh, OPTIMIZER, in_backward=in_backward, **reduction)
    copy = jax.tree.map(np.array, params)  # the step donates its arguments
    state = train_gpt.TrainState(params=copy, opt_state=OPTIMIZER.init(copy))
    state = jax.device_put(state, jax.NamedSharding(mesh, P()))
    losses = []
    for tokens in batches:
        state, value = train_step(state, tokens)
        losses.append(float(value))
    return np.array(losses), jax.device_get(state.params)


def same_bits(a, b) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def distance(a, b) -> float:
    """The norm of the difference of two trees of parameters."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(np.sqrt(sum(np.sum(np.square(np.subtract(x, y, dtype=np.float64))) for x, y in pairs)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help=f"a divisor of the batch size, {BATCH} (default: 8)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=128, help="width of the model (default: 128)")
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    if args.devices < 1 or BATCH % args.devices or args.steps < 1:
        parser.error(f"--devices must divide {BATCH}, and --steps be positive; got {args.devices} and {args.steps}")
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_platforms", "cpu")

    console = Console()
    initial = jax.device_get(train_gpt.init_params(jax.random.key(0), args.width, args.layers, CONTEXT))
    batches = make_batches(args.steps, CONTEXT)
    size = sum(p.nbytes for p in jax.tree.leaves(initial))
    console.print(f"{size} bytes of gradients in float32, {args.devices} CPU devices")
    runs = {name: (args.devices, options) for name, options in RUNS.items()}
    runs["one device, whole batch"] = 1, {}
    results = {
        name: train(initial, batches, devices, **options)
        for name, (devices, options) in track(runs.items(), "training", console=console)
    }

    single_losses, single = results.pop("one device, whole batch")
    losses, params = next(iter(results.values()))
    difference = distance(params, single)
    norm = distance(single, jax.tree.map(np.zeros_like, single))
    table = Table("gradients summed", "buckets", f"loss of step {args.steps}", "compared with the first")
    for name, (some_losses, some) in results.items():
        same = same_bits((some_losses, some), (losses, params))
        verdict = "the same bits" if same else f"{distance(some, params) / norm:.1e} of the norm"
        table.add_row(name, str(num_buckets(initial, **RUNS[name]) or "by layer"), f"{some_losses[-1]:.6f}", verdict)
    table.add_row("on one device", "", f"{single_losses[-1]:.6f}", f"{difference / norm:.1e} of the norm")
    console.print(table)
    moved, of_losses = difference / distance(single, initial), np.abs(losses / single_losses - 1).max()
    console.print(
        f"On one device the parameters differ by {difference / norm:.1e} of their norm, which is {moved:.1e} of the "
        f"distance they have moved, and the losses by at most {of_losses:.1e}, relatively. The loss of the first step: "
        f"{losses[0]:.3f}."
    )
    buckets_and_impls = [result for name, result in results.items() if "in_backward" not in RUNS[name]]
    passed = all(same_bits(result, (losses, params)) for result in buckets_and_impls) and difference / norm < 1e-5
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
