"""Counters and the flush log: what `stats()` and `explain()` show.

In: one call a flush, a compile, a miss. Out: a dict and a list of `FlushRecord`. Hits count nothing
here; the ops of a trace are added up when it is flushed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lazy_tensor.dispatch.plan.plan import Step
    from lazy_tensor.dispatch.trie.trace import State


@dataclass(slots=True)  # to be frozen would cost 1 us a flush
class FlushRecord:
    """One flush, or a replayed call: `cause` (an aten op, "exit", "flush()", "replay(f)", ...), the
    user's `where`, what ran.

    `began_s` is by `time.perf_counter`; `gap_s` before it the program and its recording ran, since
    the sync point before (0: a replayed call); `seconds` is all that it took, `plan_s` of these to
    find or build its plan, waiting for kernels included if it waits for them. `grown_s` went into
    making states of the trie before it, `first_new` the first of them. `state` is where the trace
    ended, `steps` what its plan ran (None: op by op), with each fusion's status and reason as they
    were then, and each step's seconds if somebody wanted them. `tier` says whether the plan was
    compiled whole. `raised` names the type of the error that ended it, if one did.
    """

    thread: str
    cause: str
    where: str
    n_ops: int
    began_s: float
    seconds: float
    gap_s: float = 0.0
    plan_s: float = 0.0
    grown_s: float = 0.0
    raised: str = ""
    state: State | None = None
    first_new: State | None = None
    steps: list[Step] | None = None
    peak_bytes: int = 0
    was_built: bool = False
    tier: str = ""
    statuses: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    steps_s: tuple[float, ...] = ()


COMPILES_AFTER_S = 1.0
"""Seconds of work after which kernels are built in the background: a program that ends before would
only be slowed down."""

MAY_USE_GPU = bool(torch.version.cuda or torch.version.hip)
MOST_BETWEEN_S = 0.1
"""Most seconds between two flushes for which a GPU is taken to be at work."""


RECORDED, KERNELS, QUICKER, NEW = "recorded", "kernels", "quicker", "new"
"""What became of a region of the program: recorded, or run as in eager while its kernels were
built, as recording it took longer, or as nothing repeated itself."""
OUTCOMES = (RECORDED, KERNELS, QUICKER, NEW)
SAYS_SO_AFTER_S = 10.0
"""Seconds without a repetition after which the program is told so."""


COUNTED = (
    "ops", "flushes", "segments", "plans_built", "plans_reused", "plans_failed", "schema_misses",
    "replayed", "unrecorded_blocks", "went_cold",
)  # fmt: skip
"""The names in `Stats.counts`: `stats()` has them all from the start."""


@dataclass(slots=True)
class Stats:
    """All counters of the process, in one place. Kernel counters live in `kernels.counters`."""

    counts: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[tuple[object, str]] = field(default_factory=Counter)
    sharding_misses: Counter[object] = field(default_factory=Counter)
    redistributions: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # bytes
    ran_at_once_s: dict[str, float] = field(default_factory=dict)  # by call, line and reason
    since_s: float = field(default_factory=perf_counter)  # by the same clock as a flush's beginning
    period: int = 0  # how often the counters were reset
    flush_s: float = 0.0
    worked_s: float = 0.0  # that flushes took, and what might have been recorded, in this process
    ran_until_s: float = 0.0  # the last flush, by `perf_counter`
    regions: Counter[str] = field(default_factory=Counter)
    regions_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0.0))
    log: deque[FlushRecord] = field(default_factory=lambda: deque(maxlen=32))

    def has_worked_long(self) -> bool:
        """Whether the program runs so long that compiling may pay."""
        return self.worked_s >= COMPILES_AFTER_S

    def add_work(self, began_s: float, seconds: float) -> None:
        """Account for a flush, or a replayed call. A GPU works between them, too, while the host
        does something else or waits for it."""
        if MAY_USE_GPU and torch.cuda.is_initialized():
            self.worked_s += min(max(0.0, began_s - self.ran_until_s), MOST_BETWEEN_S)
        self.worked_s += seconds
        self.ran_until_s = began_s + seconds

    def add_region(self, outcome: str, seconds: float, n: int = 1) -> None:
        """Account for a region of the program, from one sync point to the next, or for `n`."""
        self.regions[outcome] += n
        self.regions_s[outcome] += seconds
        if outcome != RECORDED:
            self.worked_s += seconds

    def repeats_little(self) -> bool:
        """Whether most of a long run did not repeat itself."""
        new_s = self.regions_s[NEW]
        return new_s >= SAYS_SO_AFTER_S and new_s > sum(self.regions_s.values()) / 2

    def reset(self) -> None:
        for counter in (
            self.counts, self.causes, self.fallbacks, self.sharding_misses, self.redistributions,
            self.regions,
        ):  # fmt: skip
            counter.clear()
        self.regions_s = dict.fromkeys(OUTCOMES, 0.0)
        self.ran_at_once_s.clear()
        self.since_s = perf_counter()
        self.period += 1
        self.flush_s = 0.0
        self.log.clear()

    @contextmanager
    def log_apart(self) -> Iterator[list[FlushRecord]]:
        """Every flush inside, however many; they are in the log as well, afterwards."""
        before, self.log = self.log, deque()
        found: list[FlushRecord] = []
        try:
            yield found
        finally:
            found += self.log
            before.extend(found)
            self.log = before


STATS = Stats()
