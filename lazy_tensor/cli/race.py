"""Runs several sides on the same batches, a step each in turn, so that noise hits all alike.

In: sides and batches. Out: a `History` a side.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lazy_tensor.cli.sides import Side
from lazy_tensor.cli.timings import Spread, spread
from lazy_tensor.cli.training import Recipe, Trainer


@dataclass(slots=True)
class History:
    """A loss and a duration in seconds for each step of one side, in order."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def warm(self) -> Spread:
        """The step's duration over the last half of the run."""
        return spread(self.seconds[len(self.seconds) // 2 :])

    def relative_difference(self, other: History) -> float:
        """The largest relative difference between losses of equal steps; 0.0 means bit-equal."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max((relative_difference(a, b) for a, b in pairs), default=0.0)


def relative_difference(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    difference = abs(a - b) / max(abs(a), abs(b))
    return math.inf if math.isnan(difference) else difference


class Race:
    """Sides and what each has done so far; `histories` holds whole rounds, whenever it stops."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = list(sides)
        self.histories = {side.name: History() for side in sides}

    @property
    def n_rounds(self) -> int:
        return min(len(history.losses) for history in self.histories.values())

    def run_round(self, tokens: Tensor, targets: Tensor) -> None:
        """One step of each side on the same batch; which goes first alternates."""
        results = {side.name: timed(side, tokens, targets) for side in self._sides}
        self._sides.reverse()
        for name, (loss, seconds) in results.items():
            self.histories[name].losses.append(loss)
            self.histories[name].seconds.append(seconds)


def timed(side: Side, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """The step's loss and its duration in seconds."""
    start = time.perf_counter()
    loss = side.run(tokens, targets)
    return loss, time.perf_counter() - start


def settle_torch(recipe: Recipe, n_sides: int, batch: tuple[Tensor, Tensor]) -> None:
    """Pay PyTorch's one-time costs and touch the memory, so that no side's first step pays."""
    trainers = [Trainer(recipe) for _ in range(n_sides)]
    for trainer in trainers:
        with trainer.random.active():
            trainer.step(*batch)
