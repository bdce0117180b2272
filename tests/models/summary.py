"""The table at the end of a run, from what tests recorded with `record_property`.

A pytest plugin, which works under xdist too: properties travel with the reports.
"""

from __future__ import annotations

from typing import Any

HEADER = ["model", "variant", "way", "backend", "absolute", "relative", "where"]


def recorded(reporter: Any, name: str) -> list[Any]:
    """The values of property `name`, of tests that passed or failed."""
    reports = [*reporter.stats.get("passed", []), *reporter.stats.get("failed", [])]
    return [
        value
        for report in reports
        for key, value in getattr(report, "user_properties", [])
        if key == name and report.when == "call"
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Each outcome that differs from eager, and how many don't."""
    reporter = terminalreporter
    rows = sorted(recorded(reporter, "model distance"), key=lambda row: row[:4])
    if not rows:
        return
    reporter.section("models: largest differences from eager")
    differing = [row for row in rows if row[5] > 0]
    reporter.line(f"{len(rows) - len(differing)} of {len(rows)} outcomes are bit-equal")
    lines = [HEADER] + [[*row[:4], f"{row[4]:.1e}", f"{row[5]:.1e}", row[6]] for row in differing]
    if differing:
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            reporter.line("  ".join(cells).rstrip())
