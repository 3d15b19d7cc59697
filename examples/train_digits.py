"""Trains a small network on handwritten digits on 8, 3 and 1 CPU devices: with ring_psum, the same bits.

    python examples/train_digits.py [--devices 8,3,1] [--epochs 30]

Each device holds a copy of the parameters and a part of each batch. With `num_shards=24` the gradients of 24 equal
shards of the batch are added along one tree, however many devices share them, so the trained parameters have the same
bits on any number of devices that divides 24. With `lax.psum` they have not. The program prints a digest of the trained
parameters for each, and fails if those of `ring_psum` differ.
"""

import argparse
import functools
import hashlib
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
NUM_SHARDS = 24  # of a batch: a multiple of every number of devices
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


def by_lax(params, images, labels):
    """The mean loss and its gradients, by `lax.psum`."""
    local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)  # else JAX itself sums gradients
    return jax.lax.pmean(jax.value_and_grad(loss)(local, images, labels), "data")


# Of the mean over all devices: see docs/sharp_bits.md for what jax.value_and_grad alone would return.
GRADIENTS = {"ring_psum": value_and_grad(loss, "data", num_shards=NUM_SHARDS), "lax.psum": by_lax}


def make_train_step(mesh, value_and_mean_grad):
    """One step of data-parallel training. Parameters are replicated, the batch is split over the axis "data"."""

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=(P(), P(), P()))
    def train_step(params, opt_state, images, labels):
        mean_loss, grads = value_and_mean_grad(params, images, labels)  # reduced in one call
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, mean_loss

    return train_step


@jax.jit
def accuracy(params, images, labels):
    return (logits(params, images).argmax(-1) == labels).mean()


def train(num_devices, name, epochs, data, console):
    """Returns the trained parameters, the held-out accuracy and the compiled step's HLO."""
    train_images, test_images, train_labels, test_labels = data
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("data",))
    train_step = make_train_step(mesh, GRADIENTS[name])
    params = jax.device_put(init_params(jax.random.key(0)), jax.NamedSharding(mesh, P()))
    opt_state = OPTIMIZER.init(params)

    rng = np.random.default_rng(0)
    columns = (
        TextColumn(f"{name} on {num_devices}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=epochs, status="compiling")
        compiled = train_step.lower(params, opt_state, train_images[:BATCH], train_labels[:BATCH]).compile().as_text()
        for _ in range(epochs):
            order = rng.permutation(len(train_images))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                batch = order[start : start + BATCH]
                params, opt_state, mean_loss = train_step(params, opt_state, train_images[batch], train_labels[batch])
            progress.update(bar, advance=1, status=f"loss {mean_loss:.4f}")
        held_out = float(accuracy(params, test_images, test_labels))
    return jax.device_get(params), held_out, compiled


def digest(params):
    """16 hexadecimal digits that differ if one bit of the parameters does."""
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(params))).hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="8,3,1", help=f"numbers that divide {NUM_SHARDS} (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    numbers = [int(number) if number.isdecimal() else 0 for number in args.devices.split(",")]
    if any(number < 1 or NUM_SHARDS % number for number in numbers):
        parser.error(f"--devices must be numbers that divide {NUM_SHARDS}, got {args.devices}")
    if args.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {args.epochs}")
    jax.config.update("jax_num_cpu_devices", max(numbers))
    jax.config.update("jax_platforms", "cpu")

    console = Console()
    data = load_data()
    console.print(f"{len(data[0])} images to train on, {len(data[1])} held out.")
    results = {(name, n): train(n, name, args.epochs, data, console) for name in GRADIENTS for n in numbers}
    digests = {key: digest(params) for key, (params, _, _) in results.items()}

    table = Table("devices", *(f"{name}: digest, accuracy" for name in GRADIENTS))
    for number in numbers:
        cells = [f"{digests[name, number]}  {results[name, number][1]:.2%}" for name in GRADIENTS]
        table.add_row(str(number), *cells)
    for name in GRADIENTS:
        compiled = results[name, numbers[0]][2]
        num_ring, num_xla = compiled.count('"jax_ring_all_reduce"'), compiled.count(" all-reduce(")
        console.print(f"A step with {name} calls jax_ring's all-reduce {num_ring}x and XLA's {num_xla}x.")
    console.print(table)
    num_results = {name: len({digests[name, number] for number in numbers}) for name in GRADIENTS}
    devices = " and ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))
    same = num_results["ring_psum"] == 1
    console.print(
        f"ring_psum on {devices} devices: {'the same bits' if same else 'NOT the same bits'}. "
        f"lax.psum: {num_results['lax.psum']} different results."
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
