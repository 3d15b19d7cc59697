"""The custom call to an engine: its operands as blocks, its attributes, its stream, and how it is described."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat, runtime
from jax_ring.lowering import tuning
from jax_ring.lowering.call import CallSpec
from jax_ring.lowering.custom_call import blocks, partitioned, streams
from jax_ring.lowering.custom_call.operation import CONFIG, attributes_without_config, dictionary, entries
from jax_ring.lowering.module_state import CustomCall, ModuleState, state_of
from jax_ring.lowering.passes import program_id
from jax_ring.lowering.xla import ops


@dataclass(frozen=True, eq=False)
class EnginePlan:
    """How an engine serves a call, for operands of certain types.

    The engine has contiguous blocks, one per rank, along a leading dimension, which it removes in a reduce-scatter,
    adds in an all-gather and keeps in an all-to-all. For other dimensions data is transposed here. Slots come before
    the blocks.

    Attributes:
      call: with groups and service.
      custom_call: without lines; None if nothing is sent: each group is one rank, or no rank has a pair.
      scatters, gathers: whether operands, and results, are arrays of a block for each rank.
      slots: the number of dimensions before the blocks.
      results: types, blocks first.
      may_alias: pairs of operand and result that can be one buffer.
      takes_position: whether the mesh position is a hidden operand.
      stream: of the GPU; empty for XLA's main stream.
    """

    call: CallSpec
    custom_call: CustomCall | None
    scatters: bool
    gathers: bool
    slots: int
    results: Sequence[ir.RankedTensorType]
    may_alias: Sequence[tuple[int, int]] = ()
    takes_position: bool = False
    stream: str = streams.MAIN

    def emit(self, ctx: _compat.LoweringContext, operands: Sequence) -> Sequence:
        """Emits one custom call for all operands."""
        call = self.call
        if self.scatters:
            operands = [blocks.lower_blocks_first(x, slots=self.slots, **call.blocks) for x in operands]
        if self.custom_call is None:
            results = self._without_call(ctx, operands)
        else:
            state = state_of(ctx)
            hidden: list[ir.Value] = []
            if self.takes_position:
                # The calls of a block share the mesh position.
                hidden = [_compat.once(ctx, ("position", ir.InsertionPoint.current.block), hlo.partition_id)]
            aliases = [(len(hidden) + i, result) for i, result in self.may_alias if _should_alias(operands[i])]
            of_line = self.custom_call._replace(lines=(state.site or _compat.call_site(ctx),))
            build = partial(build_call, ctx, state, of_line, self.results, aliases, _compat.location_by_user(ctx))
            operands = [*hidden, *operands]
            if self.stream:
                results = streams.emit_on(ctx, self.stream, build, operands, self.results)
            else:
                built = build(operands)
                results = list(built.results)
                if not state.may_leave_out:  # see passes/exit_barrier.py
                    enclosing = ir.InsertionPoint(built).block.owner.operation
                    state.may_leave_out = enclosing.name != "sdy.manual_computation"
        if self.gathers:
            at = call.dimension if call.concat_dimension is None else call.concat_dimension
            results = [blocks.lower_blocks_at(x, dimension=at, tiled=call.tiled) for x in results]
        return results

    def _without_call(self, ctx: _compat.LoweringContext, operands: Sequence) -> list:
        """The results where nothing is sent."""
        if self.call.perm == ():
            return [ops.inline_one(ctx, jnp.zeros_like, x) for x in operands]
        return [ops.reshape(x, tuple(each.shape)) for x, each in zip(operands, self.results, strict=True)]


def emit(ctx: _compat.LoweringContext, operands: Sequence, call: CallSpec) -> Sequence:
    """Emits one custom call for all operands, of the types in ctx."""
    return plan_engine(call, ctx).emit(ctx, operands)


def plan_engine(call: CallSpec, ctx: _compat.LoweringContext) -> EnginePlan:
    """How an engine serves a call of operands and results of the types in ctx."""
    scatters, gathers = call.kind.scatters and not call.part, call.kind.gathers and not call.part
    group_trees = call.service.group_trees
    slots = int(bool(group_trees and group_trees[0].num_slots() > 1))
    avals_in, avals_out = ctx.avals_in, ctx.avals_out
    if scatters:
        shapes = [aval.shape[:slots] + blocks.shape_of_blocks(aval.shape[slots:], **call.blocks) for aval in avals_in]
        avals_in = [jax.core.ShapedArray(shape, avals_in[0].dtype) for shape in shapes]
    if gathers:
        added = () if scatters else (call.axis_size,)
        avals_out = [jax.core.ShapedArray((*added, *aval.shape), aval.dtype) for aval in avals_in]
    results = [ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype)) for aval in avals_out]
    if call.perm == () or max(map(len, call.groups)) == 1:
        return EnginePlan(call, None, scatters, gathers, slots, results)
    stream, program, lane = streams.MAIN, "", 0
    if call.service.engine == "cuda":
        stream = streams.stream_of(ctx, call.options)
        lane = streams.lane_of(ctx, stream)
    elif jax.process_count() > 1:
        program = program_id.name_of(ctx)
    target = (runtime.ASYNC_TARGETS if stream else runtime.TARGETS)[call.kind.name]
    # Equal for calls that differ in types alone.
    key = (
        call.kind, call.op, call.root, call.perm, call.options.algorithm, call.options.order,
        call.groups, call.service, call.part, call.rounds_to, program, lane,
    )  # fmt: skip
    shared = _compat.once(ctx, ("attributes", *key), attributes, call, program, lane)
    may_alias = [] if stream else _may_alias(call, len(avals_in), slots)
    if stream and _compat.stream_of(ctx):
        stream = streams.MAIN  # JAX moves everything around the call to the user's stream
    # On CPU devices, which all run one program, the mesh position is a hidden operand. A GPU handler knows its GPU, and
    # could not read the position from device memory.
    takes_position, num_own = call.service.engine == "cpu", None
    if call.service.automatic_axes:
        num_own = (call.kind.scatters + slots, int(call.kind.gathers))
        shared = partitioned.attributes(shared, target, takes_position, num_own, stream)
        target, stream, takes_position = partitioned.TARGET, streams.MAIN, False
    custom_call = CustomCall(
        target=target,
        shared=shared,
        description=call.description,
        lines=(),
        num_hidden=int(takes_position),
        itemsize=avals_in[-1].dtype.itemsize,
        joins=call.kind.joins and not (call.options.apart or call.part),
        num_own=num_own,
    )
    return EnginePlan(call, custom_call, scatters, gathers, slots, results, may_alias, takes_position, stream)


# ---- Attributes that all engines decode: see ffi/attributes/attributes.h ---------------------------------------------


def attributes(call: CallSpec, program: str, lane: int) -> ir.DictAttr:
    """A call's attributes, without `call` and `site`.

    Args:
      program: the program's name between processes.
      lane: the stream's number on a GPU.
    """
    groups, engine, levels = call.groups, call.service.engine, call.service.levels
    assert levels is not None  # checked by plan.who_serves
    members = [call.service.members[position] for group in groups for position in group]
    one_shot: Sequence[int] = ()
    two_shot: Sequence[int] = ()
    if engine == "cuda" or levels.num_processes > 1:  # within a process the CPU engine has one algorithm
        # The engine picks the algorithm at run time, by the size of each message.
        one_shot, two_shot = zip(*[tuning.thresholds(engine, len(group)) for group in groups], strict=True)
    sources = [-1] * (0 if call.perm is None else len(groups[0]))
    for source, receiver in call.perm or ():
        sources[receiver] = source
    shards, sizes, ranks = zip(*call.service.group_trees, strict=True) if call.service.group_trees else ((), (), ())
    values: dict[str, str | int | Sequence[int]] = {
        "collective": call.kind.name,
        "op": call.op,
        "order": call.options.order,
        "root": call.root,
        "sources": sources,
        "algorithm": call.options.algorithm,
        "group_sizes": list(map(len, groups)),
        "members": [member.id for member in members],
        "processes": [member.process for member in members],
        "one_shot_bytes": one_shot,
        "two_shot_bytes": two_shot,
        "tree_shards": shards,
        "tree_sizes": sizes,
        "tree_ranks": list(itertools.chain.from_iterable(ranks)),
        "program": program,
        "part": call.part,
        "rounds_to": call.rounds_to,
        "blocks_apart": int(call.blocks_apart),
        "lane": lane,
    }
    return dictionary(values)


# ---- The operation ---------------------------------------------------------------------------------------------------

_MAX_LINES = 4  # beyond which a text does not help


def build_call(
    ctx: _compat.LoweringContext,
    state: ModuleState,
    call: CustomCall,
    types: Sequence[ir.Type],
    aliases: Collection[tuple[int, int]],
    location: ir.Location,
    operands: Sequence[ir.Value],
) -> ir.Operation:
    """Builds the call at the insertion point, as `jax.ffi.ffi_lowering` does in ten times the time.

    Args:
      types: of the results.
      aliases: pairs of operand and result that may share a buffer.
      operands: hidden ones, then the user's.
    """
    aliases, operand_types = tuple(aliases), tuple([value.type for value in operands])
    # Separate, because calls on different lines otherwise have the same attributes.
    config = _compat.once(ctx, ("config", call, aliases), _config, call, aliases)
    key = (call.target, operand_types, tuple(types), aliases)
    attributes = {**_compat.once(ctx, ("operation", *key), attributes_without_config, *key), CONFIG: config}
    if call.num_own is not None:
        attributes["sdy.sharding_rule"] = partitioned.rule(operand_types, types, call.num_own)
    operation = ir.Operation.create(
        "stablehlo.custom_call", results=types, operands=operands, attributes=attributes, loc=location
    )
    if config not in state.calls or not call.joins:
        state.calls[config] = call
    return operation


def _config(call: CustomCall, aliases: Collection[tuple[int, int]]) -> ir.DictAttr:
    """Attributes for the handler."""
    own: dict[str, ir.Attribute] = {"call": ir.StringAttr.get(call.description)}
    if call.num_own is not None:
        own[partitioned.ALIASES] = mlir.ir_attribute(np.array([*aliases], np.int64).reshape(-1))
    site, num_more = " and ".join(call.lines), len(call.lines) - _MAX_LINES
    if num_more > 0:
        site = f"{', '.join(call.lines[:_MAX_LINES])} and {num_more} more places"
    own["site"] = ir.StringAttr.get(site)  # until equal calls are known
    return ir.DictAttr.get({**dict(entries(call.shared)), **own})


# ---- Aliasing --------------------------------------------------------------------------------------------------------


def _may_alias(call: CallSpec, num_operands: int, slots: int) -> list[tuple[int, int]]:
    """Pairs of operand and result that can be one buffer, on the main stream.

    XLA of JAX 0.12 adds no copies for a call on another stream, which would overwrite an operand that is still read.
    """
    if call.part and call.kind.gathers:
        return [(1, 0)] if call.part[0] else []
    if call.kind.in_place and not slots:
        return [(i, i) for i in range(num_operands)]
    return [(num_operands - 1, 0)] if call.kind.is_ragged else []


# Ops whose result is a bitcast of the operand if both have the same number of elements. (A constraint can be more than
# that.)
_RESHAPE_OPS = ("stablehlo.reshape", "stablehlo.broadcast_in_dim", "sdy.sharding_constraint")


def _should_alias(value: ir.Value) -> bool:
    """Whether the result should take the operand's buffer, which saves memory and traffic.

    Not for an argument of the shard_map, which may be the caller's and would be copied. XLA also copies a value used
    later, so only speed depends on it.
    """
    owner = value.owner
    if isinstance(owner, ir.Block):
        return owner.owner.operation.name != "sdy.manual_computation"
    operands = owner.operation.operands
    if owner.operation.name in _RESHAPE_OPS and _num_elements(operands[0]) == _num_elements(value):
        return _should_alias(operands[0])
    return True


def _num_elements(value: ir.Value) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)
