"""XLA's collectives between hosts, in groups of mesh positions.

As operations, because JAX's rules derive groups from mesh axes, with which hosts need not be aligned, and traced `lax`
would be overridden.
"""

from collections.abc import Sequence

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering.topology import Groups
from jax_ring.lowering.xla import ops

_REDUCERS = {"sum": hlo.add, "max": hlo.maximum, "min": hlo.minimum}


def all_reduce(op: str, groups: Groups, x):
    """The sum, maximum or minimum of x over each group."""
    call = hlo.AllReduceOp(
        [x.type],
        [x],
        replica_groups=mlir.dense_int_elements(groups),
        channel_handle=_channel(),
        use_global_device_ids=True,
    )
    scalar = ir.RankedTensorType.get((), ir.RankedTensorType(x.type).element_type)
    block = call.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        hlo.return_([_REDUCERS[op](*block.arguments)])
    return call.result


def all_gather(groups: Groups, x):
    """The members' x, along a new leading dimension."""
    type_of = ir.RankedTensorType(x.type)
    call = hlo.AllGatherOp(
        [ir.RankedTensorType.get([len(groups[0]), *type_of.shape], type_of.element_type)],
        [ops.reshape(x, (1, *type_of.shape))],
        all_gather_dim=mlir.i64_attr(0),
        replica_groups=mlir.dense_int_elements(groups),
        channel_handle=_channel(),
        use_global_device_ids=True,
    )
    return call.results[0]


def all_to_all(groups: Groups, x):
    """What members send: x has a block for each along the leading dimension."""
    call = hlo.AllToAllOp(
        [x],
        split_dimension=mlir.i64_attr(0),
        concat_dimension=mlir.i64_attr(0),
        split_count=mlir.i64_attr(len(groups[0])),
        replica_groups=mlir.dense_int_elements(groups),
        channel_handle=_channel(),
    )
    return call.results[0]


def permute(pairs: Sequence[tuple[int, int]], x):
    """What each mesh position is sent, by pairs; else zeros."""
    return hlo.CollectivePermuteOp(x, mlir.dense_int_elements(np.array(pairs)), channel_handle=_channel()).result


def _channel():
    return hlo.ChannelHandle.get(_compat.COLLECTIVE_CHANNEL_ID, mlir.DEVICE_TO_DEVICE_TYPE)
