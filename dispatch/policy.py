"""When to record: what has been seen before, and at first a little.

In: calls that are not hits, breaks, blocks. Out: whether the trie may grow, and whether calls are
recorded at all. Hits need no policy.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from lazy_tensor.dispatch.past import Past
from lazy_tensor.dispatch.pays import EMPTY, Pays
from lazy_tensor.dispatch.stats import KERNELS, NEW, QUICKER, RECORDED, STATS
from lazy_tensor.kernels.fusion import Fusion

START_S = 0.02
"""What a process may spend on recording before anything has been seen twice."""
MOST_OF_A_STATE_S = 2e-4
"""What takes longer takes so once in a process: the first call of an op, or of a function here."""
AWAITS_OPS = 1 << 12
"""Ops that run unrecorded before it is looked again whether kernels are there."""
PAUSED = 1 << 60
"""Ops to run unrecorded while recording is paused: more than there will be."""
KEPT_OF_KERNELS = 0.9
"""What counts of earlier runs at each run of a plan: a loop with its kernels goes on when something
else begins that has none."""
LISTENS, LETS_ALONE, MOST_SITES = 64, 960, 64
"""Stretches in a row that are listened to, all of them unknown, before as many blocks are let
alone, then twice as many, up to so many: to see an op and let it pass costs a quarter of a small
one."""


class Waiting(Protocol):
    """What runs op by op while its kernels are built: a plan."""

    communicates: bool
    n_there: int
    n_under_way: int

    def awaits_kernels(self) -> bool: ...


class Unknown:
    """Blocks at one place of the program in which nothing was known, or worth recording."""

    def __init__(self) -> None:
        self.n_stretches = 0  # in a row
        self.n_to_let_alone, self.n_next = 0, LISTENS  # blocks
        self.is_left = False  # to eager, which is quicker

    def add(self, n_stretches: int, is_left: bool) -> None:
        self.n_stretches += n_stretches
        self.is_left = is_left
        if self.n_stretches >= LISTENS:
            self.n_to_let_alone, self.n_stretches = self.n_next, 0
            self.n_next = min(2 * self.n_next, LETS_ALONE)


class Policy:
    """Whether a trace records.

    It goes *cold* at a call that it has not seen before: calls then run at once, unrecorded, and
    are noted as `past`. Where a value is read, or a block begins, and all since the last such break
    is known, it records again. It is cold, too, while kernels are built, and where recording was
    measured not to pay.

    `cold` counts down the ops to run before it is looked again, to 1, where breaks are looked at.
    It lies at `address`, where `native` counts without Python.
    """

    __slots__ = ("_awaited", "_before_pause", "_cold", "_is_chosen", "_is_left", "_is_let_alone",
                 "_n_unknown", "_news", "_site", "_unknown", "address", "grown_s", "left_s", "past",
                 "pays", "with_kernels")  # fmt: skip

    make_past: type[Past] = Past

    def __init__(self) -> None:
        self._cold = array("q", [0])
        self._before_pause: int | None = None
        self.address = self._cold.buffer_info()[0]
        self.past: Past = self.make_past()
        self.reset()

    def reset(self) -> None:
        self.left_s = START_S
        self.cold = 0
        self.grown_s = 0.0  # since the last flush
        self.past.clear()
        self.pays = Pays()
        self._awaited: Waiting | None = None
        self.with_kernels = 0.0  # ops in kernels that are there less those in others, lately
        self._site: Any = None
        self._is_let_alone = False  # the block that runs: of its calls only some come here
        self._is_chosen = False  # eager, for what comes: it is quicker, or to be compared to
        self._is_left = False  # what comes to eager, which is quicker
        self._n_unknown = 0  # stretches of this block, since one that was known
        self._unknown: dict[Any, Unknown] = {}  # by site
        self._news = (False, 0)

    @property
    def cold(self) -> int:
        """How many ops to run unrecorded, and 1; 0 while the trace records."""
        return self._cold[0]

    @cold.setter
    def cold(self, count: int) -> None:
        self._cold[0] = count

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

    def pay(self, seconds: float) -> None:
        """Account for states made in this time."""
        self.left_s -= min(seconds, MOST_OF_A_STATE_S)
        self.grown_s += seconds

    def may_grow(self) -> bool:
        """Whether the call under way may become a new state."""
        return self.left_s >= 0 or self.past.is_known()

    def note_kernels(self, plan: Waiting) -> None:
        """Account for a run of `plan`: as long as more ops are in kernels that are being built than
        in those there are, ops run unrecorded, as fast as in eager, where a plan that runs op by op
        costs the recording besides. A plan that communicates does so while it computes, which ops
        that run at once don't."""
        gained = plan.n_there - plan.n_under_way
        self.with_kernels = KEPT_OF_KERNELS * self.with_kernels + gained
        if plan.n_under_way and self.with_kernels < 0 and not plan.communicates:
            self._awaited = plan
            self.cold = AWAITS_OPS

    def at_break(
        self, stretch: int | None = EMPTY, *, is_recorded: bool = False, may_choose: bool = True
    ) -> None:
        """Go on behind a break, recording if all before it is known, and it pays.

        `stretch` stands for what ends here, as the past has it, if that is known; `is_recorded`
        if it was, from its begin; `may_choose` if recording has to pay.
        """
        is_empty = not self.past.has_begun()
        known = self.past.at_break()
        if self._is_let_alone:
            self.pays.pass_over(self._outcome())
            return
        self._look_for_news()
        if not is_empty:
            self._n_unknown = 0 if known else self._n_unknown + 1
        outcome = RECORDED if is_recorded or stretch is None else self._outcome()
        coming = self.pays.goes_on(stretch, outcome, is_recorded=is_recorded)
        is_left = coming is not None and not coming.pays and may_choose
        self._is_chosen = is_left
        self._is_left = is_left and coming is not None and coming.is_compared
        if self.is_paused:
            return
        if self.cold and self._awaited is not None:
            self._look_for_kernels(self._awaited)
        elif is_left:
            self.cold = 1
        elif self.cold and (known or self.left_s >= 0):
            self.cold = 0

    def _outcome(self) -> str:
        """What becomes of a stretch that isn't recorded."""
        return KERNELS if self._awaited is not None else QUICKER if self._is_chosen else NEW

    def _look_for_news(self) -> None:
        """Try again what was left to eager once kernels are asked for, and as they come."""
        news = (STATS.has_worked_long(), Fusion.n_adopted)
        if news != self._news:
            self._news = news
            self.pays.try_again()
            self._unknown = {k: it for k, it in self._unknown.items() if not it.is_left}

    def _look_for_kernels(self, plan: Waiting) -> None:
        self.cold = AWAITS_OPS if plan.awaits_kernels() else 0
        if not self.cold:
            self._awaited, self.with_kernels = None, 0.0

    def begin_block(self, site: Any) -> bool:
        """Begin a block of the program, behind a break; whether its ops must be seen.

        They need not be where those of this `site` have not been known for long, or run quicker as
        in eager, or while kernels are built.
        """
        self._site = None
        self._is_let_alone = bool(self.cold) and self._lets_alone(site)
        if not self._is_let_alone:
            self._site, self._n_unknown = site, 0
        return not self._is_let_alone

    def _lets_alone(self, site: Any) -> bool:
        if self._awaited is not None:
            return True
        unknown = self._unknown.get(site)
        if unknown is None or not unknown.n_to_let_alone:
            return False
        unknown.n_to_let_alone -= 1
        self._is_chosen = unknown.is_left
        return True

    def end_block(self) -> None:
        """End a block behind a break, whether its ops were seen or not."""
        site, self._is_let_alone = self._site, False
        is_left = bool(self.cold) and self._is_left
        n_in_vain = LISTENS if is_left else self._n_unknown
        if n_in_vain == 0:
            self._unknown.pop(site, None)
        elif site is not None:
            if len(self._unknown) >= MOST_SITES:
                self._unknown.clear()
            self._unknown.setdefault(site, Unknown()).add(n_in_vain, is_left)

    def try_again_at_once(self) -> None:
        """Record again, whatever it costs."""
        if not self.is_paused:
            self.cold = 0
