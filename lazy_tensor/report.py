"""`stats`, `cache_info`, `explain`: what happened, as numbers and as text."""

from __future__ import annotations

from functools import _CacheInfo as CacheInfo
from typing import Any

from lazy_tensor.dispatch import flush, settings
from lazy_tensor.dispatch.stats import STATS, FlushRecord
from lazy_tensor.dispatch.trace import all_traces, local, restart_empty_traces
from lazy_tensor.kernels import cache
from lazy_tensor.kernels.pool import POOL
from lazy_tensor.replay import REPLAYS


def configure(**options: Any) -> None:
    """Change process-wide settings: see the README's table. Runs what is pending first.

    TypeError for an unknown name, naming the nearest; ValueError for a value out of its range.
    """
    new = settings.updated(settings.current(), options, "configure()")
    flush.flush(local.trace, "configure()", quiet=True)
    settings.put(new)
    restart_empty_traces()


def cache_info() -> dict[str, CacheInfo]:
    """`{name: CacheInfo(hits, misses, maxsize, currsize)}` for every cache there is.

    Sizes are entries; of "memory", which plans reuse on the CPU, bytes.
    """
    flush.compiler()
    return {**cache.cache_info(), "memory": POOL.info()}


def cache_clear() -> None:
    """Empty every cache in memory; what is pending is run first. Kernels on disk stay.

    Memory that was kept for plans goes back to the system.
    """
    flush.flush(local.trace, "cache_clear()", quiet=True)
    for trace in all_traces():
        if trace.state is trace.root:
            trace.forget()
    cache.clear_all()
    POOL.clear()


ALWAYS = ("ops", "flushes", "segments", "plans_built", "plans_reused", "schema_misses")


def stats() -> dict[str, Any]:
    """Counters since the start or `reset_stats()`.

    `ops` recorded, `segments` run as a whole, `flushes` and `flush_causes`, `fallbacks` (calls that
    ran at once, by reason), `plans_built` and `plans_reused`, calls `replayed`, and of kernels
    `compiled`, `loaded` (from `cache_dir`), `reused`, `failed`, `slower` and `compile_s` seconds.
    Of sharded calls `sharding_misses` by op, and the bytes of `redistributions` that nobody asked
    for, noted when a call is first seen at a place.
    """
    counts: dict[str, Any] = dict.fromkeys(ALWAYS, 0)
    counts.update(STATS.counts)
    counts.update(flush.compiler().counters.snapshot())
    counts["flush_causes"] = dict(STATS.causes)
    counts["fallbacks"] = {f"{op}: {why}": n for (op, why), n in STATS.fallbacks.items()}
    counts["flush_s"] = STATS.flush_s
    counts["sharding_misses"] = {str(op): n for op, n in STATS.sharding_misses.items()}
    counts["redistributions"] = {
        f"{op} at {where}: {before} to {after}": n
        for (op, before, after, where), n in STATS.redistributions.items()
    }
    return counts


def reset_stats() -> None:
    """Set every counter to zero and forget the last flushes."""
    STATS.reset()
    flush.compiler().counters.reset()


class Report:
    """The last flushes, and what became of replays; `str()` gives text."""

    def __init__(
        self, records: list[FlushRecord], replays: list[str], redistributions: list[str]
    ) -> None:
        self.records = records
        self.replays = replays
        self.redistributions = redistributions

    def __str__(self) -> str:
        lines = [*self.replays, *self.redistributions]
        if not self.records:
            return "\n".join(["nothing was flushed yet", *lines])
        lines += [f"last {len(self.records)} flushes, newest last"]
        for record in self.records:
            ran = f"in {record.n_steps} steps" if record.n_steps else "one by one"
            peak = f", peak {record.peak_bytes / 2**20:.1f} MiB" if record.n_steps else ""
            ended = f", raised {record.raised}" if record.raised else ""
            lines.append(
                f"{record.where}: {record.cause}: {record.n_ops} ops {ran}, "
                f"{record.seconds * 1e3:.2f} ms{peak}{ended}"
            )
            lines += [
                f"    segment {status}: {size} ops{f' ({reason})' if reason else ''}"
                for status, size, reason in zip(
                    record.statuses, record.sizes, record.reasons, strict=True
                )
            ]
        return "\n".join(lines)

    __repr__ = __str__


def explain() -> Report:
    """A report on the last flushes: where, why, how many ops, which segments, how long.

    The peak is of the memory that a planned flush makes, known before it runs. Each function given
    to `replay` has a line: calls replayed and recorded, what they took, why the last was recorded.
    """
    redistributions = [
        f"unasked: {op} at {where} had {n_bytes} bytes go from {before} to {after}"
        for (op, before, after, where), n_bytes in STATS.redistributions.items()
    ]
    replays = sorted(replay.summary() for replay in REPLAYS)
    return Report(list(STATS.log), replays, redistributions)
