"""A report's timeline, in lanes: what was recorded, planned, run and compiled, and when.

In: a report. Out: JSON for Chrome's trace viewer and Perfetto (`report.save("x.json")`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazy_tensor.report import Report


def chrome_trace(report: Report) -> str:
    """The lanes as JSON in the Trace Event Format, whose times are microseconds.

    Each flush is three spans in lanes of its thread; the kernels that were built share one lane.
    The lane "record" has the program's own Python too.
    """
    # "X" events are spans, "M" events name the lanes, which are threads ("tid") of the format
    numbers: dict[str, int] = {}
    events: list[dict[str, object]] = []

    def add(lane: str, began_s: float, seconds: float, name: str) -> None:
        tid = numbers.setdefault(lane, len(numbers))
        events.append(
            {"ph": "X", "pid": 0, "tid": tid, "name": name, "ts": began_s * 1e6,
             "dur": seconds * 1e6}
        )  # fmt: skip

    for flush in report.flushes:
        name = f"{flush.cause} at {flush.where}"
        # a replayed call has no time of recording
        if flush.gap_s:
            began_s = flush.began_s - flush.gap_s
            add(f"{flush.thread}: record", began_s, flush.gap_s, f"{flush.n_ops} ops")
        add(f"{flush.thread}: plan", flush.began_s, flush.plan_s, name)
        add(f"{flush.thread}: run", flush.began_s + flush.plan_s, flush.ran_s, name)
    for build in report.builds:
        add("compile", build.began_s, build.seconds, build.what)
    for name, lane in numbers.items():
        events.append(
            {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}}
        )
    return json.dumps({"traceEvents": events})
