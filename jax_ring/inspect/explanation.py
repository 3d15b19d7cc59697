"""`explain()`: the collectives of a function, who serves each of them, and what they put on the wire."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.source_info_util import summarize

from jax_ring import _compat
from jax_ring.inspect.compiled import Instruction, find_collectives
from jax_ring.inspect.wire_bytes import wire_bytes
from jax_ring.lowering import override, service, tuning, two_level
from jax_ring.lowering.reach import Levels
from jax_ring.options import Options

# JAX's primitives and, with ring_ before their names, ours.
_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmax_invariant": "all_reduce",
    "pmin": "all_reduce",
    "pmin_invariant": "all_reduce",
    "psum_scatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "broadcast_invariant": "broadcast",
    "ppermute": "permute",
    "all_to_all": "all_to_all",
}


@dataclass(frozen=True)
class Collective:
    """A collective as the function was written, or as differentiation made it.

    Attributes:
      name: the primitive's: ring_psum, psum, psum_invariant, ...
      axes: the names of the mesh axes over which it communicates.
      groups: the mesh positions that communicate with each other.
      operands: dtype and shape of each operand, on one rank.
      num_bytes: the message of one call, in bytes: the operands, or for all_gather the results.
      times: how often it is called in one call of the function; None if that is known only when it runs, as in a
        while_loop or in a branch of a cond.
      algorithm: the option `algorithm` of a collective of ours; empty for one that XLA serves.
      chosen: the algorithms that "auto" comes to by the thresholds in force (`JAX_RING_TUNING`), several where groups
        differ; empty where there is no choice: on CPU devices of one process, and for all but sums by an all-reduce.
        More than 64 operands travel as several messages, each of which may go by another one.
      served_by: "jax_ring", with the way between processes and hosts where a group has ranks in several, as in
        "jax_ring (shared memory, 2 processes)" and "jax_ring within hosts, XLA across 2 hosts"; "XLA"; or "nobody"
        where each group is one rank.
      why: why XLA, or nobody, serves it; else empty.
      wire_bytes: what a rank is predicted to send for one call, on average, in bytes.
      wire_bytes_across_hosts: how much of that goes to other hosts; None where XLA serves the call, and picks the way.
      call_site: file, line and function.
    """

    name: str
    axes: tuple
    groups: tuple[tuple[int, ...], ...]
    operands: tuple[str, ...]
    num_bytes: int
    times: int | None
    algorithm: str
    chosen: tuple[str, ...]
    served_by: str
    why: str
    wire_bytes: float
    wire_bytes_across_hosts: float | None
    call_site: str


@dataclass(frozen=True)
class Explanation:
    """What `explain()` found. As text (`str`), two tables: the function as written, and as compiled.

    Attributes:
      collectives: those of the function. What the compiler's partitioner inserts is not among them.
      instructions: those of the compiled program: equal ones merged, dead ones gone, the partitioner's included.
    """

    collectives: tuple[Collective, ...]
    instructions: tuple[Instruction, ...]

    @property
    def predicted_bytes(self) -> float | None:
        """What a rank sends in one call of the function, by the formulas; None if a number of calls is unknown."""
        return None if _any_unknown(self.collectives) else _sent(self.collectives)

    @property
    def counted_bytes(self) -> float | None:
        """The same, counted in the compiled program."""
        return None if _any_unknown(self.instructions) else _sent(self.instructions)

    def __str__(self) -> str:
        written = _table(
            "Collectives, as written",
            ("collective", "over", "ranks", "operands", "bytes", "times", "served by", "sends", "at"),
            [
                (
                    c.name,
                    ", ".join(map(str, c.axes)),
                    _several(map(len, c.groups)),
                    _several(c.operands),
                    f"{c.num_bytes:,}",
                    _times(c.times),
                    f"{c.served_by}{_in_brackets(c)}{f': {c.why}' if c.why else ''}",
                    f"{c.wire_bytes:,.0f}"
                    + (f", {c.wire_bytes_across_hosts:,.0f} across hosts" if c.wire_bytes_across_hosts else ""),
                    c.call_site,
                )
                for c in self.collectives
            ],
        )
        compiled = _table(
            "Collectives, as compiled",
            ("instruction", "ranks", "operands", "bytes", "times", "sends"),
            [
                (
                    i.name,
                    _several(i.group_sizes),
                    _several(i.operands),
                    f"{i.num_bytes:,}",
                    _times(i.times),
                    f"{i.wire_bytes:,.0f}",
                )
                for i in self.instructions
            ],
        )
        predicted, counted = (
            f"at least {_sent(found):,.0f}" if _any_unknown(found) else f"{_sent(found):,.0f}"
            for found in (self.collectives, self.instructions)
        )
        totals = f"Each rank sends, in bytes: {predicted} predicted, {counted} counted in the compiled program."
        return f"{written}\n{compiled}\n{totals}"


def explain(fn: Callable, *args: Any, **kwargs: Any) -> Explanation:
    """Finds the collectives in a function, who serves each of them, and the bytes that they put on the wire.

    The function is traced and compiled, and not run. Collectives of this library and of `jax.lax` are found in nested
    functions, loops, branches and `shard_map` alike. Under `override_lax()` it tells who serves those of lax then.

    Args:
      fn: a function, jitted or not.
      *args: what `fn` would be called with: arrays, or `jax.ShapeDtypeStruct`s in their place.
      **kwargs: the same, by name.

    Raises:
      whatever tracing and compiling `fn` with these arguments raises.
    """
    traced = (fn if hasattr(fn, "trace") else jax.jit(fn)).trace(*args, **kwargs)
    compiled = traced.lower().compile()
    return Explanation(
        tuple(_walk(_open(traced.jaxpr), None, 1)),
        tuple(find_collectives(compiled.as_text() or "")),
    )


def _walk(jaxpr: core.Jaxpr, axis_context, times: int | None) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.removeprefix("ring_") in _KINDS and axis_context is not None:
            yield _collective(eqn, axis_context, times)
        within = _compat.axis_context_within(eqn.params) if name == "shard_map" else axis_context
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _walk(_open(inner), within, _times_within(eqn, times))


def _is_jaxpr(value) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def _open(jaxpr) -> core.Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _times_within(eqn: core.JaxprEqn, times: int | None) -> int | None:
    if eqn.primitive.name in ("while", "cond") or times is None:
        return None
    return times * eqn.params["length"] if eqn.primitive.name == "scan" else times


def _collective(eqn: core.JaxprEqn, axis_context, times: int | None) -> Collective:
    params = eqn.params
    name = eqn.primitive.name
    kind = _KINDS[name.removeprefix("ring_")]
    axes = params.get("axes", params.get("axis_name"))
    axes = tuple(axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if not isinstance(axis, int))
    members = service.replica_groups(axis_context, axes, params.get("axis_index_groups"))
    groups = tuple(tuple(int(i) for i in group) for group in members)
    sizes = [len(group) for group in groups]
    served_by, why, engine, levels = _who_serves(name, kind, axis_context, groups)
    sums = kind == "all_reduce" and "psum" in name
    options = params.get("options", Options() if sums else None)
    algorithm = options.algorithm if options and engine else ""
    # The message is the larger side of the call: the results of a gather, elsewhere the operands.
    message = eqn.outvars if kind == "all_gather" else eqn.invars
    num_bytes = sum(_num_bytes(v.aval) for v in message)
    by_group: list[str] = []
    across: float | None
    if levels is not None and levels.across:
        within, across = _bytes_on_two_levels(name, levels, [v.aval for v in message])
        sends = within + across
    else:
        if sums and levels is not None and engine and service.has_choice(engine, levels) and options == Options():
            by_group = [tuning.thresholds(engine, size).choose(num_bytes) for size in sizes]
        sends = wire_bytes(kind, num_bytes, sizes, by_group or algorithm)
        across = None if served_by == "XLA" else 0.0
    return Collective(
        name=name,
        axes=axes,
        groups=groups,
        operands=tuple(_in_words(v.aval) for v in eqn.invars),
        num_bytes=num_bytes,
        times=times,
        algorithm=algorithm,
        chosen=tuple(dict.fromkeys(by_group)),
        served_by=served_by,
        why=why,
        wire_bytes=sends,
        wire_bytes_across_hosts=across,
        call_site=summarize(eqn.source_info),
    )


def _in_brackets(collective: Collective) -> str:
    chosen = f": {', '.join(collective.chosen)}" if collective.chosen else ""
    return f" ({collective.algorithm}{chosen})" if collective.algorithm else ""


def _in_words(aval) -> str:
    return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"


def _num_bytes(aval) -> int:
    # Integers of fewer than 8 bits are packed; booleans are not.
    bits = 8 if aval.dtype == jnp.bool_ else jax.dtypes.itemsize_bits(aval.dtype)
    return math.ceil(aval.size * bits / 8)


def _bytes_on_two_levels(name: str, levels: Levels, avals: Sequence) -> tuple[float, float]:
    """What a rank sends within its host, and to others, for an all-reduce that is split (see two_level.py)."""
    op = "max" if "pmax" in name else "min" if "pmin" in name else "sum"
    ranks, hosts = [len(levels.within[0])], [levels.num_hosts]
    within = across = 0.0
    for aval in avals:
        types = two_level.types_of(op, aval.dtype)
        shard = two_level.shard_size(aval.size, *ranks)
        scattered, crossing, gathered = (_num_bytes(jax.core.ShapedArray((shard,), dtype)) for dtype in types)
        within += wire_bytes("reduce_scatter", scattered * ranks[0], ranks)
        within += wire_bytes("all_gather", gathered * ranks[0], ranks)
        across += wire_bytes("all_reduce", crossing, hosts)
    return within, across


def _who_serves(
    name: str, kind: str, axis_context, groups: Sequence[Sequence[int]]
) -> tuple[str, str, str | None, Levels | None]:
    """Who; why not an engine of ours; the engine, and what it serves."""
    if all(len(group) == 1 for group in groups):
        return "nobody", "groups of one rank", None, None
    if not name.startswith("ring_") and not override.is_overridden(name):
        return "XLA", "a collective of lax, not overridden", None, None
    found = service.who_serves((_platform(axis_context.mesh),), axis_context, groups, kind)
    levels = found.levels
    if levels is None:
        return "XLA", found.why_not, None, None
    if levels.across:
        return f"jax_ring within hosts, XLA across {levels.num_hosts} hosts", "", found.engine, levels
    if levels.num_processes > 1:
        way = "shared memory" if found.engine == "cpu" else "CUDA IPC"
        return f"jax_ring ({way}, {levels.num_processes} processes)", "", found.engine, levels
    return "jax_ring", "", found.engine, levels


def _platform(mesh) -> str:
    # An abstract mesh is of no platform: the program is then for the default one, or for that of its arguments.
    platform = mesh.devices.flat[0].platform if isinstance(mesh, jax.sharding.Mesh) else jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def _any_unknown(collectives: Sequence[Collective] | Sequence[Instruction]) -> bool:
    return any(collective.times is None for collective in collectives)


def _sent(collectives: Sequence[Collective] | Sequence[Instruction]) -> float:
    return sum(collective.wire_bytes * (collective.times or 0) for collective in collectives)


def _several(values) -> str:
    values = list(map(str, values))
    if len(set(values)) == 1:
        return values[0] if len(values) == 1 else f"{len(values)} x {values[0]}"
    return ", ".join(values[:3]) + (f" and {len(values) - 3} more" if len(values) > 3 else "")


def _times(times: int | None) -> str:
    return "?" if times is None else str(times)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)) for row in (header, *rows)]
        return "\n".join([title, *(line.rstrip() for line in lines), ""])
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=160).print(table, markup=False)
    return text.getvalue()
