"""Spread: mean and sample standard deviation over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Of one quantity over seeds.

    Attributes:
        mean: NaN if any value was.
        deviation: sample standard deviation (n - 1); NaN for fewer than two values.
        count: values.
    """

    mean: float
    deviation: float
    count: int

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN for fewer than two values."""
        return self.deviation / math.sqrt(self.count) if self.count else math.nan


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of some values; of none, NaN."""
    finite = bool(values) and all(map(math.isfinite, values))
    mean = statistics.fmean(values) if finite else math.nan
    deviation = statistics.stdev(values) if finite and len(values) > 1 else math.nan
    return Spread(mean, deviation, len(values))
