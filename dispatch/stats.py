"""Counters and the flush log, which `stats()` and `explain()` show.

In: flushes, replayed calls, misses of caches, regions of the program. Out: `STATS`, the one `Stats`
of the process. A hit counts nothing here: the ops of a trace are added up when it is flushed. Times
of work and regions also decide, in `tiering` and in the compile service.
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
    """One flush, or one replayed call.

    Why and where: `cause` is an aten op, "exit", "flush()", "replay(f)" and the like, `where` the
    user's line. `raised` names the type of the error that ended it, if one did.

    Times: `began_s` is by `time.perf_counter`. `seconds` is all that it took. `plan_s` of these
    went into finding or building its plan, and into waiting for kernels if it waits. `gap_s` is the
    time before it, from the last flush or the last sync point on, in which the program ran and was
    recorded; 0 for a replayed call. `grown_s` is the time before it that went into new states of
    the trie, of which `first_new` is the first.

    What ran: `state` is where the trace ended. `steps` are those of its plan, None if it ran op by
    op, with each fusion's status and reason as they were then. `steps_s` has each step's seconds if
    somebody wanted them. `tier` says whether the plan was compiled whole.
    """

    thread: str
    cause: str
    where: str
    n_ops: int = 0
    began_s: float = 0.0
    seconds: float = 0.0
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
"""Seconds of work after which kernels are built in the background. They would only slow down a
program that ends earlier."""

MAY_USE_GPU = bool(torch.version.cuda or torch.version.hip)
MOST_BETWEEN_S = 0.1
"""Of the seconds between two flushes, a GPU is taken to be at work for so many at most."""


RECORDED, KERNELS, QUICKER, NEW = "recorded", "kernels", "quicker", "new"
"""What became of a region of the program. It was recorded, or it ran as in eager: while its kernels
were built, because eager is quicker, or because nothing repeated itself."""
OUTCOMES = (RECORDED, KERNELS, QUICKER, NEW)
SAYS_SO_AFTER_S = 10.0
"""Seconds in which nothing repeated itself after which a warning says so."""


COUNTED = (
    "ops", "flushes", "segments", "plans_built", "plans_reused", "plans_failed", "schema_misses",
    "replayed", "unrecorded_blocks", "went_cold",
)  # fmt: skip
"""The names in `Stats.counts`. `stats()` shows all of them from the start."""


@dataclass(slots=True)
class Stats:
    """All counters of the process, in one place. Kernel counters live in `kernels.counters`."""

    counts: Counter[str] = field(default_factory=Counter)  # by the names in COUNTED
    causes: Counter[str] = field(default_factory=Counter)  # flushes by cause
    # Calls that ran at once, by op and reason.
    fallbacks: Counter[tuple[object, str]] = field(default_factory=Counter)
    # Calls, by op, for which torch's sharding rules were asked.
    sharding_misses: Counter[object] = field(default_factory=Counter)
    # Bytes that were moved, by op, placements before, placements after and the user's line.
    redistributions: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    ran_at_once_s: dict[str, float] = field(default_factory=dict)  # by call, line and reason
    since_s: float = field(default_factory=perf_counter)  # the last reset, by `perf_counter`
    # How often the counters were reset. A site, or a replayed function, notes it when it runs: so
    # reports leave out those that didn't run since.
    period: int = 0
    flush_s: float = 0.0  # seconds that flushes took
    # Seconds that flushes, replayed calls and regions in eager took, since the process began: a
    # reset leaves it as it is. Kernels are built from COMPILES_AFTER_S on.
    worked_s: float = 0.0
    ran_until_s: float = 0.0  # when the last flush ended, by `perf_counter`
    # Regions of the program, and their seconds, by outcome.
    regions: Counter[str] = field(default_factory=Counter)
    regions_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0.0))
    log: deque[FlushRecord] = field(default_factory=lambda: deque(maxlen=32))  # the last flushes

    def has_worked_long(self) -> bool:
        """Whether the program has worked for so long that to compile kernels may pay."""
        return self.worked_s >= COMPILES_AFTER_S

    def add_work(self, began_s: float, seconds: float) -> None:
        """Account for the work of a flush, or of a replayed call."""
        # A GPU works between them too, while the host does something else or waits for it.
        if MAY_USE_GPU and torch.cuda.is_initialized():
            self.worked_s += min(max(0.0, began_s - self.ran_until_s), MOST_BETWEEN_S)
        self.worked_s += seconds
        self.ran_until_s = began_s + seconds

    def add_region(self, outcome: str, seconds: float, n: int = 1) -> None:
        """Account for `n` regions of the program, each from one sync point to the next."""
        self.regions[outcome] += n
        self.regions_s[outcome] += seconds
        if outcome != RECORDED:  # the work of a recorded one is in its flushes
            self.worked_s += seconds

    def repeats_little(self) -> bool:
        """Whether most of the time so far, and at least `SAYS_SO_AFTER_S`, went into regions that
        did not repeat themselves."""
        new_s = self.regions_s[NEW]
        return new_s >= SAYS_SO_AFTER_S and new_s > sum(self.regions_s.values()) / 2

    def reset(self) -> None:
        """Begin to count anew; `worked_s` goes on."""
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
        """Context manager: a list that gets all flushes inside, at the end. The log gets as many of
        them as it holds."""
        before, self.log = self.log, deque()
        found: list[FlushRecord] = []
        try:
            yield found
        finally:
            found += self.log
            before.extend(found)
            self.log = before


STATS = Stats()
