"""Accumulates gradients over micro-batches, and clips them before or after they are reduced.

    python examples/accumulation_and_clipping.py [--devices 4] [--steps 300] [--microbatches 8]

All four runs see the same batches. "accumulated" uses micro-batches, which take a fraction of the memory, and reduces
once per step. Its losses equal those of "whole batch", and both equal those of one device. "clipped too early" clips
the gradients of each device before their mean is taken, and "every micro-batch clipped" those of each micro-batch. The
norm of a mean is not the mean of the norms, so these are different methods, whose results depend on the number of
devices and micro-batches. They may even be better, as they are here, where a few examples are outliers.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jax_ring import accumulate_gradients, sync_gradients, value_and_grad

BATCH, WIDTH, LIMIT = 512, 64, 0.3


def make_data(rng, steps: int):
    """A regression with a few outliers, whose gradients need clipping.

    Returns one batch per step, and one held-out batch without noise.
    """
    truth = rng.standard_normal((WIDTH, 1)) / np.sqrt(WIDTH)
    x = rng.standard_normal((steps + 1, BATCH, WIDTH))
    y = np.sin(2 * x @ truth)
    y[:-1] += 0.2 * rng.standard_t(2, y[:-1].shape)
    return x.astype(np.float32), y.astype(np.float32)


def init_params(key):
    hidden, out = jax.random.split(key)
    scale = 1 / np.sqrt(WIDTH)
    return {"hidden": scale * jax.random.normal(hidden, (WIDTH, 256)), "out": jax.random.normal(out, (256, 1)) / 16}


def loss(params, x, y):
    return ((jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2).mean()


def clip(grads):
    return optax.clip_by_global_norm(LIMIT).update(grads, optax.EmptyState())[0]


def with_early_clipping(fun, axis_name, num_parts):
    """The mean over ranks, and over parts of each rank's batch, of gradients that are clipped separately."""

    def value_and_grad_of(params, x, y):
        local = jax.tree.map(lambda p: jax.lax.pcast(p, axis_name, to="varying"), params)
        parts = [a.reshape(num_parts, -1, a.shape[-1]) for a in (x, y)]
        values, grads = jax.lax.map(lambda part: jax.value_and_grad(fun)(local, *part), tuple(parts))
        local_means = values.mean(), jax.tree.map(lambda g: g.mean(0), jax.vmap(clip)(grads))
        return sync_gradients(local_means, axis_name)

    return value_and_grad_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    if min(args.devices, args.microbatches, args.steps) < 1 or BATCH % (args.devices * args.microbatches):
        parser.error(
            f"--devices times --microbatches must divide the batch size {BATCH}, and --steps be positive; got "
            f"{args.devices}, {args.microbatches} and {args.steps}"
        )
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    plain = optax.sgd(0.3, momentum=0.9)
    clipped = optax.chain(optax.clip_by_global_norm(LIMIT), plain)
    accumulated = value_and_grad(accumulate_gradients(loss, args.microbatches), "data")
    runs = {
        "whole batch": (value_and_grad(loss, "data"), clipped),
        "accumulated": (accumulated, clipped),
        "clipped too early": (with_early_clipping(loss, "data", 1), plain),
        "every micro-batch clipped": (with_early_clipping(loss, "data", args.microbatches), plain),
    }

    console = Console()
    x, y = make_data(np.random.default_rng(0), args.steps)
    table = Table("gradients", "held-out loss", "intermediate values", "reductions a step")
    final = {}
    for name, (gradients, optimizer) in runs.items():

        @jax.jit
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P())
        def train_step(params, state, x, y, gradients=gradients, optimizer=optimizer):
            value, grads = gradients(params, x, y)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        params = jax.device_put(init_params(jax.random.key(0)), jax.NamedSharding(mesh, P()))
        state = jax.device_put(optimizer.init(params), jax.NamedSharding(mesh, P()))
        compiled = train_step.lower(params, state, x[0], y[0]).compile()
        losses = []
        for batch in track(range(args.steps), name, console=console):
            params, state, value = compiled(params, state, x[batch], y[batch])
            losses.append(float(value))
        final[name] = np.array(losses)
        calls = compiled.as_text().count('"jax_ring_all_reduce"')
        memory = compiled.memory_analysis().temp_size_in_bytes / 1024
        table.add_row(name, f"{loss(params, x[-1], y[-1]):.4f}", f"{memory:.0f} KiB", str(calls))
    console.print(table)
    difference = np.abs(final["accumulated"] / final["whole batch"] - 1).max()
    console.print(f"Accumulated or whole: the same losses up to {difference:.1e}, by rounding.")
    return 0 if difference < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
