"""Gradients as 8-bit blocks: in which buckets, with which feedback."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName
from jax_ring.collectives.quantized import quantized_psum
from jax_ring.distributed.discovery import check_agreement
from jax_ring.training.buckets import plan_buckets
from jax_ring.training.wire import Int8Wire


def reduce_in_blocks(
    function: str,
    wire: Int8Wire,
    tree: Any,
    residual: Any,
    axis_name: AxisName,
    divisor: int,
    *,
    by_host: bool,
    **bucket_sizes: int,
) -> tuple[Any, Any]:
    """The sums, divided in float32, and this rank's rounding errors.

    In the dtypes of `tree` and `residual`; None without a residual. A bucket's leaves are concatenated before they are
    cut into blocks, so blocks may span leaves.

    tree: leaves that the wire takes.
    residual: None, or a tree to be added to `tree`, in float32.
    **bucket_sizes: as for `plan_buckets`, in bytes of codes.
    """
    likes, structure = jax.tree.flatten(tree)
    leaves = [x.astype(jnp.float32) for x in likes]
    if residual is not None:
        leaves = [x + r.astype(jnp.float32) for x, r in zip(leaves, jax.tree.leaves(residual), strict=True)]
    plan = plan_buckets(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int8), tree), **bucket_sizes)
    check_agreement(function, f"over {axis_name!r} in blocks\n{plan}\nfingerprint {plan.fingerprint}")
    sums, errors = list(leaves), list(leaves)
    packs = [pack for bucket in plan.buckets for pack in _of_one_type(bucket.leaves, leaves)]
    for number, pack in enumerate(packs):
        packed = jnp.concatenate([leaves[i].reshape(-1) for i in pack])
        key = None if wire.key is None else jax.random.fold_in(wire.key, number)
        total, error = quantized_psum(
            function, packed, axis_name, key=key, by_host=by_host, with_error=residual is not None
        )
        begin = 0
        for i in pack:
            part = slice(begin, begin := begin + leaves[i].size)
            sums[i] = total[part].reshape(leaves[i].shape)
            if error is not None:
                errors[i] = error[part].reshape(leaves[i].shape)
    sums = [(s if divisor == 1 else s / divisor).astype(like.dtype) for s, like in zip(sums, likes, strict=True)]
    if residual is None:
        return jax.tree.unflatten(structure, sums), None
    errors = [e.astype(r.dtype) for e, r in zip(errors, jax.tree.leaves(residual), strict=True)]
    return jax.tree.unflatten(structure, sums), jax.tree.unflatten(structure, errors)


def _of_one_type(places: Sequence[int], leaves: Sequence[jax.Array]) -> list[list[int]]:
    """The places, by axes over which leaves vary: what is packed varies over all."""
    packs: dict[frozenset, list[int]] = {}
    for i in places:
        packs.setdefault(_compat.varying_axes(leaves[i]), []).append(i)
    return list(packs.values())


def partition(tree: Any, chosen: Any) -> tuple[Any, Any]:
    """Two trees: the leaves for which `chosen` is true, and the others, with None for the rest."""
    first = jax.tree.map(lambda x, c: x if c else None, tree, chosen)
    return first, jax.tree.map(lambda x, c: None if c else x, tree, chosen)


def merge(first: Any, second: Any) -> Any:
    """The inverse of `partition`."""
    return jax.tree.map(lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None)
