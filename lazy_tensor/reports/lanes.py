"""A report's timeline: what was recorded, planned, run and compiled when, in lanes.

In: a report. Out: spans, and the same in the format of Chrome's trace viewer and of Perfetto.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lazy_tensor.report import Report


class Span(NamedTuple):
    """Something that took time in a lane, from `began_s` on by `time.perf_counter`."""

    lane: str
    began_s: float
    seconds: float
    name: str


def spans(report: Report) -> Iterator[Span]:
    """Each flush in three lanes of its thread (recording: the program's own Python too), each
    kernel built in one for all."""
    for flush in report.flushes:
        name = f"{flush.cause} at {flush.where}"
        if flush.gap_s:
            began_s = flush.began_s - flush.gap_s
            yield Span(f"{flush.thread}: record", began_s, flush.gap_s, f"{flush.n_ops} ops")
        yield Span(f"{flush.thread}: plan", flush.began_s, flush.plan_s, name)
        yield Span(f"{flush.thread}: run", flush.began_s + flush.plan_s, flush.ran_s, name)
    for build in report.builds:
        yield Span("compile", build.began_s, build.seconds, build.what)


def chrome_trace(report: Report) -> str:
    """The lanes as JSON, times in microseconds."""
    numbers: dict[str, int] = {}
    events: list[dict[str, object]] = []
    for span in spans(report):
        lane = numbers.setdefault(span.lane, len(numbers))
        events.append({
            "ph": "X", "pid": 0, "tid": lane, "name": span.name,
            "ts": span.began_s * 1e6, "dur": span.seconds * 1e6,
        })  # fmt: skip
    for name, lane in numbers.items():
        events.append(
            {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}}
        )
    return json.dumps({"traceEvents": events})
