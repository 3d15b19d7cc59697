"""Plots of the simulator and of fitted models: the fastest algorithm by size and ranks, and the scaling of a step."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from model import fit
from model.draw import pyplot
from model.simulator import Conditions, simulate
from model.topology import Topology
from model.training import Workload, step_seconds

COMPARED = ("one_shot", "two_shot", "halving_doubling", "double_tree", "ring", "two_level", "two_level_tree")
TWO_LEVEL_PIECES = (1, 4, 16)


def rank_counts(topology: Topology, max_ranks: int) -> list[int]:
    """Powers of two that fit on a host, then powers of two of full hosts, up to `max_ranks` ranks."""
    on_host = [1 << i for i in range(1, topology.ranks_per_host.bit_length()) if 1 << i < topology.ranks_per_host]
    hosts = [topology.ranks_per_host << i for i in range(20)]
    return [p for p in on_host + hosts if p <= max_ranks]


def seconds(algorithm: str, p: int, n: float, topology: Topology, conditions: Conditions | None = None) -> float:
    """The simulated time of one all-reduce. On two levels, the best of `TWO_LEVEL_PIECES`."""
    pieces = TWO_LEVEL_PIECES if algorithm.startswith("two_level") and p > topology.ranks_per_host else (None,)
    return min(float(simulate(algorithm, p, n, topology, conditions, pieces=m).max()) for m in pieces)


def fastest(topology: Topology, ranks: Sequence[int], sizes: Sequence[float]) -> np.ndarray:
    """The index in COMPARED of the fastest algorithm, by ranks and sizes.

    Within a host, two levels are a ring and left out. Beyond a host, one-shot and two-shot are left out: a rank would
    send to all others at once, and the model does not include the cost of a message to a NIC.
    """
    result = np.zeros((len(ranks), len(sizes)), int)
    for i, p in enumerate(ranks):
        excluded = ("two_level", "two_level_tree") if p <= topology.ranks_per_host else ("one_shot", "two_shot")
        for j, n in enumerate(sizes):
            times = [np.inf if a in excluded else seconds(a, p, n, topology) for a in COMPARED]
            result[i, j] = int(np.argmin(times))
    return result


def crossover_map(topology: Topology, max_ranks: int = 65536):
    """A figure of the fastest algorithm by message size and number of ranks."""
    plt = pyplot()
    from matplotlib.colors import BoundaryNorm, ListedColormap

    ranks = rank_counts(topology, max_ranks)
    sizes = [float(1 << i) for i in range(10, 35, 2)]
    colors = ListedColormap(plt.get_cmap("Set2").colors[: len(COMPARED)])
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    bounds = np.arange(len(COMPARED) + 1) - 0.5
    image = axes.imshow(
        fastest(topology, ranks, sizes), cmap=colors, norm=BoundaryNorm(bounds, len(COMPARED)), aspect="auto",
        origin="lower", interpolation="nearest",
    )  # fmt: skip
    bar = figure.colorbar(image, ticks=range(len(COMPARED)))
    bar.ax.set_yticklabels([name.replace("_", " ") for name in COMPARED])
    axes.set_xticks(range(0, len(sizes), 2), [_bytes(n) for n in sizes[::2]])
    axes.set_yticks(range(len(ranks)), [str(p) for p in ranks])
    axes.set(xlabel="message of each rank", ylabel="ranks", title=f"Fastest all-reduce: {topology.name}")
    return figure


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.0f} GiB"


def scaling_curve(topology: Topology, workload: Workload | None = None, conditions: Conditions | None = None):
    """A figure of a training step's efficiency from one rank to 100,000, by algorithm, with and without overlap."""
    workload = workload or Workload()
    ranks = [*rank_counts(topology, 99_999), 100_000 // topology.ranks_per_host * topology.ranks_per_host]
    compute = workload.forward + workload.backward
    figure, (times, efficiencies) = pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for algorithm, color in (("ring", "tab:red"), ("two_level", "tab:blue"), ("two_level_tree", "tab:green")):
        for overlap, style in ((False, "--"), (True, "-")):
            step = [
                min(
                    step_seconds(
                        workload,
                        partial(seconds, algorithm, p, topology=topology, conditions=conditions),
                        buckets,
                        overlap,
                    )
                    for buckets in ((1, 4, 16, 64) if overlap else (1,))
                )
                for p in ranks
            ]
            label = f"{algorithm.replace('_', ' ')}, {'overlapped' if overlap else 'after the backward pass'}"
            times.plot([1, *ranks], [compute, *step], style, color=color, label=label)
            efficiencies.plot([1, *ranks], [100, *(100 * compute / np.array(step))], style, color=color)
    times.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds per step")
    efficiencies.set(xscale="log", ylim=(0, 105), xlabel="ranks", ylabel="% of one rank's speed, each")
    times.legend(fontsize=7)
    times.yaxis.set_major_formatter("{x:g}")
    times.yaxis.set_minor_formatter("{x:.1f}")
    for axes in (times, efficiencies):
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"GPT of {workload.parameters / 1e9:g} billion parameters, {workload.tokens:g} tokens per rank: {topology.name}"
    )
    return figure


def fit_plot(measurements: Sequence[fit.Measurement], title: str):
    """A figure of the measurements, and of the model fitted to the other numbers of ranks."""
    figure, axes = pyplot().subplots(figsize=(6, 4), layout="constrained")
    for p, (model, _) in fit.leave_out_each(measurements).items():
        of_p = [m for m in measurements if m.num_ranks == p]
        (points,) = axes.plot([m.num_bytes for m in of_p], [m.seconds * 1e6 for m in of_p], "o", label=f"p = {p}")
        sizes = np.geomspace(of_p[0].num_bytes, of_p[-1].num_bytes, 100)
        axes.plot(sizes, [model.seconds(p, n) * 1e6 for n in sizes], color=points.get_color())
    axes.set(xscale="log", yscale="log", xlabel="message of each rank, bytes", ylabel="µs per call", title=title)
    axes.legend(title="points: measured\nlines: fitted to the others", fontsize=8)
    axes.grid(alpha=0.3)
    return figure
