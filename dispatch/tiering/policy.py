"""When to record: what has been seen before, and at first a little, where it pays.

In: calls that are not hits, sync points, blocks. Out: whether the trie may grow, and whether calls
are recorded at all. Hits need no policy.
"""

from __future__ import annotations

from array import array
from time import perf_counter
from typing import Any

from lazy_tensor.dispatch.stats import NEW, RECORDED, STATS
from lazy_tensor.dispatch.tiering.call_history import Past
from lazy_tensor.dispatch.tiering.sites import ROUND, ROUND_S, Compared, Site, Waiting
from lazy_tensor.dispatch.user_frame import user_line
from lazy_tensor.kernels.service.fusion import Fusion

FIRST_CALLS = 256
"""Calls that a thread records before any has come twice, so that a first try in a shell is lazy."""
OUTSIDE = "no block"
"""The place of what runs in no block, of wrapped tensors."""
PAUSED = 2
"""What `cold` is while recording is paused."""
MOST_SITES = 64
SHORT = 4
"""Calls up to which a block of a program on several ranks runs as in eager, where a sharded call
takes 8 us: a flush takes 30. Blocks of other programs are timed."""
STEPS = 8
"""Steps of optimizers in a row without a read after which a loop is one that reads none."""
ASLEEP = -1
"""What `cold` is where ops pass unseen within a block."""
BYPASSED_TURNS = 3
"""What `cold` is in a loop without reads that runs as in eager."""


class Policy:
    """Whether a trace records.

    It goes *cold* at a call that it has not seen before: calls then run at once, unrecorded, and
    are noted as `past`. Where a value is read, or a block begins, and all since the last such sync
    point is known, it records again. Whole blocks are bypassed where recording was measured not to
    pay (see `sites`).

    `cold` is 0 while the trace records, and 1 while it doesn't, until a sync point says otherwise.
    It lies at `address`, where `native` sees it without Python. While it is `ASLEEP` ops don't come
    at all, from the first on that `native` sees: it takes the mode off torch's stack. Those on
    wrapped tensors come, but what they give is plain then.
    """

    __slots__ = ("__dict__", "address", "past")  # these two `native` finds by their offsets

    has_wrapped = False  # ops on tensors that `wrap` made lazy come in no mode too
    make_past: type[Past] = Past
    native: Any = None  # without it nothing lets ops pass unseen

    def __init__(self) -> None:
        self._cold = array("q", [0])
        self._before_pause: int | None = None
        self.address = self._cold.buffer_info()[0]
        self.past: Past = self.make_past()
        self.reset()

    def reset(self) -> None:
        self.calls_left = FIRST_CALLS
        self.cold = 0
        self.grown_s = 0.0  # since the last flush
        self._region: int | None = None  # the last one that wasn't all hits
        self._is_loop = False  # it came twice in a row
        self.past.clear()
        # All ranks must record the same ops. Calls are the same on all ranks, times are not: so
        # only calls decide.
        self.spans_ranks = False
        self._is_bypassed = False  # the block that runs: of its calls only some come here
        self._place: Any = OUTSIDE  # of the block that runs
        self._n_reads = 0  # in it, since the last round
        self._n_steps = 0  # of optimizers, in it, since a value was read
        self.has_read = False  # since the last of these
        self._is_parted = False  # the block that runs: its values were needed in its middle
        self._sites: dict[Any, Site] = {}
        self._site: Site | None = None  # of the block that runs
        self._resting: tuple[Site, str] | None = None  # of blocks that C++ counts, and as what
        self._last_site: Site | None = None
        # regions of this block: that were recorded, that ran as in eager, and that were unknown,
        # since one that was known; and calls that were recorded
        self._n_known = self._n_new = self._n_unknown = self._n_recorded = 0
        self._new_s = 0.0  # spent on what is recorded, or planned, for the first time
        self._ran_s = 0.0  # by plans, and by ops that were recorded
        self._awaited: Waiting | None = None  # one of its plans, of the others most ops
        self._n_gained = 0  # ops in kernels that are there, less those in others
        self._has_worked, self._n_adopted = False, 0
        self._n_awaited = 1  # kernels more; twice as many each time, until a new site begins
        self._began_s, self._outcome = perf_counter(), NEW  # of the region under way, of the last
        self._flushed_s = 0.0  # when the last flush ended
        self._gap_s = 0.0  # of the region that ended last, what ran since its last flush
        self._round_began_s = 0.0

    @property
    def cold(self) -> int:
        """0 while the trace records; else 1, `PAUSED`, `ASLEEP` or `BYPASSED_TURNS`."""
        return self._cold[0]

    @cold.setter
    def cold(self, cold: int) -> None:
        self._cold[0] = cold

    @property
    def is_asleep(self) -> bool:
        """Whether ops of the block that runs don't come here."""
        return self._cold[0] == ASLEEP

    @property
    def is_paused(self) -> bool:
        """Whether what runs is taken apart by something else, which knows plain tensors only."""
        return self._before_pause is not None

    def pause(self, paused: bool) -> None:
        """Record nothing while something else takes the program apart; then go on as before."""
        if paused and self._before_pause is None:
            self._before_pause, self.cold = self.cold, PAUSED
        elif not paused and self._before_pause is not None:
            self.cold, self._before_pause = self._before_pause, None

    def add_growth(self, seconds: float) -> None:
        """Account for a call that is recorded for the first time, which took so long."""
        self.calls_left -= 1
        self.grown_s += seconds
        self._new_s += seconds

    def may_grow(self) -> bool:
        """Whether the call under way may become a new state: not behind one that is new. One that
        doesn't count, such as `detach`, may come before all that do."""
        return self.calls_left > 0 or self.past.is_known() or not self.past.has_begun()

    def may_plan(self, ends_region: bool) -> bool:
        """Whether what is flushed for the first time may have a plan. It may in a loop, whose
        regions come again; the lengths of a data set don't. `ends_region`: a sync point did."""
        return self._is_loop and (ends_region or self.past.is_known())

    def note_kernels(self, plan: Waiting) -> None:
        """Account for a run of `plan` in the block under way. If in all its plans more ops are in
        kernels that are being built than in those there are, the next blocks wait for them, as fast
        as in eager: a plan that runs op by op costs the recording besides."""
        if plan.communicates:
            self.span_ranks()
        self._n_gained += plan.n_there - plan.n_under_way
        site = self._site or self._last_site  # a block's plan runs at its end
        if site is not None:
            site.note_plan(plan)
        if plan.n_under_way > plan.n_there and not self.spans_ranks:  # each has its own kernels
            self._awaited = plan

    def span_ranks(self) -> None:
        """The program runs on several ranks: forget what times have decided."""
        if not self.spans_ranks:
            self.spans_ranks = True
            self._forget_sites()

    def remember(self, past: Past) -> None:
        """Note calls in `past` from now on, and look at all blocks again."""
        self.past = past
        self._forget_sites()

    def _forget_sites(self) -> None:
        self._sites.clear()
        self._site = self._last_site = None

    def at_sync_point(self, *, n_recorded: int) -> None:
        """End a region, of whose calls so many were recorded, and begin the next: it is recorded if
        all before the sync point is known."""
        has_calls = self.past.has_begun()  # that were no hits
        if has_calls:
            region = self.past.region()
            self._region, self._is_loop = region, region == self._region
        self._account(n_recorded, has_calls=has_calls, known=self.past.at_sync_point())

    def at_turn(self, *, n_recorded: int) -> None:
        """End a turn of a loop, which is known, whether its calls were recorded or not."""
        self._account(n_recorded, has_calls=not n_recorded, known=True)

    def bypass_turns(self) -> None:
        """Bypass the next turn of a loop; or a round of them, where the calls of the last one
        only are looked at."""
        self.cold = BYPASSED_TURNS
        if not self._is_comparing():
            self._n_reads = ROUND - 1
            self.past.skip_turns(ROUND - 1)

    def _is_comparing(self) -> bool:
        return self._site is not None and self._site.is_compared

    def _account(self, n_recorded: int, *, has_calls: bool, known: bool) -> None:
        is_recorded = n_recorded > 0 or (has_calls and not self.cold)
        self._end_region(is_recorded=is_recorded, is_empty=not (n_recorded or has_calls))
        if self._is_bypassed:
            return
        self._n_recorded += n_recorded
        self._n_known += is_recorded
        self._n_new += has_calls and not is_recorded
        if has_calls:
            self._n_unknown = 0 if known else self._n_unknown + 1
        if self.cold and not self.is_paused and (known or self.calls_left > 0):
            self.cold = 0

    def _end_region(self, *, is_recorded: bool, is_empty: bool) -> None:
        """Account for the time since the last sync point; what ran in an empty region is not the
        program's."""
        now_s = perf_counter()
        if self._is_bypassed or not is_empty:
            bypassed = NEW if self._site is None else self._site.why_bypassed
            unrecorded = bypassed if self._is_bypassed else NEW
            self._outcome = RECORDED if is_recorded else unrecorded
            STATS.add_region(self._outcome, now_s - self._began_s)
        self._gap_s = now_s - max(self._began_s, self._flushed_s)
        self._began_s = now_s

    def add_replay(self, seconds: float) -> None:
        """Account for a replayed call: its time is no region's."""
        self._began_s += seconds

    def add_plan(self, seconds: float) -> None:
        """Account for a plan that was built, in so many seconds."""
        self._new_s += seconds

    def add_flush(
        self, began_s: float, seconds: float, *, run_s: float, ends_region: bool
    ) -> float:
        """Account for a flush, of the region that has just ended if it `ends_region`; its plan, or
        its ops, took `run_s` of these. The seconds before it in which its region ran."""
        self._ran_s += run_s
        gap_s = self._gap_s if ends_region else began_s - max(self._began_s, self._flushed_s)
        self._flushed_s = began_s + seconds
        if ends_region:
            self._began_s += seconds
            STATS.regions_s[self._outcome] += seconds
        else:
            self._is_parted = True
        return gap_s

    def _has_news(self) -> bool:
        """Whether kernels are asked for since the last look, or enough have come to compare blocks
        again."""
        return (
            Fusion.n_adopted >= self._n_adopted + self._n_awaited
            or self._has_worked is not STATS.has_worked_long()
        )

    def _look_for_news(self) -> None:
        """Try again what was left to eager."""
        self._has_worked, self._n_adopted = STATS.has_worked_long(), Fusion.n_adopted
        self._n_awaited *= 2
        if not self.spans_ranks:
            for site in self._sites.values():
                site.try_again()

    def rests(self, place: Any) -> bool:
        """Whether the block that begins at this `place` is bypassed, as the last one there was,
        and needs no account but of its time."""
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
            self.native.grant_rests(*place[:2], site.n_may_rest())
            self._resting = site, self._outcome
        return True

    def end_rest(self) -> None:
        """End a block that needs no account but of its time."""
        STATS.add_region(self._outcome, perf_counter() - self._began_s)

    def account_rests(self) -> None:
        """Account for blocks that rested, of which C++ has kept count."""
        if self._resting is None:
            return
        (site, outcome), self._resting = self._resting, None
        n_rested, seconds = self.native.rested()
        site.rested(n_rested)
        site.period = STATS.period
        STATS.counts["unrecorded_blocks"] += n_rested
        STATS.add_region(outcome, seconds, n_rested)

    def begin_block(
        self, place: Any, *, may_choose: bool = True, must_record: bool = False
    ) -> bool:
        """Begin a block of the program, behind a sync point; whether its ops must be seen.

        They need not be where those at this `place` have not been known for long, or run quicker
        as in eager, or while their kernels are built; `may_choose` if times may say so.
        """
        self.account_rests()
        self._ends()
        self._place, self._n_reads, self._n_steps = place, 0, 0
        self.has_read = self._is_parted = False
        if must_record:
            self._follow()
            self.try_again_at_once()
            return True
        return self._begins(place, may_choose=may_choose)

    def _follow(self) -> None:
        if self._last_site is not None:
            if self._n_gained < 0:
                self._last_site.awaited = self._awaited
            self._last_site.is_followed(new_s=self._new_s, ran_s=self._ran_s)
            self._last_site = None

    def _begins(self, place: Any, *, may_choose: bool, of_reads: bool = False) -> bool:
        self._follow()
        if self._has_news():
            self._look_for_news()
        self._n_known = self._n_new = self._n_unknown = self._n_recorded = 0
        self._new_s = self._ran_s = 0.0
        self._awaited, self._n_gained = None, 0
        self._round_began_s = perf_counter()
        if self.is_paused:
            return True
        site = self._sites.get(place)
        if site is None:
            if len(self._sites) >= MOST_SITES:
                self._sites.clear()
            site = self._sites[place] = Site(user_line(), of_reads=of_reads)
            self._n_awaited = 1
        self._site, site.period = site, STATS.period
        if not site.begin(may_choose=may_choose):
            self._bypass()
            return False
        if site.was_recorded:
            self.cold = 0
        elif self.cold:
            self.cold = 1
        return True

    def _bypass(self) -> None:
        """Run the block that begins as in eager. Ops on lazy tensors give plain ones meanwhile, so
        that no later op pays for them."""
        self._is_bypassed = True
        self.cold = 1 if self.has_wrapped else ASLEEP

    def end_block(self) -> None:
        """End a block behind a sync point, whether its ops were seen or not."""
        self._ends()
        self._place, self._n_reads = OUTSIDE, 0

    def _ends(self) -> None:
        site, self._site = self._site, None
        if site is not None:
            self._last_site = site
            is_short = self.spans_ranks and self._n_recorded <= SHORT
            n_unknown = self._n_unknown if self._n_known or self._n_new else 1  # an empty block
            site.end(n_known=self._n_known, n_new=self._n_new, n_unknown=n_unknown,
                     n_reads=self._n_reads, is_parted=self._is_parted,
                     is_short=is_short)  # fmt: skip
        self._is_bypassed = False

    def add_reads(self, n: int) -> None:
        """Count reads that nobody looked at."""
        self._n_reads += n
        self.has_read |= n > 0

    def ends_round(self, *, by_turn: bool = False) -> bool:
        """Count a read, or a turn of a loop; whether the next ones may be bypassed, or are to be
        seen again. Turns are long enough to be compared one by one."""
        self._n_reads += 1
        self._is_parted |= not by_turn
        is_over = (
            self._n_reads >= ROUND
            or (by_turn and self._is_comparing())
            or (not self.spans_ranks and perf_counter() - self._round_began_s >= ROUND_S)
        )
        if not is_over or self.is_paused or self.native is None:
            return False
        return self._place is not OUTSIDE or self.has_wrapped

    def ends_step(self) -> bool:
        """Count a step of an optimizer; whether there were many since a value was read."""
        self._n_steps = 0 if self.has_read else self._n_steps + 1
        self.has_read = False
        return self._n_steps >= STEPS

    def end_round(self) -> None:
        """End so many reads of a block, behind a sync point, as if they were a block."""
        self._ends()
        self._n_reads = 0

    def begin_round(self, *, may_choose: bool) -> bool:
        """Begin the next ones; whether their ops must be seen."""
        place = (ROUND, self._place)
        return self._begins(place, may_choose=may_choose, of_reads=True)

    def compared(self) -> list[Compared]:
        """What comparisons said, a place each where blocks ran since `reset_stats()`."""
        ran = [site for site in self._sites.values() if site.period == STATS.period]
        return [site.compared for site in ran if site.compared is not None]

    def try_again_at_once(self) -> None:
        """Record again, whatever it costs."""
        if not self.is_paused:
            self.cold = 0
