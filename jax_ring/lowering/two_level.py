"""The hierarchical all-reduce across hosts: jax_ring's collectives within each host, XLA's all-reduce between hosts.

The ranks of a host reduce-scatter, after which each has the host's result for one shard of the message. The ranks with
the same shard on different hosts all-reduce it, served by XLA. Then the ranks of a host all-gather. In
total one message leaves each host, not one per rank. Parts of a large message take these steps one after the other, so
that one part crosses while others are summed and gathered.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring.lowering import between_hosts, crossing, custom_call, ops
from jax_ring.lowering.reach import Levels
from jax_ring.lowering.service import Service
from jax_ring.options import Options

# Crosses a link of 1 Gbit/s in some 30 ms. The ranks of a host need a few ms to sum and to gather it.
PART_BYTES = 4 << 20
# Each part is a few calls of the program.
MAX_PARTS = 16
# So many parts are reduce-scattered before they can cross: the ranks of a host do not cross in step.
AHEAD = 2
# So many elements begin at a cache line, whatever their type.
_ALIGNMENT = 64


class Part(NamedTuple):
    """Consecutive elements of an array: the first one, and how many."""

    begin: int
    size: int


class Types(NamedTuple):
    """The element types of the reduce-scatter, the all-reduce across hosts, and the all-gather."""

    scattered: np.dtype
    crossing: np.dtype
    gathered: np.dtype


def types_of(op: str, dtype) -> Types:
    """The element types of the steps of an all-reduce of `dtype` across hosts.

    Sums of small floats stay in float32 until they have crossed, so that they are rounded once, as on one host. On CPU
    devices this adds no network traffic, since XLA's all-reduce of them is in float32, too. Maxima and minima of floats
    cross as integers of the same order, because XLA's all-reduce of floats drops NaNs on CPU devices.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return Types(dtype, dtype, dtype)
    is_double = jnp.finfo(dtype).bits == 64
    if op != "sum":
        return Types(dtype, np.dtype(np.int64 if is_double else np.int32), dtype)
    accumulator = dtype if is_double else np.dtype(np.float32)
    return Types(accumulator, accumulator, dtype)


def emit(ctx, operands, *, kind: str, op: str, service: Service, call: str, options) -> list:
    """Emits an all-reduce that crosses hosts, and returns its results.

    Each operand is sharded separately. Concatenating them first would copy all of the data once more, and save less
    than one element of padding per operand and rank. One custom call takes all operands, and XLA combines its own
    all-reduces. Only large operands are apart, and cut into parts.
    """
    assert kind == "all_reduce"
    assert service.levels is not None
    reduction = _AllReduce(ctx, op, service, service.levels, call, options)
    parts = [reduction.parts_of(aval) for aval in ctx.avals_in]
    whole = [i for i, of_operand in enumerate(parts) if len(of_operand) == 1]
    results: dict[int, Any] = {}
    if whole:
        sums = reduction.of_whole([operands[i] for i in whole], [ctx.avals_in[i] for i in whole])
        results.update(zip(whole, sums, strict=True))
    position = hlo.partition_id() if len(whole) < len(operands) else None
    for i, aval in enumerate(ctx.avals_in):
        if i not in results:
            results[i], position = reduction.in_parts(operands[i], aval, parts[i], position)
    return [results[i] for i in range(len(operands))]


class _AllReduce(NamedTuple):
    """An all-reduce that crosses hosts, under lowering: the arguments of `emit`, and how groups are split by host."""

    ctx: mlir.LoweringRuleContext
    op: str
    service: Service
    levels: Levels
    call: str
    options: Options

    @property
    def num_shards(self) -> int:
        """The number of ranks of a group on each host."""
        return len(self.levels.within[0])

    @property
    def types(self) -> Types:
        """The element types of the steps."""
        aval: Any = self.ctx.avals_in[0]
        return types_of(self.op, aval.dtype)

    def parts_of(self, aval) -> list[Part]:
        """The parts of an operand that cross one after the other."""
        size = self.num_shards * shard_size(aval.size, self.num_shards)
        # In ring order, the bits depend on how an array is cut.
        if self.options.order == "ring" or not between_hosts.are_enclosed(self.ctx, self.levels.across):
            return [Part(0, size)]
        return parts_of(size, self.num_shards, self.types.crossing.itemsize)

    def of_whole(self, operands: Sequence, avals: Sequence) -> list:
        """The sums of operands that cross together."""
        sizes = [shard_size(aval.size, self.num_shards) for aval in avals]
        full = [_aval(self.types.scattered, self.num_shards, size) for size in sizes]
        shards = [_aval(self.types.scattered, size) for size in sizes]
        crossed = [_aval(self.types.gathered, size) for size in sizes]
        gathered = [_aval(self.types.gathered, self.num_shards, size) for size in sizes]
        values: Sequence = [to_shards(self.ctx, x, aval) for x, aval in zip(operands, full, strict=True)]
        values = self._within("reduce_scatter", values, full, shards)
        values = self._enclose(lambda values: list(map(self._all_reduce, values, shards)), values, shards, crossed)
        values = self._within("all_gather", values, crossed, gathered)
        return [from_shards(x, aval) for x, aval in zip(values, avals, strict=True)]

    def in_parts(self, operand, aval, parts: Sequence[Part], position) -> tuple[Any, Any]:
        """The sum of an operand in parts, and the position for those of the next one.

        While one part crosses, the next ones are reduce-scattered and those before are all-gathered. The parts cross in
        one order on all ranks, and XLA cannot combine its all-reduces: the rank's mesh position goes through the custom
        calls that enclose each of them, as if computed there. The reduce-scatters wait for it, too. Other steps
        run when their operands are there, unless XLA has given them a buffer that another step still reads: so the last
        all-gather takes what has crossed, and the positions. An operand of another dtype is converted part by part.
        """
        result = _aval(self.types.gathered, parts[-1].begin + parts[-1].size)
        operand = to_shards(self.ctx, operand, result.update(dtype=aval.dtype))
        before, after = (
            [_aval(dtype, part.size // self.num_shards) for part in parts]
            for dtype in (self.types.scattered, self.types.gathered)
        )
        shards: list = []
        crossed: list = []
        positions: list = []
        total: Sequence = []

        def scatter(until: int) -> None:
            for part in parts[len(shards) : until]:
                shards.append(self._scatter_part(operand, part, positions[-1:]))

        scatter(1)
        for k, part in enumerate(parts):

            def cross(values, k=k):
                x, position = values
                positions.append(position)
                scatter(k + 1 + AHEAD)
                return [self._all_reduce(x, before[k]), position]

            x, position = self._enclose(cross, [shards[k], position], [before[k], _POSITION], [after[k], _POSITION])
            values, types = [x, *total], [after[k], *(result for _ in total)]
            crossed.append(x)
            if k == len(parts) - 1:
                values += [*crossed[:k], *positions]
                types += [*after[:k], *(_POSITION for _ in positions)]
            total = self._within("all_gather", values, types, [result], part=part)
        return from_shards(total[0], aval), position

    def _scatter_part(self, operand, part: Part, positions: Sequence):
        """The shard of a part of an operand, once the positions are there. Only the part is converted."""
        whole = ir.RankedTensorType(operand.type)
        dtype, num_read = self.types.scattered, whole.shape[0]
        if whole.element_type != mlir.dtype_to_ir_type(dtype):
            operand, num_read = ops.convert(self.ctx, _part_after(operand, part, positions), dtype), part.size
            part = Part(0, part.size)
        types = [_aval(dtype, num_read), *(_POSITION for _ in positions)]
        shard = _aval(dtype, part.size // self.num_shards)
        return self._within("reduce_scatter", [operand, *positions], types, [shard], part=part)[0]

    def _within(self, kind: str, values: Sequence, avals_in: Sequence, avals_out: Sequence, part=()) -> Sequence:
        """Emits jax_ring's collective of this kind between the ranks of each host."""
        return custom_call.emit(
            self.ctx.replace(avals_in=avals_in, avals_out=avals_out), values, kind=kind,
            op=self.op if kind == "reduce_scatter" else "sum",
            service=self.service._replace(levels=self.levels._replace(across=())),
            call=f"{self.call} ({kind.replace('_', '-')} within a host)", options=self.options,
            axis_size=self.num_shards, dimension=0, tiled=False, part=part,
        )  # fmt: skip

    def _all_reduce(self, x, aval):
        return all_reduce_by_xla(self.ctx, self.op, self.levels.across, x, aval, self.types)

    def _enclose(self, emit: Callable, values: Sequence, avals_in: Sequence, avals_out: Sequence) -> Sequence:
        return between_hosts.enclose(
            self.ctx, values, emit, call=self.call, groups=self.levels.across, avals_in=avals_in, avals_out=avals_out
        )


def _part_after(x, part: Part, positions: Sequence):
    """A part of an array, which is read once the positions are there.

    The start of the part depends on the position, in a way of which only the reader knows that it is none: XLA runs a
    kernel as soon as its operands are there, and would convert all parts before the first one crosses.
    """
    begin = mlir.ir_constant(np.uint32(part.begin))
    for position in positions:
        begin = hlo.add(begin, hlo.shift_right_logical(position, mlir.ir_constant(np.uint32(31))))
    return hlo.dynamic_slice(x, [begin], mlir.dense_int_array([part.size]))


def _aval(dtype, *shape: int):
    return jax.core.ShapedArray(shape, dtype)


_POSITION = _aval(np.uint32)


def parts_of(size: int, num_shards: int, itemsize: int) -> list[Part]:
    """The parts of an array of this many elements of this many bytes, with as many elements for each shard.

    Each begins at a cache line in all shards.
    """
    num_parts = min(size * itemsize // PART_BYTES, MAX_PARTS)
    unit = num_shards * _ALIGNMENT
    if num_parts < 2 or size < num_parts * unit:
        return [Part(0, size)]
    length = math.ceil(size / num_parts / unit) * unit
    return [Part(begin, min(length, size - begin)) for begin in range(0, size, length)]


def shard_size(num_elements: int, num_shards: int) -> int:
    """The number of elements of each shard. The last shard is padded."""
    return math.ceil(num_elements / num_shards)


def to_shards(ctx, x, aval):
    """x converted, flattened and padded to the type and shape of `aval`."""
    num_elements = math.prod(ir.RankedTensorType(x.type).shape)
    x = ops.convert(ctx, ops.reshape(x, (num_elements,)), aval.dtype)
    if padding := aval.size - num_elements:
        zero = mlir.ir_constant(np.zeros((), aval.dtype))
        x = hlo.pad(x, zero, *(mlir.dense_int_array([n]) for n in (0, padding, 0)))
    return ops.reshape(x, aval.shape)


def from_shards(x, aval):
    """The inverse of `to_shards`, without the conversion: an array of the shape of `aval`."""
    x = ops.reshape(x, (math.prod(ir.RankedTensorType(x.type).shape),))
    x = hlo.slice(x, *(mlir.dense_int_array([n]) for n in (0, aval.size, 1)))
    return ops.reshape(x, aval.shape)


def all_reduce_by_xla(ctx, op: str, groups, x, aval, types: Types):
    """XLA's all-reduce of a shard of type `aval` in groups of mesh positions, converted to `types.gathered`."""
    if jnp.issubdtype(aval.dtype, jnp.floating) and op != "sum":
        keys = jax.core.ShapedArray(aval.shape, types.crossing)
        x = ops.inline(ctx, _to_ordered_integers, x, aval, keys, key_type=types.crossing, largest=op == "max")
        x = crossing.all_reduce(ctx, op, groups, x, types.crossing)
        return ops.inline(ctx, _from_ordered_integers, x, keys, aval, dtype=types.gathered)
    return ops.convert(ctx, crossing.all_reduce(ctx, op, groups, x, types.crossing), types.gathered)


def _to_ordered_integers(x, *, key_type, largest: bool):
    """Integers that compare as the floats do, with -0 below +0, and NaN as the largest or the smallest value."""
    keys = lax.bitcast_convert_type(x.astype(f"float{key_type.itemsize * 8}"), key_type)
    limits = jnp.iinfo(key_type)
    # The bits of negative floats order in reverse.
    keys = jnp.where(keys < 0, keys ^ limits.max, keys)
    return jnp.where(jnp.isnan(x), limits.max if largest else limits.min, keys)


def _from_ordered_integers(keys, *, dtype):
    """The inverse of `_to_ordered_integers`. The limits decode to NaN."""
    bits = jnp.where(keys < 0, keys ^ jnp.iinfo(keys.dtype).max, keys)
    return lax.bitcast_convert_type(bits, f"float{bits.dtype.itemsize * 8}").astype(dtype)
