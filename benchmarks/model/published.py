"""Compares the simulator with published measurements, in the table of RESULTS.md."""

import pathlib
import statistics
import tomllib
from typing import NamedTuple

from model import cost, plots, topology

ROLES = {"input": "input", "prediction": "", "in_switch": "in the switches"}
NCCL_CANDIDATES = ("ring", "two_level_tree")


class Row(NamedTuple):
    what: str
    link: str
    ranks: int
    bytes: int
    unit: str
    measured: float
    role: str
    algorithm: str  # as simulated
    simulated: float

    @property
    def error(self) -> float:
        """Simulated over measured time, less one. Bandwidths are compared as times."""
        ratio = self.simulated / self.measured
        return (1 / ratio if self.unit == "GB/s" else ratio) - 1


def rows() -> list[Row]:
    """The published figures, each with the simulated value."""
    path = pathlib.Path(__file__).parent / "published.toml"
    result = []
    for figure in tomllib.loads(path.read_text())["figure"]:
        loaded = topology.load(figure["topology"])
        for p, size, measured, role in figure["points"]:
            names = NCCL_CANDIDATES if figure["algorithm"] == "fastest" else (figure["algorithm"],)
            seconds = {name: plots.seconds(name, p, size, loaded) for name in names}
            best = min(seconds, key=lambda name: seconds[name])
            unit = figure["unit"]
            value = seconds[best] * 1e6 if unit == "us" else cost.busbw(p, size, seconds[best]) / 1e9
            link = figure["source"].split(" ")[0]
            result.append(Row(figure["what"], link, p, size, unit, measured, role, best, value))
    return result


def size_name(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def summary(found: list[Row]) -> list[str]:
    """The errors of the predictions, that is of the figures from which no parameter was taken, by message size."""
    kinds = {
        "up to 1 KiB": lambda row: row.bytes <= 1 << 10,
        "1 MiB": lambda row: row.bytes == 1 << 20,
        "larger": lambda row: row.bytes > 1 << 20,
    }
    lines = []
    for kind, is_of_kind in kinds.items():
        errors = sorted((row.error for row in found if row.role == "prediction" and is_of_kind(row)), key=abs)
        median = statistics.median(map(abs, errors))
        lines.append(f"{len(errors)} predictions of {kind}: median error {median:.0%}, largest {errors[-1]:+.0%}.")
    return lines


def table(found: list[Row]) -> list[str]:
    """The lines of a table in Markdown, and of its summary."""
    lines = ["| published | ranks | message | measured | simulated as | simulated | error in time | |"]
    lines.append("|---|---:|---:|---:|---|---:|---:|---|")
    previous = ""
    for row in found:
        unit = "µs" if row.unit == "us" else row.unit
        what = f"[{row.what}]({row.link})" if row.what != previous else "″"
        previous = row.what
        lines.append(
            f"| {what} | {row.ranks} | {size_name(row.bytes)} | {row.measured:.4g} {unit} "
            f"| {row.algorithm.replace('_', ' ')} | {row.simulated:.3g} | {row.error:+.0%} | {ROLES[row.role]} |"
        )
    return [*lines, "", *summary(found)]
