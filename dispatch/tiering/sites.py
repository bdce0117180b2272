"""Times blocks at one place of a program, and decides how the next one runs.

A block is either seen, so that its ops are recorded where they are known, or bypassed, so that it
runs as in eager. In: counts and times of blocks that ran, by either way. Out: which way the next
one runs, and what comparisons said, for reports. Called by `policy`, which keeps a `Site` for each
place. A block with many reads is cut into *rounds* of reads or of optimizer's steps, and each round
is treated like a block (at a site of its own).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import median_low
from time import perf_counter, thread_time
from typing import Protocol

import torch

from lazy_tensor.dispatch.stats import KERNELS, NEW, QUICKER

TRIALS = 16
"""Blocks that are seen before any is timed: a plan, and each of its kernels, has been tried by
then."""
COMPARED = 32
"""Most blocks that are then timed: half of them are seen, half bypassed. A program may do
something else in every other block, or more and more in each. So the two ways take turns as in
ABBA, and for each four blocks a coin says which way is A."""
CLEARLY = 4
"""`n` timed blocks are enough if one way takes 1 + CLEARLY / n times as long as the other: four if
it takes twice as long, sixteen if it takes a quarter more."""
TRACED, SHARE = 3, 0.05
"""A block is *new* if more than `SHARE` of its time went into states and plans that were made for
the first time. The first `TRACED` new blocks at a place cost what they cost. A step of training is
new three times: it is recorded, recorded again as its numbers change, and planned. New blocks
beyond these (a data set's of many lengths) take at most `SHARE` of the time. So does what a
comparison loses by the slower way."""
LOST = 1.75
"""Seconds that a new block loses for each one that its states and plans take, as calls that are no
hits pass Python. Measured: 1.8 where states are made, 1.1 to 1.7 where plans are."""
LISTENS = 64
"""Unknown regions in a row after which blocks are bypassed: to see an op and let it pass costs a
quarter of a small op."""
GOES_ON, AT_MOST = 256, 1 << 12
"""Blocks for which a decision holds before it is looked into again: `GOES_ON` the first time, then
twice as many each time, up to `AT_MOST`."""
SHORT_ONES = 32
"""Blocks for which it holds that those of a program on several ranks are too short to gain."""
RESTS_FROM = 3
"""Bypassed blocks in a row after which the next ones *rest*: nothing is done in them but to note
their time."""
AT_ONCE = 64
"""Most blocks that C++ lets rest in a row without a look by Python."""
ROUND, ROUND_S = 16, 0.1
"""Reads of values in a round, and seconds after which a round ends with fewer. Where the program
steps optimizers a round has so many steps."""
MANY_ROUNDS = 4
"""If a block has so many rounds, these are compared, else whole blocks. Of a block's two rounds
one may be the forward pass and the other the optimizer's step, which can't be compared."""
BLOCKS, READS, STEPS = "blocks", "reads", "steps"
"""What is compared: whole blocks, or rounds, by the time for a read or for an optimizer's step."""
AS_ONE = 4
"""Reads, or steps, in a round that count as one block. In a round or block that takes longer than
ROUND_S each counts as one."""
_COIN = Random(0)  # the program's own random numbers stay as they are


def settled_s() -> float:
    """The time, once a GPU has done all that it was asked for: it may be behind the host."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    return perf_counter()


def comparison_clock() -> Callable[[], float]:
    """The clock by which blocks are compared.

    With one thread and no GPU it counts the time that this thread runs: its waiting, for other
    ranks or for a processor that others use, says nothing about either way.
    """
    if torch.get_num_threads() > 1 or torch.cuda.is_initialized():
        return settled_s
    return thread_time


class PlanStatus(Protocol):
    """A plan, as far as it matters here: it runs op by op while its kernels are built."""

    communicates: bool  # it has collectives
    n_there: int  # its ops in kernels that are there
    n_under_way: int  # its ops in kernels that are being built
    spent_s: float  # what its runs took; from some seconds on it is compiled whole

    # Whether more ops are in kernels that are being built than in those that are there.
    def awaits_kernels(self) -> bool: ...

    # Whether its next runs compare it with the same plan compiled whole.
    def may_get_better(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison of the blocks at one place said, for `explain()` and its advice.

    `recorded_s` and `bypassed_s` are the seconds of a block that ran either way, `ran_s` those that
    plans took in a recorded one. Another `unit`: of a read, or of an optimizer's step, in rounds.
    `is_parted`: values were needed in the middle of the block.
    """

    where: str
    unit: str
    is_parted: bool
    recorded_s: float
    bypassed_s: float
    ran_s: float

    @property
    def eager_is_better(self) -> bool:
        return self.bypassed_s < self.recorded_s

    def __str__(self) -> str:
        recorded, bypassed = (f"{s * 1e3:.2f} ms" for s in (self.recorded_s, self.bypassed_s))
        what = "blocks at" if self.unit == BLOCKS else f"{self.unit} of the loop at"
        if self.eager_is_better:
            return f"{what} {self.where}: as in eager, {bypassed}; recorded {recorded}"
        return f"{what} {self.where}: recorded, {recorded}; as in eager {bypassed}"


class Site:
    """What is known of the blocks at one place, and how the next one runs.

    A block's time goes from its begin to the begin of the next block, wherever that is. So it
    includes the flush at the block's end, and what the program does with its lazy tensors behind
    it. Bypassed blocks are compared with those that were seen, wherever only a part of a block was
    known and recorded, too.
    """

    def __init__(self, where: str = "?", unit: str = BLOCKS) -> None:
        self.where = where  # `file.py:line` of the first block or round, for reports
        self.unit = unit
        self.n_rounds = MANY_ROUNDS  # set by `policy`: of a block, the rounds in the last one
        self.compared: Compared | None = None  # the last comparison
        self.period = 0  # `STATS.period` when a block ran last: reports leave out older ones
        self.is_bypassed = False  # how the last block ran
        self.is_unknown = False  # blocks are bypassed because their regions are unknown
        self.was_recorded = False  # all regions of the last block that was seen were recorded
        # Set by `policy`: blocks are bypassed until this plan has its kernels.
        self.awaited: PlanStatus | None = None
        # of the plans that blocks ran, the one that ran longest
        self.plan: PlanStatus | None = None
        self._n_tried = 0  # blocks since `plan` may get better; at most COMPARED are waited for
        self._n_parts = 1  # reads or steps in the last round; 1 for a block
        self._weight = 1  # blocks that the last round, or block of several reads, counts as
        self._is_parted = False  # values were needed in the middle of the last block that was seen
        # Blocks are bypassed because of what calls say: unknown, or too few. Calls are the same on
        # all ranks. So this may decide where times may not.
        self._by_count = False
        self._n_unknown = 0  # unknown regions in a row, over blocks
        self._n_bypassed = 0  # bypassed blocks in a row
        # Blocks for which the decision in force still holds, and for which the next one will hold.
        self._n_left, self._n_next = 0, GOES_ON
        # The last ones of `_n_left`: before them the last comparison has been paid for, and a new
        # one may begin as soon as there is a reason.
        self._n_free = 0
        self._eager_is_better = False  # the decision, unless `_by_count`
        # False where recording alone took longer than all that eager does. Then no kernel can make
        # recording pay, and none is waited for.
        self._kernels_may_help = True
        self._began_s = 0.0  # when the last block began
        self.is_compared = False  # the last block is timed for a comparison
        self._clock: Callable[[], float] = settled_s  # by which it is timed
        self._timed_from_s = 0.0
        self._n_traced = 0  # new blocks so far (see TRACED)
        self._until_s = 0.0  # no block is recorded before: new ones have taken their share
        self._try_anew()

    def _try_anew(self) -> None:
        """Begin a comparison anew."""
        self._n_to_record = TRIALS  # blocks to record before the first is timed
        self._recorded_s: list[float] = []  # times of timed blocks, by read
        self._bypassed_s: list[float] = []
        # Of recorded ones, without the runs of plans: the program's Python, and recording.
        self._host_s: list[float] = []
        self._n_compared = 0  # timed blocks, by weight
        self._first_is_bypassed = False  # which way is A in the present ABBA

    def try_again(self) -> None:
        """Record the next blocks and compare anew, as kernels have come, if that may help."""
        if not self._kernels_may_help:
            return
        self._try_anew()
        # Where calls decided, kernels change nothing. Else the decision in force is cut short, but
        # not before the last comparison has been paid for: many kernels may come one by one.
        if not self._by_count:
            self._n_left, self._n_next = max(self._n_left - self._n_free, 0), GOES_ON
            self._n_free = 0

    def begin(self, *, may_choose: bool) -> bool:
        """Begin a block; whether its ops are to be seen. `may_choose`: times may decide."""
        self._began_s = perf_counter()
        self.is_compared = self.is_bypassed = False
        if self._may_get_better():
            self._n_tried += self._weight
            self.try_again()
        # The first reason that holds decides. If none does the block is seen: it is one of the
        # TRIALS before a comparison, or times may not decide.
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
            # Only here: to wait for the GPU costs what the host could have done meanwhile.
            self._clock = comparison_clock()
            self._timed_from_s = self._clock()
            self._began_s = perf_counter()
        self._n_bypassed = self._n_bypassed + 1 if self.is_bypassed else 0
        return not self.is_bypassed

    def rests(self) -> bool:
        """Whether the block that begins rests: it is bypassed like those before it, in place of
        `begin` and `end`."""
        if self._n_bypassed < RESTS_FROM:
            return False
        if self.awaited is not None:
            return self._awaits_kernels()
        if self._n_left == 0 or self._may_get_better():
            return False
        self._n_left -= 1
        return True

    def n_may_rest(self) -> int:
        """How many more blocks may rest before Python looks whether kernels have come."""
        return AT_ONCE if self.awaited is not None else min(self._n_left, AT_ONCE)

    def rested(self, n: int, seconds: float) -> None:
        """Account for `n` blocks that rested by C++ alone, for so many seconds."""
        if self.awaited is None:
            self._n_left = max(self._n_left - n, 0)
        else:
            self.awaited.spent_s += seconds

    def note_plan(self, plan: PlanStatus) -> None:
        """Account for a plan that the last block ran."""
        if self.plan is None or plan.spent_s > self.plan.spent_s:
            if plan is not self.plan:
                self._n_tried = 0
            self.plan = plan

    def _may_get_better(self) -> bool:
        """Whether blocks are to be recorded so that `plan` runs: each run compares it with the same
        plan compiled whole. A few runs settle that, but the program may never run this plan again.
        So it is waited for during COMPARED blocks at most."""
        if self.plan is None or self._n_tried >= COMPARED or not self._kernels_may_help:
            return False
        return self.plan.may_get_better()

    def _awaits_kernels(self) -> bool:
        """Whether the awaited plan still waits for its kernels; forgets it if it doesn't."""
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
        n_parts: int = 0,
        is_parted: bool = False,
        is_short: bool = False,
    ) -> None:
        """End a block, or a round of `n_parts` reads or optimizer's steps.

        `n_known` of its regions were recorded, and `n_new` ran at once; `n_unknown` unknown ones
        came behind the last known one. A bypassed block has none of these, nor parts. `is_short`:
        it has too few ops to gain.
        """
        is_long = perf_counter() - self._began_s >= ROUND_S
        if self.unit != BLOCKS:
            self._n_parts = max(n_parts, 1)
            self._weight = self._n_parts if is_long else max(self._n_parts // AS_ONE, 1)
            if not n_parts:
                self.is_compared = False  # it was what its block did behind the last whole round
        elif not self.is_bypassed:
            self._weight = max(n_parts, 1) if is_long else 1
        if self.is_bypassed:
            return
        self._is_parted = is_parted
        self.was_recorded = n_known > 0 and n_new == 0
        self._n_unknown = n_unknown and self._n_unknown + n_unknown
        is_unknown = self._n_unknown >= LISTENS
        # It stays unknown while blocks are listened to again, until a region of one is known.
        self.is_unknown = is_unknown or (self.is_unknown and n_unknown > 0)
        self._by_count = is_unknown or (is_short and self.was_recorded)
        if is_unknown:
            self._n_unknown = 0
            self._go_on()
        elif self._by_count:
            self._n_left = SHORT_ONES  # no more: what runs at one place may be long the next time
        if not (n_known or n_new):
            self.is_compared = False  # an empty block: its time says nothing
        elif self._n_to_record > 0:
            self._n_to_record -= self._weight

    def is_followed(self, *, new_s: float = 0.0, ran_s: float = 0.0) -> None:
        """Account for the time of the last block, as another block begins, here or elsewhere.

        Of this time `new_s` went into what was recorded or planned for the first time, and `ran_s`
        into runs of plans.
        """
        if self.is_bypassed and self.awaited is not None:
            # The plan would have run. It is compiled whole as early as if it had.
            self.awaited.spent_s += perf_counter() - self._began_s
        if not (self.is_compared or new_s):
            return
        if self.is_compared:
            seconds = self._clock() - self._timed_from_s
        else:
            seconds = perf_counter() - self._began_s
        if new_s > SHARE * seconds:
            self._n_traced += 1  # a round, too, is one: most of its reads may have been known
            if self._n_traced > TRACED:
                # the next one is recorded when what this one lost is no more than SHARE of the time
                self._until_s = perf_counter() + LOST * new_s / SHARE - seconds
            return
        if not self.is_compared:
            return
        seconds -= new_s  # what is made once says nothing of the next blocks
        times_s = self._bypassed_s if self.is_bypassed else self._recorded_s
        times_s.append(seconds / self._n_parts)
        if not self.is_bypassed:
            # plans run by the wall's clock, which may have counted more
            self._host_s.append(max(seconds - ran_s, 0.0) / self._n_parts)
        self.is_compared = False
        self._n_compared += self._weight
        n_blocks = len(self._recorded_s) + len(self._bypassed_s)
        # Only behind a whole ABBA: then both ways have as many times.
        if n_blocks % 4 == 0:
            # of two times the smaller one: the program may have waited for something in the other
            recorded_s, bypassed_s = map(median_low, (self._recorded_s, self._bypassed_s))
            clearly = (1 + CLEARLY / n_blocks) * min(recorded_s, bypassed_s)
            if max(recorded_s, bypassed_s) > clearly or self._n_compared >= COMPARED:
                self._compare(recorded_s, bypassed_s)

    def _compare(self, recorded_s: float, bypassed_s: float) -> None:
        """Decide by these medians, and reckon for how many blocks that holds."""
        host_s = median_low(self._host_s)
        self.compared = Compared(
            self.where, self.unit, self._is_parted, recorded_s, bypassed_s,
            ran_s=recorded_s - host_s,
        )  # fmt: skip
        # What the comparison lost: its blocks that ran the slower way. If that was recording, the
        # TRIALS before it lost as much each.
        n_worse = len(self._bypassed_s)
        if bypassed_s < recorded_s:
            n_worse = len(self._recorded_s) + TRIALS // self._weight
        lost_s = n_worse * abs(recorded_s - bypassed_s)
        # Blocks of the better way after which that was SHARE of the time.
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
        # A plan is compiled whole once it has run for some seconds. The blocks that are bypassed
        # now count as runs of it: compiled whole, it may be faster than eager.
        if is_better and self._kernels_may_help and self.plan is not None:
            self.plan.spent_s += self._n_left * bypassed_s

    def _go_on(self) -> None:
        """Let the decision hold for the next blocks, and the one after it for twice as many."""
        self._n_left, self._n_next = self._n_next, min(2 * self._n_next, AT_MOST)
        self._n_free = 0
