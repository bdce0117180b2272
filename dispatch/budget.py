"""What recording may cost: a program that never repeats itself must not pay for tracing.

In: the time that growth took, each flush. Out: whether to go on recording. Hits need no clock.
"""

from __future__ import annotations

from time import thread_time

HIT_EARNS_S = 5e-6
SHARE_OF_WORK = 0.25
"""Recording new paths may take this share of the time that running them takes."""
START_S, PROBE_S, MOST_S = 0.03, 0.0005, 0.5
FIRST_COLD_OPS, MOST_COLD_OPS = 2000, 1 << 17


class Budget:
    """The seconds left for growth, and the state of a trace that has spent them.

    A trace without a budget goes *cold*: ops run at once, unrecorded. `cold` counts them down to 1,
    where it waits for an op that needs a value, so that recording starts again where a step of the
    program does. It stays cold twice as long each time in a row that recording does not pay.
    """

    __slots__ = ("cold", "cold_since_s", "grown_s", "left_s", "n_misses", "next_cold")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.left_s = START_S
        self.cold = 0
        self.next_cold = FIRST_COLD_OPS
        self.n_misses = 0
        self.grown_s = 0.0  # since the last flush
        self.cold_since_s = 0.0

    def pay(self, seconds: float) -> None:
        """Account for a state made in this time."""
        self.left_s -= seconds
        self.grown_s += seconds
        self.n_misses += 1

    @property
    def is_spent(self) -> bool:
        return self.left_s < 0

    def earn(self, n_ops: int, seconds: float) -> None:
        """Account for a flush of `n_ops` recorded ops that took `seconds` to run."""
        hits = max(n_ops - self.n_misses, 0)
        self.n_misses = 0
        self.grown_s = 0.0
        self.left_s = min(self.left_s + hits * HIT_EARNS_S + SHARE_OF_WORK * seconds, MOST_S)
        if hits > n_ops // 2:
            self.next_cold = FIRST_COLD_OPS

    def go_cold(self) -> None:
        self.cold = self.next_cold
        self.cold_since_s = thread_time()
        self.next_cold = min(self.next_cold * 2, MOST_COLD_OPS)

    def try_again(self) -> None:
        """Record a little: more follows if it turns out to repeat."""
        if self.cold:
            worked_s = thread_time() - self.cold_since_s
            self.left_s = min(self.left_s + SHARE_OF_WORK * worked_s, MOST_S)
        self.cold = 0
        self.left_s = max(self.left_s, PROBE_S)
