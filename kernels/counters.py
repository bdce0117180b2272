"""Counts of builds, loads, failures and measurements of kernels.

The compile service and its fusions write them. `stats()` reads them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields


@dataclass
class Counters:
    """Totals since the process began or since `reset()`; safe under threads."""

    compiled: int = 0
    """Kernels built in this process or by its workers."""
    loaded: int = 0
    """Kernels read from `cache_dir` instead of built."""
    reused: int = 0
    """Times a segment was found in the kernel cache, with or without a kernel."""
    failed: int = 0
    """Segments whose kernel could not be built or loaded."""
    passed_on: int = 0
    """Times a backend failed at or declined a segment, and the next backend was tried."""
    adopted: int = 0
    """Times a kernel measured faster than op-by-op replay."""
    slower: int = 0
    """Times a kernel measured slower than op-by-op replay."""
    verified: int = 0
    """Kernel runs compared with op-by-op replay."""
    disagreed: int = 0
    """Kernels dropped because their results were wrong, or they raised where replay does not."""
    compile_s: float = 0.0
    """Seconds that builds took, summed over all builds, also those that ran side by side."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return {f.name: getattr(self, f.name) for f in fields(self) if f.name[0] != "_"}

    def reset(self) -> None:
        with self._lock:
            for f in fields(self):
                if f.name[0] != "_":
                    setattr(self, f.name, f.default)
