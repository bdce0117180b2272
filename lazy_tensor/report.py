"""`stats`, `cache_info`, `explain`: what happened, as numbers and as text."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import _CacheInfo as CacheInfo, cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack, cast

from lazy_tensor.capture.replay import REPLAYS
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.options import Options
from lazy_tensor.dispatch.run import compile_service, flush, profiling
from lazy_tensor.dispatch.stats import COUNTED, STATS, FlushRecord
from lazy_tensor.dispatch.tiering.sites import Compared
from lazy_tensor.dispatch.trie.trace import all_traces, claimed, local, restart_empty_traces
from lazy_tensor.dispatch.wording import op_name
from lazy_tensor.kernels import cache
from lazy_tensor.kernels.extension.pool import POOL
from lazy_tensor.kernels.service.compile import Build
from lazy_tensor.mode import listening_mode
from lazy_tensor.reports.advice import Advice, advice_on
from lazy_tensor.reports.flushes import Flush, looked_at
from lazy_tensor.reports.lanes import chrome_trace
from lazy_tensor.reports.page import framed, page_of
from lazy_tensor.reports.text import lines_of


def configure(**options: Unpack[Options]) -> None:
    """Change process-wide settings, after a flush; the documentation lists the options.

    TypeError for an unknown name, naming the nearest; ValueError for a value out of its range.
    """
    given = cast(dict[str, Any], options)
    settings.updated(settings.current(), given, "configure()")  # before anything runs
    flush.flush(local.trace, "configure()", quiet=True)
    settings.change(given, "configure()")
    if settings.current().record == "always":
        local.trace.policy.try_again_at_once()
    restart_empty_traces()


def cache_info() -> dict[str, CacheInfo]:
    """`{name: CacheInfo(hits, misses, maxsize, currsize)}` for every cache there is.

    Sizes are entries; of "memory", which plans reuse on the CPU, bytes.
    """
    kernels = compile_service.compiler().cache.info()
    return {**cache.cache_info(), "kernel": kernels, "memory": POOL.info()}


def cache_clear() -> None:
    """Empty every cache in memory; what is pending is run first. Kernels on disk stay.

    Memory that was kept for plans goes back to the system.
    """
    flush.flush(local.trace, "cache_clear()", quiet=True)
    for trace in all_traces():
        with claimed(trace, local.trace):
            if trace.state is trace.root:
                trace.forget()
    cache.clear_all()
    POOL.clear()


def stats() -> dict[str, Any]:
    """Counters since the start or `reset_stats()`, with the same keys at any time. Counts by cause,
    reason or op are a `Counter` each: what has not happened reads 0.

    `ops` recorded, `segments` run as a whole, `flushes` and `flush_causes`, `fallbacks` (calls that
    ran at once, by reason), `plans_built` and `plans_reused`, calls `replayed`, and of kernels
    `compiled`, `loaded` (from `cache_dir`), `reused`, `failed`, `slower` and `compile_s` seconds;
    `regions_s` are the seconds in which the program was `recorded`, or ran as in eager: as it was
    `new`, while its `kernels` were built, or as that is `quicker`; `unrecorded_blocks` of
    `lazy_mode` were bypassed altogether.
    Of sharded calls `sharding_misses` by op, and the bytes of `redistributions` that nobody asked
    for, noted when a call is first seen at a place.
    """
    local.trace.policy.account_rests()
    counts: dict[str, Any] = dict.fromkeys(COUNTED, 0)
    counts.update(STATS.counts)
    counts.update(compile_service.compiler().counters.snapshot())
    fallbacks: Counter[str] = Counter()
    for (op, why), n in STATS.fallbacks.items():
        fallbacks[f"{op_name(op)}: {why}"] += n
    counts["flush_causes"] = Counter(STATS.causes)
    counts["fallbacks"] = fallbacks
    counts["flush_s"] = STATS.flush_s
    counts["regions_s"] = dict(STATS.regions_s)
    counts["sharding_misses"] = Counter({str(op): n for op, n in STATS.sharding_misses.items()})
    redistributions = {
        f"{op} at {where}: {before} to {after}": n
        for (op, before, after, where), n in STATS.redistributions.items()
    }
    counts["redistributions"] = Counter(redistributions)
    return counts


def reset_stats() -> None:
    """Set every counter to zero and forget the last flushes."""
    local.trace.policy.account_rests()
    STATS.reset()
    compile_service.compiler().counters.reset()


class Report:
    """The last flushes and what became of replays, with what would help most.

    `str()` gives text, rich prints it coloured, a notebook shows it, `save` writes a page.
    `records` are the flushes as they were noted, `flushes` the same looked at; `ran_at_once` has
    the calls that could not be recorded, with their shares of the time; `builds` are the kernels
    built meanwhile; `result` is what the function gave that `explain` was given, if any.
    `regions` tells how many regions of the program, from one value that is read to the next,
    and how many seconds, were recorded or run as in eager, and why; `kernels` counts segments by
    what became of their kernels; `blocks` tells which blocks of this thread were timed, recorded
    and as in eager.
    """

    def __init__(
        self,
        records: list[FlushRecord],
        replays: Sequence[str] = (),
        redistributions: Sequence[str] = (),
        ran_at_once: dict[str, float] | None = None,
        builds: Sequence[Build] = (),
        result: Any = None,
        *,
        regions: Mapping[str, tuple[int, float]] | None = None,
        kernels: Mapping[str, int] | None = None,
        blocks: Sequence[Compared] = (),
    ) -> None:
        self.records = records
        self.replays = list(replays)
        self.redistributions = list(redistributions)
        self.ran_at_once = ran_at_once or {}
        self.builds = list(builds)
        self.result = result
        self.regions = dict(regions or {})
        self.kernels = dict(kernels or {})
        self.blocks = list(blocks)

    @cached_property
    def flushes(self) -> list[Flush]:
        """The flushes with their segments, calls, lines, bytes and times, oldest first."""
        return looked_at(self.records)

    @cached_property
    def advice(self) -> list[Advice]:
        """At most three changes that would help, the largest share of time first."""
        return advice_on(
            self.flushes,
            blocks=self.blocks,
            regions=self.regions,
            kernels=self.kernels,
            replays=bool(self.replays),
        )

    def __str__(self) -> str:
        return "\n".join(line for _, line in lines_of(self))

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text("\n").join(Text(line, style) for style, line in lines_of(self))

    def _repr_html_(self) -> str:
        return framed(page_of(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page that shows the report in a browser, offline: a timeline, each flush as a
        picture of its segments, and the text. To a path in `.json` write the timeline alone, as
        Chrome and Perfetto open it. ValueError if `path` ends otherwise.
        """
        makers = {".html": page_of, ".json": chrome_trace}
        maker = makers.get(Path(path).suffix)
        if maker is None:
            raise ValueError(f"save(): path={str(path)!r} must end in .html or .json")
        Path(path).write_text(maker(self), encoding="utf-8")


def explain(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Report:
    """A report on the last flushes: where, why, what ran each segment, what was new, how long.

    With a function, on its call with these arguments alone, in `lazy_mode`; its plans are built at
    once and each of their steps is timed (which waits for the device); `result` of the report is
    what it returned. The peak is of the memory that a planned flush makes, known before it runs.
    Each function given to `replay` has a line: calls replayed and recorded, what they took, why the
    last was recorded.
    """
    if fn is None:
        local.trace.policy.account_rests()
        regions = {it: (n, STATS.regions_s[it]) for it, n in STATS.regions.items()}
        blocks = local.trace.policy.compared()
        return _report(list(STATS.log), {}, STATS.since_s, regions=regions, blocks=blocks)
    if not callable(fn):
        raise TypeError(f"explain(): fn={fn!r} can't be called")
    flush.flush(local.trace, "explain()", quiet=True)
    before, since_s = dict(STATS.ran_at_once_s), perf_counter()
    with STATS.log_apart() as records, profiling.timing(), listening_mode():
        result = fn(*args, **kwargs)
        flush.flush(local.trace, "explain()", quiet=True)
    return _report(records, before, since_s, result)


def _report(
    records: list[FlushRecord],
    before: dict[str, float],
    since_s: float,
    result: Any = None,
    *,
    regions: Mapping[str, tuple[int, float]] | None = None,
    blocks: Sequence[Compared] = (),
) -> Report:
    passed_s = perf_counter() - since_s
    ran_at_once = {
        call: (seconds - before.get(call, 0.0)) / passed_s
        for call, seconds in STATS.ran_at_once_s.items()
    }
    redistributions = [
        f"unasked: {op} at {where} had {n_bytes} bytes go from {before} to {after}"
        for (op, before, after, where), n_bytes in STATS.redistributions.items()
    ]
    replays = sorted(one.summary() for one in REPLAYS if one.period == STATS.period)
    service = compile_service.compiler()
    builds = [one for one in service.builds if one.began_s + one.seconds >= since_s]
    return Report(
        records, replays, redistributions, ran_at_once, builds, result,
        regions=regions, kernels=service.statuses(), blocks=blocks,
    )  # fmt: skip
