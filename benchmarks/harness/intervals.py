"""Confidence intervals of medians, and of ratios of medians, by the bootstrap."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE, RESAMPLES, SEED = 95, 2000, 0


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate with the bounds of its confidence interval. The upper bound may be infinite."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, resampled: np.ndarray) -> "Interval":
        # Without interpolation: there is no value between a number and infinity.
        tail = (100 - CONFIDENCE) / 2
        low, high = np.percentile(resampled, [tail, 100 - tail], method="nearest")
        return cls(value, float(low), float(high))

    def verdict(self) -> str:
        """What a ratio of another's time over this one's says about this one."""
        if math.isnan(self.value) or self.low <= 1 <= self.high:
            return "noise"
        return "faster" if self.low > 1 else "slower"

    def bounds(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}-{self.high:.2f}]"

    def __str__(self) -> str:
        return self.bounds() + " noise" * (self.verdict() == "noise")


def _medians(rng: np.random.Generator, *samples: Sequence[float]) -> list[np.ndarray]:
    """Medians of resampled sequences. All are resampled alike: their elements with the same index belong together."""
    size = len(samples[0])
    if not size or any(len(values) != size for values in samples):
        raise ValueError(f"needs equally many samples of each, at least one; got {[len(x) for x in samples]}")
    chosen = rng.integers(0, size, (RESAMPLES, size))
    return [np.median(np.asarray(values)[chosen], axis=1) for values in samples]


def _quotient(numerator, denominator) -> np.ndarray:
    """The ratio of two times, of which noise may have made one or both negative: infinite, zero, or unknown (1)."""
    numerator, denominator = np.asarray(numerator, float), np.asarray(denominator, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        result = np.maximum(numerator, 0) / np.maximum(denominator, 0)
    return np.where(np.isnan(result), 1, result)


def median(values: Sequence[float]) -> Interval:
    return Interval.of(float(np.median(values)), *_medians(np.random.default_rng(SEED), values))


def ratio(numerator: Sequence[float], denominator: Sequence[float], paired: bool = True) -> Interval:
    """The ratio of two medians. `paired`: samples with the same index were taken next to each other."""
    rng = np.random.default_rng(SEED)
    if paired:
        medians = _medians(rng, numerator, denominator)
    else:
        medians = [*_medians(rng, numerator), *_medians(rng, denominator)]
    return Interval.of(float(_quotient(np.median(numerator), np.median(denominator))), _quotient(*medians))


def ratio_of_ratios(
    new: tuple[Sequence[float], Sequence[float]], old: tuple[Sequence[float], Sequence[float]]
) -> Interval:
    """How a ratio of paired samples, each a numerator and a denominator, has changed from one run to another."""
    rng = np.random.default_rng(SEED)
    values = [_quotient(*(np.median(samples) for samples in pair)) for pair in (new, old)]
    resampled = [_quotient(*_medians(rng, *pair)) for pair in (new, old)]
    return Interval.of(float(_quotient(*values)), _quotient(*resampled))
