"""When to record: what has been seen before, and at first a little.

In: calls that are not hits, breaks, blocks. Out: whether the trie may grow, and whether calls are
recorded at all. Hits need no policy.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from lazy_tensor.dispatch.past import Past
from lazy_tensor.dispatch.pays import EMPTY, Pays
from lazy_tensor.dispatch.sites import ROUND, RUNS_OF_A_ROUND, Site
from lazy_tensor.dispatch.stats import KERNELS, NEW, QUICKER, RECORDED, STATS
from lazy_tensor.kernels.fusion import Fusion

FIRST_CALLS = 256
"""Calls that a thread records before any has come twice, so that a first try in a shell is lazy."""
AWAITS_OPS = 1 << 12
"""Ops that run unrecorded before it is looked again whether kernels are there."""
OUTSIDE = "no block"
"""The place of what runs in no block, of wrapped tensors."""
PAUSED = 1 << 60
"""Ops to run unrecorded while recording is paused: more than there will be."""
CHOSEN = frozenset({RECORDED, QUICKER})
"""What becomes of stretches when there is a choice."""
KEPT_OF_KERNELS = 0.9
"""What counts of earlier runs at each run of a plan: a loop with its kernels goes on when something
else begins that has none."""
MOST_SITES = 64
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
    is known, it records again. It is cold, too, while kernels are built, and where recording was
    measured not to pay.

    `cold` counts down the ops to run before it is looked again, to 1, where breaks are looked at.
    It lies at `address`, where `native` counts without Python. While it is `ASLEEP` ops don't come
    at all, from the first on that `native` sees: it takes the mode off torch's stack. Those on
    wrapped tensors come, but what they give is plain then.
    """

    __slots__ = ("_awaited", "_before_pause", "_cold", "_has_worked", "_is_chosen",
                 "_is_let_alone", "_is_loop", "_last_site", "_n_adopted", "_n_known", "_n_new",
                 "_n_reads", "_n_unknown", "_place", "_site", "_sites", "_stretch", "address",
                 "calls_left", "grown_s", "past", "pays", "spans_ranks",
                 "with_kernels")  # fmt: skip

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
        self._stretch: int | None = EMPTY  # that ended last
        self._is_loop = False  # it came twice in a row
        self.past.clear()
        self.pays = Pays()
        # All ranks must record the same ops. Calls are the same on all ranks, times are not: so
        # only calls decide.
        self.spans_ranks = False
        self._awaited: Waiting | None = None
        self.with_kernels = 0.0  # ops in kernels that are there less those in others, lately
        self._is_let_alone = False  # the block that runs: of its calls only some come here
        self._is_chosen = False  # eager, for what comes: it is quicker, or to be compared to
        self._place: Any = OUTSIDE  # of the block that runs
        self._n_reads = 0  # in it, since the last round
        self._sites: dict[Any, Site] = {}
        self._site: Site | None = None  # of the block that runs
        self._last_site: Site | None = None
        # stretches of this block: that were known, that ran as in eager as they had to, and that
        # were unknown, since one that was known
        self._n_known = self._n_new = self._n_unknown = 0
        self._has_worked, self._n_adopted = False, 0

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

    def may_grow(self) -> bool:
        """Whether the call under way may become a new state: not behind one that is new. One that
        doesn't count, such as `detach`, may come before all that do."""
        return self.calls_left > 0 or self.past.is_known() or not self.past.has_begun()

    def may_plan(self, ends_stretch: bool) -> bool:
        """Whether a plan may be built at the first flush of what was recorded, which the last break
        ends or not: of a loop, not of each of the lengths of a data set."""
        return self._is_loop and (ends_stretch or self.past.is_known())

    def note_kernels(self, plan: Waiting) -> None:
        """Account for a run of `plan`: as long as more ops are in kernels that are being built than
        in those there are, ops run unrecorded, as fast as in eager, where a plan that runs op by op
        costs the recording besides. Not of a program on several ranks, each of which has its
        kernels at a time of its own."""
        self.spans_ranks |= plan.communicates
        gained = plan.n_there - plan.n_under_way
        self.with_kernels = KEPT_OF_KERNELS * self.with_kernels + gained
        if plan.n_under_way and self.with_kernels < 0 and not self.spans_ranks:
            self._awaited = plan
            self.cold = AWAITS_OPS

    def at_break(
        self,
        stretch: int | None = EMPTY,
        *,
        is_recorded: bool = False,
        may_choose: bool = True,
        must_record: bool = False,
    ) -> None:
        """Go on behind a break, recording if all before it is known, and it pays.

        `stretch` stands for what ends here, as the past has it, if that is known; `is_recorded`
        if it was, from its begin; `may_choose` if recording has to pay, `must_record` if all is
        recorded, new or not.
        """
        is_empty = not self.past.has_begun()
        known = self.past.at_sync_point()
        if stretch != EMPTY:
            self._is_loop = stretch is not None and stretch == self._stretch
            self._stretch = stretch
        if self._is_let_alone:
            self.pays.pass_over(self._outcome())
            return
        if self._has_news():
            self._look_for_news()
        if not is_empty:
            self._n_unknown = 0 if known else self._n_unknown + 1
        is_all_recorded = is_recorded or stretch is None or (must_record and not self.cold)
        outcome = RECORDED if is_all_recorded else self._outcome()
        if is_recorded or not is_empty:
            self._n_known += outcome in CHOSEN
            self._n_new += outcome not in CHOSEN
        coming = self.pays.goes_on(stretch, outcome, is_recorded=is_recorded)
        is_left = coming is not None and not coming.pays and may_choose
        self._is_chosen = is_left
        if self.is_paused:
            return
        if self.cold and self._awaited is not None:
            self._look_for_kernels(self._awaited)
        elif is_left:
            self.cold = 1
        elif self.cold and (known or self.calls_left > 0):
            self.cold = 0

    def _outcome(self) -> str:
        """What becomes of a stretch that isn't recorded."""
        return KERNELS if self._awaited is not None else QUICKER if self._is_chosen else NEW

    def _has_news(self) -> bool:
        """Whether kernels are asked for, or have come, that weren't."""
        return (
            self._n_adopted != Fusion.n_adopted or self._has_worked is not STATS.has_worked_long()
        )

    def _look_for_news(self) -> None:
        """Try again what was left to eager."""
        self._has_worked, self._n_adopted = STATS.has_worked_long(), Fusion.n_adopted
        self.pays.try_again()
        for site in self._sites.values():
            site.times.try_again()

    def _look_for_kernels(self, plan: Waiting) -> None:
        self.cold = AWAITS_OPS if plan.awaits_kernels() else 0
        if not self.cold:
            self._awaited, self.with_kernels = None, 0.0

    def rests(self, place: Any) -> bool:
        """Whether the block that begins at this `place` is let alone, as the last one there was,
        and needs no account of it."""
        if self._cold[0] != 1 or self.has_wrapped or self._has_news():
            return False
        site = self._sites.get(place)
        if site is None or not site.rests():
            return False
        STATS.add_stretch(QUICKER, site.times.cold_s)  # about as long as it took before
        if self._last_site is not None:
            self._last_site.is_followed()
        return True

    def begin_block(self, place: Any, *, may_choose: bool = True) -> bool:
        """Begin a block of the program, behind a break; whether its ops must be seen.

        They need not be where those at this `place` have not been known for long, or run quicker
        as in eager, or while kernels are built; `may_choose` if recording has to pay.
        """
        self._ends()
        self._place, self._n_reads = place, 0
        return self._begins(place, 1, may_choose=may_choose)

    def _begins(self, place: Any, n_runs: int, *, may_choose: bool) -> bool:
        if self._last_site is not None:
            self._last_site.is_followed()
        site = self._sites.get(place)
        if site is None:
            if len(self._sites) >= MOST_SITES:
                self._sites.clear()
            site = self._sites[place] = Site(n_runs)
        self._site = site
        self._n_known = self._n_new = self._n_unknown = 0
        site.begin()
        is_awaited = self._awaited is not None
        self._is_let_alone = bool(self.cold) and (is_awaited or site.has_long_been_unknown())
        site.is_quicker_alone = (
            not self._is_let_alone and may_choose and not (site.times.pays or self.is_paused)
        )
        if site.is_quicker_alone:
            self._is_let_alone = self._is_chosen = True
            self.cold = 1
        return not self._is_let_alone

    def end_block(self) -> None:
        """End a block behind a break, whether its ops were seen or not."""
        self._ends()
        self._place, self._n_reads = OUTSIDE, 0

    def _ends(self) -> None:
        site, self._site = self._site, None
        if site is not None:
            self._last_site = site
            if self._is_let_alone:
                site.end(was_listened_to=False)
            elif self._n_known or self._n_new:
                site.end(was_listened_to=None if self._n_new else True, n_unknown=self._n_unknown)
        self._is_let_alone = False

    def ends_round(self) -> bool:
        """Count a read; whether the next ones may be let alone, or are to be seen again."""
        self._n_reads += 1
        if self._n_reads < ROUND or self.is_paused or not self.may_sleep:
            return False
        return self._place is not OUTSIDE or self.has_wrapped

    def end_round(self) -> None:
        """End so many reads of a block, behind a break, as if they were a block."""
        self._ends()
        self._n_reads = 0

    def begin_round(self, *, may_choose: bool) -> bool:
        """Begin the next ones; whether their ops must be seen."""
        place = (ROUND, self._place)
        return self._begins(place, RUNS_OF_A_ROUND, may_choose=may_choose)

    def try_again_at_once(self) -> None:
        """Record again, whatever it costs."""
        if not self.is_paused:
            self.cold = 0
