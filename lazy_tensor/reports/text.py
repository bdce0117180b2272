"""A report as text: what `print(explain())` shows.

In: a report. Out: its lines, each with a style for rich, which `print` doesn't use. First comes the
headline, then the advice, then the flushes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from lazy_tensor.dispatch.stats import KERNELS, NEW, QUICKER, RECORDED
from lazy_tensor.kernels.segment import counted
from lazy_tensor.kernels.service.fusion import Status
from lazy_tensor.reports.bandwidth import share_of_bandwidth
from lazy_tensor.reports.flushes import Flush, Step, alike, amount
from lazy_tensor.reports.places import shortened, with_cells

if TYPE_CHECKING:
    from lazy_tensor.report import Report

MOST_CALLS = 4
"""Calls that are named in a line, or have one: those that ran at once, those that weren't fused."""
MOST_KINDS = 8
"""Groups of equal flushes that are shown, the latest ones."""
MOST_SEGMENTS = 12
"""Lines for the segments of a flush."""
STATUSES: tuple[Status, ...] = (
    "ready", "measuring", "compiling", "queued", "slower", "declined", "failed",
)  # fmt: skip


def lines_of(report: Report) -> Iterator[tuple[str, str]]:
    """`(style, line)` for each line of the report; the styles are rich's."""
    # the page shows code in backquotes as such, text leaves them out
    for style, line in (*headline(report), *_advice(report), *_flushes(report)):
        yield style, with_cells(line).replace("`", "")


def _advice(report: Report) -> Iterator[tuple[str, str]]:
    if report.advice:
        yield "bold", "what would help most"
    for number, one in enumerate(report.advice, 1):
        yield "green", f"    {number}. {one}"


def _flushes(report: Report) -> Iterator[tuple[str, str]]:
    """Equal flushes as one group. Of many groups the latest, in the order of the program."""
    flushes = report.flushes
    if flushes:
        yield "bold", f"last {len(flushes)} flushes"
    else:
        yield "", "nothing was flushed yet"
    for call, share in sorted(report.ran_at_once.items(), key=lambda item: -item[1])[:MOST_CALLS]:
        if share >= WORTH_SHOWING:
            yield "", f"at once: {call}: {share:.0%} of the time"
    # the groups whose last flush came last; shown in the order of their first ones
    groups = alike(flushes)
    latest = sorted(sorted(groups, key=lambda numbers: numbers[-1])[-MOST_KINDS:])
    for numbers in latest:
        yield from _of_flushes([flushes[i] for i in numbers])
    if len(groups) > len(latest):
        n_left = sum(map(len, groups)) - sum(map(len, latest))
        yield "dim", f"{n_left} earlier flushes did other things: report.save() shows all"


WHY_UNRECORDED = {
    NEW: "as hardly anything came twice",
    KERNELS: "while kernels were built",
    QUICKER: "which is quicker",
}


def headline(report: Report) -> Iterator[tuple[str, str]]:
    """How much of the program was recorded and why not more, the kernels, the blocks that were
    timed, the functions given to `replay`, and redistributions that nobody asked for."""
    total_s = sum(seconds for _, seconds in report.regions.values())
    if total_s:
        parts = [_share(report, RECORDED, total_s, "recorded")]
        parts += [
            _share(report, outcome, total_s, f"run as in eager, {why}")
            for outcome, why in WHY_UNRECORDED.items()
            if outcome in report.regions
        ]
        outside = " outside replay" if report.replays else ""
        yield "bold", f"of {total_s:.1f} s of the program{outside}: {'; '.join(parts)}"
    if report.kernels and (report.regions or report.records):
        counts = [f"{report.kernels[it]} {it}" for it in STATUSES if report.kernels.get(it)]
        yield "bold", f"kernels: {', '.join(counts)}"
    for line in (*map(str, report.blocks), *report.replays):
        yield "", line
    for line in report.redistributions:
        yield "yellow", line


def _share(report: Report, outcome: str, total_s: float, what: str) -> str:
    n, seconds = report.regions.get(outcome, (0, 0.0))
    return f"{seconds / total_s:.0%} {what} ({n} regions)"


def _of_flushes(several: Sequence[Flush]) -> Iterator[tuple[str, str]]:
    """The lines of a group of equal flushes: medians of all of them, and what the last one ran."""
    last = several[-1]
    parts = [_ms(median(flush.seconds for flush in several))]
    if len(several) > 1:
        parts[0] = f"{len(several)} times, {parts[0]} (at first {_ms(several[0].seconds)})"
    gaps = [flush.gap_s for flush in several if flush.gap_s]
    if gaps:
        parts.append(f"{_ms(median(gaps))} of Python before")
    # planning is a part of the flush's time, and is told only where it matters
    planned = median(flush.plan_s for flush in several)
    if planned >= WORTH_SHOWING * median(flush.seconds for flush in several):
        parts.append(f"{_ms(planned)} of it planning")
    if last.peak_bytes:
        parts.append(f"peak {last.peak_bytes / 2**20:.1f} MiB")
    if last.n_bytes_saved:
        parts.append(f"{amount(last.n_bytes_saved)} never written")
    if last.raised:
        parts.append(f"raised {last.raised}")
    style = "red" if last.raised else "cyan"
    yield style, f"{last.where}: {last.cause}: {last.n_ops} ops {last.how}, {', '.join(parts)}"
    for miss, n in Counter(flush.miss for flush in several if flush.miss).items():
        yield "yellow", f"    new: {miss}" + (f" ({n}×)" if n > 1 else "")
    yield from _segments([step for step in last.steps if step.is_segment])
    yield from _calls([step for step in last.steps if not step.is_segment])


WORTH_SHOWING = 0.05
"""The share of the time from which something is mentioned."""
ENOUGH_BYTES = 1 << 20
"""Bytes that a segment must move for its share of the bandwidth to mean anything."""


def _segments(steps: Sequence[Step]) -> Iterator[tuple[str, str]]:
    """A line for each group of segments with equal text; of many groups, those that move most
    bytes. Lines stay in the order of the program."""
    alike_steps: dict[str, list[Step]] = {}
    for step in steps:
        alike_steps.setdefault(_segment(step), []).append(step)
    by_bytes = sorted(alike_steps.values(), key=lambda some: -sum(step.n_bytes for step in some))
    shown = {id(some) for some in by_bytes[:MOST_SEGMENTS]}
    for told, some in alike_steps.items():
        if id(some) in shown:
            yield "", f"    {told}" + (f" ({len(some)}×)" if len(some) > 1 else "")
    left = [step for some in by_bytes[MOST_SEGMENTS:] for step in some]
    if left:
        n_ops, moved = sum(len(step.ops) for step in left), amount(sum(s.n_bytes for s in left))
        told = f"and {len(left)} segments that move less: {n_ops} ops; {moved} read and written"
        yield "dim", f"    {told}"


def _segment(step: Step) -> str:
    told = f" ({step.reason})" if step.reason else ""
    parts = [f"segment {step.status}: {len(step.ops)} ops{told}", step.title, f"at {step.lines}"]
    speed = share_of_bandwidth(step) if step.n_bytes >= ENOUGH_BYTES else None
    moved = f"{amount(step.n_bytes)} read and written"
    if step.seconds is not None:
        moved += f" in {step.seconds * 1e6:.0f} us"
    parts.append(moved if speed is None else f"{moved}, {speed:.0%} of what memory gives")
    return "; ".join(parts)


def _calls(steps: Sequence[Step]) -> Iterator[tuple[str, str]]:
    """Calls that are in no segment, a line for each reason. Views are left out: they do nothing."""
    by_reason: dict[str, list[Step]] = {}
    for step in steps:
        if step.reason != "a view":
            by_reason.setdefault(step.reason, []).append(step)
    for reason, calls in by_reason.items():
        named = counted((step.title for step in calls), MOST_CALLS)
        seconds = [step.seconds for step in calls if step.seconds is not None]
        took = f", {_ms(sum(seconds))}" if seconds else ""
        places = shortened(op.where for step in calls for op in step.ops)
        yield "dim", f"    not fused, because {reason}: {named} at {places}{took}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
