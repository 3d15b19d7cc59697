"""Trains a mixture of experts, with one expert on each device, and compares it with a dense computation.

    python examples/mixture_of_experts.py [--devices 8] [--tokens 64] [--steps 30] [--ragged]

Each device has some of the tokens, and one expert. A router chooses the expert of each token. The tokens travel to
their experts and back by `ring_all_to_all`, in blocks of one size with room for all tokens of a device. With --ragged
they travel by `ring_ragged_all_to_all`, which sends the tokens alone.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import ring_all_to_all, ring_pmean, ring_psum, ring_ragged_all_to_all

AXIS = "expert"
WIDTH, HIDDEN, LEARNING_RATE = 16, 32, 0.5


def init_params(num_experts):
    """The router is the same on all devices; the experts are stacked, one for each device."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "router": jax.random.normal(keys[0], (WIDTH, num_experts)),
        "experts": {
            "in": jax.random.normal(keys[1], (num_experts, WIDTH, HIDDEN)) / WIDTH**0.5,
            "out": jax.random.normal(keys[2], (num_experts, HIDDEN, WIDTH)) / HIDDEN**0.5,
        },
    }


def expert_layer(expert, x):
    return jnp.tanh(x @ expert["in"]) @ expert["out"]


def route(params, tokens):
    """The expert of each token, and the weight of its output, by which the router learns."""
    probabilities = jax.nn.softmax(tokens @ params["router"])
    return probabilities.argmax(-1), probabilities.max(-1)


def dense(params, tokens):
    """On one device: every expert computes every token, and one result of each is kept."""
    expert, weight = route(params, tokens)
    results = jax.vmap(expert_layer, (0, None))(params["experts"], tokens)
    return results[expert, jnp.arange(len(tokens))] * weight[:, None]


def by_blocks(params, tokens):
    """Token i of a device has row i in the block of its expert. The other rows of the blocks are zeros."""
    expert, weight = route(params, tokens)
    rows = jnp.arange(len(tokens))
    blocks = jnp.zeros((params["router"].shape[1], *tokens.shape)).at[expert, rows].set(tokens)
    at_expert = ring_all_to_all(blocks, AXIS, 0, 0)
    results = expert_layer(jax.tree.map(lambda w: w[0], params["experts"]), at_expert)
    return ring_all_to_all(results, AXIS, 0, 0)[expert, rows] * weight[:, None]


def by_slices(params, tokens):
    """The tokens for each expert, sorted by expert, are a slice."""
    expert, weight = route(params, tokens)
    num_ranks = params["router"].shape[1]
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=num_ranks)
    starts = jnp.cumsum(sizes) - sizes
    received = ring_all_to_all(sizes, AXIS, 0, 0, tiled=True)
    places = jnp.cumsum(received) - received  # start of each received slice
    at_sender = ring_all_to_all(places, AXIS, 0, 0, tiled=True)
    room = jnp.zeros((num_ranks * len(tokens), WIDTH))
    at_expert = ring_ragged_all_to_all(tokens[order], room, starts, sizes, at_sender, received, axis_name=AXIS)
    results = expert_layer(jax.tree.map(lambda w: w[0], params["experts"]), at_expert)
    # Send back: swap the roles of sent and received.
    at_expert_starts = ring_all_to_all(starts, AXIS, 0, 0, tiled=True)
    back = ring_ragged_all_to_all(
        results, jnp.zeros_like(tokens), places, received, at_expert_starts, sizes, axis_name=AXIS
    )
    return jnp.zeros_like(back).at[order].set(back) * weight[:, None]


def make_step(layer, num_devices):
    """A step of gradient descent; under shard_map if there are several devices."""

    def step(params, tokens, targets):
        def loss(params):
            return jnp.mean((layer(params, tokens) - targets) ** 2) / num_devices

        if num_devices > 1:
            local = jax.lax.pcast(params["router"], AXIS, to="varying")
            value, grads = jax.value_and_grad(loss)({**params, "router": local})
            # The exchanges have already summed the experts' gradients over the tokens of all devices.
            grads["router"] = ring_psum(grads["router"], AXIS)
            value = ring_pmean(value * num_devices, AXIS)
        else:
            value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), value

    return step


def train(step, params, data, num_steps):
    losses = []
    for _ in range(num_steps):
        params, loss = step(params, *data)
        losses.append(float(loss))
    return jax.device_get(params), losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="at least 2 (default: 8)")
    parser.add_argument("--tokens", type=int, default=64, help="of each device")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ragged", action="store_true", help="send no more than the tokens")
    args = parser.parse_args()
    if args.devices < 2 or min(args.tokens, args.steps) < 1:
        parser.error(
            f"--devices must be 2 or more, the others positive; got {args.devices}, {args.tokens}, {args.steps}"
        )
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(jax.devices(), (AXIS,))
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((args.devices * args.tokens, WIDTH)).astype(np.float32)
    data = tokens, np.roll(tokens, 1, axis=1) * np.sign(tokens[:, :1])
    params = init_params(args.devices)

    specs = {"router": P(), "experts": P(AXIS)}
    step = make_step(by_slices if args.ragged else by_blocks, args.devices)
    step = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(specs, P(AXIS), P(AXIS)), out_specs=(specs, P()))
    )  # fmt: skip
    print(f"{args.steps} steps with an expert on each of {args.devices} devices, then densely.", flush=True)
    trained, losses = train(step, params, data, args.steps)
    expected, dense_losses = train(jax.jit(make_step(dense, 1)), params, data, args.steps)

    explanation = jax_ring.explain(step, params, *data)
    print(explanation)
    by_xla = [i.name for i in explanation.instructions if not i.name.startswith("jax_ring_")]
    print(f"collectives that XLA serves: {len(by_xla)}")
    print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} after {args.steps} steps; dense: {dense_losses[-1]:.4f}")
    distance = max(
        float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (trained, expected)), strict=True)
    )  # fmt: skip
    print(f"The parameters are those of the dense computation up to {distance:.1e}, by rounding.")
    return 0 if distance < 1e-3 and losses[-1] < losses[0] and not by_xla else 1


if __name__ == "__main__":
    sys.exit(main())
