"""A report's timeline, in lanes: what was recorded, planned, run and compiled, and when.

In: a report. Out: spans, or JSON for Chrome's trace viewer and Perfetto (`report.save("x.json")`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lazy_tensor.report import Report


class Span(NamedTuple):
    """Something that took time. `began_s` is by `time.perf_counter`."""

    lane: str
    began_s: float
    seconds: float
    name: str


def spans(report: Report) -> Iterator[Span]:
    """Each flush as spans in three lanes of its thread, and each kernel that was built in one lane
    for all. The lane "record" has the program's own Python too."""
    for flush in report.flushes:
        name = f"{flush.cause} at {flush.where}"
        # a replayed call has no time of recording
        if flush.gap_s:
            began_s = flush.began_s - flush.gap_s
            yield Span(f"{flush.thread}: record", began_s, flush.gap_s, f"{flush.n_ops} ops")
        yield Span(f"{flush.thread}: plan", flush.began_s, flush.plan_s, name)
        yield Span(f"{flush.thread}: run", flush.began_s + flush.plan_s, flush.ran_s, name)
    for build in report.builds:
        yield Span("compile", build.began_s, build.seconds, build.what)


def chrome_trace(report: Report) -> str:
    """The lanes as JSON in the Trace Event Format, whose times are microseconds."""
    # "X" events are spans, "M" events name the lanes, which are threads ("tid") of the format
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
