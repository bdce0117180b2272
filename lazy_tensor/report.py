"""`configure`, `stats`, `cache_info`, `explain`: settings, and what happened, as numbers and text.

In: the counters and the flush log of `dispatch.stats`, the policy's times, the compile service.
Out: dicts of numbers, and a `Report`, of which the package `reports` makes advice, text and pages.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
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
from lazy_tensor.kernels.extension import pool
from lazy_tensor.kernels.service.compile import Build
from lazy_tensor.mode import listening_mode
from lazy_tensor.reports.advice import Advice, advice_on
from lazy_tensor.reports.flushes import Flush, looked_at
from lazy_tensor.reports.lanes import chrome_trace
from lazy_tensor.reports.page import framed, page_of
from lazy_tensor.reports.text import lines_of


def configure(**options: Unpack[Options]) -> None:
    """Change settings of the process, after a flush; the documentation lists the options.

    An unknown name raises TypeError, which names the nearest one. A value out of its range raises
    ValueError.
    """
    given = cast(dict[str, Any], options)
    # a mistake raises here, before anything runs or changes
    settings.updated(settings.current(), given, "configure()")
    flush.flush(local.trace, "configure()", quiet=True)
    settings.change(given, "configure()")
    if settings.current().record == "always":
        local.trace.policy.try_again_at_once()
    restart_empty_traces()


def cache_info() -> dict[str, CacheInfo]:
    """`{name: CacheInfo(hits, misses, maxsize, currsize)}` for every cache.

    Sizes are numbers of entries. Those of "memory", which plans reuse on the CPU, are bytes.
    """
    kernels = compile_service.compiler().cache.info()
    return {**cache.cache_info(), "kernel": kernels, "memory": pool.info()}


def cache_clear() -> None:
    """Run what is pending, then empty every cache in memory. Kernels on disk stay.

    Memory that was kept for plans goes back to the system.
    """
    flush.flush(local.trace, "cache_clear()", quiet=True)
    # Tries of other threads go too, but only where nothing is pending: what is pending is a path in
    # its trie, and belongs to the thread that recorded it.
    for trace in all_traces():
        with claimed(trace, local.trace):
            if trace.state is trace.root:
                trace.forget()
    cache.clear_all()
    pool.clear()


def stats() -> dict[str, Any]:
    """Counters since the start or the last `reset_stats()`. The keys are always the same. Counts by
    cause, reason or op are of class `Counter`, in which what has not happened reads 0.

    `ops` were recorded, `segments` run as a whole. `flushes` are counted by `flush_causes`.
    `fallbacks` are calls that ran at once, by reason. Plans were built (`plans_built`) or known
    (`plans_reused`); calls were `replayed`. Kernels were `compiled`, `loaded` (from `cache_dir`),
    `reused`, `failed` or `slower`; compiling took `compile_s` seconds. `regions_s` are the seconds
    in which the program was `recorded` or ran as in eager: because it was `new`, while its
    `kernels` were built, or because eager is `quicker`. `unrecorded_blocks` of `lazy_mode` were
    bypassed.
    Of sharded calls, `sharding_misses` are counted by op. `redistributions` has the bytes of those
    that nobody asked for, noted when a call is first seen at a place.
    """
    # C++ counts blocks that rest by itself, until it is asked
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
    # blocks that rested before belong to the time before
    local.trace.policy.account_rests()
    STATS.reset()
    compile_service.compiler().counters.reset()


@dataclass(repr=False, eq=False)
class Report:
    """The last flushes, the calls of `replay`, and what would help most.

    `str()` gives text, rich prints it in colours, a notebook shows it, `save` writes a page.

    `records` are the flushes as they were noted; `flushes` are the same with segments, bytes and
    times. `replays` has a line for each function given to `replay`. `ran_at_once` maps calls that
    could not be recorded to their shares of the time. `builds` are the kernels built meanwhile.
    `redistributions` has a line for each redistribution that nobody asked for. `result` is what the
    function returned that `explain` was given, if any.

    `regions` maps what became of the program's regions (recorded, or why as in eager) to their
    number and their seconds. A region goes from one value that is read, or one block that begins,
    to the next. `kernels` counts segments by what became of their kernels. `blocks` are the blocks
    of this thread that were timed both recorded and as in eager.
    """

    records: list[FlushRecord]
    replays: Sequence[str] = ()
    redistributions: Sequence[str] = ()
    ran_at_once: Mapping[str, float] = field(default_factory=dict)
    builds: Sequence[Build] = ()
    result: Any = None
    _: KW_ONLY
    regions: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    kernels: Mapping[str, int] = field(default_factory=dict)
    blocks: Sequence[Compared] = ()

    @cached_property
    def flushes(self) -> list[Flush]:
        """The flushes with their segments, calls, lines, bytes and times, the oldest first."""
        return looked_at(self.records)

    @cached_property
    def advice(self) -> list[Advice]:
        """At most three changes that would help, that with the largest share of time first."""
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
        """Write the report to a file, as the end of `path` says.

        `.html` is a page for a browser, which needs no network: a timeline, a picture of each
        flush's segments, and the text. `.json` is the timeline alone, for Chrome's trace viewer and
        Perfetto. Any other ending raises ValueError.
        """
        makers = {".html": page_of, ".json": chrome_trace}
        maker = makers.get(Path(path).suffix)
        if maker is None:
            raise ValueError(f"save(): path={str(path)!r} must end in .html or .json")
        Path(path).write_text(maker(self), encoding="utf-8")


def explain(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Report:
    """A report on the last flushes: where they were, why, what ran each segment, what was new, and
    how long it took.

    With a function `fn`, call it with these arguments in `lazy_mode`, and report on this call
    alone. Its plans are then built at once, and each of their steps is timed, which waits for the
    device. `result` of the report is what `fn` returned.

    The peak of a flush is the memory that its plan makes, known before it runs. Each function given
    to `replay` has a line: the calls replayed and recorded, what they took, and why the last one
    was recorded.
    """
    if fn is None:
        local.trace.policy.account_rests()
        regions = {it: (n, STATS.regions_s[it]) for it, n in STATS.regions.items()}
        blocks = local.trace.policy.compared()
        return _report(list(STATS.log), {}, STATS.since_s, regions=regions, blocks=blocks)
    if not callable(fn):
        raise TypeError(f"explain(): fn={fn!r} can't be called")
    # the first flush keeps what was pending out of the report, the second one is the call's own
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
    """The report on `records`, and on what else happened since `since_s`, by `perf_counter`.

    `before` has the seconds that each call had run at once until then.
    """
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
        regions=regions or {}, kernels=service.statuses(), blocks=blocks,
    )  # fmt: skip
