"""Attention over a sequence that is divided over devices: ring attention, checked against plain attention.

    python examples/ring_attention.py [--devices 8] [--length 1024] [--heads 4] [--width 32] [--not-causal]

Each device keeps the queries of its part of the sequence. The keys and values travel around the ring of devices, one
step at a time, by `ring_ppermute`. A device adds up what its queries get from each part, so that it never holds more
than one part of the keys, and a block of the scores. Differentiation sends the gradients back around the ring.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import ring_ppermute

AXIS = "sequence"


def plain_attention(q, k, v, causal):
    """Softmax attention on one device. All arrays have the shape (length, heads, width)."""
    scores = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tri(len(q), dtype=bool), scores, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)


def add_block(total, q, k, v, q_start, k_start, causal):
    """Adds what the queries get from one part of the keys and values to the total.

    The total has the weighted values, the sum of the weights and the largest score of each query so far. The weights
    are exponentials of scores less the largest one, and are scaled down when a larger one appears.
    """
    values, weight, largest = total
    scores = jnp.einsum("qhd,khd->qhk", q, k) / q.shape[-1] ** 0.5
    if causal:
        before = q_start + jnp.arange(len(q))[:, None] >= k_start + jnp.arange(len(k))
        scores = jnp.where(before[:, None], scores, -jnp.inf)
    new_largest = jnp.maximum(largest, scores.max(-1))
    scale = jnp.exp(largest - new_largest)
    exponentials = jnp.exp(scores - new_largest[..., None])
    values = values * scale[..., None] + jnp.einsum("qhk,khd->qhd", exponentials, v)
    return values, weight * scale + exponentials.sum(-1), new_largest


def ring_attention(q, k, v, causal):
    """The same as `plain_attention` under shard_map, with the sequence divided over the axis."""
    p, rank, size = lax.axis_size(AXIS), lax.axis_index(AXIS), len(q)
    to_next = [(i, (i + 1) % p) for i in range(p)]

    def step(carry, i):
        total, kv = carry
        kv = ring_ppermute(kv, AXIS, to_next)  # a tree is one call
        source = (rank - i) % p  # the rank that these keys and values come from
        return (add_block(total, q, *kv, rank * size, source * size, causal), kv), None

    # Begin with the device's own part: there each query may see at least one key.
    empty = jnp.zeros_like(q), jnp.zeros_like(q[..., 0]), jnp.full_like(q[..., 0], -1e30)
    total = add_block(empty, q, k, v, rank * size, rank * size, causal)
    ((values, weight, _), _), _ = lax.scan(step, (total, (k, v)), jnp.arange(1, p))
    return values / weight[..., None]


def loss_and_gradients(attention, causal, *arrays):
    """A weighted sum of the result, the result, and the gradients with respect to queries, keys and values."""

    def loss(q, k, v):
        out = attention(q, k, v, causal)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return out, gradients


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="a divisor of the length (default: 8)")
    parser.add_argument("--length", type=int, default=1024, help="of the sequence")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="of a head")
    parser.add_argument("--not-causal", action="store_true", help="let each query see the whole sequence")
    args = parser.parse_args()
    if min(args.devices, args.length, args.heads, args.width) < 1 or args.length % args.devices:
        parser.error(f"--devices must divide --length, and all be positive; got {args.devices} and {args.length}")
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_platforms", "cpu")
    causal = not args.not_causal
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((args.length, args.heads, args.width)).astype(np.float32) for _ in range(3)]

    mesh = jax.sharding.Mesh(jax.devices(), (AXIS,))
    on_the_ring = jax.jit(
        jax.shard_map(
            functools.partial(loss_and_gradients, ring_attention, causal),
            mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS),
        )
    )  # fmt: skip
    print(f"Attention over {args.length} positions on {args.devices} devices, then on one.", flush=True)
    ours = on_the_ring(*arrays)
    expected = jax.jit(functools.partial(loss_and_gradients, plain_attention, causal))(*arrays)

    explanation = jax_ring.explain(on_the_ring, *arrays)
    print(explanation)
    by_xla = [i.name for i in explanation.instructions if not i.name.startswith("jax_ring_")]
    print(f"collectives that XLA serves: {len(by_xla)}")
    part = args.length // args.devices
    print(f"a device holds scores of {part} x {part} for each head, instead of {args.length} x {args.length}")
    distances = [
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
    ]
    print(f"Result and gradients are those of plain attention up to {max(distances):.1e}, by rounding.")
    return 0 if max(distances) < 1e-4 and not by_xla else 1


if __name__ == "__main__":
    sys.exit(main())
