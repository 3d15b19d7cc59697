"""Trains a small network on handwritten digits on several CPU devices, with gradients reduced by ring_psum.

    python examples/train_digits.py [--devices 8] [--epochs 30] [--impl ring|lax]

Each device holds a copy of the parameters and a part of each batch. It computes the gradient of its part; the mean of
these gradients over the devices is the gradient of the whole batch. Then the training is repeated with the other
implementation and on a single device, to compare the results.
"""

import argparse
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jax_ring import value_and_grad

LAYERS = (64, 128, 64, 10)
BATCH = 120
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def load_data():
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    return train_test_split(images, digits.target.astype(np.int32), test_size=0.25, random_state=0)


def init_params(key):
    keys = jax.random.split(key, len(LAYERS) - 1)
    return [
        {"w": jax.random.normal(key, (n_in, n_out)) * math.sqrt(2 / n_in), "b": jnp.zeros(n_out)}
        for key, n_in, n_out in zip(keys, LAYERS[:-1], LAYERS[1:], strict=True)
    ]


def logits(params, images):
    *hidden, last = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ last["w"] + last["b"]


def loss(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def make_train_step(mesh, impl):
    """One step of data-parallel training. Parameters are replicated, the batch is split over the axis "data"."""

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=(P(), P(), P()))
    def train_step(params, opt_state, images, labels):
        # Loss and gradients are reduced in one call. jax.value_and_grad would return wrong gradients here: see
        # docs/sharp_bits.md.
        mean_loss, grads = value_and_grad(loss, "data", impl=impl)(params, images, labels)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, mean_loss

    return train_step


@jax.jit
def accuracy(params, images, labels):
    return (logits(params, images).argmax(-1) == labels).mean()


def train(num_devices, impl, epochs, data, console):
    """Returns the trained parameters, the held-out accuracy and the compiled step's HLO."""
    train_images, test_images, train_labels, test_labels = data
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("data",))
    train_step = make_train_step(mesh, impl)
    params = jax.device_put(init_params(jax.random.key(0)), jax.NamedSharding(mesh, P()))
    opt_state = OPTIMIZER.init(params)
    compiled = train_step.lower(params, opt_state, train_images[:BATCH], train_labels[:BATCH]).compile().as_text()

    rng = np.random.default_rng(0)
    columns = (
        TextColumn(f"{impl} on {num_devices}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=epochs, status="compiling")
        for _ in range(epochs):
            order = rng.permutation(len(train_images))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                batch = order[start : start + BATCH]
                params, opt_state, mean_loss = train_step(params, opt_state, train_images[batch], train_labels[batch])
            held_out = float(accuracy(params, test_images, test_labels))
            progress.update(bar, advance=1, status=f"loss {mean_loss:.4f}  held-out accuracy {held_out:.2%}")
    return jax.device_get(params), held_out, compiled


def difference(a, b):
    """Whether two parameter trees have the same bits, and the norm of their difference relative to their own."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    same_bits = all(x.tobytes() == y.tobytes() for x, y in pairs)
    squares = sum(float(np.sum((x.astype(np.float64) - y) ** 2)) for x, y in pairs)
    return same_bits, math.sqrt(squares) / float(optax.tree.norm(a))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help=f"a divisor of the batch size, {BATCH} (default: 8)")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument(
        "--impl", choices=["ring", "lax"], default="ring", help="implementation of the collectives (default: ring)"
    )
    args = parser.parse_args()
    if args.devices < 1 or BATCH % args.devices:
        parser.error(f"--devices must divide the batch size {BATCH}, got {args.devices}")
    if args.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {args.epochs}")
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_platforms", "cpu")

    console = Console()
    data = load_data()
    console.print(f"{len(data[0])} images to train on, {len(data[1])} held out; {args.devices} CPU devices")
    params, held_out, compiled = train(args.devices, args.impl, args.epochs, data, console)
    num_ring, num_xla = compiled.count('"jax_ring_all_reduce"'), compiled.count(" all-reduce(")
    console.print(f"The compiled step calls jax_ring's all-reduce {num_ring}x and XLA's {num_xla}x.")

    other = "lax" if args.impl == "ring" else "ring"
    other_params, other_held_out, _ = train(args.devices, other, args.epochs, data, console)
    single_params, single_held_out, _ = train(1, args.impl, args.epochs, data, console)
    same_bits, other_distance = difference(params, other_params)
    _, single_distance = difference(params, single_params)

    table = Table("training", "held-out accuracy", "parameters compared with the first")
    table.add_row(f"{args.impl} on {args.devices} devices", f"{held_out:.2%}", "")
    table.add_row(
        f"{other} on {args.devices} devices", f"{other_held_out:.2%}",
        "the same bits" if same_bits else f"differ by {other_distance:.1e} of their norm",
    )  # fmt: skip
    table.add_row(
        f"{args.impl} on 1 device",
        f"{single_held_out:.2%}",
        f"differ by {single_distance:.1e} of their norm (rounding)",
    )
    console.print(table)
    return 0 if same_bits and single_distance < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
