"""Counters and the flush log: what `stats()` and `explain()` show.

In: one call a flush, a compile, a miss. Out: a dict and a list of `FlushRecord`. Hits count nothing
here; the ops of a trace are added up when it is flushed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FlushRecord:
    """One flush: `cause` (an aten op, "exit", "flush()", ...), the user's `where`, what ran.

    `raised` names the type of the error that ended it, if one did. The rest is of its plan, a trace
    that had none ran op by op: `peak_bytes`, foretold, of what the plan makes (inside kernels and
    before it left out), and for each segment its `sizes`, in ops, what ran it, why.
    """

    cause: str
    where: str
    n_ops: int
    seconds: float
    raised: str = ""
    n_steps: int = 0
    peak_bytes: int = 0
    sizes: tuple[int, ...] = ()
    statuses: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(slots=True)
class Stats:
    """All counters of the process, in one place. Kernel counters live in `kernels.compile`."""

    counts: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[tuple[object, str]] = field(default_factory=Counter)
    sharding_misses: Counter[object] = field(default_factory=Counter)
    redistributions: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # bytes
    flush_s: float = 0.0
    all_flushes_s: float = 0.0  # since the process began
    log: deque[FlushRecord] = field(default_factory=lambda: deque(maxlen=32))

    def reset(self) -> None:
        for counter in (
            self.counts, self.causes, self.fallbacks, self.sharding_misses, self.redistributions
        ):  # fmt: skip
            counter.clear()
        self.flush_s = 0.0
        self.log.clear()


STATS = Stats()
