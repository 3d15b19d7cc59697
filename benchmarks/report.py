"""The benchmark's results as a table in the form of nccl-tests, as JSON and CSV, as a summary and as a plot."""

import csv
import dataclasses
import json
import math
import os
import platform

import jax
from measure import Row

CLASSES = (("small", 0, 4 << 10), ("medium", 64 << 10, 1 << 20), ("large", 16 << 20, math.inf))
WARNING = (
    "# CPU devices share one memory: 'bandwidth' here is memory bandwidth, not that of a network.\n"
    "# limit: a bare fold of float32 by one thread per core, in the same run. Times in us: median (p10-p90)."
)


def header() -> str:
    return WARNING + (
        f"\n#{'size':>10} {'count':>10} {'type':>9} {'redop':>5} {'implementation':>15}"
        f" | {'out-of-place':^33} | {'in-place':>10} | {'in a jitted loop':^40} | {'#wrong':>6}"
        f"\n#{'(B)':>10} {'(elements)':>10} {'':>9} {'':>5} {'':>15}"
        f" | {'time':>9} {'algbw':>7} {'busbw':>7} {'':>7} | {'time':>10}"
        f" | {'time':>20} {'busbw':>8} {'limit':>9} | {'':>6}"
    )


def line(row: Row) -> str:
    algbw, busbw = row.bandwidths(row.out_of_place.median)
    loop = row.in_loop
    _, loop_busbw = row.bandwidths(loop.median)
    return (
        f"{row.bytes:>11} {row.count:>10} {row.dtype:>9} {'sum':>5} {row.implementation:>15}"
        f" | {row.out_of_place.median:>9.1f} {algbw:>7.2f} {busbw:>7.2f} {'':>7} | {row.in_place.median:>10.1f}"
        f" | {loop.median:>8.1f} {f'({loop.p10:.1f}-{loop.p90:.1f})':>15} {loop_busbw:>6.2f}"
        f" {row.limit_us / max(loop.median, 1e-3):>8.0%} | {row.wrong if row.wrong >= 0 else 'N/A':>6}"
    )


def ratios(rows: list[Row], figure: str) -> dict[str, float]:
    """Geometric mean of lax.psum's time over ring_psum's in each class of sizes; above 1, ring_psum is faster."""
    result = {}
    for label, low, high in CLASSES:
        times = {
            name: {(r.ranks, r.bytes, r.dtype): getattr(r, figure).median for r in rows if r.implementation == name}
            for name in ("ring_psum", "lax.psum")
        }
        logs = [
            math.log(theirs / times["ring_psum"][key])
            for key, theirs in times["lax.psum"].items()
            if low <= key[1] <= high and key in times["ring_psum"] and min(theirs, times["ring_psum"][key]) > 0
        ]
        if logs:
            result[label] = math.exp(sum(logs) / len(logs))
    return result


def summary(rows: list[Row]) -> str:
    lines = [
        "# lax.psum's time / ring_psum's, geometric mean (small: to 4 KiB; medium: 64 KiB-1 MiB; large: 16 MiB on)"
    ]
    for figure in ("in_loop", "out_of_place", "in_place"):
        parts = [f"{label} {ratio:.2f}x" for label, ratio in ratios(rows, figure).items()]
        lines.append(f"#   {figure.replace('_', ' '):>13}: {', '.join(parts) or 'no size in these classes'}")
    return "\n".join(lines)


def machine() -> dict:
    """What the figures were measured on."""
    model = next(
        (text.split(":", 1)[1].strip() for text in _lines("/proc/cpuinfo") if text.startswith("model name")), "unknown"
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.readlines()
    except OSError:
        return []


def write_json(path: str, rows: list[Row]) -> None:
    with open(path, "w") as file:
        json.dump({"machine": machine(), "rows": [dataclasses.asdict(row) for row in rows]}, file, indent=1)
        file.write("\n")


def write_csv(path: str, rows: list[Row]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        figures = ("out_of_place", "in_place", "in_loop")
        writer.writerow(
            ["implementation", "ranks", "bytes", "count", "dtype", "wrong", "limit_us"]
            + [f"{figure}_{part}_us" for figure in figures for part in ("median", "p10", "p90")]
        )
        for row in rows:
            writer.writerow(
                [row.implementation, row.ranks, row.bytes, row.count, row.dtype, row.wrong, f"{row.limit_us:.3f}"]
                + [f"{x:.3f}" for figure in figures for x in dataclasses.astuple(getattr(row, figure))]
            )


def plot(path: str, rows: list[Row]) -> None:
    """Time and bandwidth per call inside a jitted loop against message size, with the machine's limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, bandwidths) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    names = list(dict.fromkeys(row.implementation for row in rows))
    for name in names:
        mine = [row for row in rows if row.implementation == name and row.in_loop.median > 0]
        sizes = [row.bytes for row in mine]
        (curve,) = times.plot(sizes, [row.in_loop.median for row in mine], marker="o", label=name)
        times.fill_between(
            sizes,
            [max(row.in_loop.p10, 1e-2) for row in mine],
            [row.in_loop.p90 for row in mine],
            alpha=0.2,
            color=curve.get_color(),
        )
        bandwidths.plot(sizes, [row.bandwidths(row.in_loop.median)[1] for row in mine], marker="o", label=name)
    one_each = {row.bytes: row for row in rows}
    limit = sorted(one_each.values(), key=lambda row: row.bytes)
    times.plot([r.bytes for r in limit], [r.limit_us for r in limit], "k--", label="memory limit (float32)")
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


def _crossover(rows: list[Row]) -> int | None:
    """The first size from which lax.psum is faster at every larger size, if there is one."""
    times = {(row.implementation, row.bytes): row.in_loop.median for row in rows}
    sizes = sorted({row.bytes for row in rows})
    crossover = None
    for size in reversed(sizes):
        if times.get(("lax.psum", size), math.inf) >= times.get(("ring_psum", size), 0):
            break
        crossover = size
    return crossover
