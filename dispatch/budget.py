"""What recording may cost: a program that never repeats itself must not pay for tracing.

In: the time that new states and plans took, and the time that running took. Out: whether to go on
recording. Hits need no clock.
"""

from __future__ import annotations

from collections import deque
from time import thread_time
from typing import Protocol

HIT_EARNS_S = 5e-6
SHARE_OF_WORK = 0.05
"""Recording new paths may take this share of the time that running them takes."""
UNSEEN_S, INTERPRETED_S = 1e-4, 3e-5
"""What a new state costs where no clock looks (the way into Python, a handle, collecting garbage),
and what it costs to run an op without a plan. From `benches/bench_changing.py`."""
START_S, LEAST_S, MOST_S = 0.02, 0.005, 0.5
FIRST_COLD_OPS, MOST_COLD_OPS = 2000, 1 << 17
MOST_DEBT_S = 0.1
N_RECENT = 8
"""Flushes within which a path that is taken again pays its growth back."""


class Place(Protocol):
    """A state of the trie."""

    n_ops: int

    @property
    def parent(self) -> Place | None: ...


class Budget:
    """The seconds left for growth, and the state of a trace that has spent them.

    A trace without a budget goes *cold*: ops run at once, unrecorded. `cold` counts them down to 1,
    where it waits for an op that needs a value, so that recording starts again where a step of the
    program does. It stays cold twice as long each time in a row that recording does not pay.
    """

    __slots__ = ("cold", "cold_since_s", "grown_s", "left_s", "n_misses", "next_cold", "recent")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.left_s = START_S
        self.cold = 0
        self.next_cold = FIRST_COLD_OPS
        self.n_misses = 0
        self.grown_s = 0.0  # since the last flush
        self.cold_since_s = 0.0
        self.recent: deque[tuple[Place, float]] = deque(maxlen=N_RECENT)

    @property
    def is_spent(self) -> bool:
        return self.left_s < 0

    def pay(self, seconds: float) -> None:
        """Account for a state made in this time."""
        self.left_s -= seconds + UNSEEN_S
        self.grown_s += seconds
        self.n_misses += 1

    def pay_plan(self, seconds: float, n_interpreted: int) -> None:
        """Account for a plan made in this time, or for what ran without one."""
        seconds += n_interpreted * INTERPRETED_S
        self.left_s = max(self.left_s - seconds, min(self.left_s, -MOST_DEBT_S))

    def earn(self, place: Place, seconds: float) -> None:
        """Account for a flush at `place` that took `seconds` to run."""
        hits = max(place.n_ops - self.n_misses, 0)
        self._add(hits * HIT_EARNS_S + SHARE_OF_WORK * seconds)
        self.earn_back(place)
        if self.n_misses:
            self.recent.append((place, self.grown_s + self.n_misses * UNSEEN_S))
        elif self.recent:
            self.recent.popleft()
        self.n_misses = 0
        self.grown_s = 0.0
        if hits > place.n_ops // 2:
            self.next_cold = FIRST_COLD_OPS

    def earn_back(self, place: Place) -> None:
        """Get back what was paid lately for the path to `place`: the program repeats itself."""
        if not self.recent:
            return
        paid = {id(tip): seconds for tip, seconds in self.recent}
        passed: Place | None = place
        while passed is not None:
            if id(passed) in paid:
                self._add(paid.pop(id(passed)))
            passed = passed.parent
        self.recent = deque((pair for pair in self.recent if id(pair[0]) in paid), N_RECENT)

    def _add(self, seconds: float) -> None:
        self.left_s = max(self.left_s, min(self.left_s + seconds, MOST_S))

    def go_cold(self) -> None:
        self.cold = self.next_cold
        self.cold_since_s = thread_time()
        self.next_cold = min(self.next_cold * 2, MOST_COLD_OPS)

    def try_again(self) -> None:
        """Record a little, if the work since has earned that: more follows if it repeats."""
        if not self.cold:
            return
        now_s = thread_time()
        self._add(SHARE_OF_WORK * (now_s - self.cold_since_s))
        self.cold_since_s = now_s
        self.cold = 0 if self.left_s >= LEAST_S else FIRST_COLD_OPS
