"""The summary of the conformance tests, a hook that tests/conftest.py imports.

In: each report's `user_properties`, which xdist's workers send. Out: a table of counts.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.pages import table

KEY = "conformance"
COLUMNS = ("programs", "agree", "same error", "listed", "differ", "recorded", "fused")
HEAD = ("database", "dtype", "variant", "backend", *COLUMNS)
"""Programs, each way of recording counted: that agree, that raise as eager does, that
exceptions.toml lists, that differ; and of them all those with ops recorded, and with kernels run.
"""


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    rows = _rows(terminalreporter)
    if not rows:
        return
    terminalreporter.section("agreement with eager, in programs")
    for line in _aligned(rows):
        terminalreporter.line(line)
    path = config.getoption("results")
    if path:
        Path(path).write_text(table(HEAD, rows), encoding="utf-8")


def _rows(terminalreporter: Any) -> list[tuple[str, ...]]:
    totals: dict[tuple[str, ...], dict[str, int]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0))
    reports = (r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind))
    for report in reports:
        if report.when != "call":
            continue
        for name, entries in report.user_properties:
            for *row, counts in entries if name == KEY else ():
                for column in COLUMNS:
                    totals[tuple(row)][column] += counts[column]
    return [
        (*row, *(str(counts[column]) for column in COLUMNS))
        for row, counts in sorted(totals.items())
    ]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in (HEAD, *rows)) for i in range(len(HEAD))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (HEAD, *rows)
    ]
