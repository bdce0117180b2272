"""Decides when a trace records its calls and when they run at once, as in eager.

In: calls that are no hits, sync points, begins and ends of blocks, times of flushes. Out: whether
the trie may grow, whether a plan is worth building, whether a block's ops must be seen, and `cold`,
which the recorder and the C++ read before each op. Each trace has one `Policy`. Hits never come
here. Two kinds of knowledge decide: `past` knows which sequences of calls came before, and `sites`
knows whether recording was measured to be faster.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from lazy_tensor.dispatch.stats import NEW, RECORDED, STATS
from lazy_tensor.dispatch.tiering.call_history import Past
from lazy_tensor.dispatch.tiering.sites import (
    BLOCKS,
    MANY_ROUNDS,
    READS,
    ROUND,
    ROUND_S,
    STEPS,
    Compared,
    PlanStatus,
    Site,
)
from lazy_tensor.dispatch.user_frame import user_line
from lazy_tensor.kernels.service.fusion import Fusion

FIRST_CALLS = 256
"""Calls that a thread records though their sequence is new, so that a first try in a shell is
lazy."""
OUTSIDE = "no block"
"""Stands for the place of a block while no block runs: wrapped tensors are recorded there too."""
PAUSED = 2
"""The value of `cold` while one of torch's own modes is entered."""
MOST_SITES = 512
"""Places of blocks, and of rounds in them, that are remembered. One more, and the oldest goes."""
SHORT = 4
"""In a program on several ranks, blocks of at most so many calls are bypassed: a sharded call in
eager takes 8 us, and a flush takes 30. In other programs measured times decide."""
SHORT_FLUSH = 8
"""Ops in a flush up to which recording small ones costs more than eager: a flush takes 10 us, and
an op in eager one or two."""
UNREAD_STEPS = 8
"""After so many optimizer's steps in a row without a read, the end of each step is a sync point,
until reads come more often."""
READS_WITHOUT = 64
"""Reads without an optimizer's step after which a round of steps ends: the program has come to
another phase. One of reinforcement learning may read for each action, and then update."""
ASLEEP = -1
"""The value of `cold` while a block is bypassed and its ops are not seen."""
BYPASSED_TURNS = 3
"""The value of `cold` while turns of a loop without sync points run as in eager."""


class Policy:
    """Decides for one trace whether calls are recorded.

    Its state is `cold`, which is one of these:

    - 0: calls are recorded.
    - 1: calls run at once, and are noted in `past`. The trace comes to this state at a call that is
      new after the calls since the last sync point. It records again behind a region that is known.
    - `PAUSED`: calls run at once. Only `pause(False)` ends this, no sync point does.
    - `ASLEEP`: the block is bypassed. Either its mode was never entered, or `native` takes it off
      torch's stack at the first op that it sees. Ops on wrapped tensors still come, and most of
      them give plain tensors.
    - `BYPASSED_TURNS`: calls run at once, and are counted, as nothing else tells where a turn of
      the loop ends.

    `address` is where `cold` lies in memory: C++ reads and writes it there without Python.
    """

    # `native` finds these by the offsets of their slots.
    __slots__ = ("__dict__", "_began_s", "_flushed_s", "_gap_s", "is_bypassed", "_is_parted",
                 "_n_flushed", "_n_flushes", "_n_known", "_n_reads", "_n_recorded", "_outcome",
                 "_ran_s", "_round_began_s", "address", "grown_s", "has_read", "n_turns",
                 "n_turns_noted", "past")  # fmt: skip

    # Set by the first `wrap`, for all threads: ops on wrapped tensors come outside of modes too.
    has_wrapped = False
    make_past: type[Past] = Past  # `native.Past` once the C++ is there
    # The C++, or None. Without it no round is bypassed: only C++ takes a mode off torch's stack.
    native: Any = None

    def __init__(self) -> None:
        self._cold = array("q", [0])  # never resized: `address` must stay valid
        self._before_pause: int | None = None  # `cold` before the pause, None if there is none
        self.address = self._cold.buffer_info()[0]
        self.past: Past = self.make_past()
        self.reset()

    def reset(self) -> None:
        self.calls_left = FIRST_CALLS  # new calls that may be recorded all the same
        if self.is_paused:
            self._before_pause = 0  # what the pause goes back to
        else:
            self.cold = 0
        # Seconds that new states took since the last flush, which puts them in its `FlushRecord`.
        self.grown_s = 0.0
        # The hash of the last region that wasn't all hits, and whether the one before it was equal.
        # Such a loop will use its plans again, so `may_plan` allows them at once.
        self._region: int | None = None
        self._is_loop = False
        self.past.clear()
        # The program runs on several ranks. All of them must record the same ops. Their calls are
        # the same and their times are not, so no time may decide anything then.
        self.spans_ranks = False

        # The block or round that runs is bypassed. Its regions say nothing then, as few of its
        # calls are seen.
        self.is_bypassed = False
        # The key of its place. `lazy_mode` makes it of code object, instruction and options.
        self._place: Any = OUTSIDE
        # In the round that runs: reads, steps of an optimizer that end a region, turns of a loop;
        # all steps of an optimizer, and the reads before the last of these. A block counts its
        # rounds, too.
        self._n_reads = self._n_steps = self._n_reads_at_step = self._n_rounds = 0
        # Reads in earlier rounds of the block, if it isn't cut into these.
        self._n_reads_before = 0
        # The last round had steps of an optimizer.
        self._had_steps = False
        # Steps of an optimizer in a row without a read between them, whether each of them ends a
        # region, and whether a value was read since the last one, or since the block began.
        self._n_unread_steps = 0
        self._ends_each_step = self.has_read = False
        # Since the last sync point: turns of a loop that `past` has found, and turns that were
        # accounted for.
        self.n_turns_noted = self.n_turns = 0
        # Values were needed before the block's end. Reports don't advise `replay` then.
        self._is_parted = False

        # What is known of the blocks at each place, and of the rounds in them.
        self._sites: dict[Any, Site] = {}
        # The site of the block or round that runs. None if none runs, while paused, and in a block
        # that must be recorded.
        self._site: Site | None = None
        # While C++ counts bypassed blocks by itself: their site, and their outcome for `STATS`.
        self._resting: tuple[Site, str] | None = None
        # The site of the block that ended last. A block is timed up to the begin of the next one,
        # so that its flush at exit is part of it: this stays set until `_follow`.
        self._last_site: Site | None = None

        # Counted since the block or round began, for `Site.end`: regions that were recorded,
        # regions with calls that ran at once, unknown regions since the last known one, and calls
        # that were recorded.
        self._n_known = self._n_new = self._n_unknown = self._n_recorded = 0
        # Flushes since then, ops in them, and whether these are so few that recording costs.
        self._n_flushes = self._n_flushed = 0
        self._is_short = False
        # Seconds since then, for `Site.is_followed`: those that new states and new plans took, and
        # those in which plans, or recorded ops without a plan, ran.
        self._new_s = 0.0
        self._ran_s = 0.0
        # A plan that ran since then, most of whose ops wait for their kernels. It counts if that is
        # so for all plans together: ops in kernels that are there, less ops in kernels that are
        # being built, are less than 0. Then the next blocks at this place wait for this plan.
        self._awaited: PlanStatus | None = None
        self._n_gained = 0

        # For `_has_news`: what `STATS.has_worked_long()` and `Fusion.n_adopted` were at the last
        # look, and how many kernels more must come before the next.
        self._has_worked, self._n_adopted = False, 0
        self._n_awaited = 1

        # Times by `perf_counter`.
        # The begin of the region that runs, and the outcome of the last one. The begin is moved on
        # by what is no part of the region: replayed calls, and the flush at the last region's end.
        self._began_s, self._outcome = perf_counter(), NEW
        self._flushed_s = 0.0  # the end of the last flush
        # Seconds from the last flush in the last region, or from its begin, to its end.
        self._gap_s = 0.0
        self._round_began_s = 0.0  # the begin of the block or round that runs

    @property
    def cold(self) -> int:
        """0 while the trace records; else 1, `PAUSED`, `ASLEEP` or `BYPASSED_TURNS`."""
        return self._cold[0]

    @cold.setter
    def cold(self, cold: int) -> None:
        wakes = self._cold[0] == ASLEEP and cold != ASLEEP
        if wakes:
            self.see_all_tensors()
        self._cold[0] = cold
        # Until here ops of finalizers found the trace asleep, and may have passed some by again.
        if wakes:
            self.see_all_tensors()

    @classmethod
    def see_all_tensors(cls) -> None:
        """See ops on all lazy tensors again: C++ lets them pass some while the trace is asleep."""
        if cls.native is not None:
            cls.native.end_passing()

    @property
    def is_asleep(self) -> bool:
        """Whether the ops of the block that runs, or ran last, are not seen."""
        return self._cold[0] == ASLEEP

    @property
    def is_paused(self) -> bool:
        """Whether one of torch's own modes is entered, which knows plain tensors only."""
        return self._before_pause is not None

    def pause(self, paused: bool) -> None:
        """Record nothing while one of torch's own modes is entered; then go on as before."""
        if paused and self._before_pause is None:
            self._before_pause, self.cold = self.cold, PAUSED
        elif not paused and self._before_pause is not None:
            self.cold, self._before_pause = self._before_pause, None

    @contextmanager
    def new_calls_recorded(self) -> Iterator[None]:
        """Context manager: new calls are recorded, as a thread's first ones are."""
        before, self.calls_left = self.calls_left, sys.maxsize
        try:
            yield
        finally:
            self.calls_left = before

    def add_growth(self, seconds: float) -> None:
        """Account for a call that the trie did not know, and for the seconds that this took."""
        self.calls_left -= 1
        self.grown_s += seconds
        self._new_s += seconds

    def may_grow(self) -> bool:
        """Whether the call under way may become a new state of the trie.

        `past` has the call already, so it must be known, as all since the last sync point must. If
        `past` has no call since then, the one under way doesn't count (`detach`), and may come.
        """
        return self.calls_left > 0 or self.past.is_known() or not self.past.has_begun()

    def may_plan(self, ends_region: bool) -> bool:
        """Whether a trace that is flushed for the first time may have a plan at once.

        It may in a loop, which comes to the same trace again. A program that goes over a data set
        of many lengths doesn't, and a plan that runs once doesn't pay. `ends_region`: the flush
        comes at a sync point, where `past` has just begun anew and knows nothing.
        """
        return self._is_loop and (ends_region or self.past.is_known())

    def note_kernels(self, plan: PlanStatus) -> None:
        """Account for a run of `plan` in the block that runs, or that has just ended.

        While most ops of a block's plans wait for their kernels, the next blocks are bypassed: a
        plan that runs op by op takes as long as eager, and recording comes on top.
        """
        if plan.communicates:
            self.span_ranks()
        self._n_gained += plan.n_there - plan.n_under_way
        site = self._site or self._last_site  # a block's plan runs at its end
        if site is not None:
            site.note_plan(plan)
        # Each rank gets its kernels at a time of its own, so ranks don't wait for kernels.
        if plan.n_under_way > plan.n_there and not self.spans_ranks:
            self._awaited = plan

    def span_ranks(self) -> None:
        """Note that the program runs on several ranks; forget what times have decided."""
        if not self.spans_ranks:
            self.spans_ranks = True
            self._forget_sites()

    def remember(self, past: Past) -> None:
        """Note calls in `past` from now on, and time all blocks anew."""
        self.past = past
        self._forget_sites()

    def _forget_sites(self) -> None:
        self._sites.clear()
        self._site = self._last_site = None

    def at_sync_point(self, *, n_recorded: int) -> None:
        """End a region, of whose calls `n_recorded` were recorded, and begin the next one.

        The next region is recorded if all calls of the one that ended are known.
        """
        self.n_turns_noted = self.n_turns = 0
        has_calls = self.past.has_begun()  # calls that were no hits: hits alone are not noted
        if has_calls:
            region = self.past.region()
            self._region, self._is_loop = region, region == self._region
        self._account(n_recorded, has_calls=has_calls, known=self.past.at_sync_point())

    def at_turn(self, *, n_recorded: int) -> None:
        """End a turn of a loop without sync points. It is known, recorded or not."""
        self._account(n_recorded, has_calls=not n_recorded, known=True)

    def ends_unmarked_turn(self) -> None:
        """Note that the turn that ends has no state for its end, since its ops are flushed again
        and again. The number of its ops decides, not its time: a bypassed turn is another number of
        the loop's passes, as fewer ops are seen then."""
        self._is_short |= 0 < self._n_flushed <= SHORT_FLUSH * self._n_flushes
        if self._site is not None:
            self._site.is_compared = False

    def bypass_turns(self) -> None:
        """Bypass the next turn of a loop. Called after `begin_round` has bypassed a round."""
        self.cold = BYPASSED_TURNS
        # While ways are compared each turn is a round. Else hashing the calls of each turn would
        # cost for nothing: skip all turns of the round but the last, which must end it.
        if not self._is_comparing():
            self._n_reads = ROUND - 1
            self.past.skip_turns(ROUND - 1)

    def _is_comparing(self) -> bool:
        return self._site is not None and self._site.is_compared

    def _account(self, n_recorded: int, *, has_calls: bool, known: bool) -> None:
        """Account for a region. `has_calls`: some were no hits. `known`: all of these are known."""
        is_recorded = n_recorded > 0 or (has_calls and not self.cold)
        self._end_region(is_recorded=is_recorded, is_empty=not (n_recorded or has_calls))
        if self.is_bypassed:
            return
        self._n_recorded += n_recorded
        self._n_known += is_recorded
        self._n_new += has_calls and not is_recorded
        # A region of hits alone changes nothing here: its calls are not noted.
        if has_calls:
            self._n_unknown = 0 if known else self._n_unknown + 1
        if self.cold and not self.is_paused and (known or self.calls_left > 0):
            self.cold = 0

    def _end_region(self, *, is_recorded: bool, is_empty: bool) -> None:
        """Count the region that ends, and the time since the last sync point, in `STATS`."""
        now_s = perf_counter()
        # The time of an empty region belongs to code that calls no ops. A bypassed region only
        # looks empty: its calls were not seen.
        if self.is_bypassed or not is_empty:
            bypassed = NEW if self._site is None else self._site.why_bypassed
            unrecorded = bypassed if self.is_bypassed else NEW
            self._outcome = RECORDED if is_recorded else unrecorded
            STATS.add_region(self._outcome, now_s - self._began_s)
        self._gap_s = now_s - max(self._began_s, self._flushed_s)
        self._began_s = now_s

    def add_replay(self, seconds: float) -> None:
        """Account for a replayed call: its time is no part of the region that runs."""
        self._began_s += seconds

    def add_plan(self, seconds: float) -> None:
        """Account for a plan that was built, in so many seconds."""
        self._new_s += seconds

    def add_flush(
        self, began_s: float, seconds: float, n_ops: int, *, run_s: float, ends_region: bool
    ) -> float:
        """Account for a flush of `n_ops`, of the region that has just ended if it `ends_region`.

        Its plan, or its ops, took `run_s` of its `seconds`. Returns the seconds between the flush
        and the one before it, or the begin of its region: what the program and recording took.
        """
        self._ran_s += run_s
        self._n_flushes += 1
        self._n_flushed += n_ops
        gap_s = self._gap_s if ends_region else began_s - max(self._began_s, self._flushed_s)
        self._flushed_s = began_s + seconds
        if ends_region:
            # The next region has begun by now: the flush's time goes to the one that ended.
            self._began_s += seconds
            STATS.regions_s[self._outcome] += seconds
        else:
            self._is_parted = True
        return gap_s

    def _has_news(self) -> bool:
        """Whether blocks are to be timed again: enough kernels have come since the last look, or
        the program has worked for long enough that kernels are built at all."""
        return (
            Fusion.n_adopted >= self._n_adopted + self._n_awaited
            or self._has_worked is not STATS.has_worked_long()
        )

    def _look_for_news(self) -> None:
        """Time again the blocks at all places: with new kernels recording may be faster."""
        self._has_worked, self._n_adopted = STATS.has_worked_long(), Fusion.n_adopted
        # Twice as many kernels the next time: else a large model, whose kernels come one by one,
        # would record everything anew for each of them.
        self._n_awaited *= 2
        if not self.spans_ranks:
            for site in self._sites.values():
                site.try_again()

    def rests(self, place: Any) -> bool:
        """Whether the block that begins at this `place` rests: it is bypassed like those before it,
        and only its time is noted.

        Then `end_rest` ends it, in place of `end_block`. False if it needs `begin_block`.
        """
        self.account_rests()
        if not self.is_asleep or self.has_wrapped or self._has_news():
            return False
        site = self._sites.get(place)
        if site is None or not site.is_bypassed:
            return False
        self._follow()
        self._began_s, self._outcome = perf_counter(), site.why_bypassed
        if not site.rests():
            return False
        site.period = STATS.period
        if self.native is not None:
            # C++ compares code object and instruction. It needs no options, the third part of
            # `place`, as each change of settings ends what was granted.
            self.native.grant_rests(*place[:2], site.n_may_rest())
            self._resting = site, self._outcome
        return True

    def end_rest(self) -> None:
        """End a block that rests."""
        STATS.add_region(self._outcome, perf_counter() - self._began_s)

    def account_rests(self) -> None:
        """Account for the blocks that rested by C++ alone, and end what it was granted."""
        if self._resting is None:
            return
        (site, outcome), self._resting = self._resting, None
        n_rested, seconds = self.native.rested()
        site.rested(n_rested, seconds)
        site.period = STATS.period
        STATS.counts["unrecorded_blocks"] += n_rested
        STATS.add_region(outcome, seconds, n_rested)

    def begin_block(
        self, place: Any, *, may_choose: bool = True, must_record: bool = False
    ) -> bool:
        """Begin a block of the program, behind a sync point. Returns whether its ops must be seen.

        They need not be where blocks at this `place` stayed unknown for long, where eager is
        faster, or while kernels are built. `may_choose`: times may decide. `must_record`: record
        all, whatever is known. Where blocks have many rounds the first of these begins here; it is
        bypassed if `is_bypassed`.
        """
        self.account_rests()
        self._ends()  # a round outside of blocks, of wrapped tensors, may be under way
        self._place = place
        self._reset_counts()
        self._n_rounds = self._n_reads_before = self._n_unread_steps = 0
        self._ends_each_step = self.has_read = self._is_parted = False
        if must_record:
            self._follow()
            self.try_again_at_once()
            return True
        site = self._sites.get(place)
        if site is not None and site.n_rounds >= MANY_ROUNDS:
            self.begin_round(may_choose=may_choose)
            return True  # its reads must be seen, however it runs
        return self._begins(place, may_choose=may_choose)

    def _follow(self) -> None:
        """Tell the site of the block that ended last that another block begins."""
        if self._last_site is not None:
            if self._n_gained < 0:
                self._last_site.awaited = self._awaited
            self._last_site.is_followed(new_s=self._new_s, ran_s=self._ran_s)
            self._last_site = None

    def _begins(self, place: Any, *, may_choose: bool, unit: str = BLOCKS) -> bool:
        """Begin a block, or a round of another `unit`; whether its ops must be seen."""
        # First of all, as it reads the counters that are set to 0 here: the flush at the end of the
        # last block came after that block's end.
        self._follow()
        if self._has_news():
            self._look_for_news()
        self._n_known = self._n_new = self._n_unknown = self._n_recorded = 0
        self._n_flushes = self._n_flushed = 0
        self._is_short = False
        self._new_s = self._ran_s = 0.0
        self._awaited, self._n_gained = None, 0
        self._round_began_s = perf_counter()
        if self.is_paused:
            return True
        site = self._sites.get(place)
        if site is None:
            if len(self._sites) >= MOST_SITES:
                del self._sites[next(iter(self._sites))]
            site = self._sites[place] = Site(user_line(), unit)
            self._n_awaited = 1
        self._site, site.period = site, STATS.period
        if not site.begin(may_choose=may_choose):
            self._bypass()
            return False
        # Where the last block that was seen was recorded, this one is likely to repeat it. Else the
        # trace stays cold, but no longer asleep: `past` must get the calls of this block.
        if site.was_recorded:
            self.cold = 0
        elif self.cold:
            self.cold = 1
        return True

    def _bypass(self) -> None:
        """Run the block that begins as in eager."""
        self.is_bypassed = True
        # `cold` stays as it is behind the end of the block. There ops on wrapped tensors still
        # come, and must be noted, as nothing else would have the trace record again.
        self.cold = 1 if self.has_wrapped else ASLEEP

    def end_block(self) -> None:
        """End a block behind a sync point, whether its ops were seen or not."""
        self._ends()
        site = self._sites.get(self._place)
        if site is not None:
            # of a bypassed block nobody has seen the rounds, and any block may be a shorter one
            site.n_rounds = max(self._n_rounds, site.n_rounds - 1)
        self._place = OUTSIDE
        self._reset_counts()

    def _ends(self) -> None:
        """End a block or a round, if one runs, with what was counted in it."""
        site, self._site = self._site, None
        if site is not None:
            self._last_site = site
            is_short = self._is_short or (self.spans_ranks and self._n_recorded <= SHORT)
            # An empty block counts as unknown. So blocks without ops are soon bypassed too.
            n_unknown = self._n_unknown if self._n_known or self._n_new else 1
            n_reads, self._n_reads_before = self._n_reads_before + self._n_reads, 0
            site.end(n_known=self._n_known, n_new=self._n_new, n_unknown=n_unknown,
                     n_parts=self._n_steps if site.unit == STEPS else n_reads,
                     is_parted=self._is_parted, is_short=is_short)  # fmt: skip
        self.is_bypassed = False

    def add_reads(self, n: int) -> None:
        """Count reads of values that C++ let pass while the block was asleep."""
        self._n_reads += n
        self.has_read |= n > 0

    def ends_round(self, *, by_turn: bool = False) -> bool:
        """Count a read, an optimizer's step, or a turn of a loop if `by_turn`; whether it ends the
        round. If it does, the caller ends this round and begins the next, which may run another
        way. While turns are compared each is a round: it has hundreds of calls."""
        self._n_reads += 1
        self._is_parted |= not by_turn
        follows_step = not (self.has_read or by_turn)
        self.has_read |= not by_turn
        is_over = self._is_round_over(follows_step) or (by_turn and self._is_comparing())
        if not is_over or self.is_paused or self.native is None:
            return False
        self._n_rounds += 1
        if self._may_end_round():
            return True
        self._n_reads_before += self._n_reads
        self._begin_counting()
        return False

    def _may_end_round(self) -> bool:
        """Whether the next round may run another way than the one that is over."""
        if self._place is OUTSIDE:
            # only ops on wrapped tensors come, so without these nothing is to choose
            return self.has_wrapped
        # A block is compared as a whole: nobody sees the reads of a bypassed one.
        if self._site is not None and self._site.is_compared and self._site.unit == BLOCKS:
            return False
        block = self._sites.get(self._place)
        return block is None or max(block.n_rounds, self._n_rounds) >= MANY_ROUNDS

    def _is_round_over(self, follows_step: bool) -> bool:
        """Whether the round ends with this read. `follows_step`: it is the first one behind a step
        of an optimizer."""
        # Ranks must end their rounds at the same read, and each has its own clock.
        seconds = 0.0 if self.spans_ranks else perf_counter() - self._round_began_s
        if not (self._n_steps or self._had_steps):
            return self._n_reads >= ROUND or seconds >= ROUND_S
        # A step may have many reads, or few. So a round has a number of whole steps.
        if self._n_steps >= ROUND or (follows_step and seconds >= ROUND_S):
            return True
        if self._n_reads < self._n_reads_at_step + READS_WITHOUT:
            return False
        self._n_steps = 0  # its time for a step says nothing, and the next round is one of reads
        return True

    def ends_step(self) -> bool:
        """Count a step of an optimizer; whether steps are sync points here, as nothing is read."""
        if self.has_read:
            self._ends_each_step = self._n_unread_steps >= UNREAD_STEPS
            self._n_unread_steps = 0
        self.has_read = False
        self._n_steps += 1
        self._n_reads_at_step = self._n_reads
        self._n_unread_steps += 1
        self._ends_each_step |= self._n_unread_steps >= UNREAD_STEPS
        return self._ends_each_step

    def end_round(self) -> None:
        """End a round behind a sync point, as if it were a block."""
        self._ends()
        self._begin_counting()

    def _begin_counting(self) -> None:
        """Count the reads and steps of the next round."""
        self._had_steps = self._n_steps > 0
        self._reset_counts()
        self._round_began_s = perf_counter()

    def _reset_counts(self) -> None:
        self._n_reads = self._n_reads_at_step = self._n_steps = 0

    def begin_round(self, *, may_choose: bool) -> bool:
        """Begin the next round; whether its ops must be seen."""
        # Its site is not that of whole blocks at this place, whose times say nothing of rounds. Nor
        # do times of rounds with steps of an optimizer say anything of those without.
        unit = STEPS if self._had_steps else READS
        return self._begins((unit, self._place), may_choose=may_choose, unit=unit)

    def compared(self) -> list[Compared]:
        """The last comparison at each place where blocks ran since `reset_stats()`."""
        ran = [site for site in self._sites.values() if site.period == STATS.period]
        return [site.compared for site in ran if site.compared is not None]

    def try_again_at_once(self) -> None:
        """Record again, whatever is known."""
        if not self.is_paused:
            self.cold = 0
