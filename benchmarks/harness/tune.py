"""Measures the thresholds of `algorithm="auto"`, for `benchmarks/allreduce.py --tune`."""

import dataclasses
import math

import jax
import numpy as np
from model import fit

from harness.implementations import ALGORITHMS, AXIS
from harness.machine import describe
from harness.measure import Case, Row
from jax_ring.lowering import tuning

PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}


def rank_counts(devices: int) -> list[int]:
    """The powers of two up to `devices`, and `devices`."""
    return sorted({1 << i for i in range(1, devices.bit_length())} | {devices})


def measure(sizes: list[int], dtype: str, iterations: int, warmup: int, loop_seconds: float) -> list[dict]:
    """Measures one row per algorithm, number of ranks and size."""
    rows = []
    for p in rank_counts(len(jax.devices())):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:p]), (AXIS,))
        for size in sizes:
            count = max(1, size // jax.numpy.dtype(dtype).itemsize)
            case = Case(mesh, count, dtype, ALGORITHMS, loop_seconds)
            for name, spreads in case.run(iterations, warmup).items():
                num_bytes = count * case.dtype.itemsize
                wrong = case.wrong(name)
                rows.append(Row(name, p, num_bytes, count, dtype, *spreads, wrong=wrong, limit_us=math.nan))
                print(f"{p:>4} ranks {num_bytes:>12} bytes {name:>9} {rows[-1].in_loop.median:>10.1f} us", flush=True)
    return [dataclasses.asdict(row) for row in rows]


def lines_of(rows: list[dict], dtype: str) -> dict[str, fit.Line]:
    """Fits a line to each algorithm, and prints its errors."""
    lines = {}
    for name in ALGORITHMS:
        measurements = fit.select(rows, implementation=name, dtype=dtype)
        lines[name] = line = fit.fit_line(name, measurements)
        at = [(line.at(m.num_ranks), m) for m in measurements]
        errors = [abs((a + b * m.num_bytes) / m.seconds - 1) for (a, b), m in at]
        print(
            f"# {name}: {line.alpha * 1e6:.2f} us + {line.arrival * 1e6:.2f} us per rank + "
            f"{line.beta * 1e9:.4g} ns per byte sent; median error {np.median(errors):.0%}, largest {max(errors):.0%}"
        )
    return lines


def tune(path: str, sizes: list[int], dtype: str, iterations: int, warmup: int, loop_seconds: float) -> None:
    """Measures and writes the thresholds for this platform, for numbers of ranks up to 64.

    Raises:
      ValueError: if there are too few devices or measurements, or a result is wrong.
    """
    if len(jax.devices()) < 2:
        raise ValueError(f"--tune needs 2 devices or more, got {len(jax.devices())}")
    platform = PLATFORMS[jax.default_backend()]
    if platform == "cpu" and jax.process_count() == 1:
        print("# CPU devices of one process: all algorithms are the same, so the thresholds have no effect")
    rows = measure(sizes, dtype, iterations, warmup, loop_seconds)
    if wrong := sum(row["wrong"] for row in rows):
        raise ValueError(f"{wrong} values out of bounds: nothing is written")
    lines = lines_of(rows, dtype)
    measured = rank_counts(len(jax.devices()))
    table = {p: fit.thresholds(lines, p) for p in sorted({*measured, 2, 4, 8, 16, 32, 64})}
    tuning.write(
        path,
        {platform: table},
        machine=describe(),
        measured={"ranks": measured, "bytes": sizes, "dtype": dtype},
        fitted={name: dataclasses.asdict(line) for name, line in lines.items()},
    )
    for p, thresholds in table.items():
        limits = ("any size" if n == tuning.NO_LIMIT else f"{n} bytes" for n in thresholds)
        print("# {:>3} ranks: one_shot up to {}, two_shot up to {}".format(p, *limits), end="")
        print("" if p in measured else "  (from the fitted lines, not measured)")
