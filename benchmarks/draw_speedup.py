"""Draws how many times faster ring_psum is than lax.psum in a jitted loop, from files of benchmarks/allreduce.py.

    python benchmarks/draw_speedup.py docs/images/speed.svg benchmarks/results/NAME...

Each point is one number of devices in one folder of results, with its interval of 95 % confidence. The lowest ratio of
each message size is written below its points. Text and axes are grey on no ground, to be read in light and dark pages.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from harness import intervals, options

TIMES = "\N{MULTIPLICATION SIGN}"
GREY = "#7f7f7f"
COLORS = ("#3b82c4", "#d97706", "#2e9e6b")
MARKERS = {2: "o", 4: "s", 8: "^", 16: "D"}


class Point(NamedTuple):
    size: int
    devices: int
    ratio: intervals.Interval


def points(folder: pathlib.Path, dtype: str = "float32") -> Iterator[Point]:
    """`lax.psum`'s time in the loop over that of `ring_psum`, for each size and number of devices of a folder."""
    for path in sorted(folder.glob("allreduce-p*.json")):
        rows = json.loads(path.read_text())["rows"]
        samples = {
            (row["bytes"], row["ranks"], row["implementation"]): row["in_loop"]["samples"]
            for row in rows if row["dtype"] == dtype
        }  # fmt: skip
        for (size, devices, name), ring in samples.items():
            if name == "ring_psum" and (lax := samples.get((size, devices, "lax.psum"))):
                yield Point(size, devices, intervals.ratio(lax, ring))


def label(folder: pathlib.Path) -> str:
    """The last word of the folder that names a processor, and the version of JAX."""
    machine = json.loads(next(folder.glob("allreduce-p*.json")).read_text())["machine"]
    processor = next(word for word in folder.name.split("-") if word.startswith("zen"))
    return f"{machine['cpu']}, {processor.replace('zen', 'Zen ')}, JAX {machine['jax']}"


def draw(file: str, folders: list[pathlib.Path]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {
        "svg.fonttype": "none", "svg.hashsalt": "speed", "font.family": "sans-serif", "font.size": 11,
        "text.color": GREY, "axes.labelcolor": GREY, "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    }  # fmt: skip
    found = [(folder, list(points(folder))) for folder in folders]
    sizes = sorted({point.size for _, several in found for point in several if point.size <= 16 << 20})
    figure, axes = pyplot.subplots(figsize=(4.8, 4.2), layout="constrained")
    for i, (folder, several) in enumerate(found):
        for marker, devices in zip(MARKERS.values(), MARKERS, strict=True):
            mine = [point for point in several if point.devices == devices and point.size in sizes]
            ratios = [point.ratio for point in mine]
            shift = (len(MARKERS) * i + list(MARKERS).index(devices) - len(MARKERS) * len(found) / 2 + 0.5) * 0.065
            below, above = [r.value - r.low for r in ratios], [r.high - r.value for r in ratios]
            axes.errorbar(
                [sizes.index(point.size) + shift for point in mine], [ratio.value for ratio in ratios],
                yerr=[below, above], fmt=marker, ms=4, lw=1, color=COLORS[i],
                label=label(folder) if devices == 2 else None,
            )  # fmt: skip
    for x, size in enumerate(sizes):
        lowest = min(point.ratio.value for _, several in found for point in several if point.size == size)
        axes.text(x, 0.72, f"{lowest:.1f}{TIMES}", ha="center", va="center")
    axes.text(-0.62, 0.72, "lowest\ndrawn", ha="right", va="center")
    axes.axhline(1, color=GREY, lw=1)
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.6, 64)
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.set_yticks([1, 2, 4, 8, 16, 32], [f"{n}{TIMES}" for n in (1, 2, 4, 8, 16, 32)])
    names = [f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" for size in sizes]
    axes.set_xticks(range(len(sizes)), names)
    axes.set_title("ring_psum against lax.psum: times faster,\nfloat32 in a jitted loop on 2 cores", fontsize=11)
    shapes = ", ".join(f"{name} {n}" for name, n in zip("●■▲◆", MARKERS, strict=True))
    axes.set_xlabel(f"message; devices: {shapes}", fontsize=9.5)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("picture", type=options.file)
    parser.add_argument("folders", type=pathlib.Path, nargs="+", help="of results")
    arguments = parser.parse_args()
    draw(arguments.picture, arguments.folders)
