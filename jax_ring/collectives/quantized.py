"""The sum that sends scale groups of 8 bits: all-to-all, sum in float32, all-gather.

Values are rounded twice for any number of ranks: by the contributor and by the owner of the sum. The scheme follows
ZeRO++ (Wang et al., 2023) and EQuARX (Ahmed et al., 2025).
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from jax_ring import _compat, runtime
from jax_ring.collectives import scale_groups as int8
from jax_ring.collectives.axes import AxisName, axes_of, check_named, num_ranks, split_axes
from jax_ring.collectives.leaves import as_varying
from jax_ring.collectives.primitives import register, ring_all_gather_p, ring_psum_scatter_p
from jax_ring.lowering.call import ALL_REDUCE, CallSpec
from jax_ring.lowering.custom_call.operation import describe
from jax_ring.lowering.hierarchical import all_reduce, crossing, wait_markers
from jax_ring.lowering.hierarchical.crossing import Crossing, Step
from jax_ring.lowering.plan import STEPS, replica_groups, who_serves
from jax_ring.lowering.topology import Groups, Levels
from jax_ring.lowering.xla import ops
from jax_ring.lowering.xla.fallback import rank_in_group
from jax_ring.options import Options

logger = logging.getLogger("jax_ring")


def quantized_psum(
    function: str,
    x: jax.Array,
    axis_name: AxisName,
    *,
    key: jax.Array | None = None,
    by_host: bool = True,
    with_error: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """The sum of `x` over the ranks, sent in 8 bits per element, and the rounding error.

    Args:
      function: the public function, for errors.
      x: float32[n].
      axis_name: a mapped axis, or several.
      key: for stochastic rounding, the same on all ranks; None for rounding to nearest.
      by_host: whether to sum in float32 within hosts, and round only what crosses them.
      with_error: whether to return the error; else None.

    Returns:
      The sum, the same on all ranks, and this rank's error, a float32[n]. The sum of `x` is the first plus the sum of
        the second over the ranks, up to rounding in float32. Where it is not finite, the first is the same infinity or
        NaN, and the second 0.
    """
    axes = _compat.skip_size_one_axes(axes_of(axis_name))
    if not axes:
        return x, jnp.zeros_like(x) if with_error else None
    check_named(function, axes)
    operands = [as_varying(function, x, axes, mixed=False)]
    key_impl = None
    if key is not None:
        key = jax.random.fold_in(key, lax.axis_index(axes))
        key_impl = jax.random.key_impl(key)
        operands.append(as_varying(function, jax.random.key_data(key), axes))
    # vma tracks mesh axes only; over vmap axes the result keeps the operand's type.
    invariant = _compat.check_vma() and bool(split_axes(axes)[1])
    total, *error = quantized_psum_p.bind(
        *operands, function=function, axes=axes, key_impl=key_impl, by_host=by_host, with_error=with_error,
        invariant=invariant,
    )  # fmt: skip
    return total, error[0] if with_error else None


# ---- The algorithm --------------------------------------------------------------------------------------------------


def _on_one_level(x: jax.Array, *key_data: jax.Array, axes: tuple, key_impl):
    """`quantized_psum` of float32[..., n], row by row, between all ranks."""
    if x.ndim > 1:
        return jax.vmap(partial(_on_one_level, axes=axes, key_impl=key_impl))(x, *key_data)
    packets, error = _reduce_scatter(x, _keys(key_data, key_impl), axes, None, num_ranks(axes), lax.axis_index(axes))
    return _values(lax.all_gather(packets, axes), x), error


def _by_host(x: jax.Array, *key_data: jax.Array, axes: tuple, key_impl, levels: Levels):
    """The sum between the ranks that own one chunk of their hosts' sums.

    axes: of the whole mesh: ranks are the mesh positions of `levels`.
    """
    if x.ndim > 1:
        return jax.vmap(partial(_by_host, axes=axes, key_impl=key_impl, levels=levels))(x, *key_data)
    rank, host = (rank_in_group(axes, groups) for groups in (levels.intra, levels.inter))
    num_chunks = levels.num_ranks
    intra: dict[str, Any] = {
        "axes": axes, "axis_index_groups": levels.intra, "axis_size": num_chunks, "dimension": 0, "tiled": False,
        "options": Options(),
    }  # fmt: skip
    chunks = _padded(x, num_chunks * levels.num_hosts * int8.GROUP).reshape(num_chunks, -1)
    (chunk,) = ring_psum_scatter_p.bind(chunks, **intra)
    packets, own_error = _reduce_scatter(chunk, _keys(key_data, key_impl), axes, levels.inter, levels.num_hosts, host)
    packets = lax.all_gather(packets, axes, axis_index_groups=levels.inter)
    (packets,) = ring_all_gather_p.bind(packets, **intra)
    error = jnp.where(jnp.arange(num_chunks)[:, None] == rank, own_error, 0)
    return _values(packets, x), error.reshape(-1)[: x.size]


def _reduce_scatter(x: jax.Array, keys: tuple, axes: tuple, groups, num_ranks: int, rank: jax.Array):
    """The packets of this rank's part of the sum, and its rounding error, like x."""
    scale_groups = _padded(x, num_ranks * int8.GROUP).reshape(num_ranks, -1, int8.GROUP)
    packets = int8.encode(scale_groups, keys[0])
    received = lax.all_to_all(packets, axes, 0, 0, axis_index_groups=groups)
    total = int8.fold(received)
    total_packets = int8.encode(total, keys[1])
    is_own = jnp.arange(num_ranks)[:, None, None] == rank
    error = int8.rounding_error(scale_groups, packets)
    error += jnp.where(is_own, int8.rounding_error(total, total_packets), 0)
    return total_packets, error.reshape(-1)[: x.size]


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, (0, -x.size % multiple))


def _values(packets: jax.Array, like: jax.Array) -> jax.Array:
    return int8.decode(packets).reshape(-1)[: like.size]


def _keys(key_data: tuple, key_impl) -> tuple:
    if not key_data:
        return None, None
    key = jax.random.wrap_key_data(*key_data, impl=key_impl)
    return tuple(jax.random.fold_in(key, stage) for stage in (1, 2))


def _in_packets(groups: Groups) -> Crossing:
    """How the sum crosses hosts in parts: in packets, added by the ranks that own a part.

    groups: ranks with the same chunk on different hosts.
    """
    num_hosts, dtype = len(groups[0]), np.dtype(np.float32)
    unit = num_hosts * int8.GROUP  # a scale group for each host

    def encode(x):
        return int8.encode(x.reshape(num_hosts, -1, int8.GROUP))

    def add(received):
        return int8.encode(int8.fold(received))

    steps = [
        Step(lambda ctx, x: ops.inline_one(ctx, encode, x), lambda ctx, x: crossing.all_to_all(groups, x)),
        Step(lambda ctx, x: ops.inline_one(ctx, add, x), lambda ctx, x: crossing.all_gather(groups, x)),
    ]
    # Twice the wire size. A step between processes takes as long for a quarter of the bytes, so use fewer steps.
    return Crossing(dtype, dtype, steps, bytes_each=2, unit=unit)


# ---- The primitive --------------------------------------------------------------------------------------------------

# A primitive, because the hosts of the ranks are known only at lowering.
quantized_psum_p = Primitive("ring_quantized_psum")
quantized_psum_p.multiple_results = True


def _abstract_eval(x, *key_data, axes, with_error, invariant, **params):
    del key_data, params  # do not affect the types
    of_psum: Callable = _compat.abstract_psum
    if invariant:
        of_psum = partial(_compat.abstract_invariant, _compat.psum_invariant_p)
    total, effects = of_psum(x, axes=axes, axis_index_groups=None)
    return [total, x][: 1 + with_error], effects


def _steps(platforms, axis_context, *, axes, key_impl, by_host, with_error, **params):
    """Computes the results by the collectives that this primitive becomes."""
    del params  # do not affect the results
    steps: Callable = partial(_on_one_level, axes=axes, key_impl=key_impl)
    if by_host:
        levels = _call(platforms, axis_context, axes).service.levels
        if levels is not None and levels.inter:
            steps = partial(_by_host, axes=axis_context.mesh.axis_names, key_impl=key_impl, levels=levels)
    return lambda *operands: steps(*operands)[: 1 + with_error]


def _call(platforms, axis_context, axes: tuple, function: str = "") -> CallSpec:
    call = CallSpec(function, ALL_REDUCE, axes=axes, groups=replica_groups(axis_context, axes, None))
    return call._replace(service=who_serves(platforms, axis_context, call.groups, call.kind, call.options))


def _lower(ctx, *operands, **params):
    platforms, axis_context = _compat.platforms_of(ctx), ctx.module_context.axis_context
    within_hosts = False
    if params["by_host"]:
        call = _call(platforms, axis_context, params["axes"], params["function"])
        _note_service(call)
        within_hosts = call.service.levels is not None and bool(call.levels.inter)
        if within_hosts and _can_be_cut(ctx, call.levels, params["with_error"]):
            call = call._replace(description=describe(call, ctx.avals_in))
            return [all_reduce.emit_sum(call, ctx, *operands, _in_packets(call.levels.inter))]
    steps = _steps(platforms, axis_context, **params)
    return ops.inline(ctx, steps, operands, ctx.avals_in, lax_by_xla=within_hosts)


def _can_be_cut(ctx, levels: Levels, with_error: bool) -> bool:
    """Whether the sum may cross hosts in parts. Errors and random keys depend on the ranks of scale groups."""
    (x, *key_data) = ctx.avals_in
    return (
        wait_markers.are_enclosed(ctx, levels.inter)
        and levels.num_processes == 1
        and x.ndim == 1
        and not (with_error or key_data)
    )


def _note_service(call: CallSpec) -> None:
    function, axes, levels = call.function, call.axes, call.service.levels
    if levels is not None:
        if levels.inter:
            logger.info("%s over %s rounds only what crosses %d hosts", function, axes, levels.num_hosts)
    elif jax.process_count() > 1:
        text = f"{function} over {axes} rounds the values of every rank, and XLA exchanges them: {call.service.why_not}"
        if runtime.STRICT:
            raise NotImplementedError(
                f"{text}. {runtime.STRICT_VARIABLE}=1 forbids it; unset the variable to allow it."
            )
        logger.info("%s", text)


def _refuse_jvp(primals, tangents, *, function, **params):
    # The derivative of rounding is zero, which is of no use.
    raise NotImplementedError(f"{function} with wire='int8' has no derivative. Differentiate before reducing.")


def _batch(axis_data, operands, dims, *, axes, function, **params):
    if axis_data.name not in axes:
        rows = [batching.bdim_at_front(x, d, axis_data.size) for x, d in zip(operands, dims, strict=True)]
        results = quantized_psum_p.bind(*rows, axes=axes, function=function, **params)
        return results, [0] * len(results)
    if len(axes) > 1:
        raise NotImplementedError(
            f"{function} with wire='int8' over {axes} includes the vmap axis {axis_data.name!r}, which must be the "
            "only axis. Map them all over devices with shard_map."
        )
    fun = partial(_on_one_level, axes=axes, key_impl=params["key_impl"])
    over_axis = jax.custom_jvp(jax.vmap(fun, dims, axis_name=axis_data.name, axis_size=axis_data.size))
    over_axis.defjvp(partial(_refuse_jvp, function=function))
    total, error = over_axis(*operands)
    results = 1 + params["with_error"]
    return [total[0], error][:results], [None, 0][:results]


register(quantized_psum_p, _abstract_eval, _refuse_jvp, _batch, _lower)
STEPS[quantized_psum_p] = _steps
