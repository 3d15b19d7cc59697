"""Summarizes the JSON files of several benchmark runs as one page of tables.

    python benchmarks/summarize.py benchmarks/results/NAME

Reads allreduce-*.json and, if present, loops-*.json, train_step-*.json, processes-*.json, two_level-*.json and
scaling-*.json in the folder, and writes README.md there. Figures are medians over the runs. A ratio is the median of
the ratios of the runs, with the lowest and the highest bound of their confidence intervals.
"""

import json
import pathlib
import statistics
import sys
from collections import defaultdict

import scaling
from harness import FIGURES, intervals
from peers.libraries import PEERS


def load(folder: pathlib.Path, pattern: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def size_name(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def spread_of(ratios: list[intervals.Interval]) -> str:
    """The median of the runs, with the lowest and the highest bound of their confidence intervals."""
    low, high = min(each.low for each in ratios), max(each.high for each in ratios)
    middle = statistics.median(each.value for each in ratios)
    return f"{middle:.2f} ({low:.2f} to {high:.2f}){' noise' * (low <= 1 <= high)}"


def ratio_of(numerator: dict, denominator: dict) -> intervals.Interval:
    """A ratio of two figures of a run, without an interval where their samples are not there."""
    if numerator.get("samples") and len(numerator["samples"]) == len(denominator.get("samples", [])):
        return intervals.ratio(numerator["samples"], denominator["samples"])
    value = numerator["median"] / max(denominator["median"], 1e-3)
    return intervals.Interval(value, value, value)


def share(values: list[float]) -> str:
    """The part of the limit. More than the limit is not possible, so something was disturbed."""
    middle = statistics.median(values)
    return f"{middle:.0%}" if middle <= 1 else "above (disturbed)"


def allreduce_tables(runs: list[dict], dtype: str) -> list[str]:
    """One table per number of ranks: times per call, and lax.psum's times over them."""
    cells = defaultdict(lambda: defaultdict(list))  # (ranks, bytes): figure: values by run
    for run in runs:
        rows = {(r["ranks"], r["bytes"], r["implementation"]): r for r in run["rows"] if r["dtype"] == dtype}
        for (ranks, size, name), ring in rows.items():
            lax = rows.get((ranks, size, "lax.psum"))
            if name != "ring_psum" or lax is None:
                continue
            cell = cells[ranks, size]
            for figure in FIGURES:
                if not ring.get(figure):
                    continue
                cell[figure].append(ring[figure]["median"])
                cell[f"{figure} ratio"].append(ratio_of(lax[figure], ring[figure]))
                cell[f"{figure} limit"].append(ring["limit_us"] / max(ring[figure]["median"], 1e-3))
            cell["wrong"].append(ring["wrong"] + lax["wrong"])
    lines = []
    for ranks in sorted({ranks for ranks, _ in cells}):
        lines += [
            f"\n### {dtype}, p = {ranks}\n",
            "| message | in a loop, µs | lax / ring | of the limit | waiting, µs | lax / ring | of the limit "
            "| from Python, µs | lax / ring | of the limit | donated, µs | lax / ring |",
            "|---:" * 12 + "|",
        ]
        for size in sorted(size for p, size in cells if p == ranks):
            cell = cells[ranks, size]
            parts = [size_name(size)]
            for figure in FIGURES:
                times = cell[figure]
                parts.append(f"{statistics.median(times):.1f}" if times else "")
                parts.append(spread_of(cell[f"{figure} ratio"]) if times else "")
                if figure != "in_place":
                    parts.append(share(cell[f"{figure} limit"]) if times else "")
            lines.append(f"| {' | '.join(parts)} |")
        wrong = sum(sum(cell["wrong"]) for (p, _), cell in cells.items() if p == ranks)
        lines.append(f"\nValues out of bounds, ring_psum and lax.psum: {wrong}.")
    return lines


def peers_tables(runs: list[dict]) -> list[str]:
    """Times of the libraries that run one process per rank, and of ring_psum in the same runs."""
    cells = defaultdict(lambda: defaultdict(list))  # (ranks, bytes, figure): implementation: values by run
    for run in runs:
        names = dict.fromkeys(row["implementation"] for row in run["rows"])
        peers = [name for name in names if name in PEERS]
        for row in run["rows"] if peers else ():
            if row["dtype"] == "float32" and row["implementation"] in ("ring_psum", *peers):
                for figure in ("in_loop", "out_of_place"):
                    cells[row["ranks"], row["bytes"], figure][row["implementation"]].append(row[figure]["median"])
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell))
    lines = []
    for ranks in sorted({ranks for ranks, _, _ in cells}):
        heads = [f"{name}, {label}" for label in ("loop", "one call") for name in names]
        lines += [
            f"\n### float32, p = {ranks}, µs\n",
            f"| message | {' | '.join(heads)} |",
            "|---:" * (1 + len(heads)) + "|",
        ]
        for size in sorted({size for p, size, _ in cells if p == ranks}):
            figures = [
                f"{statistics.median(cells[ranks, size, figure][name]):.1f}"
                for figure in ("in_loop", "out_of_place")
                for name in names
            ]
            lines.append(f"| {size_name(size)} | {' | '.join(figures)} |")
    return lines


def processes_tables(runs: list[dict]) -> list[str]:
    """Times per call in a loop between processes, ratios to ring_psum, and bytes that cross hosts."""
    cells = defaultdict(lambda: defaultdict(list))  # (layout, bytes): figure: values by run
    for run in runs:
        rows = {
            ((r["processes"], r["ranks"] // r["processes"], r["hosts"]), r["bytes"], r["implementation"]): r
            for r in run["rows"]
            if r["dtype"] == "float32"
        }
        for (layout, size, name), row in rows.items():
            cell, ring = cells[layout, size], rows.get((layout, size, "ring_psum"))
            cell[f"{name}, µs"].append(row["in_loop"]["median"])
            if ring is not None and row is not ring:
                cell[f"{name} / ring_psum"].append(row["in_loop"]["median"] / max(ring["in_loop"]["median"], 1e-3))
            if row["hosts"] > 1 and row["xla_bytes"] is not None:
                cell[f"{name}, bytes to XLA"].append(row["xla_bytes"])
                cell[f"{name}, bytes on loopback"].append(row["loopback_bytes"])
    lines = []
    for layout in dict.fromkeys(layout for layout, _ in cells):
        sizes = [size for one, size in cells if one == layout]
        figures = list(dict.fromkeys(figure for size in sizes for figure in cells[layout, size]))
        processes, devices, hosts = layout
        lines += [
            f"\n### float32, {processes} processes x {devices} ranks{f', configured as {hosts} hosts' * (hosts > 1)}\n",
            f"| message | {' | '.join(figures)} |",
            "|---:" * (1 + len(figures)) + "|",
        ]
        for size in sizes:
            texts = [
                "" if not (values := cells[layout, size][figure])
                else spread(values) if "/ ring" in figure
                else f"{statistics.median(values):,.0f}" if "bytes" in figure
                else f"{statistics.median(values):.1f}"
                for figure in figures
            ]  # fmt: skip
            lines.append(f"| {size_name(size)} | {' | '.join(texts)} |")
    return lines


def train_step_table(runs: list[dict]) -> list[str]:
    cells = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for row in run["rows"]:
            cell = cells[row["ranks"], row["model"], row["dtype"], row["variant"]]
            cell["ms"].append(row["median_ms"])
            cell["speedup"].append(
                intervals.Interval(row["speedup"], *row.get("speedup_interval", [row["speedup"]] * 2))
            )
            cell["over floor"] += [row["over_floor"]] if "over_floor" in row else []
    lines = [
        "\n| p | model | dtype | gradients summed by | ms per step | lax.psum fused / this | this / no collective |",
        "|--:|---|---|---|--:|--:|--:|",
    ]
    for (ranks, model, dtype, variant), cell in cells.items():
        milliseconds = statistics.median(cell["ms"])
        speedup = "" if "lax.psum" in variant and "leaf" not in variant else spread_of(cell["speedup"])
        floor = spread(cell["over floor"]) if cell["over floor"] else ""
        lines.append(f"| {ranks} | {model} | {dtype} | {variant} | {milliseconds:.2f} | {speedup} | {floor} |")
    return lines


def loops_table(runs: list[dict]) -> list[str]:
    lines = [
        "\n| p | message | type | ring_psum, µs | lax.psum, µs | no collective, µs | lax / ring |",
        "|--:|---:|---|--:|--:|--:|--:|",
    ]
    for row in sorted((row for run in runs for row in run["rows"]), key=lambda row: (row["ranks"], row["dtype"])):
        times = " | ".join(f"{us:.1f}" for us in row["median_us"].values())
        ratio = spread_of([intervals.Interval(row["speedup"], *row["speedup_interval"])])
        lines.append(f"| {row['ranks']} | {size_name(row['bytes'])} | {row['dtype']} | {times} | {ratio} |")
    return lines


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    allreduce, steps = load(folder, "allreduce-*.json"), load(folder, "train_step-*.json")
    processes = load(folder, "processes-*.json") + load(folder, "two_level-*.json")
    machine = allreduce[0]["machine"]
    lines = [
        "# Measurements",
        f"\n{machine['cpu']}, {machine['cores']} cores, {machine['system']}; Python {machine['python']}, "
        f"JAX {machine['jax']}. Written by `benchmarks/summarize.py` from the JSON files beside this page.",
        "\nTimes are medians. A ratio is lax.psum's time over ring_psum's in the same run: the median of the runs, "
        "with the lowest and the highest bound of their confidence intervals of 95 % in brackets, and noise where "
        "these include 1. A time in a loop is less that of the empty loop, or (waiting) of a loop in which ranks wait "
        "for each other too. The limit is a bare fold by one thread per core, without a runtime, in the same run. CPU "
        "devices share one memory: this is about memory, not a network.",
        "\n## All-reduce",
    ]
    for dtype in dict.fromkeys(row["dtype"] for run in allreduce for row in run["rows"]):
        lines += allreduce_tables(allreduce, dtype)
    if loops := load(folder, "loops-*.json"):
        lines += [
            "\n## Loops that compute something else",
            "\nWhole turns: a product of two matrices of 128 rows and columns, a kernel, and the sum.",
            *loops_table(loops),
        ]
    if many := scaling.load(folder):
        lines += ["\n## From 2 to 64 devices", "", scaling.table(many), "\n![Time per call and rank](scaling.png)"]
    others = peers_tables(allreduce)
    if others:
        lines += [
            "\n## Libraries that run one process per rank",
            "\nMeans over the ranks, medians over calls and runs. Loop: back-to-back calls in a jitted loop, minus the "
            "same loop without them; for torch.distributed in a Python loop.",
            *others,
        ]
    if processes:
        lines += [
            "\n## Between processes of one host",
            "\nPer call in a jitted loop, minus the same loop without it (torch.distributed: in a Python loop). Means "
            "over the processes.",
            *processes_tables(processes),
        ]
    if steps:
        lines += ["\n## A whole training step", *train_step_table(steps)]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
