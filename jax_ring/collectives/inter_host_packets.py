"""8-bit blocks that cross hosts in parts: packets, added by the ranks that own a part."""

import numpy as np

from jax_ring.collectives import int8_blocks as int8
from jax_ring.lowering.group_tables import Groups
from jax_ring.lowering.hierarchical import xla_ops
from jax_ring.lowering.hierarchical.inter_host import Crossing, Step
from jax_ring.lowering.xla import ops
from jax_ring.lowering.xla.ops import aval_of


def in_packets(groups: Groups) -> Crossing:
    """A crossing whose all-gather decodes the packets of the sum.

    groups: ranks with the same shard on different hosts.
    """
    num_hosts, dtype = len(groups[0]), np.dtype(np.float32)
    unit = num_hosts * int8.BLOCK  # a block for each host

    def encode(x):
        return int8.encode(x.reshape(num_hosts, -1, int8.BLOCK))

    def add(received):
        return int8.encode(int8.fold(received))

    def steps(size: int) -> list[Step]:
        shard = aval_of(dtype, size)
        packets = aval_of(np.int8, num_hosts, size // unit, int8.PACKET)
        total = aval_of(np.int8, *packets.shape[1:])
        return [
            Step(
                lambda ctx, x: ops.inline_one(ctx, encode, x, shard), packets,
                lambda ctx, x: xla_ops.all_to_all(groups, x), packets,
            ),
            Step(
                lambda ctx, x: ops.inline_one(ctx, add, x, packets), total,
                lambda ctx, x: xla_ops.all_gather(groups, x), packets,
            ),
        ]  # fmt: skip

    # Twice the wire size. A step between processes takes as long for a quarter of the bytes, so use fewer steps.
    return Crossing(dtype, dtype, steps, bytes_each=2, unit=unit)
