"""Fits cost models to measurements of `benchmarks/allreduce.py`, and derives the thresholds of `algorithm="auto"`.

CPU devices share their memory, so nothing is sent: the ranks arrive one after the other, and then the message is folded
in memory. The levels of the memory take the place of links. A call of p ranks with n bytes each takes

    alpha + arrival p + beta min(pn, cache) + beta' max(pn - cache, 0)

seconds. beta' is the cost of a byte beyond those that the caches hold; `cache` is fitted as well.

Where the algorithms differ, a `Line` is fitted to each, over the bytes that its formula says a rank sends. Two lines
cross at a threshold of `algorithm="auto"`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_ring.lowering.tuning import NO_LIMIT, Thresholds
from model import cost


class Measurement(NamedTuple):
    """A measured all-reduce: the median time for one number of ranks and one message size per rank."""

    num_ranks: int
    num_bytes: int
    seconds: float


def read(
    paths: Iterable[str | Path],
    *,
    implementation: str = "ring_psum",
    dtype: str = "float32",
    figure: str = "in_loop",
) -> list[Measurement]:
    """Reads measurements from files of `benchmarks/allreduce.py --json`. Repeated cases are reduced to their median.

    Raises:
      ValueError: if the files have no such measurement, or are others.
    """
    rows = []
    for path in paths:
        try:
            rows += json.loads(Path(path).read_text())["rows"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of benchmarks/allreduce.py --json") from error
    return select(rows, implementation=implementation, dtype=dtype, figure=figure)


def select(
    rows: Iterable[Mapping], *, implementation: str, dtype: str = "float32", figure: str = "in_loop"
) -> list[Measurement]:
    """The measurements of one implementation in rows of the benchmark. Repeated cases are reduced to their median.

    Raises:
      ValueError: if the rows have no such measurement.
    """
    seconds: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if (row["implementation"], row["dtype"]) == (implementation, dtype) and row[figure]["median"] > 0:
            seconds.setdefault((row["ranks"], row["bytes"]), []).append(row[figure]["median"] * 1e-6)
    if not seconds:
        raise ValueError(f"the measurements have no {figure} of {implementation} in {dtype}")
    return [Measurement(*key, float(np.median(values))) for key, values in sorted(seconds.items())]


@dataclass(frozen=True)
class Model:
    """The cost model of an all-reduce on CPU devices; see the docstring of the module.

    Attributes:
      alpha: seconds per call.
      arrival: seconds per rank.
      beta: seconds per byte, of all messages together, that the caches hold.
      beta_memory: seconds per byte beyond those.
      cache: bytes that the caches hold.
    """

    alpha: float
    arrival: float
    beta: float
    beta_memory: float
    cache: float

    def seconds(self, num_ranks: int, num_bytes: float) -> float:
        """The predicted time of one call with messages of `num_bytes` each."""
        return float(_terms(num_ranks, num_bytes, self.cache) @ self._coefficients())

    def _coefficients(self) -> np.ndarray:
        return np.array([self.alpha, self.arrival, self.beta, self.beta_memory])

    def errors(self, measurements: Sequence[Measurement]) -> np.ndarray:
        """The relative error, predicted / measured - 1, of each measurement."""
        return np.array([self.seconds(m.num_ranks, m.num_bytes) / m.seconds - 1 for m in measurements])


def _terms(num_ranks: int, num_bytes: float, cache: float) -> np.ndarray:
    total = num_ranks * num_bytes
    return np.array([1, num_ranks, min(total, cache), max(total - cache, 0)])


def _non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 that minimizes |ax - b|, by trying each subset of the unknowns; there are few."""
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
        # Scale each column by its largest entry, so that the solver does not mistake small columns for zero.
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
    """The cost model of one algorithm: alpha + arrival p + beta (bytes that a rank sends).

    beta includes folding, since the bytes folded are proportional to the bytes sent.

    Attributes:
      algorithm: a key of `SENT_BYTES`.
      alpha: seconds per call.
      arrival: seconds per rank.
      beta: seconds per byte that a rank sends.
    """

    algorithm: str
    alpha: float
    arrival: float
    beta: float

    def at(self, num_ranks: int) -> tuple[float, float]:
        """For this number of ranks: seconds of an empty message, and seconds per byte of a message."""
        return self.alpha + self.arrival * num_ranks, self.beta * SENT_BYTES[self.algorithm](num_ranks)


# By algorithm: bytes sent by a rank of p per byte of its message. A ring in many pieces sends all pieces and their
# results.
SENT_BYTES = {
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
    rows = np.array([[1, m.num_ranks, SENT_BYTES[algorithm](m.num_ranks) * m.num_bytes] for m in measurements])
    scale = np.maximum(rows.max(0), 1)
    x = _non_negative_least_squares(rows / scale / seconds[:, None], np.ones(len(seconds)))
    return Line(algorithm, *(x / scale).tolist())


def thresholds(lines: Mapping[str, Line], num_ranks: int) -> Thresholds:
    """The largest messages for which one-shot is no slower than two-shot, and two-shot or one-shot than a ring."""
    one_shot = _crossing(lines["one_shot"].at(num_ranks), lines["two_shot"].at(num_ranks))
    two_shot = _crossing(lines["two_shot"].at(num_ranks), lines["ring"].at(num_ranks))
    return Thresholds(one_shot, max(one_shot, two_shot))


def _crossing(first: tuple[float, float], second: tuple[float, float]) -> int:
    """The largest message up to which the first line is not above the second; 0 if it starts above it."""
    (a, a_per_byte), (b, b_per_byte) = first, second
    if a > b:
        return 0
    if a_per_byte <= b_per_byte:
        return NO_LIMIT
    return math.floor((b - a) / (a_per_byte - b_per_byte))


def leave_out_each(measurements: Sequence[Measurement]) -> dict[int, tuple[Model, np.ndarray]]:
    """For each number of ranks: the model fitted to all other numbers, and its errors on this one."""
    result = {}
    for p in sorted({m.num_ranks for m in measurements}):
        model = fit([m for m in measurements if m.num_ranks != p])
        result[p] = model, model.errors([m for m in measurements if m.num_ranks == p])
    return result
