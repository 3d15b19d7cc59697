"""How 8-bit blocks cross hosts in parts: packets, which are added by the ranks that own a part of the blocks."""

from typing import NamedTuple

import numpy as np

from jax_ring.collectives import int8_blocks as int8
from jax_ring.lowering.group_tables import Groups
from jax_ring.lowering.hierarchical import xla_ops
from jax_ring.lowering.hierarchical.inter_host import Step
from jax_ring.lowering.xla import ops
from jax_ring.lowering.xla.ops import aval_of


class InPackets(NamedTuple):
    """A `inter_host.Crossing`. The all-gather decodes the packets of the sum.

    Attributes:
      groups: of the ranks that have the same shard on different hosts.
    """

    groups: Groups
    scattered: np.dtype = np.dtype(np.float32)
    result: np.dtype = np.dtype(np.float32)
    # Twice what crosses. Steps between processes take as long for a quarter of the bytes, so there are fewer of them.
    bytes_each: int = 2
    max_parts: int = 16

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return len(self.groups[0])

    @property
    def unit(self) -> int:
        """A shard has a multiple of so many elements: a block for each host."""
        return self.num_hosts * int8.BLOCK

    def steps(self, size: int) -> list[Step]:
        """The steps, for a shard of so many elements."""
        shard = aval_of(self.scattered, size)
        packets = aval_of(np.int8, self.num_hosts, size // self.unit, int8.PACKET)
        total = aval_of(np.int8, *packets.shape[1:])

        def encode(x):
            return int8.encode(x.reshape(self.num_hosts, -1, int8.BLOCK))

        def add(received):
            return int8.encode(int8.fold(received))

        return [
            Step(
                lambda ctx, x: ops.inline_one(ctx, encode, x, shard), packets,
                lambda ctx, x: xla_ops.all_to_all(self.groups, x), packets,
            ),
            Step(
                lambda ctx, x: ops.inline_one(ctx, add, x, packets), total,
                lambda ctx, x: xla_ops.all_gather(self.groups, x), packets,
            ),
        ]  # fmt: skip
