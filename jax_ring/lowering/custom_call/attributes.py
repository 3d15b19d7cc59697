"""A custom call's attributes in XLA's form, and those that all engines decode: see ffi/attributes/attributes.h."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring import _compat
from jax_ring.lowering import topology, tuning
from jax_ring.lowering.call_spec import CallSpec
from jax_ring.lowering.custom_call import streams
from jax_ring.lowering.passes import program_id

CONFIG = "mhlo.backend_config"  # holds the attributes that the call's handler decodes


def from_values(values: Mapping) -> ir.DictAttr:
    """Attributes of 64-bit integers, sequences of these, booleans and texts."""
    return ir.DictAttr.get(
        {
            name: mlir.ir_attribute(value if isinstance(value, str | bool) else np.asarray(value, np.int64)[()])
            for name, value in values.items()
        }
    )


def named(attributes) -> list[tuple[str, ir.Attribute]]:
    """A dictionary's entries as Python values.

    Raises:
      TypeError: if Python has no type for one, such as a complex constant.
    """
    # Not `attributes[i].attr`: it ends the process where this raises.
    return [(name, attributes[name]) for i in range(len(attributes)) if (name := attributes[i].name)]


def of_operation(
    target: str, operand_types: Sequence[ir.Type], types: Sequence[ir.Type], shared_buffers: Collection[tuple[int, int]]
) -> dict[str, ir.Attribute]:
    """All but CONFIG. types: of the results. shared_buffers: as of `aliases`."""
    ranks = [[ir.RankedTensorType(each).rank for each in group] for group in (operand_types, types)]
    layouts: dict[int, ir.Attribute] = {}
    for rank in {*ranks[0], *ranks[1]}:
        dimensions: Any = np.arange(rank, dtype=np.int64)[::-1].copy()  # fastest first
        layouts[rank] = ir.DenseIntElementsAttr.get(dimensions, type=ir.IndexType.get())
    attributes = {
        "call_target_name": ir.StringAttr.get(target),
        "has_side_effect": ir.BoolAttr.get(False),
        "backend_config": ir.StringAttr.get(""),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1),
        "called_computations": ir.ArrayAttr.get([]),
        "operand_layouts": ir.ArrayAttr.get([layouts[rank] for rank in ranks[0]]),
        "result_layouts": ir.ArrayAttr.get([layouts[rank] for rank in ranks[1]]),
    }
    if shared_buffers:
        attributes["output_operand_aliases"] = aliases(shared_buffers, len(types))
    return attributes


def custom_call(
    target: str,
    operands: Sequence,
    types: Sequence[ir.Type],
    shared_buffers: Collection[tuple[int, int]],
    config: ir.DictAttr,
) -> ir.Operation:
    attributes = of_operation(target, [x.type for x in operands], types, shared_buffers)
    return ir.Operation.create(
        "stablehlo.custom_call", results=list(types), operands=operands, attributes={**attributes, CONFIG: config}
    )


def aliases(pairs: Collection[tuple[int, int]], num_results: int) -> ir.ArrayAttr:
    """Pairs of operand and result that may share a buffer."""
    return ir.ArrayAttr.get(
        [
            # A single result is no tuple.
            hlo.OutputOperandAlias.get(
                output_tuple_indices=[result] if num_results > 1 else [], operand_index=operand,
                operand_tuple_indices=[],
            )
            for operand, result in pairs
        ]
    )  # fmt: skip


# ---- Those of the engines --------------------------------------------------------------------------------------------


def of(call: CallSpec, ctx, stream: str) -> ir.DictAttr:
    """A call's attributes on this stream, without `call` and `site` of operation.py."""
    mesh, program, lane = ctx.module_context.axis_context.mesh, "", 0
    if call.service.engine == "cuda":
        lane = streams.lane_of(ctx, stream)
    elif jax.process_count() > 1:
        program = program_id.name_of(ctx)
    key = (
        call.kind, call.op, call.root, call.perm, call.options.algorithm, call.options.order,
        call.service, mesh, call.part, call.rounds_to, program, lane,
    )  # fmt: skip
    return _compat.once(ctx, ("attributes", *key), attributes_of, call, mesh, program, lane)


def attributes_of(call: CallSpec, mesh, program: str, lane: int) -> ir.DictAttr:
    """The same. program: its name between processes. lane: of a GPU."""
    groups, levels, engine = call.groups, call.service.levels, call.service.engine
    of_mesh = topology.members_of(engine, mesh)
    assert levels is not None  # checked by dispatch.who_serves
    assert of_mesh is not None
    members = [of_mesh[position] for group in groups for position in group]
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
    return from_values(values)
