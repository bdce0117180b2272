"""Statistics of repeated timings: what the demo and the benchmarks report of a list of seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile, in seconds."""

    median_s: float
    p10_s: float
    p90_s: float


def spread(seconds: Sequence[float]) -> Spread:
    """The spread of one or more timings."""
    median = statistics.median(seconds)
    if len(seconds) == 1:
        return Spread(median, median, median)
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return Spread(median, deciles[0], deciles[-1])
