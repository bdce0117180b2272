"""Whether recording pays: what a stretch of a program takes recorded, and what as in eager.

In: the end of a stretch, the time that flushes take. Out: whether the next one had better be
recorded. Stretches are known by their calls (`past.stretch`).
"""

from __future__ import annotations

import math
from time import perf_counter

from lazy_tensor.dispatch.stats import NEW, STATS

TRIALS = 16
"""Runs that are recorded before they are compared: a plan, and each of its kernels, has been tried
by then."""
COLD_TRIALS = 3
"""Runs as in eager that they are compared to."""
TRIES_AGAIN, AT_MOST = 256, 1 << 16
"""Runs as in eager after which what was slower is tried again; each time twice as many."""
FORGETS = 1.01
"""By so much a run the shortest time is taken to have grown: the machine may be busier now."""
MOST_STRETCHES = 1024
EMPTY = 0


class Times:
    """What one stretch took."""

    __slots__ = ("cold_s", "follows", "n_cold", "n_recorded", "recorded_s", "tries_again")

    def __init__(self) -> None:
        self.cold_s = self.recorded_s = math.inf  # at best, lately
        self.n_cold = self.n_recorded = 0
        self.tries_again = TRIES_AGAIN
        self.follows: int | None = None  # the stretch that came next, last time

    def add(self, seconds: float, *, is_recorded: bool, n: int = 1) -> None:
        """Account for a run, as good as `n` shorter ones."""
        if is_recorded:
            self.recorded_s = min(self.recorded_s * FORGETS, seconds)
            self.n_recorded += n
            return
        self.cold_s = min(self.cold_s * FORGETS, seconds)
        self.n_cold += n
        if self.n_cold >= self.tries_again and self.n_recorded >= TRIALS:
            self.tries_again = min(2 * self.tries_again, AT_MOST)
            self.try_again()

    def try_again(self) -> None:
        self.recorded_s, self.n_recorded, self.n_cold = math.inf, 0, 0

    @property
    def is_compared(self) -> bool:
        return self.n_recorded >= TRIALS and self.n_cold >= COLD_TRIALS

    @property
    def pays(self) -> bool:
        """Whether it had better be recorded next time."""
        if not self.is_compared:
            return self.n_recorded < TRIALS
        return self.recorded_s <= self.cold_s


class Pays:
    """The times of the stretches that a trace came by."""

    def __init__(self) -> None:
        self._times: dict[int, Times] = {}
        self._began_s = perf_counter()
        self._last: Times | None = None  # of the stretch that ended last, its flush still to come
        self._seconds, self._is_recorded = 0.0, False
        self._outcome = NEW

    def goes_on(self, stretch: int | None, outcome: str, *, is_recorded: bool) -> Times | None:
        """Account for a stretch that ends here, of which `outcome` says what became; what is known
        of the one that comes, if it is what came here before.

        An `EMPTY` one is none: what ran meanwhile is not the program's. None for one that isn't
        known.
        """
        now_s = perf_counter()
        seconds, self._began_s = now_s - self._began_s, now_s
        if stretch != EMPTY:
            if self._last is not None:
                self._last.add(self._seconds, is_recorded=self._is_recorded)
            self._outcome = outcome
            STATS.add_stretch(outcome, seconds)
            if self._last is not None and stretch is not None:
                self._last.follows = stretch
            self._last = None
            if stretch is not None:
                if len(self._times) >= MOST_STRETCHES:
                    self._times.clear()
                self._last = self._times.setdefault(stretch, Times())
                self._seconds, self._is_recorded = seconds, is_recorded
        return self._last and self._times.get(self._last.follows or EMPTY)

    def pass_over(self, outcome: str) -> None:
        """Account for what runs as in eager, unseen."""
        now_s = perf_counter()
        STATS.add_stretch(outcome, now_s - self._began_s)
        self._began_s = now_s

    def add_flush(self, seconds: float) -> None:
        """Account for a flush of the stretch that has just ended."""
        self._seconds += seconds
        self._began_s += seconds
        STATS.stretches_s[self._outcome] += seconds

    def try_again(self) -> None:
        """Kernels have come: what was recorded may be quicker now."""
        for times in self._times.values():
            times.try_again()
