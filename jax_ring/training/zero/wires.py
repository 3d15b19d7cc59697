"""What a sharded optimizer sends: scattered gradients and gathered parameters, rounded or as they are.

Blocks of 8 bits follow ZeRO++ (Wang et al., 2023). Gradients are rounded once, by their rank: the part that a rank gets
is a sum in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_ring.collectives import int8_blocks as int8
from jax_ring.training.same_bits.fence import fence
from jax_ring.training.same_bits.rounding import each_rounded
from jax_ring.training.wire import UNCHANGED, Int8Wire
from jax_ring.training.zero.interface import padded

if TYPE_CHECKING:
    from jax_ring.training.zero.local_gradients import Reduction


def gathered(vectors: dict[str, jax.Array], reduction: Reduction) -> dict[str, jax.Array]:
    """The parts of all ranks, one after the other along the last dimension, as `param_wire` brings them."""
    wire, axis_name, gather = reduction.param_wire, reduction.axis_name, reduction.collectives.all_gather

    def floats(x):
        sent = x if isinstance(wire, Int8Wire) else wire.sent(x, 1)
        # Without a fence the compiler may leave out a rounding on one rank, where nothing is sent.
        sent = fence(sent) if reduction.is_tree and sent.dtype != x.dtype else sent
        return gather(sent, axis_name, axis=x.ndim - 1).astype(x.dtype)

    def blocks(x):
        packets = each_rounded(int8.encode, _in_blocks(x)) if reduction.is_tree else int8.encode(_in_blocks(x))
        everyones = gather(packets, axis_name, axis=x.ndim - 1)
        parts = int8.decode(everyones).reshape(*x.shape[:-1], reduction.num_ranks, -1)
        return parts[..., : x.shape[-1]].reshape(*x.shape[:-1], -1).astype(x.dtype)

    return {name: blocks(x) if _takes(wire, x) else floats(x) for name, x in vectors.items()}


def scattered(vectors: dict[str, jax.Array], reduction: Reduction) -> dict[str, jax.Array]:
    """This rank's part of the sums of vectors over the ranks, rounded to `wire`; in the vectors' dtypes."""
    wire, count = reduction.wire, reduction.num_ranks

    def in_blocks(x):
        packets = int8.encode(_in_blocks(x.reshape(count, -1)))
        total = int8.fold(reduction.collectives.all_to_all(packets, reduction.axis_name, 0, 0))
        return total.reshape(-1)[: x.size // count].astype(x.dtype)

    chosen = {name: in_blocks(x) for name, x in vectors.items() if _takes(wire, x)}
    rest = {name: x for name, x in vectors.items() if name not in chosen}
    floats = UNCHANGED if isinstance(wire, Int8Wire) else wire
    scales = {name: floats.scale_of(x, count, count) for name, x in rest.items()}
    sums = reduction.sums_of_parts({name: floats.sent(x, scales[name]) for name, x in rest.items()})
    return chosen | {name: floats.received(sums[name], x, scales[name], 1) for name, x in rest.items()}


def _takes(wire: Any, x: jax.Array) -> bool:
    return isinstance(wire, Int8Wire) and wire.takes(x)


def _in_blocks(x: jax.Array) -> jax.Array:
    """float32[..., blocks, 256], from the last dimension."""
    return padded(x.astype(jnp.float32), int8.BLOCK).reshape(*x.shape[:-1], -1, int8.BLOCK)
