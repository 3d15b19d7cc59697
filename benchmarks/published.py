"""Holds the simulator against all-reduces that others measured, and prints the table of docs/algorithms.md.

python benchmarks/published.py
"""

import pathlib
import tomllib

from jax_ring.schedule import cost, simulate, topology

ROLES = {"input": "bandwidth is from here", "prediction": "", "in_switch": "perhaps reduced in the switches"}


def rows() -> list[dict]:
    """The published figures, each with the bus bandwidth simulated, in GB/s, and its relative error."""
    path = pathlib.Path(__file__).parent / "published.toml"
    figures = tomllib.loads(path.read_text())["figure"]
    for figure in figures:
        ranks, size = figure["ranks"], figure["bytes"]
        described = topology.load(figure["topology"])
        seconds = simulate(figure["algorithm"], ranks, size, described, pieces=figure.get("pieces")).max()
        figure["simulated"] = cost.busbw(ranks, size, float(seconds)) / 1e9
        figure["error"] = figure["simulated"] / figure["busbw_gb_per_s"] - 1
    return figures


def main() -> None:
    print("| published | GB/s | simulated as | GB/s | error | |\n|---|---:|---|---:|---:|---|")
    for row in rows():
        link = row["source"].split(" ")[0]
        algorithm = row["algorithm"].replace("_", " ")
        print(
            f"| [{row['what']}]({link}) | {row['busbw_gb_per_s']:.0f} | {algorithm} | {row['simulated']:.0f}"
            f" | {row['error']:+.0%} | {ROLES[row['role']]} |"
        )


if __name__ == "__main__":
    main()
