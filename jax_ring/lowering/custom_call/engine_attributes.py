"""The attributes that all engines decode; see ffi/attributes/attributes.h."""

import itertools
from collections.abc import Sequence

from jax.extend.mlir import ir

from jax_ring.lowering import topology, tuning
from jax_ring.lowering.call_spec import CallSpec
from jax_ring.lowering.custom_call import ffi_attributes, streams
from jax_ring.lowering.passes import program_id
from jax_ring.lowering.state import state_of


def of(call: CallSpec, ctx, stream: str) -> ir.DictAttr:
    """A call's attributes on this stream, without `call` and `site` of operation.py."""
    mesh, levels, engine = ctx.module_context.axis_context.mesh, call.levels, call.service.engine
    program, lane = ("", streams.lane_of(ctx, stream)) if engine == "cuda" else (program_id.name_of(ctx), 0)
    key = (
        call.kind, call.op, call.root, call.perm, call.options.algorithm, call.options.order,
        levels, engine, call.group_trees, mesh, call.part, call.rounds_to, program, lane,
    )  # fmt: skip
    return state_of(ctx).once(("attributes", *key), attributes_of, call, mesh, program, lane)


def attributes_of(call: CallSpec, mesh, program: str, lane: int) -> ir.DictAttr:
    """The same. program: its name between processes. lane: of a GPU."""
    levels, engine = call.levels, call.service.engine
    groups = levels.intra
    members, processes = (_gpus if engine == "cuda" else _positions)(mesh, list(itertools.chain.from_iterable(groups)))
    one_shot: Sequence[int] = ()
    two_shot: Sequence[int] = ()
    if engine == "cuda" or levels.num_processes > 1:  # within a process the CPU engine has one algorithm
        # The engine picks the algorithm at run time, by the size of each message.
        one_shot, two_shot = zip(*[tuning.thresholds(engine, len(group)) for group in groups], strict=True)
    shards, sizes, ranks = zip(*call.group_trees, strict=True) if call.group_trees else ((), (), ())
    values: dict[str, str | int | Sequence[int]] = {
        "collective": call.kind.name,
        "op": call.op,
        "order": call.options.order,
        "root": call.root,
        "sources": _sources_of(call),
        "algorithm": call.options.algorithm,
        "group_sizes": list(map(len, groups)),
        "members": members,
        "processes": processes,
        "one_shot_bytes": one_shot,
        "two_shot_bytes": two_shot,
        "tree_shards": shards,
        "tree_sizes": sizes,
        "tree_ranks": list(itertools.chain.from_iterable(ranks)),
        "program": program,
        "part": call.part,
        "rounds_to": call.rounds_to,
        "lane": lane,
    }
    return ffi_attributes.from_values(values)


def _sources_of(call: CallSpec) -> list[int]:
    """By rank, the source in a permutation, or -1."""
    sources = [-1] * (0 if call.perm is None else len(call.levels.intra[0]))
    for source, receiver in call.perm or ():
        sources[receiver] = source
    return sources


def _positions(mesh, members: list[int]) -> tuple[list[int], list[int]]:
    """Mesh positions of CPU devices, and their processes."""
    processes = topology.processes_of_cpus(mesh)
    assert processes is not None  # checked by topology.levels_of
    return members, [processes[i] for i in members]


def _gpus(mesh, members: list[int]) -> tuple[list[int], list[int]]:
    """Ids of the GPUs at these mesh positions, and their processes."""
    gpus = topology.gpus_of(mesh)
    assert gpus is not None  # checked by topology.levels_of
    return [gpus[i].id for i in members], [gpus[i].process for i in members]
