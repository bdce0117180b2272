"""When to record: what has been seen before, and at first a little, where it pays.

In: calls that are not hits, breaks, blocks. Out: whether the trie may grow, and whether calls are
recorded at all. Hits need no policy.
"""

from __future__ import annotations

from array import array
from time import perf_counter
from typing import Any, Protocol

from lazy_tensor.dispatch.past import Past
from lazy_tensor.dispatch.sites import ROUND, ROUND_S, Site
from lazy_tensor.dispatch.stats import KERNELS, NEW, QUICKER, RECORDED, STATS
from lazy_tensor.dispatch.where import user_line
from lazy_tensor.kernels.fusion import Fusion

FIRST_CALLS = 256
"""Calls that a thread records before any has come twice, so that a first try in a shell is lazy."""
AWAITS_OPS = 1 << 12
"""Ops that run unrecorded before it is looked again whether kernels are there."""
OUTSIDE = "no block"
"""The place of what runs in no block, of wrapped tensors."""
PAUSED = 1 << 60
"""Ops to run unrecorded while recording is paused: more than there will be."""
KEPT_OF_KERNELS = 0.9
"""What counts of earlier runs at each run of a plan: a loop with its kernels goes on when something
else begins that has none."""
RESTS = 16
"""Of so many blocks that wait for kernels one looks for them."""
MOST_SITES = 64
SHORT = 4
"""Calls up to which a block of a program on several ranks runs as in eager, where a sharded call
takes 8 us: a flush takes 30. Blocks of other programs are timed."""
STEPS = 8
"""Steps of optimizers in a row without a read after which a loop is one that reads none."""
ASLEEP = -1
"""What `cold` is where ops pass unseen within a block."""


class Waiting(Protocol):
    """What runs op by op while its kernels are built: a plan."""

    communicates: bool
    n_there: int
    n_under_way: int

    def awaits_kernels(self) -> bool: ...


class Policy:
    """Whether a trace records.

    It goes *cold* at a call that it has not seen before: calls then run at once, unrecorded, and
    are noted as `past`. Where a value is read, or a block begins, and all since the last such break
    is known, it records again. It is cold, too, while kernels are built. Whole blocks are let alone
    where recording was measured not to pay (see `sites`).

    `cold` counts down the ops to run before it is looked again, to 1, where breaks are looked at.
    It lies at `address`, where `native` counts without Python. While it is `ASLEEP` ops don't come
    at all, from the first on that `native` sees: it takes the mode off torch's stack. Those on
    wrapped tensors come, but what they give is plain then.
    """

    __slots__ = ("__dict__", "address", "past")  # these two `native` finds by their offsets

    has_wrapped = False  # ops on tensors that `wrap` made lazy come in no mode too
    make_past: type[Past] = Past
    may_sleep = False  # without `native` nothing lets ops pass unseen

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
        self._awaited: Waiting | None = None
        self.with_kernels = 0.0  # ops in kernels that are there less those in others, lately
        self._is_let_alone = False  # the block that runs: of its calls only some come here
        self._place: Any = OUTSIDE  # of the block that runs
        self._n_reads = 0  # in it, since the last round
        self._n_steps = 0  # of optimizers, in it, since a value was read
        self.has_read = False  # since the last of these
        self._sites: dict[Any, Site] = {}
        self._site: Site | None = None  # of the block that runs
        self._last_site: Site | None = None
        # regions of this block: that were recorded, that ran as in eager, and that were unknown,
        # since one that was known; and calls that were recorded
        self._n_known = self._n_new = self._n_unknown = self._n_recorded = 0
        self._traced_s = 0.0  # by what it records for the first time, and by its plans
        self._has_worked, self._n_adopted = False, 0
        self._n_awaited = 1  # kernels more; twice as many each time, until a new site begins
        self._began_s, self._outcome = perf_counter(), NEW  # of the region under way, of the last
        self._round_began_s = 0.0
        self._n_rests = 0

    @property
    def cold(self) -> int:
        """How many ops to run unrecorded, and 1; 0 while the trace records."""
        return self._cold[0]

    @cold.setter
    def cold(self, count: int) -> None:
        self._cold[0] = count

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
        self._traced_s += seconds

    def may_grow(self) -> bool:
        """Whether the call under way may become a new state: not behind one that is new. One that
        doesn't count, such as `detach`, may come before all that do."""
        return self.calls_left > 0 or self.past.is_known() or not self.past.has_begun()

    def may_plan(self, ends_region: bool) -> bool:
        """Whether a plan may be built at the first flush of what was recorded, which the last break
        ends or not: of a loop, not of each of the lengths of a data set."""
        return self._is_loop and (ends_region or self.past.is_known())

    def note_kernels(self, plan: Waiting) -> None:
        """Account for a run of `plan`: as long as more ops are in kernels that are being built than
        in those there are, ops run unrecorded, as fast as in eager, where a plan that runs op by op
        costs the recording besides. Not of a program on several ranks, each of which has its
        kernels at a time of its own."""
        if plan.communicates:
            self.span_ranks()
        gained = plan.n_there - plan.n_under_way
        self.with_kernels = KEPT_OF_KERNELS * self.with_kernels + gained
        if plan.n_under_way and self.with_kernels < 0 and not self.spans_ranks:
            self._awaited = plan
            self.cold = AWAITS_OPS

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

    def at_break(self, *, n_recorded: int) -> None:
        """End a region, of whose calls so many were recorded, and begin the next: it is recorded if
        all before the break is known."""
        has_calls = self.past.has_begun()  # that were no hits
        if has_calls:
            region = self.past.region()
            self._region, self._is_loop = region, region == self._region
        known = self.past.at_sync_point()
        is_recorded = n_recorded > 0 or (has_calls and not self.cold)
        self._end_region(is_recorded=is_recorded, is_empty=not (n_recorded or has_calls))
        if self._is_let_alone:
            return
        if self._has_news():
            self._look_for_news()
        self._n_recorded += n_recorded
        self._n_known += is_recorded
        self._n_new += has_calls and not is_recorded
        if has_calls:
            self._n_unknown = 0 if known else self._n_unknown + 1
        if self.is_paused:
            return
        if self.cold and self._awaited is not None:
            self._look_for_kernels(self._awaited)
        elif self.cold and (known or self.calls_left > 0):
            self.cold = 0

    def _end_region(self, *, is_recorded: bool, is_empty: bool) -> None:
        """Account for the time since the last break; what ran in an empty region is not the
        program's."""
        now_s = perf_counter()
        if self._is_let_alone or not is_empty:
            alone = NEW if self._site is None or self._site.is_unknown else QUICKER
            unrecorded = alone if self._is_let_alone else NEW
            if self._awaited is not None:
                unrecorded = KERNELS
            self._outcome = RECORDED if is_recorded else unrecorded
            STATS.add_stretch(self._outcome, now_s - self._began_s)
        self._began_s = now_s

    def add_plan(self, seconds: float) -> None:
        """Account for a plan that was built."""
        self._traced_s += seconds

    def add_flush(self, seconds: float) -> None:
        """Account for a flush of the region that has just ended."""
        self._began_s += seconds
        STATS.stretches_s[self._outcome] += seconds

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

    def _look_for_kernels(self, plan: Waiting) -> None:
        self.cold = AWAITS_OPS if plan.awaits_kernels() else 0
        if not self.cold:
            self._awaited, self.with_kernels = None, 0.0

    def rests(self, place: Any) -> bool:
        """Whether the block that begins at this `place` is let alone, as the last one there was,
        and needs no account but of its time."""
        if not self.is_asleep or self.has_wrapped or self._has_news():
            return False
        if self._awaited is not None:
            self._n_rests += 1
            outcome, rests = KERNELS, self._n_rests % RESTS > 0  # now and then: are they there?
        else:
            site = self._sites.get(place)
            if site is None or not site.is_alone:
                return False
            self._follow()
            outcome, rests = NEW if site.is_unknown else QUICKER, site.rests()
        self._began_s, self._outcome = perf_counter(), outcome
        return rests

    def end_rest(self) -> None:
        """End a block that needs no account but of its time."""
        STATS.add_stretch(self._outcome, perf_counter() - self._began_s)

    def begin_block(
        self, place: Any, *, may_choose: bool = True, must_record: bool = False
    ) -> bool:
        """Begin a block of the program, behind a break; whether its ops must be seen.

        They need not be where those at this `place` have not been known for long, or run quicker
        as in eager, or while kernels are built; `may_choose` if times may say so.
        """
        self._ends()
        self._place, self._n_reads, self._n_steps = place, 0, 0
        self.has_read = False
        if must_record:
            self._follow()
            self.try_again_at_once()
            return True
        return self._begins(place, may_choose=may_choose)

    def _follow(self) -> None:
        if self._last_site is not None:
            self._last_site.is_followed(self._traced_s)
            self._last_site = None

    def _begins(self, place: Any, *, may_choose: bool, of_reads: bool = False) -> bool:
        self._follow()
        self._n_known = self._n_new = self._n_unknown = self._n_recorded = 0
        self._traced_s = 0.0
        self._round_began_s = perf_counter()
        if self.is_paused:
            return True
        if self.cold and self._awaited is not None:
            self._let_alone()
            return False
        site = self._sites.get(place)
        if site is None:
            if len(self._sites) >= MOST_SITES:
                self._sites.clear()
            site = self._sites[place] = Site(user_line(), of_reads=of_reads)
            self._n_awaited = 1
        self._site = site
        if not site.begin(may_choose=may_choose):
            self._let_alone()
            return False
        if site.was_recorded:
            self.cold = 0
        elif self.is_asleep:
            self.cold = 1
        return True

    def _let_alone(self) -> None:
        """Run the block that begins as in eager. Ops on lazy tensors give plain ones meanwhile, so
        that no later op pays for them."""
        self._is_let_alone = True
        if not self.has_wrapped:
            self.cold = ASLEEP
        elif self._awaited is None:
            self.cold = 1

    def end_block(self) -> None:
        """End a block behind a break, whether its ops were seen or not."""
        self._ends()
        self._place, self._n_reads = OUTSIDE, 0

    def _ends(self) -> None:
        site, self._site = self._site, None
        if site is not None:
            self._last_site = site
            is_short = self.spans_ranks and self._n_recorded <= SHORT
            n_unknown = self._n_unknown if self._n_known or self._n_new else 1  # an empty block
            site.end(n_known=self._n_known, n_new=self._n_new, n_unknown=n_unknown,
                     n_reads=self._n_reads, is_short=is_short)  # fmt: skip
        self._is_let_alone = False

    def ends_round(self) -> bool:
        """Count a read; whether the next ones may be let alone, or are to be seen again."""
        self._n_reads += 1
        is_over = self._n_reads >= ROUND or (
            not self.spans_ranks and perf_counter() - self._round_began_s >= ROUND_S
        )
        if not is_over or self.is_paused or not self.may_sleep:
            return False
        return self._place is not OUTSIDE or self.has_wrapped

    def ends_step(self) -> bool:
        """Count a step of an optimizer; whether there were many since a value was read."""
        self._n_steps = 0 if self.has_read else self._n_steps + 1
        self.has_read = False
        return self._n_steps >= STEPS

    def end_round(self) -> None:
        """End so many reads of a block, behind a break, as if they were a block."""
        self._ends()
        self._n_reads = 0

    def begin_round(self, *, may_choose: bool) -> bool:
        """Begin the next ones; whether their ops must be seen."""
        place = (ROUND, self._place)
        return self._begins(place, may_choose=may_choose, of_reads=True)

    def compared(self) -> list[Site]:
        """The places whose blocks were compared, recorded and let alone."""
        return [site for site in self._sites.values() if site.compared_s is not None]

    def try_again_at_once(self) -> None:
        """Record again, whatever it costs."""
        if not self.is_paused:
            self.cold = 0
