"""`explain()`: lists the collectives of a function, who serves each of them, and the bytes they send."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core
from jax.extend.source_info_util import summarize

from jax_ring import _compat
from jax_ring.inspect.compiled import Instruction, find_collectives
from jax_ring.inspect.predicted import Predictor
from jax_ring.inspect.table import relative, table
from jax_ring.lowering.call import is_number
from jax_ring.lowering.passes.source_lines import inherit
from jax_ring.lowering.plan import STEPS, Plan, replica_groups
from jax_ring.options import Options

# By function of jax.lax. jax_ring's functions have the prefix ring_.
_KINDS = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "psum_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "ppermute": "permute",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "pbroadcast": "broadcast",
    "pbroadcast_dynamic": "all_reduce",  # the source is in an array
    "ring_reduce": "reduce",  # lax.reduce is no collective
    "ring_broadcast": "broadcast",
}

# Functions of the training layer that name their collectives by `jax.named_scope`.
_NAMED = ("block_sum", "block_max")


@dataclass(frozen=True)
class Collective:
    """A collective as written, or as inserted by differentiation.

        for call in jax_ring.explain(train_step, params, batch).collectives:
            print(call.name, call.call_site, call.served_by, call.why)

    Attributes:
      name: of the function to call: ring_psum, psum, psum_scatter, block_sum, ... A pmean is a psum.
      axes: the mesh axes.
      groups: of mesh positions.
      operands: dtype and shape on one rank.
      num_bytes: the message size of one call: of the operands, or for all_gather and ragged_all_to_all of the results.
        Terms of a `ShardSums` count as one.
      times: calls in one call of the function; None if known only at run time, as in a while_loop.
      order: of the addition: the option `order`; "XLA" if XLA chooses it, alone or between hosts; "rank by host" of a
        psum_scatter across hosts, in the order `order` on each host, then in that of the hosts; empty if nothing is
        added.
      algorithm: the option; empty if XLA serves the call.
      chosen: the algorithms that "auto" selects by the active thresholds (`JAX_RING_TUNING`), several if groups differ
        or more than 64 operands make several messages. Empty without a choice: on CPU devices of one process, and for
        anything but an all-reduced sum.
      served_by: "jax_ring", with the transport between processes or hosts, as in "jax_ring (shared memory, 2
        processes)" or "jax_ring within hosts, XLA across 2 hosts"; "XLA"; or "none" if each group is one rank.
      why: the reason for XLA or none; else empty.
      wire_bytes: the predicted average bytes that a rank sends per call; for ragged_all_to_all at most.
      wire_bytes_across_hosts: the part to other hosts; None if XLA serves the call.
      call_site: file, line and function.
    """

    name: str
    axes: tuple
    groups: tuple[tuple[int, ...], ...]
    operands: tuple[str, ...]
    num_bytes: int
    times: int | None
    order: str
    algorithm: str
    chosen: tuple[str, ...]
    served_by: str
    why: str
    wire_bytes: float
    wire_bytes_across_hosts: float | None
    call_site: str


@dataclass(frozen=True)
class Explanation:
    """The result of `explain()`. Printed, it is two tables of up to ten rows each.

        sent = jax_ring.explain(train_step, params, batch).predicted_bytes

    Attributes:
      collectives: those of the function.
      instructions: those of the compiled program, with the partitioner's.
    """

    collectives: tuple[Collective, ...]
    instructions: tuple[Instruction, ...]

    @property
    def predicted_bytes(self) -> float | None:
        """Bytes that a rank sends per call, as written; None if a number of calls is unknown."""
        return _total_wire_bytes(self.collectives)

    @property
    def counted_bytes(self) -> float | None:
        """Bytes that a rank sends per call, as compiled; None if a number of calls is unknown."""
        return _total_wire_bytes(self.instructions)

    def __str__(self) -> str:
        written = table(
            "Collectives, as written",
            ("collective", "over", "ranks", "bytes", "times", "order", "sends"),
            [
                (
                    c.name,
                    ", ".join(map(str, c.axes)),
                    _abbreviate(map(len, c.groups)),
                    f"{c.num_bytes:,}",
                    _count_text(c.times),
                    c.order,
                    f"{c.wire_bytes:,.0f}"
                    + (f", {c.wire_bytes_across_hosts:,.0f} across hosts" if c.wire_bytes_across_hosts else ""),
                )
                for c in self.collectives
            ],
            [
                (
                    relative(c.call_site),
                    f"{c.served_by}{_algorithm_text(c)}{f': {c.why}' if c.why else ''}",
                    _abbreviate(c.operands),
                )
                for c in self.collectives
            ],
            "collectives",
        )
        compiled = table(
            "Collectives, as compiled",
            ("instruction", "ranks", "bytes", "times", "sends"),
            [
                (i.name, _abbreviate(i.group_sizes), f"{i.num_bytes:,}", _count_text(i.times), f"{i.wire_bytes:,.0f}")
                for i in self.instructions
            ],
            [(_abbreviate(i.operands),) for i in self.instructions],
            "instructions",
        )
        predicted, counted = _total_text(self.collectives), _total_text(self.instructions)
        totals = f"Each rank sends, in bytes: {predicted} predicted, {counted} counted."
        return f"{written}\n{compiled}\n{totals}"


def explain(fn: Callable, *args: Any, **kwargs: Any) -> Explanation:
    """Lists the collectives of a function, who serves each of them, and the bytes they send.

        print(jax_ring.explain(train_step, params, batch))

    The function is traced and compiled, not run. Collectives are found in nested functions, loops, branches and
    `shard_map`; those of `jax.lax` as an active `override_lax()` lowers them.

    Args:
      fn: a function, jitted or not.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct` for them.
      **kwargs: its keyword arguments.

    Raises:
      TypeError: if `fn` is not callable. Others: as from tracing and compiling `fn`.
    """
    if not callable(fn):
        raise TypeError(
            f"explain: pass a function and its arguments, as in explain(f, x), not a result; got {type(fn).__name__}"
        )
    traced = (fn if hasattr(fn, "trace") else jax.jit(fn)).trace(*args, **kwargs)
    instructions = tuple(find_collectives(traced.lower().compile().as_text() or ""))
    return Explanation(tuple(_walk(_as_jaxpr(traced.jaxpr), None, 1, Predictor(instructions))), instructions)


def _walk(jaxpr: core.Jaxpr, axis_context, times: int | None, predictor: Predictor) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        if axis_context is not None and (kind := _kind_of(_compat.function_name(eqn.primitive))):
            yield _collective(eqn, kind, axis_context, times, predictor)
        if axis_context is not None and eqn.primitive in STEPS:
            yield from _steps(eqn, axis_context, times, predictor)
        is_shard_map = eqn.primitive.name == "shard_map"
        inner_context = _compat.axis_context_within(eqn.params) if is_shard_map else axis_context
        for inner in _jaxprs_of(eqn, _platform(inner_context and inner_context.mesh)):
            if _compat.is_jaxpr(inner):
                body = inherit(inner, eqn.source_info.traceback) if is_shard_map else inner
                yield from _walk(_as_jaxpr(body), inner_context, _times_within(eqn, times), predictor)


def _steps(eqn: core.JaxprEqn, axis_context, times: int | None, predictor: Predictor) -> Iterator[Collective]:
    """The collectives of a call that consists of several, at the user's line."""
    mesh = axis_context.mesh
    run = STEPS[eqn.primitive]((_platform(mesh),), axis_context, **eqn.params)
    avals: list[Any] = [v.aval for v in eqn.invars]
    with _compat.without_vma():
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        traced = jax.make_jaxpr(run, axis_env=list(mesh.shape.items()))(*types)
    for step in _walk(traced.jaxpr, axis_context, times, predictor):
        yield replace(step, call_site=summarize(eqn.source_info))


def _kind_of(function: str) -> str | None:
    """The kind of collective, by its name in `wire_bytes()`; None for other functions."""
    function = function.removesuffix("_start")  # of an asynchronous collective
    return _KINDS.get(function) or _KINDS.get(function.removeprefix("ring_"))


def _as_jaxpr(jaxpr: Any) -> core.Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _jaxprs_of(eqn: core.JaxprEqn, platform: str) -> list:
    """What an equation runs on a platform, among other parameters."""
    if eqn.primitive.name == "custom_linear_solve":
        return [eqn.params["jaxprs"].solve]  # the others are for derivatives
    if platforms := _compat.platforms_of_branches(eqn.params):
        branches = zip(platforms, eqn.params["branches"], strict=True)
        return [branch for names, branch in branches if platform in (names or [platform])][:1]
    return jax.tree.leaves(list(eqn.params.values()), is_leaf=_compat.is_jaxpr)


def _times_within(eqn: core.JaxprEqn, times: int | None) -> int | None:
    is_unknown = eqn.primitive.name in ("while", "cond") and not _compat.platforms_of_branches(eqn.params)
    if is_unknown or times is None:
        return None
    return times * eqn.params["length"] if eqn.primitive.name == "scan" else times


def _collective(eqn: core.JaxprEqn, kind: str, axis_context, times: int | None, predictor: Predictor) -> Collective:
    params, name = eqn.params, _compat.function_name(eqn.primitive)
    axes = params.get("axes", params.get("axis_name"))
    axes = tuple(axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if not isinstance(axis, int))
    groups = replica_groups(axis_context, axes, params.get("axis_index_groups"))
    options = params.get("options", Options())
    planned, predicted = predictor.predict(eqn, axis_context, _platform(axis_context.mesh))
    served_by, why = _who_serves(planned, groups)
    message = _message(eqn, name, kind)
    if options.num_shards is not None:
        message = [jax.core.ShapedArray(aval.shape[1:], aval.dtype) for aval in message]  # without slots
    num_bytes = sum(map(_num_bytes, message))
    by_xla = sum((each.wire_bytes for each, _ in predicted if not each.name.startswith("jax_ring")), 0.0)
    has_options = "options" in params or (kind == "all_reduce" and "psum" in name)
    scope = str(eqn.source_info.name_stack).rsplit("/", 1)[-1].rstrip(")").rsplit("(", 1)[-1]  # of "jvp(scope)"
    return Collective(
        name=scope if scope in _NAMED else name,
        axes=axes,
        groups=groups,
        operands=tuple(_aval_text(v.aval) for v in eqn.invars),
        num_bytes=num_bytes,
        times=times,
        order=_order(name, options, served_by),
        algorithm=options.algorithm if has_options and served_by.startswith("jax_ring") else "",
        chosen=tuple(dict.fromkeys(algorithm for _, chosen in predicted for algorithm in chosen)),
        served_by=served_by,
        why=why,
        wire_bytes=sum((each.wire_bytes for each, _ in predicted), 0.0),
        wire_bytes_across_hosts=None if served_by == "XLA" else by_xla,
        call_site=summarize(eqn.source_info),
    )


def _message(eqn: core.JaxprEqn, name: str, kind: str) -> list[Any]:
    """The types of a call's larger side: results of a gather and a ragged all-to-all, else operands."""
    variables = eqn.outvars if kind in ("all_gather", "ragged_all_to_all") else eqn.invars
    if name == "pbroadcast_dynamic":
        variables = variables[:1]  # without the source
    avals: list[Any] = [v.aval for v in variables]
    return [getattr(aval, "inner_aval", aval) for aval in avals]  # of an asynchronous collective


def _order(name: str, options: Options, served_by: str) -> str:
    if "psum" not in name and name != "ring_reduce":
        return ""
    if "XLA" not in served_by or options.order == "tree":
        return options.order
    return f"{options.order} by host" if "psum_scatter" in name and served_by != "XLA" else "XLA"


def _algorithm_text(collective: Collective) -> str:
    chosen = f": {', '.join(collective.chosen)}" if collective.chosen else ""
    return f" ({collective.algorithm}{chosen})" if collective.algorithm else ""


def _aval_text(aval: Any) -> str:
    return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"


def _who_serves(planned: Plan | None, groups: Sequence[Sequence[int]]) -> tuple[str, str]:
    """`Collective.served_by` and `Collective.why`."""
    if all(len(group) == 1 for group in groups):
        return "none", "groups of one rank"
    if planned is None:
        return "XLA", "a collective of lax, not overridden"
    service = planned.call.service
    if service.levels is None:
        return "XLA", service.why_not
    if planned.crosses_hosts:
        return f"jax_ring within hosts, XLA across {service.levels.num_hosts} hosts", ""
    if service.levels.num_processes > 1:
        transport = "shared memory" if service.engine == "cpu" else "CUDA IPC"
        return f"jax_ring ({transport}, {service.levels.num_processes} processes)", ""
    return "jax_ring", ""


def _platform(mesh: Any) -> str:
    # An abstract mesh has no platform. The program is then lowered for the default platform, or for that of its
    # arguments.
    platform = mesh.devices.flat[0].platform if isinstance(mesh, jax.sharding.Mesh) else jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def _total_wire_bytes(collectives: Sequence[Collective | Instruction]) -> float | None:
    known = [each.wire_bytes * each.times for each in collectives if each.times is not None]
    return sum(known) if len(known) == len(collectives) else None


def _total_text(collectives: Sequence[Collective | Instruction]) -> str:
    known = [each for each in collectives if each.times is not None]
    return f"{'at least ' if len(known) < len(collectives) else ''}{_total_wire_bytes(known):,.0f}"


def _num_bytes(aval: Any) -> int:
    if not is_number(aval.dtype):  # random keys
        aval = jax.eval_shape(jax.random.key_data, aval)
    # Integers of fewer than 8 bits are packed; booleans are not.
    bits = 8 if aval.dtype == bool else jax.dtypes.itemsize_bits(aval.dtype)
    return math.ceil(aval.size * bits / 8)


def _abbreviate(values: Iterable) -> str:
    values = list(map(str, values))
    if len(set(values)) == 1:
        return values[0] if len(values) == 1 else f"{len(values)} x {values[0]}"
    return ", ".join(values[:3]) + (f" and {len(values) - 3} more" if len(values) > 3 else "")


def _count_text(count: int | None) -> str:
    return "?" if count is None else str(count)
