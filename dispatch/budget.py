"""What recording may cost: a program that never repeats itself must not pay for tracing.

In: the time that new states and plans took, and the time that running took. Out: whether to go on
recording. Hits need no clock.
"""

from __future__ import annotations

from array import array
from time import thread_time
from typing import Any, NamedTuple, Protocol

HIT_EARNS_S = 5e-6
SHARE_OF_WORK = 0.05
"""Recording new paths may take this share of the time that running them takes."""
UNSEEN_S, INTERPRETED_S = 1e-4, 3e-5
"""What a new state costs where no clock looks (the way into Python, a handle, collecting garbage),
and what it costs to run an op without a plan. From `benches/bench_changing.py`."""
MOST_OF_A_STATE_S = 2e-4
"""What takes longer takes so once in a process: the first call of an op, or of a function here."""
START_S, LEAST_S, MOST_S = 0.02, 0.005, 0.5
FIRST_COLD_OPS, MOST_COLD_OPS = 2000, 1 << 17
MOST_DEBT_S = 0.02
PAUSED = 1 << 60
"""Ops to run unrecorded while recording is paused: more than there will be."""
N_RECENT, PAID_BACK = 8, 4
"""A path that is taken again within so many flushes pays its growth back so many times."""
KEPT_OF_KERNELS = 0.9
"""What counts of earlier runs at each run of a plan: a loop with its kernels goes on when something
else begins that has none."""
LEAST_LOOKS, LEAST_HOPE = 2, 1 / 16
"""Each time that it isn't, half as many flushes are waited for and half as much may be spent: down
to so many, and to this part of `SHARE_OF_WORK`."""


class Place(Protocol):
    """A state of the trie."""

    n_ops: int

    @property
    def parent(self) -> Place | None: ...


class Waiting(Protocol):
    """What runs op by op while its kernels are built: a plan."""

    n_there: int
    n_under_way: int

    def awaits_kernels(self) -> bool: ...


class Recent(NamedTuple):
    """A path that was new, what was paid for it, and the age up to which that may come back."""

    place: Place
    paid_s: float
    until: int


class Budget:
    """The seconds left for growth, and the state of a trace that has spent them.

    A trace without a budget goes *cold*: ops run at once, unrecorded. `cold` counts them down to 1,
    where it waits for an op that needs a value, so that recording starts again where a step of the
    program does. It stays cold twice as long each time in a row that recording does not pay. After
    new states were made it looks, for nothing, whether the program soon comes there again, and
    spends less each time that it does not. It is cold, too, while kernels are built.

    The count lies at `address`, where `native` counts without Python.
    """

    __slots__ = ("_awaited", "_before_pause", "_block", "_cold", "_cold_block", "address", "age",
                 "cold_since_s", "grew", "grown_s", "hope", "left_s", "looks", "n_misses",
                 "next_cold", "paid_s", "recent", "with_kernels")  # fmt: skip

    def __init__(self) -> None:
        self._cold = array("q", [0])
        self._before_pause: int | None = None
        self.address = self._cold.buffer_info()[0]
        self.reset()

    def reset(self) -> None:
        self.left_s = START_S
        self.cold = 0
        self.next_cold = FIRST_COLD_OPS
        self.n_misses = 0
        self.grown_s = self.paid_s = 0.0  # since the last flush
        self.grew = False  # since it was cold
        self.looks = 0
        self.hope = 1.0  # that the program repeats itself
        self.cold_since_s = 0.0
        self._awaited: Waiting | None = None
        self.with_kernels = 0.0  # ops in kernels that are there less those in others, lately
        self.age = 0  # in flushes, and in times that it was cold where a step may begin
        self.recent: list[Recent] = []
        self._block: tuple[Any, int] | None = None  # where it is, and `cold` when it began
        self._cold_block: tuple[Any, int] | None = None  # the last, if cold, and its number of ops

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

    @property
    def is_spent(self) -> bool:
        return self.left_s < 0

    def pay(self, seconds: float) -> None:
        """Account for a state made in this time."""
        paid_s = min(seconds, MOST_OF_A_STATE_S) + UNSEEN_S
        self.left_s -= paid_s
        self.paid_s += paid_s
        self.grown_s += seconds
        self.n_misses += 1
        self.grew = True

    def pay_plan(self, seconds: float, n_interpreted: int) -> None:
        """Account for a plan made in this time, or for what ran without one."""
        seconds += n_interpreted * INTERPRETED_S
        self.left_s = max(self.left_s - seconds, min(self.left_s, -MOST_DEBT_S))

    def earn(self, place: Place, seconds: float) -> None:
        """Account for a flush at `place` that took `seconds` to run."""
        hits = max(place.n_ops - self.n_misses, 0)
        self._add(hits * HIT_EARNS_S + SHARE_OF_WORK * self.hope * seconds)
        self.earn_back(place)
        self.age += 1
        if self.n_misses:
            self.recent.append(Recent(place, self.paid_s, self.age + N_RECENT))
        self.n_misses = 0
        self.grown_s = self.paid_s = 0.0
        if hits > place.n_ops // 2:
            self.next_cold = FIRST_COLD_OPS
            self.hope = 1.0

    def earn_back(self, place: Place) -> None:
        """Get back what was paid lately for the path to `place`: the program repeats itself."""
        n_before = len(self.recent)
        self.recent = [recent for recent in self.recent if recent.until > self.age]
        if len(self.recent) < n_before:  # it does not
            self.hope = max(self.hope / 2, LEAST_HOPE)
        if not self.recent:
            return
        passed: Place | None = place
        passes: set[int] = set()
        while passed is not None:
            passes.add(id(passed))
            passed = passed.parent
        for recent in self.recent:
            if id(recent.place) in passes:
                self._add(PAID_BACK * recent.paid_s)
                self.hope = 1.0
        self.recent = [recent for recent in self.recent if id(recent.place) not in passes]

    def _add(self, seconds: float) -> None:
        self.left_s = max(self.left_s, min(self.left_s + seconds, MOST_S))

    def go_cold(self, n_known: int = 0) -> None:
        """Stop recording. `n_known` ops had been recorded, by states known before unless some were
        new: then this is where to look whether the program comes again."""
        if self.grew:
            self.looks = max(int(self.hope * N_RECENT), LEAST_LOOKS)
        elif n_known:
            self.looks = 0  # it went another way
        self.grew = False
        self.cold_since_s = thread_time()
        self.cold = 1
        if not self.looks:
            self.cold = self.next_cold
            self.next_cold = min(self.next_cold * 2, MOST_COLD_OPS)

    def note_kernels(self, plan: Waiting) -> None:
        """Account for a run of `plan`: as long as more ops are in kernels that are being built than
        in those there are, ops run unrecorded, as fast as in eager, where a plan that runs op by op
        costs the recording besides."""
        gained = plan.n_there - plan.n_under_way
        self.with_kernels = KEPT_OF_KERNELS * self.with_kernels + gained
        if plan.n_under_way and self.with_kernels < 0:
            self._awaited = plan
            self.cold_since_s = thread_time()
            self.cold = MOST_COLD_OPS

    def begin_block(self, site: Any) -> bool:
        """Begin a block of the program; whether its ops must be seen.

        They need not be if none would be recorded, going by the last block, which was at the same
        `site`: to see an op and let it pass costs a fifth of a small one.
        """
        if self.cold:
            self._look_again()
            self.cold_since_s = thread_time()  # what ran outside earns nothing
        if self._cold_block is not None:
            last, n_ops = self._cold_block
            if last == site and self.cold > n_ops:
                return False
        self._block, self._cold_block = (site, self.cold), None
        return True

    def end_block(self) -> None:
        """End a block, whether its ops were seen or not."""
        if self.cold:
            self._earn_cold()
        if self._block is not None and self.cold > 1:
            site, before = self._block
            if before > self.cold:
                self._cold_block = (site, before - self.cold)
        self._block = None

    def try_again_at_once(self) -> None:
        """Record again, whatever it cost so far."""
        if not self.is_paused:
            self.cold = 0

    def try_again(self) -> None:
        """Record what is known, and a little more if the work since has earned that."""
        if self.cold:
            self._earn_cold()
            self._look_again()

    def _look_again(self) -> None:
        if self._awaited is not None:
            if self._awaited.awaits_kernels():
                self.cold = MOST_COLD_OPS
                return
            self._awaited, self.with_kernels, self.looks = None, 0.0, 1
        self.age += 1
        if self.looks or self.left_s >= LEAST_S:
            self.looks = max(self.looks - 1, 0)
            self.cold = 0
        else:
            self.cold = FIRST_COLD_OPS

    def _earn_cold(self) -> None:
        """Account for what ran unrecorded since the last time."""
        now_s = thread_time()
        self._add(SHARE_OF_WORK * self.hope * (now_s - self.cold_since_s))
        self.cold_since_s = now_s
