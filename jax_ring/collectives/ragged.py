"""The ragged all-to-all: slices of sizes known at run time, from every rank to every other."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, Groups, axes_of, check_groups, check_named, group_size
from jax_ring.collectives.exchange import ring_all_to_all
from jax_ring.collectives.leaves import as_varying, check_dtype
from jax_ring.collectives.primitives import register
from jax_ring.collectives.vmap_axis import accumulator_dtype
from jax_ring.lowering import ragged
from jax_ring.lowering.call import RAGGED_ALL_TO_ALL, CallSpec
from jax_ring.options import make_options

_NUMBERS = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


def ring_ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups | None = None,
) -> jax.Array:
    """Sends slices of `operand` to the ranks of a mapped axis. A drop-in for `jax.lax.ragged_all_to_all`.

        # sizes: rows of x for each rank, of shape (p,); room: zeros, in which rows arrive
        starts = jnp.cumsum(sizes) - sizes
        received = ring_all_to_all(sizes, "data", 0, 0, tiled=True)
        places = ring_all_to_all(jnp.cumsum(received) - received, "data", 0, 0, tiled=True)
        y = ring_ragged_all_to_all(x, room, starts, sizes, places, received, axis_name="data")

    With K slices and p ranks, slice i goes to rank i // (K // p): rows `input_offsets[i]` to `input_offsets[i] +
    send_sizes[i]` of `operand` become rows `output_offsets[i]` and following of that rank's result. Bits are kept, NaNs
    included. On GPUs, and between hosts, XLA serves the call.

    The transpose sends cotangents back, as in `jax.lax`. Overlapping slices have none: a row sent twice would get one
    of its cotangents.

    Args:
      operand: an array of shape (N, ...), of any dtype but random keys.
      output: the result where nothing is received, of shape (M, ...) and the same dtype.
      input_offsets, send_sizes: integer arrays of shape (K,), K a multiple of p: the rows to send.
      output_offsets: integers of the same shape: where these rows begin in the receivers' results.
      recv_sizes: integers of the same shape: the rows of each slice that this rank receives, `all_to_all(send_sizes)`.
      axis_name: a `shard_map` or `pmap` axis, or a sequence of them; no vmap axis.
      axis_index_groups: a list of lists of ranks, all of one length.

    Returns:
      An array like `output`. With vma tracking it varies over the axis.

    Raises:
      ValueError: if shapes do not fit each other or the number of ranks, or sizes and offsets are no integers. At run
        time, on all ranks, if a slice leaves its operand or result, or its receiver expects another size. This is not
        checked where no engine serves the call, such as across hosts: rows are then wrong, as in `lax`.
      NotImplementedError: over a vmap axis. Others: those of `ring_psum`.
    """
    function, options = "ring_ragged_all_to_all", make_options("ring_ragged_all_to_all")
    axes = axes_of(axis_name)
    if not axes:
        raise ValueError(f"{function} needs at least one axis, got axis_name={axis_name!r}")
    check_named(function, axes)
    groups = check_groups(function, axis_index_groups, axes)
    size = group_size(function, axes, groups)
    operand, output = jnp.asarray(operand), jnp.asarray(output)
    numbers = [jnp.asarray(x) for x in (input_offsets, send_sizes, output_offsets, recv_sizes)]
    for name, x in zip(_NUMBERS, numbers, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.integer) or x.ndim != 1 or x.shape[0] < 1:
            raise ValueError(f"{function}: {name} must be integers of shape (K,) with K > 0, got {jax.typeof(x)}")
        if x.shape != numbers[0].shape or x.shape[0] % size:
            raise ValueError(
                f"{function}: {', '.join(_NUMBERS)} must be of one length, a multiple of the number of ranks, {size}; "
                f"got {[x.shape[0] for x in numbers]}"
            )
    if operand.ndim < 1 or operand.shape[1:] != output.shape[1:] or operand.ndim != output.ndim:
        raise ValueError(
            f"{function}: operand and output must have rows of one shape, got {jax.typeof(operand)} and "
            f"{jax.typeof(output)}"
        )
    if operand.dtype != output.dtype:
        raise ValueError(f"{function}: operand is {operand.dtype} and output {output.dtype}; they must be of one dtype")
    check_dtype(function, RAGGED_ALL_TO_ALL, "sum", operand)
    # Batching and the transpose add offsets, to numbers of rows that a small type may not hold.
    numbers = [x.astype(accumulator_dtype(x.dtype)) for x in numbers]
    operands = _alike([operand, output, *numbers], axes)
    return ring_ragged_all_to_all_p.bind(*operands, axes=axes, axis_index_groups=groups, options=options)


def _alike(operands: list, axes: tuple) -> list:
    """The operands, cast to values that vary over the same axes, as the result does."""
    all_axes = dict.fromkeys(axis for x in operands for axis in sorted(_compat.varying_axes(x), key=str))
    return [as_varying("ring_ragged_all_to_all", x, tuple({**dict.fromkeys(axes), **all_axes})) for x in operands]


def _abstract_eval(operand, output, *numbers, axes, axis_index_groups, options):
    del operand, numbers, options
    # Called for its effects. The result has the type of the output.
    return _compat.abstract_psum(output, axes=axes, axis_index_groups=axis_index_groups)


def _jvp(primals, tangents, **params):
    out = ring_ragged_all_to_all_p.bind(*primals, **params)
    sent, kept = tangents[:2]
    if type(sent) is ad.Zero and type(kept) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    operands = [ad.instantiate_zeros(sent), ad.instantiate_zeros(kept), *primals[2:]]
    return out, ring_ragged_all_to_all_p.bind(*_alike(operands, params["axes"]), **params)


def _transpose(cotangent, operand, output, *numbers, **params):
    if type(cotangent) is ad.Zero:
        return [ad.Zero(operand.aval.to_ct_aval()), ad.Zero(output.aval.to_ct_aval()), *[None] * len(numbers)]
    input_offsets, send_sizes, output_offsets, recv_sizes = numbers
    axes, groups = params["axes"], params["axis_index_groups"]
    swap = partial(ring_all_to_all, axis_name=axes, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True)
    begins = swap(output_offsets)
    to_operand = to_output = None
    if ad.is_undefined_primal(operand):
        zeros = jnp.zeros(operand.aval.shape, operand.aval.dtype)
        back = _alike([cotangent, zeros, begins, recv_sizes, swap(input_offsets), send_sizes], axes)
        to_operand = ring_ragged_all_to_all_p.bind(*back, **params)
    if ad.is_undefined_primal(output):
        edges = jnp.zeros(cotangent.shape[0] + 1, jnp.int32).at[begins].add(1).at[begins + recv_sizes].add(-1)
        is_received = jnp.cumsum(edges)[:-1] > 0
        to_output = jnp.where(is_received.reshape(-1, *[1] * (cotangent.ndim - 1)), 0, cotangent)
    return [to_operand, to_output, *[None] * len(numbers)]


def _batch(axis_data, operands, dims, **params):
    if axis_data.name in params["axes"]:
        raise NotImplementedError(
            f"ring_ragged_all_to_all over the vmap axis {axis_data.name!r}, which its namesake in jax.lax does not "
            "take either. Map the axis over devices with shard_map."
        )
    if all(dim is None for dim in dims):
        return ring_ragged_all_to_all_p.bind(*operands, **params), None
    size = axis_data.size
    # Make the batch members consecutive rows and their slices those of one call. A rank's slices must stay together.
    batches = [batching.bdim_at_front(x, dim, size) for x, dim in zip(operands, dims, strict=True)]
    (operand, output), numbers = batches[:2], batches[2:]
    for i, num_rows in ((0, operand.shape[1]), (2, output.shape[1])):
        numbers[i] = numbers[i] + num_rows * jnp.arange(size, dtype=numbers[i].dtype)[:, None]
    num_ranks = group_size("ring_ragged_all_to_all", params["axes"], params["axis_index_groups"])

    def merge_numbers(x):
        return jnp.swapaxes(x.reshape(size, num_ranks, -1), 0, 1).reshape(-1)

    rows = [x.reshape(-1, *x.shape[2:]) for x in (operand, output)]
    result = ring_ragged_all_to_all_p.bind(*rows, *map(merge_numbers, numbers), **params)
    return result.reshape(output.shape), 0


ring_ragged_all_to_all_p = Primitive("ring_ragged_all_to_all")
_CALL = CallSpec("ring_ragged_all_to_all", RAGGED_ALL_TO_ALL, to_xla=_compat.lax_rule(_compat.ragged_all_to_all_p))
register(ring_ragged_all_to_all_p, _abstract_eval, _jvp, _batch, partial(ragged.lower, _CALL))
ad.primitive_transposes[ring_ragged_all_to_all_p] = _transpose
