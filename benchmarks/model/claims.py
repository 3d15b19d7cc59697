"""Four plots that refute common claims about all-reduces and data parallelism."""

import numpy as np

from model import cost
from model.draw import pyplot
from model.simulator import Conditions, simulate
from model.topology import Topology

# Bytes per parameter of Adam in mixed precision: 16-bit parameters and gradients, 32-bit parameters and two
# moments. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020.
PARAMETERS, GRADIENTS, OPTIMIZER = 2, 2, 12
NVLINK_GB_PER_S = 450.0  # NVLink 4, in each direction
SHARP_BUSBW = 480.0  # GB/s, published for 8 H100; see published.toml


def claims(topology: Topology):
    """A figure of four panels: the cost of p, in-switch reduction, stragglers, and memory per parameter."""
    figure, panels = pyplot().subplots(2, 2, figsize=(10, 7), layout="constrained")
    for draw_panel, axes in zip((_ranks, _switch, _stragglers, _memory), panels.flat, strict=True):
        draw_panel(axes, topology)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    return figure


def _ranks(axes, topology: Topology) -> None:
    ranks = [topology.ranks_per_host << i for i in range(14)]
    for size, label, color in ((1 << 20, "1 MiB", "tab:blue"), (1 << 30, "1 GiB", "tab:orange")):
        axes.plot(ranks, [simulate("ring", p, size, topology).max() for p in ranks], color=color, label=label)
        bandwidth = [cost.ring(p, size).sent * topology.host_link().beta for p in ranks]
        axes.plot(ranks, bandwidth, "--", color=color, label=f"{label}, bandwidth term alone")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds", title='"The cost does not depend on p"')


def _switch(axes, topology: Topology) -> None:
    ranks = np.arange(2, 17)
    axes.plot(ranks, np.full(len(ranks), NVLINK_GB_PER_S), label="from rank to rank: at most the line rate")
    axes.plot(ranks, NVLINK_GB_PER_S * 2 * (ranks - 1) / ranks, label="reduced in the switch: a message out, one back")
    axes.plot([8], [SHARP_BUSBW], "ko", label="published, 8 H100 with NVLink SHARP")
    axes.set(ylim=(0, 1000), xlabel="ranks", ylabel="bus bandwidth, GB/s", title='"Nothing beats a ring"')


def _stragglers(axes, topology: Topology) -> None:
    p, size, slowdowns = topology.ranks_per_host, 1 << 26, np.arange(1, 5, 0.5)
    alone = simulate("ring", p, size, topology).max()
    times = [simulate("ring", p, size, topology, Conditions(stragglers=1, slowdown=s)).max() for s in slowdowns]
    axes.plot(slowdowns, np.array(times) / alone, "o-", label=f"ring of {p} ranks, one of them slow")
    axes.plot(slowdowns, (p - 1 + slowdowns) / p, "--", label="if each rank cost its own share of the time")
    axes.set(
        xlabel="how many times slower the one rank is", ylabel="time of the all-reduce",
        title='"A ring is asynchronous"', ylim=(0, None),
    )  # fmt: skip


def _memory(axes, topology: Topology) -> None:
    ranks = 2.0 ** np.arange(11)
    bytes_per_parameter = {  # (replicated, sharded)
        "data parallel": (PARAMETERS + GRADIENTS + OPTIMIZER, 0),
        "ZeRO-1: optimizer state split": (PARAMETERS + GRADIENTS, OPTIMIZER),
        "ZeRO-2: gradients too": (PARAMETERS, GRADIENTS + OPTIMIZER),
        "ZeRO-3: parameters too": (0, PARAMETERS + GRADIENTS + OPTIMIZER),
    }
    for label, (replicated, sharded) in bytes_per_parameter.items():
        axes.plot(ranks, replicated + sharded / ranks, label=label)
    axes.set(
        xscale="log", xlabel="ranks", ylabel="bytes per parameter on each rank",
        title='"Data parallelism trains larger models"',
    )  # fmt: skip
