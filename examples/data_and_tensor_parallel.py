"""Data parallelism by hand over tensor parallelism by the compiler: a transformer block on a two-dimensional mesh.

    python examples/data_and_tensor_parallel.py [--data 2] [--model 4] [--steps 20] [--batch 16] [--width 64]

The batch is divided over the axis "data", which is manual: a shard_map computes gradients of its part of the batch,
and `jax_ring.value_and_grad` averages them. The weights are divided over the axis "model", which is left to the
compiler: it divides the products, and adds its own sums where a product needs one. The gradients stay divided as the
weights are, so each device sends its part of them only. The result is compared with training on one device.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring

HEADS, LENGTH = 4, 8

# How the weights are divided over "model": attention by heads, the other layer by its hidden units.
SPECS = {
    "qkv": P(None, None, "model"),
    "out": P("model", None, None),
    "up": P(None, "model"),
    "bias": P("model"),
    "down": P("model", None),
    "scale": P(None),
}


def initial_weights(width):
    shapes = {
        "qkv": (3, width, HEADS, width // HEADS),
        "out": (HEADS, width // HEADS, width),
        "up": (width, 4 * width),
        "bias": (4 * width,),
        "down": (4 * width, width),
        "scale": (width,),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape) / np.sqrt(width)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def block(weights, x):
    """Attention and a layer of hidden units. x: (batch, length, width)."""
    q, k, v = jnp.einsum("blw,cwhd->cblhd", x, weights["qkv"])
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]))
    x = x + jnp.einsum("bhqk,bkhd,hdw->bqw", scores, v, weights["out"])
    return x * (1 + weights["scale"]) + jax.nn.gelu(x @ weights["up"] + weights["bias"]) @ weights["down"]


def loss(weights, batch):
    x, y = batch
    return jnp.mean((block(weights, x) - y) ** 2)


def sgd(weights, gradients):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def one_device_step(weights, batch):
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    return value, sgd(weights, gradients)


def make_step(mesh):
    """A step of training on the mesh: manual over "data", and the compiler's over "model"."""

    def step(weights, batch):
        value, gradients = jax_ring.value_and_grad(loss, axis_name="data")(weights, batch)
        return value, sgd(weights, gradients)

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), axis_names={"data"}))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=int, default=2, help="devices along the axis of data parallelism")
    parser.add_argument("--model", type=int, default=4, help="devices along the axis of tensor parallelism: 1, 2 or 4")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="examples in a step, a multiple of --data")
    parser.add_argument("--width", type=int, default=64, help="a multiple of 4")
    arguments = parser.parse_args()
    if HEADS % arguments.model:
        parser.error(f"--model must be 1, 2 or 4, which divide the {HEADS} heads; got {arguments.model}")
    if arguments.batch % arguments.data:
        parser.error(f"--batch must be a multiple of --data; got {arguments.batch} and {arguments.data}")
    if arguments.width % HEADS:
        parser.error(f"--width must be a multiple of {HEADS}; got {arguments.width}")
    return arguments


def main():
    arguments = parse_arguments()
    jax.config.update("jax_num_cpu_devices", arguments.data * arguments.model)
    mesh = jax.make_mesh(
        (arguments.data, arguments.model), ("data", "model"), axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices("cpu"),
    )  # fmt: skip
    weights = initial_weights(arguments.width)
    key = jax.random.key(1)
    batch = tuple(jax.random.normal(k, (arguments.batch, LENGTH, arguments.width)) for k in jax.random.split(key))

    print(f"{arguments.steps} steps on one device, then on {arguments.data} x {arguments.model}.", flush=True)
    expected, on_one_device = weights, jax.jit(one_device_step)
    for _ in range(arguments.steps):
        expected_loss, expected = on_one_device(expected, batch)

    divided = {name: jax.device_put(w, NamedSharding(mesh, SPECS[name])) for name, w in weights.items()}
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    step = make_step(mesh)
    print(jax_ring.explain(step, divided, batch))
    for i in range(arguments.steps):
        value, divided = step(divided, batch)
        if i == 0:
            print(f"loss of the first step {value:.5f}")
    print(f"loss of the last step {value:.5f}, on one device {expected_loss:.5f}")
    for name, w in divided.items():
        # Training keeps the weights divided: no device ever holds a whole one.
        assert w.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), w.ndim), (name, w.sharding)
    difference = max(float(jnp.max(jnp.abs(np.asarray(w) - expected[name]))) for name, w in divided.items())
    print(f"The weights are those of one device up to {difference:.1e}, by rounding.")
    if not difference < 1e-4:
        sys.exit("the weights are not those of training on one device")


if __name__ == "__main__":
    main()
