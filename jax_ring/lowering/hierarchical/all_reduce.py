"""The hierarchical all-reduce: jax_ring within hosts, XLA between them.

A host's ranks reduce-scatter; each then has a chunk of the host's result. Ranks with the same chunk on different hosts
all-reduce it by XLA, or exchange it. Then a host's ranks all-gather. One message leaves each host, not one per rank. A
large message takes these steps in parts: one crosses while others are summed and gathered. Of a small one, each host is
sent a copy.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering.call import ALL_GATHER, REDUCE_SCATTER, CallSpec
from jax_ring.lowering.hierarchical import crossing as by_xla
from jax_ring.lowering.hierarchical import wait_markers
from jax_ring.lowering.hierarchical.crossing import (
    Crossing,
    Types,
    by_all_reduce,
    by_exchange,
    chunk_size,
    decoded,
    encoded,
    fold,
    types_of,
)
from jax_ring.lowering.hierarchical.two_levels import Steps
from jax_ring.lowering.passes import exchanges, fold_casts
from jax_ring.lowering.topology import Levels
from jax_ring.lowering.xla import bitcasts, ops
from jax_ring.lowering.xla.ops import aval_of, aval_of_value

# Crosses a link of 1 Gbit/s in some 30 ms. The ranks of a host need a few ms to sum and gather it.
PART_BYTES = 4 << 20
# Number of parts to reduce-scatter before they can cross: the ranks of a host do not cross in step.
AHEAD = 2
# Up to this size, messages are concatenated to cross. On a link of 1 Gbit/s that takes as long from 256 KiB on.
JOINED_BYTES = 1 << 20
# An offset of this many elements is on a cache line, whatever their type.
_ALIGNMENT = 64


class Part(NamedTuple):
    """(offset, length) of a slice of an array."""

    begin: int
    size: int


def emit(call: CallSpec, ctx: _compat.LoweringContext, operands: Sequence) -> list:
    """Emits an all-reduce that crosses hosts.

    Operands are cut separately: concatenating would copy all data, and save at most one element of padding per
    operand and rank. One custom call takes all. Chunks are concatenated to cross, unless they are large. Large operands
    are apart, and cut into parts.
    """
    types = types_of(call.op, ctx.avals_in[0].dtype)
    in_parts = reduction = _Sum(ctx, call, by_all_reduce(call.op, call.levels.inter, types))
    if call.op == "sum" and types.gathered != types.scattered:  # small floats: an exchange sends fewer bytes
        in_parts = reduction._replace(crossing=by_exchange(call.levels.inter, types.gathered))
    large = [i for i, aval in enumerate(ctx.avals_in) if reduction.is_cut(aval)]
    whole = [i for i in range(len(operands)) if i not in large]
    results: dict[int, Any] = {}
    if whole:
        sums = _of_whole(Steps(ctx, call), [operands[i] for i in whole], [ctx.avals_in[i] for i in whole], types)
        results.update(zip(whole, sums, strict=True))
    position = hlo.partition_id() if large else None
    for i in large:
        aval = ctx.avals_in[i]
        unrounded = fold_casts.unrounded(operands[i]) if in_parts.converts else None
        if unrounded is None:
            results[i], position = in_parts.in_parts(operands[i], aval, position)
        else:
            wide = aval_of(np.float32, *aval.shape)
            total, position = in_parts.of_rounded().in_parts(unrounded, wide, position)
            results[i] = fold_casts.rounded_again(ctx, total, aval.dtype)
    return [results[i] for i in range(len(operands))]


def _of_whole(steps: Steps, operands: Sequence, avals: Sequence, types: Types) -> list:
    """Sums of operands that are not cut."""
    call, num_ranks = steps.call, steps.call.levels.num_ranks
    sizes = [chunk_size(aval.size, num_ranks) for aval in avals]
    full = [aval_of(types.scattered, num_ranks, size) for size in sizes]
    values = [to_chunks(x, aval) for x, aval in zip(operands, full, strict=True)]
    values = steps.intra(REDUCE_SCATTER, values, [aval_of(types.scattered, size) for size in sizes])
    crossed: dict[int, Any] = {}
    limit = JOINED_BYTES if call.service.engine == "cpu" else 0  # NCCL's take little longer for more operands
    for group in _crossing_together([num_ranks * size * types.crossing.itemsize for size in sizes], limit):
        crossed.update(zip(group, _across(steps, [values[i] for i in group], types), strict=True))
    values = [crossed[i] for i in range(len(sizes))]
    values = steps.intra(ALL_GATHER, values, [aval_of(types.gathered, num_ranks, size) for size in sizes])
    return [from_chunks(x, aval) for x, aval in zip(values, avals, strict=True)]


def _across(steps: Steps, values: Sequence, types: Types) -> Sequence:
    """Reduces chunks over the hosts by one collective of XLA.

    An all-reduce of Gloo's sends four messages and more, one after another, and XLA makes one for each operand.
    Small chunks take one message to each host: a rank sends its own to all, and reduces all in host order.
    """
    levels, op, engine = steps.call.levels, steps.call.op, steps.call.service.engine
    if types.crossing != types.scattered:
        values = steps.each(partial(encoded, op=op, types=types), values)
    num_bytes = sum(aval_of_value(x).size for x in values) * types.crossing.itemsize
    if exchanges.are_copied(engine, levels, num_bytes):
        values = steps.each(bitcasts.to_words, values)
        values = steps.each(lambda x: jnp.broadcast_to(x, (levels.num_hosts, x.size)), values)
        values = steps.inter(partial(by_xla.all_to_all, levels.inter), values)
        values = steps.each(lambda x: fold(bitcasts.from_words(x, types.crossing), op), values)
    else:
        values = steps.inter(partial(by_xla.all_reduce, op, levels.inter), values)
    if types.gathered != types.crossing:
        values = steps.each(partial(decoded, types=types), values)
    return values


def _crossing_together(num_bytes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of messages of these sizes: of those up to a limit, which cross as one, and each other one."""
    small = [i for i, size in enumerate(num_bytes) if size <= limit]
    return [small] * bool(small) + [[i] for i, size in enumerate(num_bytes) if size > limit]


# ---- Sums in parts ---------------------------------------------------------------------------------------------------


def emit_sum(call: CallSpec, ctx: _compat.LoweringContext, operand: ir.Value, crossing: Crossing):
    """Emits the sum of one operand between CPU processes with another crossing."""
    return _Sum(ctx, call, crossing).in_parts(operand, ctx.avals_in[0], hlo.partition_id())[0]


def _parts_for(size: int, levels: Levels, crossing: Crossing) -> list[Part]:
    """The parts of an operand of this size."""
    ranks = levels.num_ranks
    padded = ranks * chunk_size(size, ranks, crossing.unit)
    return parts_of(padded, ranks, crossing.bytes_each, crossing.unit, crossing.max_parts)


class _Sum(NamedTuple):
    ctx: _compat.LoweringContext
    call: CallSpec
    crossing: Crossing
    rounds_to: str = ""  # the type to which float32 operands are rounded before the addition

    @property
    def converts(self) -> bool:
        """Whether steps within a host convert between 16-bit floats and float32."""
        rounded, num_processes = self.crossing.rounded, self.call.levels.num_processes
        return rounded is not None and rounded.itemsize == 2 and num_processes == 1

    def of_rounded(self) -> "_Sum":
        """The sum of float32 rounded to this one's small floats, with a float32 result."""
        crossing = self.crossing
        assert crossing.rounded is not None
        return self._replace(rounds_to=crossing.rounded.name, crossing=crossing._replace(result=crossing.scattered))

    def is_cut(self, aval: jax.core.ShapedArray) -> bool:
        levels = self.call.levels
        # In ring order, the bits depend on how an array is cut.
        return (
            self.call.options.order != "ring"
            and wait_markers.are_enclosed(self.ctx, levels.inter)
            and len(_parts_for(aval.size, levels, self.crossing)) > 1
        )

    def in_parts(self, operand: ir.Value, aval: jax.core.ShapedArray, position: ir.Value | None) -> tuple[Any, Any]:
        """The sum of an operand in parts, and the position for the next operand's.

        While a part crosses, later ones are reduce-scattered and earlier ones all-gathered. All ranks cross in one
        order, and XLA cannot combine: the mesh position goes through the custom calls around each crossing, as if
        computed there. Reduce-scatters wait for it, too. Other steps run when operands are there, unless XLA reuses a
        buffer that is still read: so the last all-gather takes all crossings and positions. Operands of another dtype
        are converted by part.
        """
        parts = _parts_for(aval.size, self.call.levels, self.crossing)
        result = aval_of(self.crossing.result, parts[-1].begin + parts[-1].size)
        operand = to_chunks(operand, result.update(dtype=aval.dtype))
        steps = self.crossing.steps
        values: list = []  # latest value of each part
        positions: list = []
        total: Sequence = []

        def scatter(until: int) -> None:
            for part in parts[len(values) : until]:
                values.append(steps[0].compute(self.ctx, self._scatter_part(operand, part, positions[-1:])))

        scatter(1)
        for k, i in _in_turn(len(parts), len(steps)):
            step = steps[i]

            def cross(values, k=k, step=step):
                x, position = values
                positions.append(position)
                scatter(k + 1 + AHEAD)
                return [step.cross(self.ctx, x), position]

            x = values[k] if i == 0 else step.compute(self.ctx, values[k])
            values[k], position = wait_markers.enclose(
                self.ctx, [x, position], cross, call=self.call.description, groups=self.call.levels.inter
            )
            if i < len(steps) - 1:
                continue
            gathered = [values[k], *total]
            if k == len(parts) - 1:
                gathered += [*values[:k], *positions]
            total = Steps(self.ctx, self.call).intra(ALL_GATHER, gathered, [result], part=parts[k])
        return from_chunks(total[0], aval), position

    def _scatter_part(self, operand, part: Part, positions: Sequence):
        """A part's chunk, converted, once the positions are there."""
        whole = ir.RankedTensorType(operand.type)
        dtype, steps = self.crossing.scattered, Steps(self.ctx, self.call)
        if whole.element_type != mlir.dtype_to_ir_type(dtype) and not self.converts:
            operand = ops.convert(_part_after(operand, part, positions), dtype)
            part = Part(0, part.size)
        chunk = aval_of(dtype, part.size // self.call.levels.num_ranks)
        of_part = {"part": part, "rounds_to": self.rounds_to}
        return steps.intra(REDUCE_SCATTER, [operand, *positions], [chunk], **of_part)[0]


def _in_turn(num_parts: int, num_steps: int) -> list[tuple[int, int]]:
    """The order of (part, step).

    Before a part's next step, the next part takes the one before: the link is busy during additions.
    """
    order = ((begin - step, step) for begin in range(num_parts + num_steps - 1) for step in range(num_steps))
    return [(part, step) for part, step in order if 0 <= part < num_parts]


def _part_after(x, part: Part, positions: Sequence):
    """A part of an array, read once the positions are there.

    Adds position >> 31, always 0, to the start, as a fake data dependency: XLA would convert all parts before the first
    crosses.
    """
    begin = mlir.ir_constant(np.uint32(part.begin))
    for position in positions:
        begin = hlo.add(begin, hlo.shift_right_logical(position, mlir.ir_constant(np.uint32(31))))
    return hlo.dynamic_slice(x, [begin], mlir.dense_int_array([part.size]))


def parts_of(size: int, num_chunks: int, itemsize: int, unit: int = 1, max_parts: int = 16) -> list[Part]:
    """The parts of an array, with as many elements for each chunk.

    Each begins at a cache line in all chunks, and a multiple of `unit`.
    """
    num_parts = min(size * itemsize // PART_BYTES, max_parts)
    unit = num_chunks * math.lcm(_ALIGNMENT, unit)
    if num_parts < 2 or size < num_parts * unit:
        return [Part(0, size)]
    length = math.ceil(size / num_parts / unit) * unit
    return [Part(begin, min(length, size - begin)) for begin in range(0, size, length)]


def to_chunks(x: ir.Value, aval: jax.core.ShapedArray) -> ir.Value:
    """x converted, flattened and padded for `aval`."""
    num_elements = math.prod(ir.RankedTensorType(x.type).shape)
    x = ops.convert(ops.reshape(x, (num_elements,)), aval.dtype)
    if padding := aval.size - num_elements:
        zero = mlir.ir_constant(np.zeros((), aval.dtype))
        x = hlo.pad(x, zero, *(mlir.dense_int_array([n]) for n in (0, padding, 0)))
    return ops.reshape(x, aval.shape)


def from_chunks(x: ir.Value, aval: jax.core.ShapedArray) -> ir.Value:
    """The array of `aval`'s shape that `to_chunks` cut, in the dtype of the chunks."""
    x = ops.reshape(x, (math.prod(ir.RankedTensorType(x.type).shape),))
    x = hlo.slice(x, *(mlir.dense_int_array([n]) for n in (0, aval.size, 1)))
    return ops.reshape(x, aval.shape)
