"""Measures how the time of an all-reduce grows with the number of CPU devices, and plots it.

    python benchmarks/scaling.py FOLDER --devices 2,4,8,16,32,64

runs benchmarks/allreduce.py with each number of devices, in a process of its own, writes FOLDER/scaling-pN.json, and
draws FOLDER/scaling.png of all such files. With `--devices ""` it only draws. All devices share the cores: a time per
rank that stays the same means that the work grows with the ranks, and nothing else does.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from harness import intervals, options
from harness.report import size_name

ALLREDUCE = pathlib.Path(__file__).with_name("allreduce.py")
NAMES = ("ring_psum", "lax.psum")


def measure(folder: pathlib.Path, ranks: int, arguments: argparse.Namespace) -> None:
    sizes = ",".join(map(str, arguments.sizes))
    command = [sys.executable, str(ALLREDUCE), "--devices", str(ranks), "--sizes", sizes, "-w", "1"]
    command += ["-n", str(arguments.iters), "--loop-seconds", str(arguments.loop_seconds), "--impl", ",".join(NAMES)]
    subprocess.run([*command, "--json", str(folder / f"scaling-p{ranks}.json")], check=True)


def load(folder: pathlib.Path) -> list[dict]:
    return [row for path in folder.glob("scaling-p*.json") for row in json.loads(path.read_text())["rows"]]


def per_rank(rows: list[dict]) -> dict[tuple[int, str], list[tuple[int, intervals.Interval]]]:
    """Microseconds per rank of a call in a loop, by message and implementation, for each number of ranks."""
    result: dict = {}
    for row in sorted(rows, key=lambda row: (row["bytes"], row["ranks"])):
        times = [sample / row["ranks"] for sample in row["in_loop"]["samples"]]
        curve = result.setdefault((row["bytes"], row["implementation"]), [])
        curve.append((row["ranks"], intervals.median(times)))
    return result


def table(rows: list[dict]) -> str:
    by_message = per_rank(rows)
    ranks = sorted({row["ranks"] for row in rows})
    lines = [f"| time per rank, µs | {' | '.join(f'p = {p}' for p in ranks)} |", "|---|" + "---:|" * len(ranks)]
    for (size, name), curve in by_message.items():
        times = dict(curve)
        cells = [
            "" if p not in times else "noise" if times[p].low <= 0 else f"{float(f'{times[p].value:.3g}'):g}"
            for p in ranks
        ]  # fmt: skip
        lines.append(f"| {size_name(size)}, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(path: pathlib.Path, rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    curves = per_rank(rows)
    sizes = sorted({size for size, _ in curves})
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(4.2 * len(sizes), 4), layout="constrained", squeeze=False)
    for size, axes in zip(sizes, panels[0], strict=True):
        for name in dict.fromkeys(name for _, name in curves):
            points = [(p, each) for p, each in curves.get((size, name), []) if each.low > 0]
            ranks, middles = [p for p, _ in points], [each.value for _, each in points]
            bars = [[each.value - each.low for _, each in points], [each.high - each.value for _, each in points]]
            axes.errorbar(ranks, middles, bars, marker="o", capsize=3, label=name)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="time per call and rank in µs")
        axes.set_title(size_name(size))
        axes.set_xticks(ticks := sorted({row["ranks"] for row in rows}), [str(p) for p in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(True, which="major", alpha=0.3)
        axes.legend()
    figure.suptitle(f"All-reduce of {rows[0]['dtype']} in a jitted loop: time per call and rank")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    numbers, sizes = options.several(options.count), options.several(options.size)
    parser.add_argument("--devices", type=numbers, default="2,4,8,16,32,64", help="numbers of devices to measure")
    parser.add_argument("--sizes", type=sizes, default="4K,256K,4M", help="messages of one rank")
    parser.add_argument("-n", "--iters", type=options.count, default=8, help="timed runs")
    parser.add_argument("--loop-seconds", type=options.seconds, default=0.05, help="duration of one jitted loop, about")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for ranks in arguments.devices:
        measure(arguments.folder, ranks, arguments)
    if not (rows := load(arguments.folder)):
        sys.exit(f"{arguments.folder} has no scaling-p*.json to draw")
    print(table(rows))
    plot(arguments.folder / "scaling.png", rows)


if __name__ == "__main__":
    main()
