"""Trains a network with Adam, with replicated and with sharded optimizer state, and compares memory and results.

    python examples/zero.py [--devices 8] [--epochs 10] [--plot memory.png]

Adam keeps two numbers per parameter. With ZeRO, each device keeps them for its shard of the parameters only, and
updates that shard. Stage 1 all-reduces the gradients; stage 2 reduce-scatters them.
"""

import argparse
import functools
import math
import sys

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table
from train_digits import BATCH, accuracy, init_params, load_data, loss

from jax_ring import sync_gradients, zero

ADAM = optax.adam(2e-3)


def replicated_adam():
    """Adam with the interface of `zero.ShardedOptimizer`, and the same state on all devices."""

    def update(grads, state, params):
        return ADAM.update(sync_gradients(grads, "data"), state, params)

    return ADAM.init, update, lambda params: jax.tree.map(lambda _: P(), jax.eval_shape(ADAM.init, params))


def make_state(mesh, init, specs, params):
    return jax.jit(jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs))(params)


def bytes_on_a_device(state) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))


def predicted_bytes(num_params: int, num_devices: int) -> int:
    """Two float32 numbers per parameter of a shard, and the step count."""
    return 2 * 4 * -(-num_params // num_devices) + 4


def relative_distance(a, b) -> float:
    """The norm of the difference of two trees of parameters, relative to that of the first."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    squares = sum(float(np.sum((x.astype(np.float64) - y) ** 2)) for x, y in pairs)
    return math.sqrt(squares) / float(optax.tree.norm(a))


def plot_memory(file: str, params, num_params: int) -> None:
    """Plots bytes of Adam's state on a device, predicted and measured, by number of devices."""
    from matplotlib import pyplot as plt

    numbers = range(1, len(jax.devices()) + 1)
    measured = []
    for n in numbers:
        optimizer = zero.sharded_optimizer(ADAM, "data")
        mesh, params = jax.sharding.Mesh(jax.devices()[:n], ("data",)), jax.device_get(params)
        measured.append(bytes_on_a_device(make_state(mesh, optimizer.init, optimizer.specs(params), params)))
    predicted = [predicted_bytes(num_params, n) for n in numbers]
    plt.plot(numbers, predicted[:1] * len(predicted), "--", label="replicated")
    plt.plot(numbers, predicted, label="ZeRO, predicted")
    plt.plot(numbers, measured, "o", label="ZeRO, measured")
    plt.xlabel("devices")
    plt.ylabel("bytes of state on a device")
    plt.ylim(bottom=0)
    plt.legend()
    plt.tight_layout()
    plt.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help=f"a divisor of the batch size, {BATCH} (default: 8)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--plot", metavar="FILE", help="plot memory by number of devices; needs matplotlib")
    args = parser.parse_args()
    if args.devices < 1 or BATCH % args.devices or args.epochs < 1:
        parser.error(f"--devices must divide {BATCH}, and --epochs be positive; got {args.devices} and {args.epochs}")
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    train_images, test_images, train_labels, test_labels = load_data()

    console = Console()
    table = Table("Adam", "held-out accuracy", "state on a device", "parameters compared")
    optimizers = {
        "replicated": replicated_adam(),
        "ZeRO stage 1": zero.sharded_optimizer(ADAM, "data", stage=1)[:3],
        "ZeRO stage 2": zero.sharded_optimizer(ADAM, "data", stage=2)[:3],
    }
    results = {}
    for name, (init, update, specs_of) in optimizers.items():
        params = jax.device_put(init_params(jax.random.key(0)), jax.NamedSharding(mesh, P()))
        specs = specs_of(params)
        state = make_state(mesh, init, specs, params)

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), specs, P("data"), P("data")), out_specs=(P(), specs)
        )
        def train_step(params, state, images, labels, update=update):
            local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
            updates, state = update(jax.grad(loss)(local, images, labels), state, params)
            return optax.apply_updates(params, updates), state

        rng = np.random.default_rng(0)
        for _ in track(range(args.epochs), name, console=console):
            order = rng.permutation(len(train_images))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                batch = order[start : start + BATCH]
                params, state = train_step(params, state, train_images[batch], train_labels[batch])
                # Hundreds of unfinished steps can stall the dispatch of JAX 0.10 to CPU devices.
                jax.block_until_ready(params)
        on_a_device = bytes_on_a_device(state)
        results[name] = jax.device_get(params), on_a_device
        distance = relative_distance(results["replicated"][0], results[name][0])
        table.add_row(
            name, f"{accuracy(params, test_images, test_labels):.2%}", f"{on_a_device} bytes",
            f"differ by {distance:.1e} of their norm",
        )  # fmt: skip
    console.print(table)

    size = sum(p.size for p in jax.tree.leaves(params))
    predicted = predicted_bytes(size, args.devices)
    counted = results["ZeRO stage 1"][1]
    console.print(
        f"ZeRO: {counted} bytes on a device, predicted 2 x 4 x ceil({size} / {args.devices}) + 4 = {predicted}."
    )
    if args.plot:
        plot_memory(args.plot, params, size)
    as_predicted = all(results[name][1] == predicted for name in ("ZeRO stage 1", "ZeRO stage 2"))
    return 0 if as_predicted and distance < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
