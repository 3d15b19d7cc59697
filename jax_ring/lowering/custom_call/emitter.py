"""Emits the custom call to an engine: its operands and attributes, and the transposes around it."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat, runtime
from jax_ring.lowering import topology, trees, tuning
from jax_ring.lowering.custom_call import ffi_attributes, layout, operation, partitioned, partitioner, streams
from jax_ring.lowering.custom_call.operation import Call, Description
from jax_ring.lowering.dispatch import Service, has_choice
from jax_ring.lowering.passes import exit_barrier, program_id, source_lines
from jax_ring.lowering.state import cached_in_module
from jax_ring.lowering.xla import ops


def emit(ctx, operands, **call) -> Sequence:
    """Emits one custom call for all operands, and returns its results. call: the arguments of `prepare`."""
    return prepare(ctx, **call)(ctx, operands)


def prepare(
    ctx, *, kind: str, op: str, service: Service, call: str, options, root=0, perm=(), axis_size=None,
    group_trees=None, concat_dimension=None, part=(), rounds_to="", **dimensions,
) -> Callable[..., Sequence]:  # fmt: skip
    """How one custom call is emitted for operands of the types in ctx: a function of (ctx, operands) to its results.

    A module may keep this function, so it keeps no reference to the module.

    The engine scatters and gathers contiguous blocks, one per rank, along a leading dimension: it removes that
    dimension from the operand of a reduce-scatter, adds it to the result of an all-gather, and keeps it in an
    all-to-all. For other dimensions the data is transposed here. Operands with several slots have these in front of the
    blocks.

    dimensions: `dimension` and `tiled`, of the blocks in the user's arrays.
    concat_dimension: that of the blocks in the result of an all-to-all, if it is another one.
    group_trees: along which a call adds whose order is "tree", if its groups do not have all ranks of their trees.
    part: the first element and the number of elements of the part that the operand of a reduce-scatter or the result of
      an all-gather is, of an array of one dimension, which the call has in its stead. An all-gather takes the array
      with the parts before as well, if there are any. Further operands are not read, but the call waits for them.
    rounds_to: the float of 16 bits to which a reduce-scatter of a part rounds float32 before it adds; else empty.
    """
    assert service.levels is not None
    scatters = kind in ("reduce_scatter", "all_to_all") and not part
    gathers = kind in ("all_gather", "all_to_all") and not part
    groups = service.levels.intra
    if not trees.adds_along_tree(kind, options):
        group_trees = []
    elif group_trees is None:
        group_trees = trees.trees_of(groups, options)
    has_slots = bool(group_trees) and group_trees[0].num_slots() > 1
    avals_in = ctx.avals_in
    if scatters:
        avals_in = [
            jax.core.ShapedArray(
                aval.shape[:has_slots]
                + layout.shape_of_blocks(aval.shape[has_slots:], axis_size=axis_size, **dimensions),
                aval.dtype,
            )
            for aval in avals_in
        ]  # fmt: skip
    avals_out = ctx.avals_out
    if gathers:
        avals_out = [
            jax.core.ShapedArray(aval.shape if scatters else (axis_size, *aval.shape), aval.dtype) for aval in avals_in
        ]
    if kind == "permute" and not perm:
        return lambda ctx, operands: [
            ops.inline(ctx, jnp.zeros_like, x, aval, aval) for x, aval in zip(operands, avals_in, strict=True)
        ]
    is_alone = all(len(group) == 1 for group in groups)
    takes_position = _TAKES_POSITION[service.engine] and not service.automatic_axes
    if not is_alone:
        of_engine = _describe_call(
            ctx, kind=kind, op=op, service=service, call=call, options=options, root=root, perm=tuple(perm),
            group_trees=tuple(group_trees), num_hidden=int(takes_position), itemsize=avals_in[-1].dtype.itemsize,
            num_own=(scatters + has_slots, int(gathers)), part=tuple(part), rounds_to=rounds_to,
        )  # fmt: skip
        result_types = [_type_of(ctx, aval) for aval in avals_out]
    blocks_first: Callable = partial(layout.lower_blocks_first, slots=int(has_slots), axis_size=axis_size, **dimensions)
    if concat_dimension is not None:
        dimensions["dimension"] = concat_dimension

    def emit(ctx, operands) -> Sequence:
        if scatters:
            operands = [blocks_first(x) for x in operands]
        if is_alone:
            results: Sequence = [ops.reshape(x, aval.shape) for x, aval in zip(operands, avals_out, strict=True)]
        else:
            hidden = [_position(ctx)] if takes_position else []
            aliases = [
                (len(hidden) + i, i)
                for i, x in enumerate(operands)
                if kind in IN_PLACE and not has_slots and _should_alias(x)
            ]
            if part and kind == "all_gather" and part[0]:
                aliases = [(len(hidden) + 1, 0)]
            if kind == "ragged_all_to_all" and _should_alias(operands[-1]):
                aliases = [(len(hidden) + len(operands) - 1, 0)]
            results = _emit_call(ctx, of_engine, [*hidden, *operands], result_types, aliases)
        if gathers:
            results = [layout.lower_blocks_at(x, **dimensions) for x in results]
        return results

    return emit


class _Described(NamedTuple):
    """A custom call, but for its operands and for the lines that it serves."""

    target: str
    stream: str
    call: Call


def _describe_call(
    ctx, *, kind: str, service: Service, call: str, options, num_hidden: int, itemsize: int, num_own: tuple[int, int],
    part: tuple[int, ...], **of_attributes,
) -> _Described:  # fmt: skip
    stream = streams.stream_of(ctx, service.engine, options)
    target = runtime.ASYNC_TARGETS[kind] if stream else runtime.TARGETS[kind]
    shared = _shared_attributes(
        ctx, kind=kind, service=service, options=options, stream=stream, part=part, **of_attributes
    )
    if streams.of_user(ctx):
        stream = streams.MAIN  # JAX gives the user's stream to all that is around the call
    if service.automatic_axes:
        shared = partitioned.attributes(shared, target, _TAKES_POSITION[service.engine], num_own, stream)
        target, stream = partitioner.TARGET, streams.MAIN
    of_engine = Call(
        shared=shared,
        description=call,
        lines=(),
        num_hidden=num_hidden,
        itemsize=itemsize,
        joins=kind in _JOINED and not (options.apart or part),
        num_own=num_own if service.automatic_axes else None,
    )
    return _Described(target, stream, of_engine)


def _emit_call(ctx, described: _Described, operands: Sequence, result_types: Sequence, aliases: Sequence) -> Sequence:
    target, stream, call = described
    call = call._replace(lines=source_lines.lines_of(ctx))

    def build(*operands):
        with _named_by_user(ctx):
            return operation.build(ctx, target, call, operands, result_types, aliases)

    if stream:
        return streams.emit_on(ctx, stream, build, operands, result_types)
    results = list(build(*operands).results)
    exit_barrier.note(ctx, results)
    return results


def _position(ctx) -> ir.Value:
    """The caller's mesh position, which the calls of a block share."""
    return cached_in_module(ctx, ("position", ir.InsertionPoint.current.block), hlo.partition_id)


# The collectives of which each operand has results of its own, so that one call can take those of several.
_JOINED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "reduce", "broadcast")


def _unsharded(aval):
    """The type without explicit mesh axes: which reshapes they allow is no question any more."""
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def _sources_of(perm, groups) -> np.ndarray:
    """For each rank of a group the one whose operand it gets, or -1."""
    sources = np.full(len(groups[0]), -1, np.int64)
    for source, receiver in perm:
        sources[receiver] = source
    return sources


def _type_of(ctx, aval) -> ir.Type:
    return cached_in_module(
        ctx, ("type", aval.shape, aval.dtype), lambda: mlir.aval_to_ir_type(ctx.module_context, _unsharded(aval))
    )  # fmt: skip


def _named_by_user(ctx):
    """A context in which operations get a name that tells in a profile which part of the user's program they serve."""
    function = _compat.function_name(ctx.primitive)
    name = f"{user}.{function}" if (user := _compat.user_name(ctx).replace("/", ".")) else function
    return _compat.location_named(ctx, name)


def describe(ctx, function: str, axes, axis_index_groups) -> Description:
    """Describes the call in timeout errors, without its line: equal calls have equal descriptions."""
    shapes = [f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]" for aval in ctx.avals_in]
    axis = f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {axes!r}"
    groups = "" if axis_index_groups is None else f" in groups {[list(g) for g in axis_index_groups]}"
    return Description(function, shapes, len(shapes), axis + groups)


# ---- Attributes -----------------------------------------------------------------------------------------------------

# The operands in front of the user's. On CPU devices that is the mesh position, a run-time value, since all devices run
# the same program. The handler of a GPU knows its GPU, and could not read the position, which would be in its memory.
_TAKES_POSITION = {"cpu": True, "cuda": False}


def _shared_attributes(
    ctx, *, kind: str, op: str, service: Service, options, root: int, perm: tuple, group_trees: tuple, stream: str,
    part: tuple[int, ...], rounds_to: str,
) -> ir.DictAttr:  # fmt: skip
    """The attributes of a call, but for those that name it in errors."""
    assert service.levels is not None
    levels = service.levels
    groups = levels.intra
    mesh = ctx.module_context.axis_context.mesh
    name_of_program = program_id.name_of(ctx) if service.engine == "cpu" else ""
    lane = streams.lane_of(ctx, stream) if service.engine == "cuda" else 0
    of_cpu = {"program": name_of_program, "part": np.array(part, np.int64), "rounds_to": rounds_to}

    def compute() -> ir.DictAttr:
        # The engine picks the algorithm at run time, when it knows the size of each message.
        has_thresholds = has_choice(service.engine, levels)
        thresholds = [tuning.thresholds(service.engine, len(group)) for group in groups if has_thresholds]
        return ffi_attributes.from_values(
            {
                "collective": kind,
                "op": op,
                "root": np.int64(root),
                "sources": _sources_of(perm, groups) if kind == "permute" else np.array([], np.int64),
                "algorithm": options.algorithm,
                "order": options.order,
                "group_sizes": np.array([len(group) for group in groups], np.int64),
                "one_shot_bytes": np.array([t.one_shot for t in thresholds], np.int64),
                "two_shot_bytes": np.array([t.two_shot for t in thresholds], np.int64),
                **trees.attributes_of(group_trees),
                **_GROUP_ENCODERS[service.engine](mesh, [i for group in groups for i in group]),
                **({"lane": np.int64(lane)} if service.engine == "cuda" else of_cpu),
            }
        )

    key = (
        kind, op, root, perm, options.algorithm, options.order, tuple(map(tuple, groups)), service.engine,
        levels.num_processes, group_trees, mesh, name_of_program, lane, part, rounds_to,
    )  # fmt: skip
    return cached_in_module(ctx, ("attributes", key), compute)


def _encode_members_for_cpu(mesh, members: list[int]) -> dict:
    processes = topology.processes_of_cpus(mesh)
    assert processes is not None  # checked by topology.levels_of
    return {
        "partitions": np.array(members, np.int64),
        "processes": np.array([processes[i] for i in members], np.int64),
    }


def _encode_members_for_cuda(mesh, members: list[int]) -> dict:
    gpus = topology.gpus_of(mesh)
    assert gpus is not None  # checked by topology.levels_of
    return {
        "processes": np.array([gpus[i].process for i in members], np.int64),
        "devices": np.array([gpus[i].id for i in members], np.int64),
    }


_GROUP_ENCODERS = {"cpu": _encode_members_for_cpu, "cuda": _encode_members_for_cuda}


# ---- Aliasing -------------------------------------------------------------------------------------------------------

# The collectives whose result may overwrite the operand. In the others, peers may still read a rank's operand when its
# result is written.
IN_PLACE = ("all_reduce", "reduce", "broadcast")

# Ops whose result is a bitcast of the operand, if both have the same number of elements. (A constraint may be more.)
_RESHAPE_OPS = ("stablehlo.reshape", "stablehlo.broadcast_in_dim", "sdy.sharding_constraint")


def _should_alias(value) -> bool:
    """Whether the result should alias the operand's buffer, which saves memory and memory traffic.

    It should not if the operand is an argument of the shard_map: its buffer may belong to the caller, and XLA would
    copy it first. XLA also copies a value that is used later, so aliasing affects speed only.
    """
    owner = value.owner
    if isinstance(owner, ir.Block):
        return owner.owner.operation.name != "sdy.manual_computation"
    operands = owner.operation.operands
    if owner.operation.name in _RESHAPE_OPS and _num_elements(operands[0]) == _num_elements(value):
        return _should_alias(operands[0])
    return True


def _num_elements(value) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)
