"""Blocks at one place of a program: whether their ops must be seen.

In: how long they took, listened to and let alone, and what was known of them. Out: whether the next
one may be let alone. Of a block with many reads each `ROUND` of these counts as one.
"""

from __future__ import annotations

from time import perf_counter

from lazy_tensor.dispatch.pays import Times

LISTENS, LETS_ALONE = 64, 960
"""Stretches in a row that are listened to, all of them unknown, before as many blocks are let
alone, then twice as many, up to so many: to see an op and let it pass costs a quarter of a small
one."""
RESTS, RESTS_FROM = 31, 32
"""Blocks that are let alone without being timed, after each one that is, once so many were: to time
one costs what some ops do."""
ROUND, RUNS_OF_A_ROUND = 16, 4
"""Reads of values, and as how many runs of a stretch the time of so many counts."""


class Site:
    """What is known of the blocks at one place.

    Their `times` go from the begin of one to that of the next, whichever that is: what a block
    leaves to be run, or leaves lazy, is its doing too. To be listened to may pay or not, whether
    each of their stretches is recorded or not: those that are seen and let pass cost more than
    those that nobody sees.
    """

    def __init__(self, n_runs: int = 1) -> None:
        self.times = Times()
        self._n_runs = n_runs
        self._began_s = 0.0
        self._was_listened_to: bool | None = None  # the last one; None if its time says nothing
        self._n_unknown = 0  # stretches in a row
        self._n_to_let_alone, self._n_next = 0, LISTENS  # blocks
        self.is_quicker_alone = False
        self._n_rests = 0  # since the last block that was timed

    def begin(self) -> None:
        """A block begins."""
        self._began_s, self._was_listened_to = perf_counter(), None
        self._n_rests = 0

    def end(self, *, was_listened_to: bool | None, n_unknown: int = 0) -> None:
        """It ends, `n_unknown` stretches after the last one that was known."""
        self._was_listened_to = was_listened_to
        if was_listened_to is False:
            return
        self._n_unknown = n_unknown and self._n_unknown + n_unknown
        if self._n_unknown >= LISTENS:
            self._n_to_let_alone, self._n_unknown = self._n_next, 0
            self._n_next = min(2 * self._n_next, LETS_ALONE)
        elif not n_unknown:
            self._n_next = LISTENS

    def is_followed(self) -> None:
        """Another block begins, here or elsewhere."""
        if self._was_listened_to is not None:
            seconds = perf_counter() - self._began_s
            self.times.add(seconds, is_recorded=self._was_listened_to, n=self._n_runs)
            self._was_listened_to = None

    def rests(self) -> bool:
        """Whether the block that begins is let alone as the last one was, and not even timed."""
        if not self.is_quicker_alone or self._n_rests == RESTS or self.times.n_cold < RESTS_FROM:
            return False
        self._n_rests += 1
        self.times.n_cold += 1
        return True

    def has_long_been_unknown(self) -> bool:
        """Whether the block that begins may be let alone for it."""
        if self._n_to_let_alone == 0:
            return False
        self._n_to_let_alone -= 1
        return True
