"""Fits cost models to what `benchmarks/allreduce.py` measured, and says how far off they are, and what to choose.

On CPU devices nothing travels: the ranks arrive one after the other, and then the message is folded in memory. So the
links are the levels of the memory. A call of p ranks with n bytes each takes

    alpha + arrival p + beta min(pn, cache) + beta' max(pn - cache, 0)

seconds: beta' is the cost of a byte beyond those that the caches hold, and `cache` is fitted like the others.

Where the algorithms differ, each has a line of its own, over the bytes that its formula says a rank sends: `Line`.
Where two of them cross is a threshold of `algorithm="auto"`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_ring.lowering.tuning import NO_LIMIT, Thresholds
from jax_ring.schedule import cost


class Measurement(NamedTuple):
    """The median of one figure of the benchmark."""

    num_ranks: int
    num_bytes: int  # of one rank's message
    seconds: float


def read(
    paths: Iterable[str | Path],
    *,
    implementation: str = "ring_psum",
    dtype: str = "float32",
    figure: str = "in_loop",
) -> list[Measurement]:
    """What files of `benchmarks/allreduce.py --json` say; of several runs of a case the median.

    Raises:
      ValueError: if there is no such measurement in them.
    """
    rows = [row for path in paths for row in json.loads(Path(path).read_text())["rows"]]
    return select(rows, implementation=implementation, dtype=dtype, figure=figure)


def select(
    rows: Iterable[Mapping], *, implementation: str, dtype: str = "float32", figure: str = "in_loop"
) -> list[Measurement]:
    """What rows of the benchmark say of an implementation; of several of a case the median.

    Raises:
      ValueError: if they say nothing.
    """
    seconds: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if (row["implementation"], row["dtype"]) == (implementation, dtype) and row[figure]["median"] > 0:
            seconds.setdefault((row["ranks"], row["bytes"]), []).append(row[figure]["median"] * 1e-6)
    if not seconds:
        raise ValueError(f"no {figure} of {implementation} in {dtype} among the measurements")
    return [Measurement(*key, float(np.median(values))) for key, values in sorted(seconds.items())]


@dataclass(frozen=True)
class Model:
    """Seconds of an all-reduce on CPU devices; see the module's description."""

    alpha: float  # seconds
    arrival: float  # seconds for each rank
    beta: float  # seconds per byte of all messages together that the caches hold
    beta_memory: float  # seconds per byte beyond
    cache: float  # bytes

    def seconds(self, num_ranks: int, num_bytes: float) -> float:
        """Of one call, with messages of `num_bytes` each."""
        return float(_terms(num_ranks, num_bytes, self.cache) @ self._coefficients())

    def _coefficients(self) -> np.ndarray:
        return np.array([self.alpha, self.arrival, self.beta, self.beta_memory])

    def errors(self, measurements: Sequence[Measurement]) -> np.ndarray:
        """Predicted over measured, less one, for each measurement."""
        return np.array([self.seconds(m.num_ranks, m.num_bytes) / m.seconds - 1 for m in measurements])


def _terms(num_ranks: int, num_bytes: float, cache: float) -> np.ndarray:
    total = num_ranks * num_bytes
    return np.array([1, num_ranks, min(total, cache), max(total - cache, 0)])


def _non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 that minimizes |ax - b|: with few unknowns every set of those that are zero can be tried."""
    best, result = np.inf, np.zeros(a.shape[1])
    for chosen in range(1, 1 << a.shape[1]):
        columns = [i for i in range(a.shape[1]) if chosen >> i & 1]
        x = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
        error = np.square(a[:, columns] @ x - b).sum()
        if (x >= 0).all() and error < best:
            best = error
            result = np.zeros(a.shape[1])
            result[columns] = x
    return result


def fit(measurements: Sequence[Measurement]) -> Model:
    """The model with the least sum of squared relative errors.

    Raises:
      ValueError: if there are fewer measurements than the model has parameters.
    """
    if len(measurements) < 5:
        raise ValueError(f"the model has 5 parameters; got {len(measurements)} measurements, at least 5 are needed")
    seconds = np.array([m.seconds for m in measurements])
    totals = sorted({m.num_ranks * m.num_bytes for m in measurements})
    best, result = np.inf, None
    for cache in totals:
        rows = np.array([_terms(m.num_ranks, m.num_bytes, cache) for m in measurements])
        # In units of each column's largest entry, which the solver can tell from zero.
        scale = np.maximum(rows.max(0), 1)
        relative = rows / scale / seconds[:, None]
        x = _non_negative_least_squares(relative, np.ones(len(seconds)))
        error = np.square(relative @ x - 1).sum()
        if error < best:
            alpha, arrival, beta, beta_memory = (x / scale).tolist()
            best, result = error, Model(alpha, arrival, beta, beta_memory, cache)
    assert result is not None
    return result


@dataclass(frozen=True)
class Line:
    """Seconds of an all-reduce by one algorithm, alpha + arrival p + beta (bytes that a rank sends).

    Folding is in beta, since what is folded is in proportion to what is sent.
    """

    algorithm: str  # one of ENGINES
    alpha: float  # seconds
    arrival: float  # seconds for each rank
    beta: float  # seconds per byte

    def at(self, num_ranks: int) -> tuple[float, float]:
        """Seconds of an empty message, and of each byte of a message."""
        return self.alpha + self.arrival * num_ranks, self.beta * ENGINES[self.algorithm](num_ranks)


# Bytes that a rank sends for each byte of its message. A ring in many pieces sends them all, and their results.
ENGINES = {
    "one_shot": lambda p: cost.one_shot(p, 1).sent,
    "two_shot": lambda p: cost.two_shot(p, 1).sent,
    "ring": lambda p: 2.0,
}


def fit_line(algorithm: str, measurements: Sequence[Measurement]) -> Line:
    """The line with the least sum of squared relative errors.

    Raises:
      ValueError: if there are fewer measurements than the line has parameters.
    """
    if len(measurements) < 3:
        raise ValueError(f"a line has 3 parameters; got {len(measurements)} measurements, at least 3 are needed")
    seconds = np.array([m.seconds for m in measurements])
    rows = np.array([[1, m.num_ranks, ENGINES[algorithm](m.num_ranks) * m.num_bytes] for m in measurements])
    scale = np.maximum(rows.max(0), 1)
    x = _non_negative_least_squares(rows / scale / seconds[:, None], np.ones(len(seconds)))
    return Line(algorithm, *(x / scale).tolist())


def thresholds(lines: Mapping[str, Line], num_ranks: int) -> Thresholds:
    """Up to which message one-shot is no slower than two-shot, and two-shot, or one-shot, than a ring."""
    one_shot = _crossing(lines["one_shot"].at(num_ranks), lines["two_shot"].at(num_ranks))
    two_shot = _crossing(lines["two_shot"].at(num_ranks), lines["ring"].at(num_ranks))
    return Thresholds(one_shot, max(one_shot, two_shot))


def _crossing(first: tuple[float, float], second: tuple[float, float]) -> int:
    """The largest message up to which the first line is nowhere above the second one; 0 if it begins there."""
    (a, per_byte), (b, other_per_byte) = first, second
    if a > b:
        return 0
    if per_byte <= other_per_byte:
        return NO_LIMIT
    return math.floor((b - a) / (per_byte - other_per_byte))


def leave_out_each(measurements: Sequence[Measurement]) -> dict[int, tuple[Model, np.ndarray]]:
    """For each number of ranks, the model fitted to all others, and its errors where it was not fitted."""
    result = {}
    for p in sorted({m.num_ranks for m in measurements}):
        model = fit([m for m in measurements if m.num_ranks != p])
        result[p] = model, model.errors([m for m in measurements if m.num_ranks == p])
    return result
