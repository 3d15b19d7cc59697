"""Two ways to use jax_ring in third-party code.

    python examples/replace_psum.py [--devices 8]

`ThirdPartyTrainer` stands for a trainer of a library: it calls `psum` internally, and leaves other sums to
differentiation. The first way replaces the name `psum` in the module that calls it, and covers the calls by that name.
The second, `override_lax()`, covers all of them, since it changes how JAX's collectives are lowered. Both train to the
same result.
"""

import argparse
import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import psum
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jax_ring

STEPS = 20


class ThirdPartyTrainer:
    """Data-parallel linear regression with normalised features. Imagine that it is an installed package."""

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))

    def __init__(self, mesh):
        # A new function per trainer, so that jit traces it again, with the current `psum`.
        step = functools.partial(ThirdPartyTrainer._step, self)
        self.step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P()))

    def _step(self, state, x, y):
        params, opt_state = state
        num_devices = psum(1, "data")
        x = x - psum(x.mean(0), "data") / num_devices

        def loss(params):
            return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

        # The parameters are the same on all devices, so differentiation sums these gradients over the devices.
        value, grads = jax.value_and_grad(loss)(params)
        grads = jax.tree.map(lambda g: g / num_devices, grads)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), psum(value, "data") / num_devices

    def init(self, num_features):
        params = {"w": jnp.zeros(num_features), "b": jnp.zeros(())}
        return params, self.optimizer.init(params)


def train(mesh, data):
    """Trains, and returns the parameters, the last loss, and the result of jax_ring.explain() for a step."""
    trainer = ThirdPartyTrainer(mesh)
    state = trainer.init(data[0].shape[1])
    for _ in range(STEPS):
        state, loss = trainer.step(state, *data)
    return jax.device_get(state[0]), float(loss), jax_ring.explain(trainer.step, state, *data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="a divisor of 240 (default: 8)")
    args = parser.parse_args()
    if args.devices < 1 or 240 % args.devices:
        parser.error(f"--devices must divide 240, got {args.devices}")
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((240, 5)).astype(np.float32) + 3
    data = x, (x @ np.arange(5) + 1).astype(np.float32)

    results = {"unchanged": train(mesh, data)}

    # ring_psum has the signature of lax.psum, so it can replace it.
    trainer_module = sys.modules[ThirdPartyTrainer.__module__]
    with mock.patch.object(trainer_module, "psum", jax_ring.ring_psum):
        results["with the name psum replaced"] = train(mesh, data)

    with jax_ring.override_lax():
        results["under override_lax()"] = train(mesh, data)
        explanation_of_override = results["under override_lax()"][2]

    table = Table("the training", "calls by jax_ring", "by XLA", "loss", "parameters")
    expected = results["unchanged"][0]
    same = True
    for name, (params, loss, explanation) in results.items():
        by_ring = sum(call.served_by == "jax_ring" for call in explanation.collectives)
        same_bits = all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (params, expected)), strict=True))
        same &= same_bits
        by_xla = len(explanation.collectives) - by_ring
        bits = "the same bits" if same_bits else "different bits"
        table.add_row(name, str(by_ring), str(by_xla), f"{loss:.4f}", bits)
    console = Console()
    console.print("Under override_lax(), jax_ring.explain() shows, for one step:\n", style="bold")
    print(explanation_of_override)
    console.print(table)
    console.print(f"The parameters of the three trainings have {'the same' if same else 'DIFFERENT'} bits.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
