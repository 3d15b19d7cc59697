"""Fits a cost model to what `benchmarks/allreduce.py` measured, and says how far off it is.

On CPU devices nothing travels: the ranks arrive one after the other, and then the message is folded in memory. So the
links are the levels of the memory. A call of p ranks with n bytes each takes

    alpha + arrival p + beta min(pn, cache) + beta' max(pn - cache, 0)

seconds: beta' is the cost of a byte beyond those that the caches hold, and `cache` is fitted like the others.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np


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
    seconds: dict[tuple[int, int], list[float]] = {}
    for path in paths:
        for row in json.loads(Path(path).read_text())["rows"]:
            if (row["implementation"], row["dtype"]) == (implementation, dtype) and row[figure]["median"] > 0:
                seconds.setdefault((row["ranks"], row["bytes"]), []).append(row[figure]["median"] * 1e-6)
    if not seconds:
        raise ValueError(f"no {figure} of {implementation} in {dtype} in {[str(path) for path in paths]}")
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
    """x >= 0 that minimizes |ax - b|: with four unknowns every set of those that are zero can be tried."""
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


def leave_out_each(measurements: Sequence[Measurement]) -> dict[int, tuple[Model, np.ndarray]]:
    """For each number of ranks, the model fitted to all others, and its errors where it was not fitted."""
    result = {}
    for p in sorted({m.num_ranks for m in measurements}):
        model = fit([m for m in measurements if m.num_ranks != p])
        result[p] = model, model.errors([m for m in measurements if m.num_ranks == p])
    return result
