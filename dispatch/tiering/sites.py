"""Blocks at one place of a program: whether their ops are seen, and recorded where they are known,
or bypassed, as in eager.

In: counts and times of blocks that ran, by either way. Out: how the next one had better run. What
lies between two reads of a block that has many counts as a block, too: so many are looked at as a
*round*.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import median
from time import perf_counter
from typing import Protocol

import torch

from lazy_tensor.dispatch.stats import KERNELS, NEW, QUICKER

TRIALS = 16
"""Blocks that are recorded before they are compared: a plan, and each of its kernels, has been
tried by then."""
COMPARED = 32
"""Blocks that are then compared: half of them are recorded, half bypassed. A program may do
something else in every other one, or more and more: so these take turns as in ABBA, and a coin says
which of them begin."""
CLEARLY = 4
"""`n` blocks say enough if one way takes 1 + CLEARLY / n times as long as the other: four if it
takes twice as long, sixteen if it takes a quarter more."""
TRACED, SHARE = 3, 0.05
"""Blocks that are new and may take what recording them takes, as a step of training is three times:
recorded, with numbers that change, planned. Others, as a data set's of many lengths, take at most
this share of the time; so does what a comparison loses by the slower way. A block is new if more
than this share of its time went into what was."""
LISTENS = 64
"""Unknown regions in a row after which blocks are bypassed: to see an op and let it pass costs a
quarter of a small op."""
GOES_ON, AT_MOST = 256, 1 << 12
"""Blocks for which the better way is taken before it is looked again; each time twice as many, up
to so many."""
SHORT_ONES = 32
"""The same where blocks of a program on several ranks are too short to gain."""
RESTS_FROM = 3
"""After so many blocks in a row that were bypassed, only the time of the next ones is noted."""
AT_ONCE = 64
"""Blocks that C++ lets rest without a look by Python."""
ROUND, ROUND_S = 16, 0.1
"""Reads of values in a round, or fewer if they take so long."""
READS = 4
"""As many reads count as a block that is recorded, or compared; in a round that ends by its time
each does."""
_COIN = Random(0)


def settled_s() -> float:
    """The time, once a GPU has done all that it was asked for: it may be behind the host."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    return perf_counter()


class Waiting(Protocol):
    """A plan: it runs op by op while its kernels are built."""

    communicates: bool
    n_there: int
    n_under_way: int
    spent_s: float

    def awaits_kernels(self) -> bool: ...

    def may_get_better(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison of blocks at one place said: seconds of a recorded one, in which its plans
    ran for `ran_s`, and of a bypassed one. `of_reads`: of what lies between two reads, or steps;
    `is_parted`: values were needed in the middle of the block."""

    where: str
    of_reads: bool
    is_parted: bool
    recorded_s: float
    bypassed_s: float
    ran_s: float

    @property
    def eager_is_better(self) -> bool:
        return self.bypassed_s < self.recorded_s

    def __str__(self) -> str:
        recorded, bypassed = (f"{s * 1e3:.2f} ms" for s in (self.recorded_s, self.bypassed_s))
        what = "rounds of the loop at" if self.of_reads else "blocks at"
        if self.eager_is_better:
            return f"{what} {self.where}: as in eager, {bypassed}; recorded {recorded}"
        return f"{what} {self.where}: recorded, {recorded}; as in eager {bypassed}"


class Site:
    """What is known of the blocks at one place, and how the next one is to run.

    Their times go from the begin of one to that of the next, whichever that is: what a block leaves
    to be run, or leaves lazy, is its doing too. What is seen may pay or not, whether all regions of
    a block are recorded or not: those that are seen and let pass cost more than those that nobody
    sees.
    """

    def __init__(self, where: str = "?", *, of_reads: bool = False) -> None:
        self.where = where  # `file.py:line`
        self.compared: Compared | None = None  # the last time
        self.period = 0  # of the counters, in which a block ran last
        self.is_bypassed = False  # the last block was bypassed
        self.is_unknown = False  # as its regions are unknown
        self.was_recorded = False  # the last one that was seen
        self.awaited: Waiting | None = None  # blocks run as in eager until it has its kernels
        self.plan: Waiting | None = None  # of the plans that blocks ran, the one that ran longest
        self._n_tried = 0  # blocks that were recorded as this one may get better
        self._of_reads = of_reads
        self._n_reads = 1  # of the last round
        self._weight = 1  # as how many blocks that counts, or a block
        self._is_parted = False
        self._by_count = False  # as its calls say, not its time: on all ranks of a program alike
        self._n_unknown = 0  # regions in a row
        self._n_bypassed = 0  # blocks in a row
        self._n_left, self._n_next = 0, GOES_ON  # blocks for which the better way is taken
        self._n_free = 0  # of these, the last ones, when the last comparison has been paid for
        self._eager_is_better = False
        self._kernels_may_help = True  # as to record doesn't take longer than all that eager does
        self._began_s = 0.0  # the block that ran last
        self.is_compared = False  # the time of the block that runs, or ran last, counts
        self._n_traced = 0  # blocks that were new
        self._until_s = 0.0  # when the next one may be
        self._try_anew()

    def _try_anew(self) -> None:
        self._n_to_record = TRIALS
        self._recorded_s: list[float] = []  # of blocks that are compared
        self._bypassed_s: list[float] = []
        self._host_s: list[float] = []  # of recorded ones, what took the host besides running them
        self._n_compared = 0
        self._first_is_bypassed = False  # of four of them

    def try_again(self) -> None:
        """Record the next blocks, and compare anew, if that may help: kernels have come."""
        if not self._kernels_may_help:
            return
        self._try_anew()
        if not self._by_count:
            self._n_left, self._n_next = max(self._n_left - self._n_free, 0), GOES_ON
            self._n_free = 0

    def begin(self, *, may_choose: bool) -> bool:
        """A block begins; whether its ops are to be seen. `may_choose`: it may depend on times."""
        self._began_s = perf_counter()
        self.is_compared = self.is_bypassed = False
        if self._may_get_better():
            self._n_tried += self._weight
            self.try_again()
        if may_choose and self._awaits_kernels():
            self.is_bypassed = True
        elif self._n_left > 0 and (may_choose or self._by_count):
            self._n_left -= 1
            self.is_bypassed = self._by_count or self._eager_is_better
        elif may_choose and self._until_s > self._began_s:
            self.is_bypassed = True
        elif may_choose and self._n_to_record <= 0:
            place = (len(self._recorded_s) + len(self._bypassed_s)) % 4
            if place == 0:
                self._first_is_bypassed = bool(_COIN.getrandbits(1))
            self.is_bypassed = self._first_is_bypassed is (place in (0, 3))
            self.is_compared = True
            self._began_s = settled_s()
        self._n_bypassed = self._n_bypassed + 1 if self.is_bypassed else 0
        return not self.is_bypassed

    def rests(self) -> bool:
        """Whether the block that begins is bypassed like those before: only its time is noted."""
        if self._n_bypassed < RESTS_FROM:
            return False
        if self.awaited is not None:
            return self._awaits_kernels()
        if self._n_left == 0 or self._may_get_better():
            return False
        self._n_left -= 1
        return True

    def n_may_rest(self) -> int:
        """How many more may before it is looked whether kernels came."""
        return AT_ONCE if self.awaited is not None else min(self._n_left, AT_ONCE)

    def rested(self, n: int) -> None:
        """So many blocks more were bypassed."""
        if self.awaited is None:
            self._n_left = max(self._n_left - n, 0)

    def note_plan(self, plan: Waiting) -> None:
        """Account for a plan that the last block ran."""
        if self.plan is None or plan.spent_s > self.plan.spent_s:
            if plan is not self.plan:
                self._n_tried = 0
            self.plan = plan

    def _may_get_better(self) -> bool:
        """Whether a plan is to be compared with one that was compiled whole. That is over after a
        few runs, but the program may not come to this plan again."""
        if self.plan is None or self._n_tried >= COMPARED or not self._kernels_may_help:
            return False
        return self.plan.may_get_better()

    def _awaits_kernels(self) -> bool:
        plan = self.awaited
        if plan is not None and not (self._kernels_may_help and plan.awaits_kernels()):
            self.awaited = None
        return self.awaited is not None

    @property
    def why_bypassed(self) -> str:
        """What blocks that are bypassed count as (see `stats.OUTCOMES`)."""
        if self.awaited is not None:
            return KERNELS
        return NEW if self.is_unknown else QUICKER

    def end(
        self,
        *,
        n_known: int,
        n_new: int,
        n_unknown: int,
        n_reads: int = 0,
        is_parted: bool = False,
        is_short: bool = False,
    ) -> None:
        """A block ends, or a round of so many reads: with regions that were recorded, with others,
        and so many unknown ones behind the last that was known, unless it was bypassed.
        `is_short`: it has too few ops to gain."""
        self._n_reads = max(n_reads, 1) if self._of_reads else 1
        is_long = perf_counter() - self._began_s >= ROUND_S
        self._weight = self._n_reads if is_long else max(self._n_reads // READS, 1)
        if self.is_bypassed:
            return
        self._is_parted = is_parted
        self.was_recorded = n_known > 0 and n_new == 0
        self._n_unknown = n_unknown and self._n_unknown + n_unknown
        is_unknown = self._n_unknown >= LISTENS
        self.is_unknown = is_unknown or (self.is_unknown and n_unknown > 0)
        self._by_count = is_unknown or (is_short and self.was_recorded)
        if is_unknown:
            self._n_unknown = 0
            self._go_on()
        elif self._by_count:
            self._n_left = SHORT_ONES  # what runs at one place may be long the next time
        if not self.was_recorded:
            self.is_compared = False  # its time says nothing
        elif self._n_to_record > 0:
            self._n_to_record -= self._weight

    def is_followed(self, *, new_s: float = 0.0, ran_s: float = 0.0) -> None:
        """Another block begins, here or elsewhere. Of the one that ran `new_s` went into what was
        recorded or planned for the first time, and `ran_s` into running what it had recorded."""
        if not (self.is_compared or new_s):
            return
        now_s = settled_s() if self.is_compared else perf_counter()
        seconds = now_s - self._began_s
        if new_s > SHARE * seconds:
            self._n_traced += self._weight
            if self._n_traced > TRACED:
                self._until_s = now_s + seconds * (1 / SHARE - 1)
            return
        if not self.is_compared:
            return
        seconds -= new_s
        times_s = self._bypassed_s if self.is_bypassed else self._recorded_s
        times_s.append(seconds / self._n_reads)
        if not self.is_bypassed:
            self._host_s.append((seconds - ran_s) / self._n_reads)
        self.is_compared = False
        self._n_compared += self._weight
        n_blocks = len(self._recorded_s) + len(self._bypassed_s)
        if n_blocks % 4 == 0:
            recorded_s, bypassed_s = median(self._recorded_s), median(self._bypassed_s)
            clearly = (1 + CLEARLY / n_blocks) * min(recorded_s, bypassed_s)
            if max(recorded_s, bypassed_s) > clearly or self._n_compared >= COMPARED:
                self._compare(recorded_s, bypassed_s)

    def _compare(self, recorded_s: float, bypassed_s: float) -> None:
        host_s = median(self._host_s)
        self.compared = Compared(
            self.where, self._of_reads, self._is_parted, recorded_s, bypassed_s,
            ran_s=recorded_s - host_s,
        )  # fmt: skip
        n_worse = len(self._bypassed_s)
        if bypassed_s < recorded_s:
            n_worse = len(self._recorded_s) + TRIALS // self._weight
        lost_s = n_worse * abs(recorded_s - bypassed_s)
        n_owed = round(lost_s / SHARE / max(min(recorded_s, bypassed_s), 1e-9))
        self._kernels_may_help = host_s < bypassed_s
        self._host_s.clear()
        self._recorded_s.clear()
        self._bypassed_s.clear()
        self._n_compared = 0
        is_better = self.compared.eager_is_better
        if is_better is not self._eager_is_better:
            self._eager_is_better, self._n_next = is_better, GOES_ON
        self._go_on()
        self._n_free = max(self._n_left - n_owed, 0)
        if is_better and self._kernels_may_help and self.plan is not None:
            self.plan.spent_s += self._n_left * bypassed_s

    def _go_on(self) -> None:
        self._n_left, self._n_next = self._n_next, min(2 * self._n_next, AT_MOST)
        self._n_free = 0
