"""Compares data-parallel training on a ring with a parameter server, synchronous and with stale gradients.

    python examples/parameter_server.py [--devices 8] [--epochs 8] [--rate 0.2] [--plot losses.png]

"server" reduces the gradients to rank 0 (`ring_reduce`), updates the parameters there, and broadcasts them; each step
waits for it. "stale by k" takes gradients at the parameters of k steps ago, as in asynchronous training, where k is
about the number of workers. At a learning rate that suits k = 0, training oscillates and then diverges with larger k:
the largest stable rate falls as 1/k. "ring" is plain data-parallel training.
"""

import argparse
import collections
import sys
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table
from train_digits import BATCH, init_params, load_data, loss

from jax_ring import ring_broadcast, ring_pmean, ring_reduce, value_and_grad


def make_ring_step(mesh, rate: float):
    def step(params, at, images, labels):
        value, grads = value_and_grad(loss, "data")(at, images, labels)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    return compiled(mesh, step)


def make_server_step(mesh, rate: float):
    def step(params, at, images, labels):
        at = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), at)
        value, grads = jax.value_and_grad(loss)(at, images, labels)
        grads = ring_reduce(grads, "data", root=0)  # zeros on the other ranks, whose parameters are unused
        params = jax.tree.map(lambda p, g: p - rate / mesh.size * g, params, grads)
        return ring_broadcast(params, "data", root=0), ring_pmean(value, "data")

    return compiled(mesh, step)


def compiled(mesh, step):
    """Jits a step: (parameters, parameters to take gradients at, images, labels) to (parameters, loss)."""
    specs = (P(), P(), P("data"), P("data"))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), P())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help=f"a divisor of the batch size, {BATCH} (default: 8)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate (default: 0.2)")
    parser.add_argument("--plot", metavar="FILE", help="plot the losses; needs matplotlib")
    args = parser.parse_args()
    if args.devices < 1 or BATCH % args.devices or args.epochs < 1:
        parser.error(f"--devices must divide {BATCH}, and --epochs be positive; got {args.devices} and {args.epochs}")
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_platforms", "cpu")
    p, mesh = args.devices, jax.sharding.Mesh(jax.devices(), ("data",))
    images, _, labels, _ = load_data()
    initial = jax.device_put(init_params(jax.random.key(0)), jax.NamedSharding(mesh, P()))
    volume = sum(leaf.nbytes for leaf in jax.tree.leaves(initial))
    server = make_server_step(mesh, args.rate)
    runs = {"ring": (make_ring_step(mesh, args.rate), 0), "server": (server, 0)}
    runs |= {f"server, stale by {k}": (server, k) for k in (2, 4, 8, 16)}
    # Bytes in and out of the busiest rank in a step, with one link per message.
    busiest = dict.fromkeys(runs, 2 * (p - 1) * volume) | {"ring": 4 * volume * (p - 1) // p}

    console = Console()
    table = Table("", "bytes through the busiest rank", "ms per step", "loss of the last epoch")
    curves = {}
    for name, (step, staleness) in runs.items():
        params, rng = initial, np.random.default_rng(0)
        history = collections.deque([params], maxlen=staleness + 1)  # the oldest comes first
        losses, times = [], []
        for _ in track(range(args.epochs), name, console=console):
            order = rng.permutation(len(images))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                batch = order[start : start + BATCH]
                begin = time.perf_counter()
                params, value = jax.block_until_ready(step(params, history[0], images[batch], labels[batch]))
                times.append(time.perf_counter() - begin)
                history.append(params)
                losses.append(float(value))
        curves[name] = losses
        last = np.mean(losses[-(len(images) // BATCH) :])
        table.add_row(name, f"{busiest[name]}", f"{1e3 * np.median(times):.2f}", f"{last:.4f}")
    console.print(table)
    console.print("Times are of CPU devices, which share one memory. Bytes are what links would have to carry.")
    console.print("Ring and server have the same losses, up to rounding; stale gradients have others.")
    if args.plot:
        from matplotlib import pyplot as plt

        for name, losses in curves.items():
            # The ring's curve is hidden under the server's.
            plt.semilogy(losses, label=name, linewidth=5 if name == "ring" else 1.5)
        plt.xlabel("step")
        plt.ylabel("loss")
        plt.legend()
        plt.savefig(args.plot)
    return 0 if np.allclose(curves["ring"], curves["server"], rtol=1e-3, equal_nan=True) else 1


if __name__ == "__main__":
    sys.exit(main())
