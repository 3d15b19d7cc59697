"""Formats benchmark results as a table in the form of nccl-tests, as JSON, CSV, a summary and a plot."""

import csv
import dataclasses
import json
import math
import os

from harness import FIGURES, intervals
from harness.machine import at_end
from harness.measure import Row, Spread

SMALL = 4 << 10
CLASSES = (("small", 0, SMALL), ("medium", 64 << 10, 1 << 20), ("large", 16 << 20, math.inf))
WARNING = (
    "# CPU devices share one memory: 'bandwidth' here is memory bandwidth, not that of a network.\n"
    "# Times in us: median (p10-p90). In a jitted loop: less the same loop without a collective, or (waiting) with a\n"
    "# sum of 4 bytes instead, less the time of that sum: ranks wait for each other in both. limit: a bare fold by\n"
    "# one thread per core, in the same run, over that time. pt, up to 4 KiB: the time by p round trips of a cache\n"
    "# line. noise: the time may be 0, or the times equal, by the confidence interval of 95 %. above: the time is\n"
    "# below the limit, see the note."
)


def header() -> str:
    return WARNING + (
        f"\n#{'size':>10} {'count':>10} {'type':>9} {'redop':>5} {'implementation':>15}"
        f" | {'out-of-place':^33} | {'in-place':>10} | {'in a jitted loop':^58} | {'#wrong':>6}"
        f"\n#{'(B)':>10} {'(elements)':>10} {'':>9} {'':>5} {'':>15}"
        f" | {'time':>9} {'algbw':>7} {'busbw':>7} {'':>7} | {'time':>10}"
        f" | {'time':>20} {'busbw':>8} {'limit':>9} {'waiting':>9} {'limit':>7} | {'':>6}"
    )


def is_noise(spread: Spread) -> bool:
    """Whether a time in a loop, which is a difference of two, may be zero."""
    return bool(spread.samples) and intervals.median(spread.samples).low <= 0


def fraction(row: Row, spread: Spread, round_trip_us: float = math.nan) -> str:
    """A time in a loop in units that carry over to other machines, as far as they make sense: the limit over it, and of
    a small message the multiple of p round trips of a cache line."""
    if is_noise(spread):
        return "noise"
    if row.bytes <= SMALL and round_trip_us > 0:
        return f"{spread.median / row.ranks / round_trip_us:.1f} pt"
    share = row.limit_us / max(spread.median, 1e-3)
    return "-" if math.isnan(share) else "above" if share > 1 else f"{share:.0%}"


def line(row: Row, round_trip_us: float = math.nan) -> str:
    algbw, busbw = row.bandwidths(row.out_of_place.median)
    loop, waiting = row.in_loop, row.in_waiting_loop
    _, loop_busbw = row.bandwidths(loop.median)
    part, waiting_part = (fraction(row, each, round_trip_us) if each else "-" for each in (loop, waiting))
    text = (
        f"{row.bytes:>11} {row.count:>10} {row.dtype:>9} {'sum':>5} {row.implementation:>15}"
        f" | {row.out_of_place.median:>9.1f} {algbw:>7.2f} {busbw:>7.2f} {'':>7} | {row.in_place.median:>10.1f}"
        f" | {loop.median:>8.1f} {f'({loop.p10:.1f}-{loop.p90:.1f})':>15} {loop_busbw:>6.2f} {part:>8}"
        f" {f'{waiting.median:.1f}' if waiting else '-':>9} {waiting_part:>7}"
        f" | {row.wrong if row.wrong >= 0 else 'N/A':>6}"
    )
    return "\n".join([text, *notes(row)])


def notes(row: Row) -> list[str]:
    """A line for each time below the limit, with both numbers: no collective is that fast."""
    return [
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
            f"# {other}'s time / ring_psum's, geometric mean (small: to 4 KiB; medium: 64 KiB-1 MiB; large: 16 MiB on)"
        )
        for figure in FIGURES:
            means = ratios([row for row in rows if getattr(row, figure) is not None], figure, other)
            parts = [f"{label} {ratio:.2f}x" for label, ratio in means.items()]
            lines.append(f"#   {figure.replace('_', ' '):>15}: {', '.join(parts) or 'no size in these classes'}")
        lines.append(interval_table(rows, other))
    return "\n".join(lines)


def interval_table(rows: list[Row], other: str) -> str:
    """A table of another's time over ring_psum's, with confidence intervals, by message."""
    columns = {figure: compared(rows, figure, other) for figure in FIGURES}
    titles = "".join(f" {figure.replace('_', ' '):>27}" for figure in FIGURES)
    lines = [f"#{'size (B)':>10} {'type':>9}{titles}"]
    for key in dict.fromkeys(key for column in columns.values() for key in column):
        cells = (str(column[key]) if key in column else "-" for column in columns.values())
        lines.append(f"#{key[3]:>10} {key[4]:>9}" + "".join(f" {cell:>27}" for cell in cells))
    return "\n".join(lines)


def ratio_table(rows: list[Row], others: tuple[str, ...]) -> str:
    """A table of the times of others over that of ring_psum, by message: in a jitted loop, and from Python."""
    figures = [(other, figure) for figure in ("in_loop", "out_of_place") for other in others]
    ring = {figure: times(rows, "ring_psum", figure) for _, figure in figures}
    compared = [times(rows, *pair) for pair in figures]
    titles = [f"{other} ({'loop' if figure == 'in_loop' else 'Python'})" for other, figure in figures]
    lines = [f"# time / ring_psum's\n#{'size (B)':>10} {'type':>9}" + "".join(f" {title:>19}" for title in titles)]
    for key in ring["in_loop"]:
        cells = [
            f"{time[key] / ring[figure][key]:.3g}x" if key in time and ring[figure][key] > 0 else "-"
            for (_, figure), time in zip(figures, compared, strict=True)
        ]
        lines.append(f"#{key[3]:>10} {key[4]:>9}" + "".join(f" {cell:>19}" for cell in cells))
    return "\n".join(lines)


def crossing_table(rows: list[Row]) -> str:
    """A table of the bytes that go to XLA's collectives and through the loopback interface, by message."""
    lines = [
        "# bytes in one call: the operands of XLA's collectives in the compiled program, over all ranks; and all that\n"
        "# went through this host's loopback interface, with headers and other traffic",
        f"#{'size (B)':>10} {'type':>9} {'implementation':>15} {'operands':>12} {'/ lax.psum':>11}"
        f" {'loopback':>14} {'/ lax.psum':>11} {'time in a loop':>15} {'/ lax.psum':>11}",
    ]
    baselines = {(row.bytes, row.dtype): row for row in rows if row.implementation == "lax.psum"}
    for row in rows:
        if row.xla_bytes is None or (base := baselines.get((row.bytes, row.dtype))) is None:
            continue
        pairs = (
            (row.xla_bytes, base.xla_bytes),
            (row.loopback_bytes, base.loopback_bytes),
            (row.in_loop.median, base.in_loop.median),
        )
        (operands, part), (loopback, lo_part), (time, time_part) = (
            (value, f"{value / base_value:.3f}" if base_value else "-") for value, base_value in pairs
        )
        lines.append(
            f"#{row.bytes:>10} {row.dtype:>9} {row.implementation:>15} {operands:>12} {part:>11}"
            f" {loopback:>14.0f} {lo_part:>11} {time:>12.1f} us {time_part:>11}"
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


def write_json(path: str, rows: list[Row], machine: dict) -> None:
    write_rows(path, **as_json(rows, machine))


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
        busbw = [row.bandwidths(row.in_loop.median)[1] for row in clear]
        bandwidths.plot([row.bytes for row in clear], busbw, marker="o", label=name)
    by_size = {row.bytes: row for row in rows}
    limit = sorted(by_size.values(), key=lambda row: row.bytes)
    times.plot([r.bytes for r in limit], [r.limit_us for r in limit], "k--", label="memory limit")
    bandwidths.plot([r.bytes for r in limit], [r.bandwidths(r.limit_us)[1] for r in limit], "k--", label="memory limit")
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
