"""Draws a schedule as a diagram of ranks and time, and as an animation of the moving chunks."""

from pathlib import Path

import numpy as np

from model.interpreter import Message, Run, run
from model.schedules import Schedule

FRAMES_PER_STEP = 10
GREY = "#7f7f7f"  # legible on light and on dark pages
_INK = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def pyplot():
    """matplotlib's pyplot, without a window.

    Raises:
      ImportError: if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'jax-ring[benchmarks]'") from error
    matplotlib.use("Agg")
    # In an SVG, text stays text, and ids do not change from run to run.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jax_ring", "font.size": 9})
    matplotlib.rcParams.update(dict.fromkeys(_INK, GREY))
    from matplotlib import pyplot

    return pyplot


def save(figure, path: str | Path) -> None:
    """Writes a figure in the format of the file name's extension, and closes it."""
    svg = str(path).endswith(".svg")
    figure.savefig(path, metadata={"Date": None} if svg else None, dpi=110, transparent=svg)
    pyplot().close(figure)


def traced(schedule: Schedule, num_ranks: int, num_chunks: int) -> Run:
    """Runs the schedule on messages of `num_chunks` elements, each the set of the ranks folded into it."""
    inputs = [np.array([frozenset([rank])] * num_chunks + [None], object)[:-1] for rank in range(num_ranks)]

    def union(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.array([x | y for x, y in zip(a, b, strict=True)] + [None], object)[:-1]

    return run(schedule, inputs, union)


def _color(chunk: float, num_chunks: int):
    return pyplot().get_cmap("turbo")(0.1 + 0.8 * chunk / max(num_chunks - 1, 1))


def diagram(schedule: Schedule, num_ranks: int, num_chunks: int, title: str):
    """A figure with a column for each rank, time from top to bottom, and an arrow for each message.

    The color identifies the chunk. An arrow is solid if the chunk is folded on arrival, and dashed if it is copied.
    """
    messages = traced(schedule, num_ranks, num_chunks).messages
    steps = max((m.sent + 1 for m in messages), default=0)
    figure, axes = pyplot().subplots(figsize=(1.2 + 0.62 * num_ranks, 1.1 + 0.42 * steps), layout="constrained")
    for rank in range(num_ranks):
        axes.plot([rank, rank], [0, steps], color="0.8", linewidth=1, zorder=0)
    for message in messages:
        middle = (message.chunk.begin + message.chunk.end - 1) / 2
        axes.annotate(
            "",
            (message.to, message.sent + 1),
            (message.source, message.sent),
            arrowprops={
                "arrowstyle": "-|>",
                "color": _color(middle, num_chunks),
                "linestyle": "-" if message.folded else "--",
                "linewidth": 0.7 + 1.3 * message.chunk.size / num_chunks,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
    axes.set(xlim=(-0.4, num_ranks - 0.6), ylim=(steps + 0.15, -0.15), xlabel="rank", ylabel="step", title=title)
    axes.set_xticks(range(num_ranks))
    axes.set_yticks(range(steps + 1))
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    axes.spines[:].set_visible(False)
    return figure


def _label(ranks: frozenset[int], num_ranks: int) -> str:
    if len(ranks) == num_ranks:
        return "sum"
    return "+".join(map(str, sorted(ranks))) if num_ranks <= 5 else str(len(ranks))


def _states(result: Run, num_ranks: int, num_chunks: int) -> list[list[list[frozenset[int]]]]:
    """By step, rank and chunk: the ranks folded into the chunk, before the first step and after each."""
    state = [[frozenset([rank]) for _ in range(num_chunks)] for rank in range(num_ranks)]
    states = [[list(row) for row in state]]
    for step in range(result.steps):
        for message in (m for m in result.messages if m.sent == step):
            for chunk, value in zip(range(*message.chunk), message.values, strict=True):
                state[message.to][chunk] = value | state[message.to][chunk] if message.folded else value
        states.append([list(row) for row in state])
    return states


def animate(schedule: Schedule, num_ranks: int, num_chunks: int, title: str, path: str | Path) -> None:
    """Writes a GIF of the ranks in a circle, each with its chunks, and of the chunks that move between them.

    The label of a chunk lists the ranks folded into it (with more than five ranks: their number).
    """
    plt = pyplot()
    from matplotlib.animation import FuncAnimation, PillowWriter

    result = traced(schedule, num_ranks, num_chunks)
    states = _states(result, num_ranks, num_chunks)
    angle = np.pi / 2 - 2 * np.pi * np.arange(num_ranks) / num_ranks
    radius = max(1.0, 0.32 * num_ranks)
    center = radius * np.stack([np.cos(angle), np.sin(angle)], 1)
    width, height = 0.5, 0.62 / num_chunks
    figure, axes = plt.subplots(figsize=(5, 5), gridspec_kw={"left": 0, "right": 1, "bottom": 0, "top": 0.9})

    def place(rank: int, chunk: float) -> np.ndarray:
        return center[rank] + [0, ((num_chunks - 1) / 2 - chunk) * height]

    def cell(at: np.ndarray, chunk: int, ranks: frozenset[int], moving: bool) -> None:
        done = len(ranks) == num_ranks
        color = _color(chunk, num_chunks)
        ink = "white" if done and np.dot(color[:3], (0.3, 0.6, 0.1)) < 0.5 else "black"  # luminance
        corner = (at[0] - width / 2, at[1] - height / 2)
        axes.add_patch(
            plt.Rectangle(
                corner, width, height, facecolor=color, alpha=0.9 if done else 0.4,
                edgecolor="black", linewidth=1.6 if moving else 0.5, zorder=3 if moving else 1,
            )
        )  # fmt: skip
        if height > 0.06:
            label = _label(ranks, num_ranks)
            axes.text(*at, label, ha="center", va="center", fontsize=7, color=ink, zorder=4 if moving else 2)

    def frame(number: int) -> None:
        step, part = divmod(number, FRAMES_PER_STEP)
        axes.clear()
        for rank in range(num_ranks):
            for chunk in range(num_chunks):
                cell(place(rank, chunk), chunk, states[step][rank][chunk], moving=False)
            axes.text(*(center[rank] * (1 + 0.55 / radius)), f"rank {rank}", ha="center", va="center")
        progress = part / (FRAMES_PER_STEP - 1)
        for message in (m for m in result.messages if m.sent == step):
            for chunk, ranks in zip(range(*message.chunk), message.values, strict=True):
                at = (1 - progress) * place(message.source, chunk) + progress * place(message.to, chunk)
                cell(at, chunk, ranks, moving=True)
        action = _action_text([m for m in result.messages if m.sent == step])
        axes.set_title(f"{title}\n" + (f"step {step + 1} of {result.steps}: {action}" if action else "done"))
        axes.set(xlim=(-radius - 0.8, radius + 0.8), ylim=(-radius - 0.8, radius + 0.8), aspect="equal")
        axes.axis("off")

    frames = [*range(result.steps * FRAMES_PER_STEP), *[result.steps * FRAMES_PER_STEP] * FRAMES_PER_STEP]
    FuncAnimation(figure, frame, frames=frames).save(str(path), writer=PillowWriter(fps=8), dpi=80)
    plt.close(figure)


def _action_text(messages: list[Message]) -> str:
    kinds = {"fold" if message.folded else "copy" for message in messages}
    return " and ".join(sorted(kinds, reverse=True))
