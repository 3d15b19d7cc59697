"""Formats benchmark results as tables, JSON, CSV, a summary and a plot."""

import contextlib
import csv
import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from harness import FIGURES, intervals
from harness.machine import at_end
from harness.measure import Row, Spread
from harness.options import size_text

SMALL = 4 << 10
CLASSES = (("small", 0, SMALL), ("medium", 64 << 10, 1 << 20), ("large", 16 << 20, math.inf))
HEADER = (
    "# Median times in us of sums out of place, in place, and in a jitted loop less\n"
    "# the same loop without a collective. busbw: of that, in GB/s; CPU devices share\n"
    "# one memory, so it is not a network's. limit: a bare fold by one thread per\n"
    "# core, over that time. waiting: over the time less a loop with a sum of 4\n"
    "# bytes, in which ranks wait, too, less the time of that sum. pt, up to 4 KiB:\n"
    "# the time by p round trips of a cache line. noise: the time may be 0, or the\n"
    "# times equal, by the interval of 95 %. above: the time is below the limit, see\n"
    "# the note.\n"
    f"#{'size':>5} {'type':>8} {'implementation':>15} {'out':>8} {'in place':>8} {'loop':>8} {'busbw':>6} {'limit':>6}"
    f" {'waiting':>7}"
)


def progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def is_noise(spread: Spread) -> bool:
    """Whether a time in a loop, which is a difference of two, may be zero."""
    return bool(spread.samples) and intervals.median(spread.samples).low <= 0


def fraction(row: Row, spread: Spread, round_trip_us: float = math.nan) -> str:
    """A time in a loop in units that carry over to other machines, as far as they make sense: the limit over it, and of
    a small message the multiple of p round trips of a cache line."""
    if is_noise(spread):
        return "noise"
    if row.bytes <= SMALL and round_trip_us > 0:
        trips = spread.median / row.ranks / round_trip_us
        return f"{trips:.{int(trips < 10)}f} pt"
    share = row.limit_us / max(spread.median, 1e-3)
    return "-" if math.isnan(share) else "above" if share > 1 else f"{share:.0%}"


def line(row: Row, round_trip_us: float = math.nan) -> str:
    loop, waiting = (fraction(row, each, round_trip_us) if each else "-" for each in (row.in_loop, row.in_waiting_loop))
    text = (
        f"{size_text(row.bytes):>6} {_names(row.dtype, row.implementation)}"
        f" {_us(row.out_of_place)} {_us(row.in_place)} {_us(row.in_loop)}"
        f" {row.busbw(row.in_loop.median):>6.2f} {loop:>6} {waiting:>7}"
    )
    return "\n".join([text, *notes(row)])


def _names(dtype: str, implementation: str) -> str:
    """Both, in as many columns for long names of dtypes."""
    return f"{dtype:>8} {implementation:>{23 - max(len(dtype), 8)}}"


def _us(spread: Spread) -> str:
    return f"{spread.median:>8.{int(spread.median < 1e5)}f}"


def notes(row: Row) -> list[str]:
    """A line for wrong values, and for each time below the limit, with both numbers: no collective is that fast."""
    return [f"#   {row.implementation}: {row.wrong} values are wrong"] * (row.wrong > 0) + [
        f"#   {row.implementation}, {name}: {spread.median:.1f} us, but the limit took {row.limit_us:.1f} us: one of"
        " them was disturbed, or the loop without the collective was"
        for name, spread in (("in a loop", row.in_loop), ("waiting", row.in_waiting_loop))
        if spread and fraction(row, spread) == "above"
    ]


def times(rows: list[Row], name: str, figure: str) -> dict[tuple, float]:
    """The median times of an implementation, by layout and message."""
    return {
        (r.processes, r.ranks, r.hosts, r.bytes, r.dtype): getattr(r, figure).median
        for r in rows
        if r.implementation == name
    }


def ratios(rows: list[Row], figure: str, other: str) -> dict[str, float]:
    """Geometric mean of another time over ring_psum's, by class of sizes. Above 1, ring_psum is faster."""
    result = {}
    ring, other_times = times(rows, "ring_psum", figure), times(rows, other, figure)
    for label, low, high in CLASSES:
        logs = [
            math.log(other_times[key] / ring[key])
            for key in other_times
            if low <= key[3] <= high and key in ring and min(other_times[key], ring[key]) > 0
        ]
        if logs:
            result[label] = math.exp(sum(logs) / len(logs))
    return result


def compared(rows: list[Row], figure: str, other: str) -> dict[tuple, intervals.Interval]:
    """Another implementation's time over ring_psum's, by layout and message. Above 1, ring_psum is faster."""
    of = {
        name: {
            (r.processes, r.ranks, r.hosts, r.bytes, r.dtype): getattr(r, figure).samples
            for r in rows
            if r.implementation == name and getattr(r, figure) is not None
        }
        for name in ("ring_psum", other)
    }
    ring, others = of["ring_psum"], of[other]
    return {
        # Samples of other processes cannot be paired with these.
        key: intervals.ratio(others[key], ring[key], paired=key[0] == 1 and len(others[key]) == len(ring[key]))
        for key in others
        if ring.get(key) and others[key]
    }


def summary(rows: list[Row], others: tuple[str, ...] = ("lax.psum",)) -> str:
    lines = []
    for other in others:
        lines.append(
            f"# {other}'s time / ring_psum's, geometric mean\n# small: to 4 KiB; medium: 64 KiB-1 MiB; large: 16 MiB on"
        )
        for figure in FIGURES:
            means = ratios([row for row in rows if getattr(row, figure) is not None], figure, other)
            parts = [f"{label} {ratio:.2f}x" for label, ratio in means.items()]
            lines.append(f"#   {figure.replace('_', ' '):>15}: {', '.join(parts) or 'no size in these classes'}")
        lines.append(interval_table(rows, other))
    return "\n".join(lines)


def interval_table(rows: list[Row], other: str) -> str:
    """A table of another's time over ring_psum's, with confidence intervals, by message."""
    columns = {figure: compared(rows, figure, other) for figure in ("in_loop", "out_of_place")}
    titles = "".join(f" {figure.replace('_', ' '):>28}" for figure in columns)
    lines = [f"#{'size':>5} {'type':>8}{titles}"]
    for key in dict.fromkeys(key for column in columns.values() for key in column):
        cells = (str(column[key]) if key in column else "-" for column in columns.values())
        lines.append(f"#{size_text(key[3]):>5} {key[4]:>8}" + "".join(f" {cell:>28}" for cell in cells))
    return "\n".join(lines)


def ratio_table(rows: list[Row], others: tuple[str, ...]) -> str:
    """A table of the times of others over that of ring_psum, by message: in a jitted loop, and from Python."""
    figures = ("in_loop", "out_of_place")
    of = {(name, figure): times(rows, name, figure) for name in ("ring_psum", *others) for figure in figures}
    lines = [f"# time / ring_psum's\n#{'size':>5} {'type':>8} {'implementation':>15} {'in a loop':>10} {'Python':>10}"]
    for key, name in itertools.product(of["ring_psum", "in_loop"], others):
        pairs = [(of[name, figure].get(key), of["ring_psum", figure][key]) for figure in figures]
        cells = "".join(f" {f'{time / ring:.3g}x' if time and ring > 0 else '-':>10}" for time, ring in pairs)
        lines.append(f"#{size_text(key[3]):>5} {_names(key[4], name)}{cells}")
    return "\n".join(lines)


def crossing_table(rows: list[Row]) -> str:
    """A table of the bytes that go to XLA's collectives and through the loopback interface, by message."""
    lines = [
        "# bytes in one call: the operands of XLA's collectives in the compiled program,\n"
        "# over all ranks; all that went through this host's loopback interface",
        f"#{'size':>5} {'type':>8} {'implementation':>15} {'operands':>11} {'/ lax.psum':>10}"
        f" {'loopback':>12} {'/ lax.psum':>10}",
    ]
    baselines = {(row.bytes, row.dtype): row for row in rows if row.implementation == "lax.psum"}
    for row in rows:
        if row.xla_bytes is None or (base := baselines.get((row.bytes, row.dtype))) is None:
            continue
        pairs = ((row.xla_bytes, base.xla_bytes), (row.loopback_bytes, base.loopback_bytes))
        (operands, part), (loopback, lo_part) = (
            (value, f"{value / base_value:.3f}" if base_value else "-") for value, base_value in pairs
        )
        lines.append(
            f"#{size_text(row.bytes):>5} {_names(row.dtype, row.implementation)} {operands:>11} {part:>10}"
            f" {loopback:>12.0f} {lo_part:>10}"
        )
    return "\n".join(lines)


def size_name(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def as_json(rows: list[Row], machine: dict) -> dict:
    return {"machine": machine, "rows": [dataclasses.asdict(row) for row in rows]}


def write_rows(path: str, rows: list[dict], machine: dict) -> None:
    """Writes JSON with a line for each row, and what the machine was like at the end."""
    machine = machine | at_end()
    with open(path, "w") as file:
        text = ",\n".join(json.dumps(row) for row in rows)
        file.write(f'{{"machine": {json.dumps(machine)},\n"rows": [\n{text}\n]}}\n')


@contextlib.contextmanager
def written_to(path: str | None, machine: dict) -> Iterator[list]:
    """Rows that are written to a file, if given: also those that are there when Ctrl-C or an error ends the run."""
    rows: list = []
    try:
        yield rows
    except KeyboardInterrupt:
        print(f"interrupted; {len(rows)} rows are {f'in {path}' if path else 'lost'}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        if path and rows:
            write_rows(path, [dataclasses.asdict(row) if isinstance(row, Row) else row for row in rows], machine)


def write_csv(path: str, rows: list[Row]) -> None:
    with open(path, "w", newline="") as file:
        writer, parts = csv.writer(file), ("median", "p10", "p90")
        writer.writerow(
            ["implementation", "ranks", "bytes", "count", "dtype", "wrong", "limit_us"]
            + [f"{figure}_{part}_us" for figure in FIGURES for part in parts]
        )
        for row in rows:
            writer.writerow(
                [row.implementation, row.ranks, row.bytes, row.count, row.dtype, row.wrong, f"{row.limit_us:.3f}"]
                + [f"{getattr(getattr(row, figure), part, math.nan):.3f}" for figure in FIGURES for part in parts]
            )


def plot(path: str, rows: list[Row]) -> None:
    """Plots time and bandwidth per call in a jitted loop over message size, with the memory limit.

    Bars are confidence intervals. A time that may be zero is hollow, and left out of the bandwidths.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, bandwidths) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    names = list(dict.fromkeys(row.implementation for row in rows))
    for name in names:
        rows_of_name = [row for row in rows if row.implementation == name and row.in_loop.median > 0]
        sizes = [row.bytes for row in rows_of_name]
        medians = [row.in_loop.median for row in rows_of_name]
        bounds = [_bounds(row.in_loop) for row in rows_of_name]
        bars = [[max(middle - low, 0) for middle, (low, _) in zip(medians, bounds, strict=True)]]
        bars += [[max(high - middle, 0) for middle, (_, high) in zip(medians, bounds, strict=True)]]
        curve = times.errorbar(sizes, medians, bars, marker="o", capsize=3, label=name)[0]
        noisy = [(row.bytes, row.in_loop.median) for row in rows_of_name if is_noise(row.in_loop)]
        times.plot(*zip(*noisy, strict=True), "o", mfc="white", color=curve.get_color(), zorder=9) if noisy else None
        clear = [row for row in rows_of_name if not is_noise(row.in_loop)]
        busbw = [row.busbw(row.in_loop.median) for row in clear]
        bandwidths.plot([row.bytes for row in clear], busbw, marker="o", label=name)
    by_size = {row.bytes: row for row in rows}
    limit = sorted(by_size.values(), key=lambda row: row.bytes)
    times.plot([r.bytes for r in limit], [r.limit_us for r in limit], "k--", label="memory limit")
    bandwidths.plot([r.bytes for r in limit], [r.busbw(r.limit_us) for r in limit], "k--", label="memory limit")
    crossover = _crossover(rows)
    if crossover:
        times.axvline(crossover, color="gray", linestyle=":", label="lax.psum becomes faster")
    for axes, label in ((times, "time per call in µs"), (bandwidths, "busbw in GB/s")):
        axes.set(xscale="log", yscale="log", xlabel="message in bytes (each rank)", ylabel=label)
        axes.grid(True, which="major", alpha=0.3)
        axes.legend()
    row = rows[0]
    figure.suptitle(f"All-reduce of {row.dtype}, {row.ranks} CPU devices on {os.cpu_count()} cores, in a jitted loop")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bounds(spread: Spread) -> tuple[float, float]:
    if not spread.samples:
        return spread.p10, spread.p90
    interval = intervals.median(spread.samples)
    return max(interval.low, 1e-2), interval.high


def _crossover(rows: list[Row]) -> int | None:
    """The smallest size from which lax.psum is faster at every size, if there is one."""
    times = {(row.implementation, row.bytes): row.in_loop.median for row in rows}
    sizes = sorted({row.bytes for row in rows})
    crossover = None
    for size in reversed(sizes):
        if times.get(("lax.psum", size), math.inf) >= times.get(("ring_psum", size), 0):
            break
        crossover = size
    return crossover
