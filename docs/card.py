"""Draws the picture that previews of links show: docs/_static/card.png."""

import pathlib

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

INK, GREY, BLUE, ORANGE = "#1b2330", "#5c6675", "#2f7fd1", "#e07b1a"
LINES = (
    "The same bits on any number of devices.",
    "Errors that name the missing rank.",
    "Faster than lax.psum on CPUs.",
)

figure = pyplot.figure(figsize=(12, 6.3), dpi=100, facecolor="white")
axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 12), ylim=(0, 6.3))
axes.set_axis_off()
axes.add_patch(pyplot.Circle((2.6, 3.15), 1.5, fill=False, color="#8a93a6", lw=6))
for i, angle in enumerate(np.arange(8) * np.pi / 4):
    at = 2.6 + 1.5 * np.cos(angle), 3.15 + 1.5 * np.sin(angle)
    axes.add_patch(pyplot.Circle(at, 0.38, color=ORANGE if i == 3 else BLUE, zorder=2))
axes.text(5.2, 4.5, "jax_ring", fontsize=58, weight="bold", color=INK, va="center")
axes.text(5.2, 3.6, "collectives for JAX", fontsize=30, color=GREY, va="center")
for i, line in enumerate(LINES):
    axes.text(5.2, 2.6 - 0.6 * i, line, fontsize=21, color=INK, va="center")
figure.savefig(pathlib.Path(__file__).parent / "_static/card.png", metadata={"Software": None})
