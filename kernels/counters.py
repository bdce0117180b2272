"""Counts of what happened to kernels. Written by the compile service, read by `stats()`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields


@dataclass
class Counters:
    """Totals since the start or `reset()`; safe under threads."""

    compiled: int = 0
    """Kernels built in this process or by its workers."""
    loaded: int = 0
    """Kernels read from `cache_dir` instead of built."""
    reused: int = 0
    """Times a segment was found in the kernel cache, whatever its state."""
    failed: int = 0
    """Segments whose kernel could not be built or loaded."""
    passed_on: int = 0
    """Times a backend had no kernel for a segment and the next one was asked."""
    adopted: int = 0
    """Times a kernel was measured and found faster than op-by-op replay."""
    slower: int = 0
    """Times it was found slower."""
    verified: int = 0
    """Kernel runs compared with op-by-op replay."""
    disagreed: int = 0
    """Kernels dropped because they computed something else, or raised where replay does not."""
    compile_s: float = 0.0
    """Seconds that building took, all workers together."""
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
