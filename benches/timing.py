"""The way in which benchmarks take timings. In: functions by name. Out: their seconds by round.

Ratios are taken round by round, and their median counts: the machine's speed changes, but affects
neighbours alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile, in seconds."""

    median_s: float
    p10_s: float
    p90_s: float


def spread(seconds: Sequence[float]) -> Spread:
    """The median and the 10th and 90th percentile of one or more timings."""
    median = statistics.median(seconds)
    if len(seconds) == 1:
        return Spread(median, median, median)
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return Spread(median, deciles[0], deciles[-1])


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of every function in every round, by the function's name."""

    seconds: dict[str, list[float]]

    def spread(self, name: str) -> Spread:
        return spread(self.seconds[name])

    def ratio(self, name: str, reference: str) -> float:
        """The median, over the rounds, of `name`'s time over `reference`'s in the same round."""
        pairs = zip(self.seconds[name], self.seconds[reference], strict=True)
        return statistics.median(a / b for a, b in pairs)


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int,
    synchronize: Callable[[], object] = lambda: None,
) -> Timings:
    """Time each function once a round, in alternating order, so that noise and drift affect all
    alike.

    The first `warmup` rounds are run, but not kept. `synchronize` is called before each reading of
    the clock: pass `torch.cuda.synchronize` for work on a GPU.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions.items())
    for _ in range(warmup + rounds):
        for name, function in order:
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
        # a b, b a: each comes as often after the other as before it
        order.reverse()
    return Timings({name: times[warmup:] for name, times in seconds.items()})
