"""The all-reduces under comparison, each as a function of one rank's array inside shard_map."""

import jax.numpy as jnp
from jax import lax

from jax_ring import ring_psum

AXIS = "ranks"


def ppermute_ring(x):
    """A ring written with `lax.ppermute`: reduce-scatter, then all-gather, p - 1 steps each."""
    p, rank = lax.axis_size(AXIS), lax.axis_index(AXIS)
    to_next = [(r, (r + 1) % p) for r in range(p)]
    chunks = jnp.pad(x, (0, -x.size % p)).reshape(p, -1)
    # Step s: send chunk rank - s, and add the received chunk to chunk rank - s - 1.
    for step in range(p - 1):
        received = lax.ppermute(chunks[(rank - step) % p], AXIS, to_next)
        chunks = chunks.at[(rank - step - 1) % p].add(received)
    # Chunk rank + 1 is now complete on this rank. Pass it around the ring.
    for step in range(p - 1):
        received = lax.ppermute(chunks[(rank + 1 - step) % p], AXIS, to_next)
        chunks = chunks.at[(rank - step) % p].set(received)
    return chunks.reshape(-1)[: x.size]


IMPLEMENTATIONS = {
    "ring_psum": lambda x: ring_psum(x, AXIS),
    "ring_psum(ring)": lambda x: ring_psum(x, AXIS, order="ring"),
    "lax.psum": lambda x: lax.psum(x, AXIS),
    "ppermute": ppermute_ring,
}

# Options that `algorithm="auto"` chooses from.
ALGORITHMS = {
    name: lambda x, name=name: ring_psum(x, AXIS, algorithm=name) for name in ("one_shot", "two_shot", "ring")
}
